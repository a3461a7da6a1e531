"""Operations between four ranks: values and gradients by their definition, and torch's own checks."""

import functools
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.ops import collectives as ops
from graphmoe.ops.replicas import reference
from graphmoe.ops.replicas.exchange import Exchange
from graphmoe.ops.symm import CollectivePeers, use_peers
from graphmoe.plan.layout import Layout
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.layouts import REPLICAS, Case
from tests.distributed.ranks import Job
from tests.ops import replica_cases
from tests.ops.replica_cases import HOLDERS, assert_traffic_is_that_of_the_definition

pytestmark = pytest.mark.slow
RANKS, SIZE = 4, 2
LAYOUT = Layout(dp=2, tp=SIZE)
RUN = {
    "all_gather": lambda x, dim: ops.all_gather(x, "tp", SIZE, dim),
    "reduce_scatter": lambda x, dim: ops.reduce_scatter(x, "tp", SIZE, dim),
    "all_to_all": lambda x, dim: ops.all_to_all(x, "tp", SIZE, split=dim, join=x.dim() - 1),
    "sum": lambda x, dim: ops.all_reduce(x, "tp", SIZE, "sum"),
    "max": lambda x, dim: ops.all_reduce(x, "tp", SIZE, "max"),
}
SHAPES = {"first dim": ((4, 3, 5), 0), "behind one": ((1, 4, 5), 1), "in the middle": ((3, 4, 5), 1)}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class Ends(NamedTuple):
    x: Tensor
    y: Tensor
    dy: Tensor
    dx: Tensor | None
    fresh: bool


