"""The grouped MLP on all backends and the model's experts: values, gradients, dead rows, fakes, kernels."""

import functools
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from graphmoe.config.schema import ConfigError, ModelConfig
from graphmoe.model.moe_segments import Experts
from graphmoe.ops.gradients import Gradient
from graphmoe.ops.grouped_mlp import grouped_mlp_into, reference, tuning, vendor
from graphmoe.ops.grouped_mlp import triton_backend as kernels
from graphmoe.ops.grouped_mlp.triton_backend import row_tiles
from graphmoe.ops.grouped_mlp.weight_grad_kernel import into
from tests.ops import grouped_mlp_fakes
from tests.ops.ahead_of_time import CROSSED, launches_of
from tests.ops.interpreted import BACKENDS, KERNELS, device_of
from tests.ops.mlp_cases import (
    CASES,
    COUNTS,
    IMPORTANT,
    NAN,
    assert_directions_match,
    assert_results_match,
    interpreter_slack,
    leaves_of,
    make_problem,
    ops_of,
)
from tests.ops.row_cases import fresh_memory_is_nan
from tests.ops.seen_ops import SeenOps

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
HALF_OF = {"turbo": "primus_turbo", "te": "transformer_engine"}
"""Vendors' backends, which take bf16 and fp16 only, with their packages."""
ops = torch.ops.graphmoe


@pytest.fixture
def fakes(monkeypatch):
    vendor.te_module.cache_clear()
    grouped_mlp_fakes.install_te(monkeypatch)
    yield grouped_mlp_fakes.install_turbo(monkeypatch)
    vendor.te_module.cache_clear()


EACH_DTYPE = [(case, DTYPES[number % 2]) for number, case in enumerate([*CASES, *COUNTS])]
EACH_DTYPE += [(case, DTYPES[(number + 1) % 2]) for number, case in enumerate(CASES) if case in IMPORTANT]
"""Every case in fp32 or bf16, the important ones in both."""


