"""Experts with replicas on two ranks: an eager expression, the operation, and compiled units, against fp64.

Each rank owns two of four experts, and its tokens choose among those and the replicas in its slots.
"""

import functools
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphmoe.config.schema import RecomputeConfig
from graphmoe.ops.gradients import Gradient
from graphmoe.ops.grouped_mm import grouped_mm
from graphmoe.ops.permute import permute, routing_plan, unpermute
from graphmoe.ops.symm import CollectivePeers, use_peers
from graphmoe.passes import select_passes
from graphmoe.passes.base import PassRunner
from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.compile import report
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.ranks import Ranks
from graphmoe.segments import Segment, run_segments
from tests.distributed.ranks import run_ranks
from tests.distributed.training import unmeasured
from tests.ops.mlp_cases import written_out
from tests.ops.row_cases import choose, values
from tests.runs import config
from tests.tolerances import TOLERANCES, relative_error

RANKS, OWNED, T, K, D, WIDTH = 2, 2, 23, 2, 8, 5
EXPERT_RS = torch.tensor([[3, -1, 2], [0, 1, -1]], dtype=torch.int32)
PARTS = ("ends", "row", "slot")


def weights(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    sizes = (2 * WIDTH, D), (D, WIDTH)
    both = (values(RANKS * OWNED, *size, seed=i) / size[1] ** 0.5 for i, size in enumerate(sizes))
    return tuple(w.to(dtype) for w in both)  # type: ignore[return-value]


def tokens_of(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, dy, weights of slots, and the places of the tokens of a rank: own experts, then slots in use."""
    used = [*range(OWNED), *(OWNED + s for s, e in enumerate(EXPERT_RS[rank].tolist()) if e >= 0)]
    place_TK = torch.tensor(used, dtype=torch.int32)[choose("random", T, K, len(used), seed=rank).long()]
    x, dy = (values(T, D, seed=20 + 2 * rank + i) for i in range(2))
    return x, dy, values(T, K, seed=30 + rank).abs(), place_TK


class Preprocess(nn.Module):
    """The plan of places."""

    def forward(self, place_TK: Tensor) -> tuple[Tensor, ...]:
        plan = routing_plan(place_TK, OWNED + EXPERT_RS.shape[1])
        return plan.ends_E, plan.row_TK, plan.slot_R


class Experts(nn.Module):
    """The experts of a rank, with weights of replicas behind theirs."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        own = slice(rank * OWNED, (rank + 1) * OWNED)
        self.gate_up, self.down = (nn.Parameter(w[own].clone()) for w in weights())

    def forward(
        self, x: Tensor, weight_TK: Tensor, ends_E: Tensor, row_TK: Tensor, slot_R: Tensor, expert_RS: Tensor
    ) -> Tensor:
        replicas = torch.ops.graphmoe.replica_weights
        gate_up, down = (torch.cat([w, replicas(w, expert_RS)]) for w in (self.gate_up, self.down))
        gate, up = grouped_mm(permute(x, slot_R, row_TK), gate_up, ends_E).chunk(2, dim=-1)
        weight_R1 = permute(weight_TK.reshape(-1, 1), slot_R, row_TK.reshape(-1, 1))
        return unpermute(grouped_mm(F.silu(gate) * up * weight_R1, down, ends_E), slot_R, row_TK)

    def fused(self, *tensors: Tensor) -> Tensor:
        x, weight_TK, ends_E, row_TK, slot_R, expert_RS = tensors
        given = (x, self.gate_up, self.down, weight_TK, slot_R, row_TK, ends_E)
        return torch.ops.graphmoe.grouped_mlp(*given, "torch", expert_RS)[0]


FORMS = ("eager", "operation", "compiled", "compiled into sums", "compiled again")


def by_form(form: str, ranks: Ranks, folder: Path) -> list[list[Tensor]]:
    """y and the gradients of x, weights of slots, and both weights; twice, by the same graphs as they are."""
    use_peers(CollectivePeers(torch.distributed.group.WORLD))
    experts = Experts(ranks.rank)
    gradients = {id(p): Gradient(torch.full(p.shape, torch.nan)) for p in experts.parameters()}
    totals = [*gradients.values()] if "into sums" in form else []
    segments = [
        Segment("moe_preprocess", Preprocess(), ("places",), PARTS, stream="comm"),
        Segment("moe_experts", experts, ("x", "weight", *PARTS, "experts"), ("y",)),
    ]
    if form == "operation":
        segments[1] = Segment("moe_experts", experts.fused, segments[1].reads, ("y",))
    run = run_segments
    if form.startswith("compiled"):
        passes = select_passes(config("compile.enabled=true").passes, {})
        again = Recompute.of(RecomputeConfig(segments=["moe_experts"] if form.endswith("again") else []))
        into = (lambda p: gradients[id(p)]) if totals else None
        run = CompiledSegments(PassRunner(passes), into, recompute=again)
    found, (x, dy, weight, places) = [], tokens_of(ranks.rank)
    for _ in range(2):
        leaves = [each.clone().requires_grad_() for each in (x, weight)]
        experts.zero_grad()
        named = {"x": leaves[0], "weight": leaves[1], "places": places, "experts": EXPERT_RS}
        with mock.patch.object(report, "compile_graph", lambda graph: graph), unmeasured():
            (y,) = run(segments, named, ("y",))
            y.backward(dy)
        sums = [g.total.clone() for g in totals] or [p.grad for p in experts.parameters()]
        found.append([y.detach(), *(leaf.grad for leaf in leaves), *sums])
    if isinstance(run, CompiledSegments):
        assert {p.name: p.matches for r in run.reports for p in r.passes}["fuse_experts"] == 1
    use_peers(None)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[list[Tensor]]]]:
    cases = {form: functools.partial(by_form, form) for form in FORMS}
    return run_ranks(tmp_path_factory.mktemp("replicas"), cases, RANKS)


def expected() -> list[list[Tensor]]:
    gate_up, down = (w.requires_grad_() for w in weights(torch.float64))
    found = []
    for rank in range(RANKS):
        x, dy, weight, places = tokens_of(rank)
        experts = torch.cat([torch.arange(OWNED) + rank * OWNED, EXPERT_RS[rank]]).int()
        leaves = [each.double().requires_grad_() for each in (x, weight)]
        y = written_out(leaves[0], gate_up, down, leaves[1], experts[places.long()])
        y.backward(dy.double())
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for rank, of_rank in enumerate(found):
        own = slice(rank * OWNED, (rank + 1) * OWNED)
        of_rank += [w.grad[own] for w in (gate_up, down)]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_results_and_gradients_are_those_of_all_copies(results, form):
    for of_rank, wanted in zip(results[form], expected(), strict=True):
        for step, of_step in enumerate(of_rank):
            for i, (actual, exact) in enumerate(zip(of_step, wanted, strict=True)):
                times = 1 + step if i > 2 and "into sums" in form else 1
                assert relative_error(actual, times * exact) <= TOLERANCES[torch.float32].gradient, (step, i)


def test_the_operation_has_the_same_bits_eagerly_and_compiled(results):
    for form in ("compiled", "compiled again"):
        for one, other in zip(results["operation"], results[form], strict=True):
            for eager, compiled in zip(one, other, strict=True):
                assert all(a.equal(b) for a, b in zip(eager, compiled, strict=True))
