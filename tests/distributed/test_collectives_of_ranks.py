"""Collectives between four ranks: values and gradients by their definition, and torch's own checks."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from graphmoe.ops import collectives as ops
from graphmoe.plan.layout import Layout
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.ranks import Job

pytestmark = pytest.mark.slow
SIZE = 2
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
    """Inputs and outputs of a collective, forward and backward."""

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

    def __call__(self, ranks: Ranks, folder: Path) -> Ends:
        ops.use_groups(Mesh(LAYOUT))
        generator = torch.Generator().manual_seed(ranks.rank)
        x = torch.randint(-9, 9, self.shape, generator=generator).to(self.dtype)
        x = x.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        y = RUN[self.kind](x, self.dim)
        dy = torch.randint(-9, 9, y.shape, generator=generator).to(self.dtype)
        dy = dy.transpose(0, -1).contiguous().transpose(0, -1)
        dx = torch.autograd.grad(y, x, dy)[0] if y.requires_grad else None
        fresh = y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        return Ends(x.detach(), y.detach(), dy, dx, fresh)


CASES = {
    f"{kind}, {where}, {dtype}": Collective(kind, *SHAPES[where], dtype)
    for kind in RUN
    for where in SHAPES
    for dtype in DTYPES
}


def others(ranks: Ranks, folder: Path) -> tuple[Tensor, ...]:
    ops.use_groups(Mesh(LAYOUT))
    x = torch.arange(4.0).view(2, 2) + ranks.rank
    first, second = ops.sums_over("tp", SIZE, x, x.sum().requires_grad_())
    graphmoe = torch.ops.graphmoe
    for op, arguments in {
        graphmoe.all_gather: (x.clone().requires_grad_(), "tp", SIZE, 1),
        graphmoe.reduce_scatter: (x.clone().requires_grad_(), "tp", SIZE, 1),
        graphmoe.all_to_all: (x.clone().requires_grad_(), "tp", SIZE, 0, 1),
        graphmoe.all_reduce: (x.clone().requires_grad_(), "tp", "sum"),
        graphmoe.index_along: (x, "tp"),
    }.items():
        torch.library.opcheck(op.default, arguments)
    return first, second.detach(), ops.index_along("tp", x)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("ranks"), {**CASES, "others": others}, num_ranks=4).results()


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


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_definition(ranks, name):
    case = CASES[name]
    for rank, ends in enumerate(ranks[name]):
        group = [ranks[name][other] for other in LAYOUT.group("tp", rank)]
        index = LAYOUT.index("tp", rank)
        assert ends.y.equal(expected(case.kind, [e.x for e in group], case.dim, index, False)) and ends.fresh
        if case.kind == "max":
            assert ends.dx is None
        else:
            assert ends.dx.equal(expected(case.kind, [e.dy for e in group], case.dim, index, True))


def test_several_tensors_are_summed_and_each_rank_knows_its_place(ranks):
    for rank, (first, second, index) in enumerate(ranks["others"]):
        x = SIZE * torch.arange(4.0).view(2, 2) + sum(LAYOUT.group("tp", rank))
        assert first.equal(x) and second.equal(x.sum()) and int(index) == rank % 2