@dataclass(frozen=True)
class Collective:
    """One collective on small integers, whose sums are exact."""

    kind: str
    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype

    def __call__(self, ranks: Ranks) -> Ends:
        generator = torch.Generator().manual_seed(ranks.rank)
        x = self.values(self.shape, generator).requires_grad_()
        y = RUN[self.kind](x, self.dim)
        dy = self.values(y.shape, generator)
        dx = torch.autograd.grad(y, x, dy)[0] if y.requires_grad else None
        fresh = y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        return Ends(x.detach(), y.detach(), dy, dx, fresh)

    def values(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        x = torch.randint(-9, 9, shape, generator=generator).to(self.dtype)
        return x.transpose(0, -1).contiguous().transpose(0, -1)


COLLECTIVES = {
    f"{kind}, {where}, {dtype}": Collective(kind, *SHAPES[where], dtype)
    for kind, where, dtype in itertools.product(RUN, SHAPES, DTYPES)
}
REPLICATED = {
    f"{holders} {dtype}": replica_cases.Case(RANKS, 2, 3, holders, dtype)
    for holders, dtype in itertools.product(HOLDERS, (*DTYPES, torch.float8_e4m3fn))
}


def operations(ranks: Ranks, _: Path) -> dict[str, Any]:
    """Results of all cases of one operation: they share groups, which take longer to make than to use."""
    ops.use_groups(Mesh(LAYOUT))
    use_peers(CollectivePeers(dist.group.WORLD))
    checks_and_sums(ranks)
    found: dict[str, Any] = {name: case(ranks) for name, case in COLLECTIVES.items()}
    return found | {name: case.run(ranks.rank) for name, case in REPLICATED.items()}


def checks_and_sums(ranks: Ranks) -> None:
    """Torch's checks of the operations; several tensors are summed, and each rank knows its place."""
    x = torch.arange(4.0).view(2, 2) + ranks.rank
    case, graphmoe = replica_cases.Case(RANKS, 2, 2, "all"), torch.ops.graphmoe
    weights = case.weights(ranks.rank, 0).nan_to_num().requires_grad_()
    for op, *arguments in (
        (graphmoe.all_gather, x.clone().requires_grad_(), "tp", SIZE, 1),
        (graphmoe.reduce_scatter, x.clone().requires_grad_(), "tp", SIZE, 1),
        (graphmoe.all_to_all, x.clone().requires_grad_(), "tp", SIZE, 0, 1),
        (graphmoe.all_reduce, x.clone().requires_grad_(), "tp", "sum"),
        (graphmoe.index_along, x, "tp"),
        (graphmoe.replica_counts, case.counts_RE[ranks.rank], RANKS),
        (graphmoe.replica_weights, weights, case.expert_RS),
        (graphmoe.replica_weights_grad, case.gradients(ranks.rank, 0), case.expert_RS, 2),
    ):
        torch.library.opcheck(op.default, tuple(arguments))
    first, second = ops.sums_over("tp", SIZE, x, x.sum().requires_grad_())
    total = SIZE * torch.arange(4.0).view(2, 2) + sum(LAYOUT.group("tp", ranks.rank))
    assert first.equal(total) and second.equal(total.sum())
    assert int(ops.index_along("tp", x)) == ranks.rank % 2


def fetches(more: Sequence[str], ranks: Ranks, folder: Path) -> tuple[int, ...]:
    """Numbers of pulls, of weights that came along with rows, of transfers, and of gradients sent so."""
    words = (*REPLICAS, "recompute.segments=[moe_experts]", *more)
    calls = [(Exchange, "pull"), (Exchange, "keep"), (reference, "pull"), (reference, "add_made")]
    with ExitStack() as stack:
        patches = [mock.patch.object(*call, autospec=True, side_effect=getattr(*call)) for call in calls]
        spies = [stack.enter_context(patch) for patch in patches]
        Case(RANKS, "ep=2", "", words, TWO_LAYERS, "traced").training(ranks, folder)
    return tuple(spy.call_count for spy in spies)


def in_turns(more: Sequence[str], ranks: Ranks, folder: Path) -> None:
    """All pulls find weights that came along with rows, and gradients go home in exchanges of rows."""
    pulls, along, transfers, homes = fetches(("pipeline.ep_overlap=true", *more), ranks, folder)
    assert transfers == along and pulls > 0 and homes > 0


def captured(scope: str, ranks: Ranks, folder: Path) -> None:
    """All weights come along with rows, or none, and then they are fetched; replays reduce no gradients."""
    words = f"graph.scope={scope}", "graph.warmup_steps=1", "pipeline.ep_overlap=true"
    pulls, along, transfers, homes = fetches(words, ranks, folder)
    are_sent, are_reduced = CAPTURED[scope]
    assert pulls > 0 and (transfers == along if are_sent else (transfers, along) == (pulls, 0))
    assert (homes > 0) == are_reduced


CAPTURED = {  # whether exchanges of rows send weights of replicas, and whether they reduce gradients
    "partial": (True, True), "layer": (True, False), "[shared_experts]": (True, True),
    "[attn,moe_preprocess,moe_experts]": (False, True), "[moe_preprocess,moe_combine]": (False, False),
    "[moe_preprocess,moe_dispatch,moe_experts]": (False, False),
    "[moe_dispatch,moe_experts,moe_combine]": (False, False),
}  # fmt: skip
TWO_LAYERS = ("model.num_dense_layers=0", "model.num_layers=2", "train.val_batches=0")
OTHERS = {
    "replicas in turns": functools.partial(in_turns, ()),
    "replicas in turns, kept": functools.partial(in_turns, ("moe.replica_keep=true",)),
    **{f"replicas, {scope}": functools.partial(captured, scope) for scope in CAPTURED},
}


@pytest.fixture(scope="module")
def ranks(folder) -> dict[str, list[Any]]:
    found = Job(folder, {"operations": operations, **OTHERS}, RANKS).results()
    by_rank = found.pop("operations")
    return found | {name: [of_rank[name] for of_rank in by_rank] for name in (*COLLECTIVES, *REPLICATED)}


def expected(kind: str, xs: list[Tensor], dim: int, index: int, back: bool) -> Tensor:
    """The result on one rank of the group from what all have, or the gradient: the other collective."""
    last = xs[0].dim() - 1
    split, join = (last, dim) if back else (dim, last)
    if kind == ("reduce_scatter" if back else "all_gather"):
        return torch.cat(xs, dim=dim)
    if kind == "all_to_all":
        return torch.cat([x.chunk(SIZE, dim=split)[index] for x in xs], dim=join)
    if kind == "max":
        return torch.stack(xs).amax(dim=0)
    if kind == "sum":
        return xs[index] if back else torch.stack(xs).sum(dim=0)
    return torch.stack(xs).sum(dim=0).chunk(SIZE, dim=dim)[index]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_and_gradients_are_those_of_the_definition(ranks, name):
    case = COLLECTIVES[name]
    for rank, ends in enumerate(ranks[name]):
        group = [ranks[name][other] for other in LAYOUT.group("tp", rank)]
        index = LAYOUT.index("tp", rank)
        assert ends.y.equal(expected(case.kind, [e.x for e in group], case.dim, index, False)) and ends.fresh
        if case.kind == "max":
            assert ends.dx is None
        else:
            assert ends.dx.equal(expected(case.kind, [e.dy for e in group], case.dim, index, True))


@pytest.mark.parametrize("name", REPLICATED)
def test_weights_and_gradients_of_replicas_get_where_the_definition_says(ranks, name):
    assert_traffic_is_that_of_the_definition(REPLICATED[name], ranks[name])


@pytest.mark.parametrize("name", OTHERS)
def test_each_rank_finds_what_it_checks_itself(ranks, name):
    assert ranks[name] == [None] * RANKS
