"""Units: where segments are cut, what W adds to, plans that one unit makes and another reads, the report."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from graphmoe.ops.grouped_mm import grouped_mm
from graphmoe.ops.permute import routing_plan
from graphmoe.passes.base import PassRunner, PassSpec, Rewrites
from graphmoe.runtime.compile.code import accumulate_outputs
from graphmoe.runtime.compile.report import UnitReport, to_json, to_text
from graphmoe.runtime.compile.units import BoundUnit, units_of
from graphmoe.segments import Segment, run_segments
from tests.ops.mlp_cases import make_problem
from tests.runtime.test_compiled import executor, model_of


def fingerprint(segments, keep=("x",)) -> str:
    (unit,) = units_of(segments, keep)
    return BoundUnit.of(unit).fingerprint()


def test_units_end_where_the_stream_changes_and_hand_on_only_what_is_needed_after_them():
    segments = [
        Segment("attn", torch.neg, ("x",), ("x",)),
        Segment("moe_router", torch.neg, ("x",), ("h",)),
        Segment("moe_dispatch", torch.neg, ("h",), ("received",), stream="comm"),
        Segment("moe_experts", torch.neg, ("received",), ("routed",)),
        Segment("moe_combine", torch.add, ("x", "routed"), ("x",)),
    ]
    units = units_of(segments, ("x",))
    assert [unit.name for unit in units] == ["attn..moe_router", "moe_dispatch", "moe_experts..moe_combine"]
    assert [unit.reads for unit in units] == [("x",), ("h",), ("received", "x")]
    assert [unit.writes for unit in units] == [("h", "x"), ("received",), ("x",)]
    assert units_of(segments, ("h", "x"))[2].writes == ("x",)
    assert units_of(segments[:2], ("x",))[0].writes == ("x",)


def test_a_segment_without_fixed_sizes_is_no_part_of_a_unit_that_has_them():
    segments = [
        Segment("moe_router", torch.neg, ("x",), ("h",)),
        Segment("moe_experts", torch.neg, ("h",), ("routed",), dynamic=True),
        Segment("moe_combine", torch.add, ("x", "routed"), ("x",)),
    ]
    dynamic = {unit.name: unit.dynamic for unit in units_of(segments, ("x",))}
    assert dynamic == {"moe_router": False, "moe_experts": True, "moe_combine": False}
    with pytest.raises(AssertionError, match="moe_experts waits for the host"):
        units_of(segments, ("x",), captured={"moe_experts"})


def test_layers_alike_have_one_fingerprint_and_others_or_other_results_their_own():
    layers = [layer.segments() for layer in model_of("model.num_layers=4").layers[:4]]
    dense, *moe = map(fingerprint, layers)
    assert moe[0] == moe[1] == moe[2] != dense
    assert fingerprint(layers[1], ("x", "loss")) != moe[0]
    for word in ("model.norm_eps=1e-3", "model.aux_loss_coef=0.5", "moe.force_balance=true"):
        assert fingerprint(model_of("model.num_layers=4", word).layers[1].segments()) != moe[0], word


def test_a_module_with_an_attribute_that_is_not_plain_shares_with_no_other():
    def segments() -> list[Segment]:
        module = nn.Linear(2, 2)
        module.hidden = object()  # type: ignore[assignment]
        return [Segment("mlp", module, ("x",), ("x",))]

    first = segments()
    assert fingerprint(first) == fingerprint(first) != fingerprint(segments())


aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


def accumulated(
    function, *arguments: torch.Tensor, add: bool = True
) -> tuple[set[object], list[torch.Tensor]]:
    """Targets in the changed graph, and its buffers after one run from ones; the given graph stays."""
    given = make_fx(function)(*arguments)
    code = given.code
    graph = accumulate_outputs(given, add=add)
    buffers = [torch.ones(o.shape) for o in function(*arguments)]
    assert graph(*arguments, *buffers) == () and given.code == code
    return {node.target for node in graph.graph.nodes}, buffers


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda a: (a * 3, a - 1),
        lambda a: ((a * 3).bfloat16(), a.bfloat16() * 3),
        lambda a: (aten.permute(a * 2, [1, 0]), aten.permute(a[None] * 2, [1, 0, 2])),
    ],
    ids=["fp32", "bf16", "permuted"],
)
def test_each_output_is_added_to_its_buffer_in_fp32_or_takes_its_place(function, add):
    a = torch.randn(5, 7)
    targets, buffers = accumulated(function, a, add=add)
    assert all(buffer.equal(add + value.float()) for buffer, value in zip(buffers, function(a), strict=True))
    assert (aten.add.Tensor in targets) == add


def test_a_rounding_at_the_end_is_left_out_and_a_transposed_product_is_one_of_the_transposed():
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    targets, (buffer,) = accumulated(lambda a: (convert(a * 3, torch.bfloat16),), a)
    assert buffer.equal(1 + a * 3) and convert not in targets

    def transposed(a, b):
        return (aten.permute(aten.mm(a, b), [1, 0]),)

    _, (buffer,) = accumulated(transposed, a, b)
    torch.testing.assert_close(buffer, 1 + (a @ b).T)
    graph = accumulate_outputs(make_fx(transposed)(a, b), add=True)
    (product,) = graph.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert product.meta["val"].shape == (3, 5)


def grads_of_experts(name: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    p = make_problem(name, dtype)
    h, a = (torch.ones(len(p.plan[0]), w).to(dtype) for w in (p.w_gate_up.shape[1], p.w_down.shape[2]))
    return p.dy_TD, p.x_TD, h, a, *p.plan


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("replicas", [[], [[1, 0]]], ids=["without replicas", "with replicas"])
def test_the_experts_kernels_fill_their_buffers_themselves(replicas, add, one_peer):
    given = grads_of_experts("skewed, dead rows", torch.float32 if replicas else torch.bfloat16)
    given += tuple(torch.tensor([expert_S], dtype=torch.int32) for expert_S in replicas)

    def gradients(*given):
        of_gate_up, of_down = torch.ops.graphmoe.grouped_mlp_wgrad(*given[:7], "torch", *given[7:])
        return of_down, given[0] * 2, of_gate_up

    targets, buffers = accumulated(gradients, *given, add=add)
    near = {"rtol": 1e-6, "atol": 1e-5} if replicas else {"rtol": 0, "atol": 0}
    for buffer, value in zip(buffers, gradients(*given), strict=True):
        torch.testing.assert_close(buffer, value.float() + add, **near)
    assert torch.ops.graphmoe.grouped_mlp_wgrad_into.default in targets
    assert torch.ops.graphmoe.grouped_mlp_wgrad.default not in targets


def test_the_gradient_of_biases_is_added_before_it_is_rounded():
    *_, ends = grads_of_experts("skewed, dead rows", torch.bfloat16)
    dh, sums = torch.randn(int(ends[-1]) + 9, 80).bfloat16(), torch.ops.graphmoe.expert_sums
    _, (buffer,) = accumulated(lambda dh, ends: (convert(sums(dh, ends), torch.bfloat16),), dh, ends)
    assert buffer.equal(1 + sums(dh, ends)) and not buffer.equal(1 + sums(dh, ends).bfloat16())


def test_a_gradient_of_experts_that_is_read_elsewhere_is_copied():
    given = grads_of_experts("random", torch.float32)

    def gradients(*given):
        of_gate_up, of_down = torch.ops.graphmoe.grouped_mlp_wgrad(*given, "torch")
        return of_gate_up, of_down, of_down * 2

    _, buffers = accumulated(gradients, *given, add=False)
    assert all(torch.equal(b, value) for b, value in zip(buffers, gradients(*given), strict=True))


T, K, E, D, WIDTH = 12, 2, 4, 8, 5


pytestmark = pytest.mark.usefixtures("graphs_as_they_are")


class Plan(nn.Module):
    """ends, row and slot, each after a change."""

    def __init__(self, **changes) -> None:
        super().__init__()
        self.changes = changes

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        plan = routing_plan(ids, E)
        parts = {"ends": plan.ends_E, "row": plan.row_TK, "slot": plan.slot_R}
        return tuple(self.changes.get(name, lambda part: part)(part) for name, part in parts.items())


class Experts(nn.Module):
    """Both products of each expert, and the weighted sum of a token's rows, which ``rows_of`` finds."""

    def __init__(self, rows_of=lambda row: row) -> None:
        super().__init__()
        self.up = nn.Parameter(0.3 * torch.randn(E, 2 * WIDTH, D))
        self.down = nn.Parameter(0.3 * torch.randn(E, D, WIDTH))
        self.rows_of = rows_of

    def forward(self, x: Tensor, weight: Tensor, ends: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        gate, up = grouped_mm(x[slot // K], self.up, ends).chunk(2, dim=-1)
        rows = grouped_mm(F.silu(gate) * up, self.down, ends)
        row = self.rows_of(row)
        return (rows[row] * weight[:, : row.shape[1], None]).sum(1)


def matches_of(segments: list[Segment]) -> dict[str, int]:
    """Run the segments as units and compare with the plain ones; how often each pass matched."""
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
    given = {"x": torch.randn(T, D), "weight": torch.rand(T, K), "ids": ids, "other_ids": ids.flip(0)}
    execute = executor()
    modules = [segment.run for segment in segments if isinstance(segment.run, nn.Module)]
    parameters = [p for module in modules for p in module.parameters()]

    def gradients(run) -> list[Tensor]:
        leaves = {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in given.items()}
        (y,) = run(segments, leaves, ("y",))
        wanted = [leaves["x"], leaves["weight"], *parameters]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]

    for plain, found in zip(gradients(run_segments), gradients(execute), strict=True):
        torch.testing.assert_close(found, plain)
    counted = Counter[str]()
    for row in (row for report in execute.reports for row in report.passes):
        counted[row.name] += row.matches
    return counted


def layer(plan: Plan, experts: Experts) -> list[Segment]:
    parts = ("ends", "row", "slot")
    return [
        Segment("moe_preprocess", plan, ("ids",), parts, stream="comm"),
        Segment("moe_experts", experts, ("x", "weight", *parts), ("y",)),
    ]


def test_a_plan_keeps_its_meaning_from_unit_to_unit():
    matches = matches_of(layer(Plan(slot=lambda slot: slot.long().int()), Experts()))
    assert matches["fuse_permutation"] >= 3 and matches["fuse_experts"] == 1


CHANGED = {  # in the unit that makes the plan, and in the one that reads it
    "copied across": ({"row": lambda row: row.t().contiguous()}, torch.t),
    "transposed": ({"row": torch.t}, torch.t),
    "a part": ({"row": lambda row: row[:, :1]},),
    "wider": ({"row": torch.Tensor.long},),
    "made anew": ({"ends": lambda ends: torch.cat([ends[:-1], ends[-1:]])},),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_not_the_plan_itself_is_read_as_it_is(passes_may_miss, name):
    changes, *rows_of = CHANGED[name]
    matches = matches_of(layer(Plan(**changes), Experts(*rows_of)))
    assert matches["fuse_permutation"] == 1 and matches["fuse_experts"] == 0


def test_parts_of_two_plans_are_not_one(passes_may_miss):
    """Make both plans in units of one name, and so the rows of the other plan's ids."""
    parts, others = ("ends", "row", "slot"), ("other_ends", "other_row", "other_slot")
    segments = [
        Segment("moe_preprocess", Plan(), ("ids",), parts, stream="comm"),
        Segment("attn", torch.sin, ("x",), ("x",)),
        Segment("moe_preprocess", Plan(), ("other_ids",), others, stream="comm"),
        Segment("moe_experts", Experts(), ("x", "weight", "ends", "other_row", "slot"), ("y",)),
    ]
    assert matches_of(segments)["fuse_experts"] == 0


def one_of_two(graph: fx.Graph) -> Rewrites:
    return Rewrites(1, ("sin_1: it has 2 users",), "nothing to see")


def no_candidates(graph: fx.Graph) -> Rewrites:
    return Rewrites(0, (), "0 sorts, none of expert ids")


SPECS = [
    PassSpec("one_of_two", one_of_two, "forward", "bitwise"),
    PassSpec("no_candidates", no_candidates, "forward", "bitwise", ("moe_experts",)),
]


def report(unit: str) -> UnitReport:
    rows = PassRunner(SPECS).run("forward", fx.symbolic_trace(lambda x: x + x), unit, (unit,))
    return UnitReport(unit, 3, 0.5, {"fx_hits": 0}, rows)


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if f" {name} " in line and "left by" not in line]
    return line.replace("│", " ").split()[1:-1]


def test_what_units_leave_is_counted_and_explained():
    reports = [report("mlp"), report("attn")]
    text = to_text(reports)
    assert row(text, "one_of_two")[:3] == ["2", "of", "4"] and row(text, "no_candidates")[:1] == ["0"]
    reasons = [line for line in text.splitlines() if "left by" in line]
    assert reasons == [f"left by one_of_two in {unit}: sin_1: it has 2 users" for unit in ("mlp", "attn")]
    for unit in to_json(reports, 0, "")["units"]:
        assert [row["left"] for row in unit["passes"]] == [("sin_1: it has 2 users",), ()]


def test_a_pass_without_expected_candidates_is_mentioned(passes_may_miss):
    text = to_text([report("moe_experts")])
    assert row(text, "no_candidates")[:3] == ["0", "of", "1"]
    assert "left by no_candidates in moe_experts: 0 sorts, none of expert ids" in text
