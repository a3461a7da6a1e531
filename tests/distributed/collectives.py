"""Collectives between ranks, as cases of `tests.distributed.ranks`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphmoe.ops import collectives as ops
from graphmoe.plan.layout import Layout
from graphmoe.runtime.ranks import Mesh, Ranks

SIZE = 2
LAYOUT = Layout(dp=2, tp=SIZE)


@dataclass
class Ends:
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
        y = call(self.kind, x, self.dim)
        dy = torch.randint(-9, 9, y.shape, generator=generator).to(self.dtype)
        dy = dy.transpose(0, -1).contiguous().transpose(0, -1)
        dx = torch.autograd.grad(y, x, dy)[0] if y.requires_grad else None
        fresh = y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        return Ends(x.detach(), y.detach(), dy, dx, fresh)


def call(kind: str, x: Tensor, dim: int) -> Tensor:
    """The collective along tp."""
    if kind == "all_gather":
        return ops.all_gather(x, "tp", SIZE, dim)
    if kind == "all_to_all":
        return ops.all_to_all(x, "tp", SIZE, split=dim, join=x.dim() - 1)
    if kind == "all_to_all back":
        return ops.all_to_all(x, "tp", SIZE, split=x.dim() - 1, join=dim)
    return (
        ops.reduce_scatter(x, "tp", SIZE, dim)
        if kind == "reduce_scatter"
        else ops.all_reduce(x, "tp", SIZE, kind)
    )


def others(ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    """Run operations without gradients, and torch's checks of registration, fakes and tracing."""
    ops.use_groups(Mesh(LAYOUT))
    x = torch.arange(4.0).view(2, 2) + ranks.rank
    first, second = ops.sums_over("tp", SIZE, x, x.sum().requires_grad_())
    graphmoe = torch.ops.graphmoe
    checks = (
        (graphmoe.all_gather.default, (x.clone().requires_grad_(), "tp", SIZE, 1)),
        (graphmoe.reduce_scatter.default, (x.clone().requires_grad_(), "tp", SIZE, 1)),
        (graphmoe.all_to_all.default, (x.clone().requires_grad_(), "tp", SIZE, 0, 1)),
        (graphmoe.all_reduce.default, (x.clone().requires_grad_(), "tp", "sum")),
        (graphmoe.index_along.default, (x, "tp")),
    )
    for op, arguments in checks:
        torch.library.opcheck(op, arguments)
    return {"index": ops.index_along("tp", x), "first": first, "second": second.detach()}
