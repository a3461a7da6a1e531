"""A routing plan that one unit makes and another reads: known where it is one, and never else."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphmoe.ops.grouped_mm import grouped_mm
from graphmoe.ops.permute import routing_plan
from graphmoe.passes.table import PassRunner, select_passes
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.segments import Segment, run_segments
from tests.runs import config

T, K, E, D, WIDTH = 12, 2, 4, 8, 5


pytestmark = pytest.mark.usefixtures("graphs_as_they_are")


class Plan(nn.Module):
    """ends, row and slot, each after a change."""

    def __init__(self, ends=None, row=None, slot=None) -> None:
        super().__init__()
        self.changes = (ends, row, slot)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        plan = routing_plan(ids, E)
        parts = (plan.ends_E, plan.row_TK, plan.slot_R)
        return tuple(
            p if change is None else change(p) for p, change in zip(parts, self.changes, strict=True)
        )


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
    execute = CompiledSegments(
        lambda trains: PassRunner(select_passes(config("compile.enabled=true").passes, {}))
    )
    modules = [segment.run for segment in segments if isinstance(segment.run, nn.Module)]
    parameters = [p for module in modules for p in module.parameters()]

    def gradients(run) -> list[Tensor]:
        leaves = {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in given.items()}
        (y,) = run(segments, leaves, ("y",))
        wanted = [leaves["x"], leaves["weight"], *parameters]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]

    for plain, found in zip(gradients(run_segments), gradients(execute), strict=True):
        torch.testing.assert_close(found, plain)
    counted = [(p.name, p.matches) for report in execute.reports for p in report.passes]
    return {name: sum(n for other, n in counted if other == name) for name, _ in counted}


def layer(plan: Plan, experts: Experts) -> list[Segment]:
    parts = ("ends", "row", "slot")
    return [
        Segment("moe_preprocess", plan, ("ids",), parts, stream="comm"),
        Segment("moe_experts", experts, ("x", "weight", *parts), ("y",)),
    ]


def test_a_plan_keeps_its_meaning_from_unit_to_unit():
    matches = matches_of(layer(Plan(slot=lambda slot: slot.long().int()), Experts()))
    assert matches["fuse_permutation"] >= 3 and matches["fuse_experts"] == 1


@pytest.mark.parametrize(
    "plan, rows_of",
    [
        (Plan(row=lambda row: row.t().contiguous()), lambda row: row.t()),
        (Plan(row=lambda row: row.t()), lambda row: row.t()),
        (Plan(row=lambda row: row[:, :1]), lambda row: row),
        (Plan(row=lambda row: row.long()), lambda row: row),
        (Plan(ends=lambda ends: torch.cat([ends[:-1], ends[-1:]])), lambda row: row),
    ],
    ids=["copied across", "transposed", "a part", "wider", "made anew"],
)
def test_what_is_not_the_plan_itself_is_read_as_it_is(passes_may_miss, plan, rows_of):
    matches = matches_of(layer(plan, Experts(rows_of)))
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