@pytest.mark.parametrize(("case", "dtype"), EACH_DTYPE, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_direction_matches_fp64_with_nan_in_dead_rows(backend, case, dtype):
    if backend == "interpreted" and "512" in case:  # 1,000 tiles of weights would take 10 s
        case = (*CASES[case][:4], 40, *CASES[case][5:])
    p = make_problem(case, dtype, device_of(backend))
    assert_directions_match(ops_of(backend), p, interpreter_slack(dtype))
    if backend == "cuda":
        assert_directions_match(ops_of("torch"), p)


CLAMPED = {  # sizes that are no multiples of a tile; 7 is half of a standard deviation of h or more
    "skewed": (("skewed", 33, 128, 80, 4, 2, 9), 7.0),
    "empty experts": (("half of the experts", 19, 48, 48, 8, 2, 3), 4.0),
    "some slots are not routed here": (("unrouted", 27, 20, 12, 8, 4, 5), 7.0),
}


@pytest.mark.parametrize("case", CLAMPED)
@pytest.mark.parametrize("backend", [*BACKENDS, *HALF_OF])
def test_clamps_and_biases_match_fp64_with_nan_in_dead_rows(backend, case, fakes):
    shape, limit = CLAMPED[case]
    kinds = (torch.bfloat16,) if backend in HALF_OF else (torch.float32, torch.bfloat16)
    for dtype in kinds[:1] if backend == "interpreted" else kinds:  # which cuts h to bf16
        p = make_problem(shape, dtype, device_of(backend), limit)
        assert_directions_match(ops_of(backend), p)
        h_RH = ops_of(backend).forward(*p.inputs, *p.plan, **p.clamps)[1][: p.live]
        assert 0.1 < float((h_RH.abs() > limit).float().mean()) < 0.9


def test_autograd_gives_the_gradient_of_the_biases():
    p = make_problem(*CLAMPED["skewed"][:1], torch.float32, limit=7.0)
    leaves = [t.detach().requires_grad_() for t in p.leaves]
    y_TD, _ = ops.grouped_mlp(*leaves[:4], *p.plan, "torch", b_gate_up=leaves[4], limit=7.0)
    expected = torch.autograd.grad(y_TD, leaves, p.dy_TD)
    assert_results_match(p, y_TD, expected)
    totals = [Gradient(torch.full_like(w, NAN)) for w in leaves[1:3]]
    y_TD = grouped_mlp_into(totals, "torch", *leaves[:4], *p.plan, b_gate_up=leaves[4], limit=7.0)
    dx, dweight, dbias = torch.autograd.grad(y_TD, [leaves[i] for i in (0, 3, 4)], p.dy_TD)
    found = (dx, *(gradient.total for gradient in totals), dweight, dbias)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(AssertionError, match="biases of replicas"):
        replicas = torch.zeros(1, 1, dtype=torch.int32)
        ops.grouped_mlp(*p.inputs, *p.plan, "torch", replicas, b_gate_up=p.b_gate_up)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_gate_or_up_is_not_clamped_away(backend):
    p = make_problem(("one expert", 9, 16, 16, 3, 1, 0), torch.float32, device_of(backend), 7.0)
    for half in range(2):
        p.b_gate_up.zero_()[1, 16 * half + 3] = NAN
        y_TD, h_RH = ops_of(backend).forward(*p.inputs, *p.plan, **p.clamps)
        _, _, dh_RH, a_RF = ops_of(backend).dgrad(p.dy_TD, h_RH, *p.inputs[1:], *p.plan, **p.clamps)
        assert y_TD.isnan().all() and a_RF[:, 3].isnan().all() and dh_RH[:, [3, 19]].isnan().any(1).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", HALF_OF)
def test_each_direction_of_vendors_matches_fp64_in_bf16(backend, case, fakes):
    assert_directions_match(ops_of(backend), make_problem(case, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", HALF_OF)
def test_vendors_refuse_what_is_not_16_bits(backend, dtype, fakes):
    p = make_problem("random", dtype)
    with pytest.raises(ConfigError, match=f"moe.experts={backend} has bf16 .* precision.compute=bf16"):
        ops.grouped_mlp(*p.inputs, *p.plan, backend)


RUNS = ("op", "model", "planned", "received", "received_fused")


def run_as(name, p, x, w_gate_up, w_down, weight_TK):
    """y by the op, or by a method of the model's module, whose weights may be leaves of autograd."""
    slot_R, row_TK, ends_E = p.plan
    if name == "op":
        return ops.grouped_mlp(x, w_gate_up, w_down, weight_TK, *p.plan, "torch")[0]
    E, D, F = w_down.shape
    experts = Experts(ModelConfig(hidden_size=D, num_experts=E, expert_ffn_size=F))
    del experts.w_gate_up, experts.w_down
    experts.w_gate_up, experts.w_down = w_gate_up, w_down
    if name == "received":
        return experts.received(x, weight_TK, p.expert_TK)
    if name == "received_fused":
        return experts.received_fused("torch", (), x, weight_TK, p.expert_TK)
    if name == "planned":
        return experts.planned(x, weight_TK, ends_E, row_TK, slot_R)
    return experts(x, weight_TK, ends_E, row_TK, slot_R[: p.live])


NOT_RUN = {  # all experts of the model are here, and what is received is for an expert here
    "model": ("some slots are not routed here", "no slot is routed here"),
    "received": ("no slot is routed here",),
    "received_fused": ("no slot is routed here",),
}
BY_AUTOGRAD = [
    (run, case, DTYPES[(at + number) % 3])
    for at, run in enumerate(RUNS)
    for number, case in enumerate(CASES)
    if (case in IMPORTANT or at in (number % 5, (number + 2) % 5)) and case not in NOT_RUN.get(run, ())
]
"""Each important case by every run, the others by two, in one dtype."""


@pytest.mark.parametrize(("run", "case", "dtype"), BY_AUTOGRAD, ids=str)
def test_autograd_gives_the_gradients_of_all_four_inputs(run, case, dtype):
    p = make_problem(case, dtype)
    leaves = leaves_of(p)
    with fresh_memory_is_nan():
        y_TD = run_as(run, p, *leaves)
        gradients = torch.autograd.grad(y_TD, leaves, p.dy_TD)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)
    # bf16 rounds the two inner activations too, which the table's rows for one product leave out.
    assert_results_match(p, y_TD, gradients, 2.0 if dtype == torch.bfloat16 and run != "op" else 1.0)


@torch.no_grad()
def test_the_model_does_not_round_the_weight_of_a_slot_to_bf16():
    p = make_problem(("random", 1300, 7, 5, 6, 3, 0), torch.bfloat16)
    one, more = (
        run_as("model", p, *p.inputs[:3], torch.full_like(p.weight_TK, weight)).double()
        for weight in (1.0, 1.003)  # the outputs are rounded to bf16: many show the weight behind
    )
    assert float((one * more).sum() / one.square().sum()) == pytest.approx(1.003, abs=3e-4)  # 1.0 in bf16


def test_weight_gradients_are_computed_only_where_wanted():
    p = make_problem("random", torch.float32)
    for wanted in product((True, False), repeat=4):
        leaves = leaves_of(p, wanted)
        with SeenOps() as seen:
            y_TD, _ = ops.grouped_mlp(*leaves, *p.plan, "torch")
            assert y_TD.requires_grad == any(wanted)
            if any(wanted):
                y_TD.backward(p.dy_TD)
        names = [name.removeprefix("graphmoe::") for name in seen.names if "grouped_mlp" in name]
        directions = ["_dgrad"] * any(wanted) + ["_wgrad"] * (wanted[1] or wanted[2])
        assert names == ["grouped_mlp", *(f"grouped_mlp{direction}" for direction in directions)], wanted
        assert [leaf.grad is not None for leaf in leaves] == list(wanted)


def test_nothing_of_row_size_is_kept_but_h_whose_gradient_is_ignored():
    p = make_problem("skewed, dead rows", torch.float32)
    leaves, kept = leaves_of(p), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y_TD, h_RH = ops.grouped_mlp(*leaves, *p.plan, "torch")
    given = {t.data_ptr() for t in (*p.inputs, *p.plan)}
    extra = [t for t in kept if t.data_ptr() not in given]
    assert [t.shape for t in extra] == [(len(p.plan[0]), p.w_gate_up.shape[1])]
    dh_RH = torch.full_like(h_RH, NAN)
    both = torch.autograd.grad((y_TD, h_RH), leaves, (p.dy_TD, dh_RH), retain_graph=True)
    alone = torch.autograd.grad(y_TD, leaves, p.dy_TD, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(both, alone, strict=True))
    assert torch.autograd.grad(h_RH.sum(), leaves, allow_unused=True, retain_graph=True) == (None,) * 4
    y_TD.sum().backward()  # an expanded gradient


@pytest.mark.parametrize("mixed", ["{},torch,torch", "torch,{},torch", "torch,torch,{}"])
@pytest.mark.parametrize("vendor", HALF_OF)
def test_a_vendor_may_run_one_direction_alone_and_is_named_where_it_is_missing(vendor, mixed, request):
    p, run = make_problem("empty experts", torch.bfloat16), ops_of(mixed.format(vendor))
    package = HALF_OF[vendor]
    with pytest.raises(ConfigError, match=f"moe.experts={vendor} needs the package {package}.*pip install"):
        assert_directions_match(run, p)
    request.getfixturevalue("fakes")
    assert_directions_match(run, p)


def test_te_without_the_product_that_takes_device_counts_takes_those_of_the_host(monkeypatch, caplog):
    vendor._warn_of_waiting.cache_clear()
    grouped_mlp_fakes.install_te(monkeypatch, supported=False)
    assert_directions_match(ops_of("te"), make_problem("empty experts", torch.bfloat16))
    assert not grouped_mlp_fakes.FakeGroupedLinear.built
    (warning,) = caplog.messages
    assert warning.startswith("moe.experts=te: each GEMM waits for the host")
    given = torch.bfloat16, torch.device("cuda")
    assert vendor.TE.reason_against(*given, False) is None
    assert "waits for the host" in vendor.TE.reason_against(*given, True)


def test_turbo_gets_the_weights_as_they_are_stored(fakes):
    p = make_problem("random", torch.bfloat16)
    y_TD, _ = ops.grouped_mlp(*leaves_of(p), *p.plan, "turbo")
    y_TD.backward(p.dy_TD)
    used = [call["b"].data_ptr() for call in fakes.calls if "trans_c" not in call]
    assert used == [w.data_ptr() for w in (p.w_gate_up, p.w_down, p.w_down, p.w_gate_up)]


# The kernels: ways to launch them, single steps, machine code.


@pytest.mark.parametrize(
    "fields",
    [
        {"descriptors": "weights"},
        {"descriptors": "both", "flatten": True, "subtiles": 2},
        {"subtiles": 2, "block_n": 64, "group": 1},
        {"per_unit": 0},
        {"subtiles": 4, "block_n": 64, "ahead": 2},
        {"subtiles": 2, "ahead": 2},
        {"per_unit": 1, "block_m": 32, "block_k": 32},
        {"descriptors": "both"},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", KERNELS)
def test_every_way_to_launch_gives_the_same_results(backend, fields, monkeypatch):
    monkeypatch.setattr(tuning, "_INTERPRETER", replace(tuning._INTERPRETER, **fields))
    case = "odd sizes" if fields == {"descriptors": "both"} else "skewed, dead rows"  # loaded by pointer
    assert_directions_match(ops_of(backend), make_problem(case, torch.float32, device_of(backend)))


@pytest.mark.parametrize("case", ["random", "skewed, dead rows", "some slots are not routed here"])
@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_leave_dead_rows_alone_and_give_the_same_bits_again(backend, case):
    p, run = make_problem(case, torch.float32, device_of(backend)), ops_of(backend)
    results = []
    for _ in range(2):
        with fresh_memory_is_nan():
            y_TD, h_RH = run.forward(*p.inputs, *p.plan)
            dx_TD, dweight_TK, dh_RH, a_RF = run.dgrad(p.dy_TD, h_RH, *p.inputs[1:], *p.plan)
            alone_RH = run.hidden(*p.inputs[:2], *p.plan)
        for buffer in (h_RH, dh_RH, a_RF, alone_RH):
            assert bool(buffer[p.live :].isnan().all()) and not bool(buffer[: p.live].isnan().any())
        results.append([y_TD, dx_TD, dweight_TK, *(buffer[: p.live] for buffer in (h_RH, dh_RH, a_RF))])
    assert all(torch.equal(first, again) for first, again in zip(*results, strict=True))


@pytest.mark.parametrize("size", [(3, 5), (2, 4096), (0, 4)])
@pytest.mark.parametrize("backend", KERNELS)
def test_a_bf16_gradient_is_stored_in_fp32_or_added(backend, size):
    device = device_of(backend)
    gradient, total = torch.randn(size, device=device).bfloat16(), torch.full(size, torch.nan, device=device)
    for factor in (1, 2):
        into(total, gradient, add=factor == 2)
        assert torch.equal(total, factor * gradient.float())


@pytest.mark.parametrize(("live", "ends"), [(0, [7, 7, 7, 7]), (2, [7, 8, 9, 9]), (3, [3, 5, 6, 8])])
@pytest.mark.parametrize("numbers", [15, 8192])
@pytest.mark.parametrize("backend", KERNELS)
def test_gradients_of_experts_behind_the_last_with_rows_are_not_stored(backend, numbers, live, ends):
    device = device_of(backend)
    gradient = torch.randn(3, numbers, device=device).bfloat16()
    total = torch.full_like(gradient, torch.nan)
    into(total, gradient, add=False, ends_E=torch.tensor(ends, device=device, dtype=torch.int32)[1:])
    assert torch.equal(total[:live], gradient[:live]) and bool(total[live:].isnan().all())


@pytest.mark.parametrize("height", [16, 64])
@pytest.mark.parametrize(
    "counts", [[0, 70, 0, 0, 5, 64, 0], [1, 0] * 256, [0, 0, 0], [129]], ids=lambda c: str(c)[:20]
)
@pytest.mark.parametrize("backend", KERNELS)
def test_the_table_of_row_tiles_covers_each_expert_once(backend, counts, height):
    ends_E = torch.tensor(counts, device=device_of(backend)).cumsum(0).int()
    count, *table = row_tiles(ends_E, sum(counts) + 7)(height).tolist()
    bound, ends = len(table) // 2, zip(ends_E.tolist(), counts, strict=True)
    tiles = [(e, row) for e, (end, rows) in enumerate(ends) for row in range(end - rows, end, height)]
    assert count == len(tiles) <= bound
    assert [*zip(table[:count], table[bound : bound + count], strict=True)] == tiles


TARGETS_OF = {"hopper": ("sm_90", "sm_100"), "instinct": ("gfx942", "gfx950")}
TARGETS_OF["small"] = ("sm_90", *TARGETS_OF["instinct"])  # fp32 has one table
"""Targets on which the table of a kind of device is compiled."""
FEW = {"hopper": (20,), "instinct": (16, 20, 64), "small": ()}
"""Rows of an expert for which a kind of device has lower tiles: of 16, 32 and 64 rows."""
SHAPES = {"wide": (2048, 1408, 64, 6), "odd": (200, 72, 12, 3), "clamped": (2880, 2880, 32, 4)}
"""D, F, E, K: DeepSeek-V2-Lite, one with a tail in each axis, and gpt-oss with biases and clamps."""


def ahead_of_time_cases() -> list[dict[str, Any]]:
    """Every step in the default configs of every kind of device: bf16, many and few rows, and fp32.

    The first product and the gradients in fp32 have a second list of weights. A layer with tails and one with
    biases are compiled on one target of a kind each.
    """
    cases: list[dict[str, Any]] = []
    for kind, targets in TARGETS_OF.items():
        given = [(shape, "bf16", 1 << 20) for shape in SHAPES] + [("wide", "bf16", n) for n in FEW[kind]]
        for shape, dtype, rows in [("odd", "fp32", 1 << 20)] if kind == "small" else given:
            call = functools.partial(every_step, kind, *SHAPES[shape], dtype, rows)
            launches = launches_of("", call)
            only = CROSSED.get(kind, targets) if shape == "clamped" else targets
            if shape == "odd":
                only = tuple(target for target in targets if target not in CROSSED.get(kind, ()))
            for number, case in enumerate(launches):
                if case["name"] in ("tiles_kernel", "weight_sums_kernel"):
                    name = case["name"] + " behind" * case["constexprs"].get("BEHIND", 0)
                    if name not in [other["name"] for other in cases]:
                        cases.append(case | {"name": name})  # for all targets
                elif rows not in FEW[kind] or case["name"] == "rows_kernel":
                    name = f"{case['name']} {number} {kind} {shape} {dtype} {rows}"
                    case["constexprs"]["UPCAST"] = False
                    cases.append(case | {"name": name, "only": only})
    gradient, total = (torch.empty(4096, device="meta", dtype=d) for d in (torch.bfloat16, torch.float32))
    ends_E = torch.empty(2, device="meta", dtype=torch.int32)
    cases += launches_of("", lambda: into(total, gradient, add=True))
    return cases + launches_of("of more", lambda: into(gradient, gradient, add=False, ends_E=ends_E))


def every_step(kind: str, D: int, F: int, E: int, K: int, dtype: str, rows_per_expert: int) -> None:
    """Launch all steps on the meta device, as if on a kind of GPU."""
    kept, R = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], E * rows_per_expert
    meta = functools.partial(torch.empty, device="meta")
    x, weights = meta(R // K, D, dtype=kept), [(E, 2 * F, D), (E, D, F)]
    plan = reference.Plan(*(meta(size, dtype=torch.int32) for size in ((R,), (R // K, K), (E,))))
    experts = reference.Experts(*(meta(size, dtype=kept) for size in weights), meta(R // K, K), *plan)
    if SHAPES["clamped"] == (D, F, E, K):
        experts = experts._replace(b_gate_up=meta(E, 2 * F, dtype=kept), limit=7.0)
    own, (gate_up, down) = E - E // 4, (meta(size) for size in weights)
    with mock.patch.multiple(kernels, kind_of=lambda device: kind, units_of=lambda device: 132):
        _, h = kernels.forward(x, experts)
        kernels.hidden(x, experts.w_gate_up[:own], plan, experts.w_gate_up[own:])
        _, _, dh, a = kernels.dgrad(x, h, experts)
        kernels.wgrad(x, x, dh, a, plan)
        kernels.wgrad(x, x, dh, a, plan._replace(ends_E=plan.ends_E[:own]), (gate_up[:own], down[:own]), True)
        kernels.wgrad_of_more(x, x, dh, a, plan, (gate_up[own:], down[own:]))
        kernels.wgrad_of_more(x, x, dh, a, plan, (gate_up[own:].to(kept), down[own:].to(kept)))
