"""Layout of a job's ranks along the parallel dimensions.

Ranks are folded twice (parallel folding, arXiv 2504.14960, section 3): PP x DP x CP x TP for dense weights,
PP x EDP x EP x ETP for routed experts. Ranks along the last dimension are consecutive.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

import numpy as np

from graphmoe.config.choices import ContextMethod, DpShard
from graphmoe.config.ranges import ConfigError
from graphmoe.config.sections import ParallelConfig

if TYPE_CHECKING:
    from torch import Tensor

Axis = Literal[
    "pp", "dp", "cp", "tp", "edp", "ep", "etp", "dp_cp", "dp_pp", "cp_tp", "ep_etp", "stage", "embed", "world"
]  # fmt: skip
"""Dimensions, and combinations: ``dp_cp`` ranks with the same dense shards, ``dp_pp`` with other tokens or
layers, ``cp_tp`` with parts of the same sequences, ``ep_etp`` one copy of all experts, ``stage`` all ranks
with the same layers, ``embed`` those with the same rows of the embedding."""
DENSE: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")
EXPERT: tuple[Axis, ...] = ("pp", "edp", "ep", "etp")
_SPANS: dict[Axis, tuple[tuple[Axis, ...], tuple[Axis, ...]]] = {
    **{axis: (DENSE, (axis,)) for axis in DENSE},
    **{axis: (EXPERT, (axis,)) for axis in EXPERT[1:]},
    "dp_cp": (DENSE, ("dp", "cp")),
    "dp_pp": (DENSE, ("pp", "dp")),
    "cp_tp": (DENSE, ("cp", "tp")),
    "ep_etp": (EXPERT, ("ep", "etp")),
    "stage": (DENSE, ("dp", "cp", "tp")),
    "world": (DENSE, DENSE),
}
AXES: tuple[Axis, ...] = (*_SPANS, "embed")
# axes over which gradients, new weights and a step's scalars are communicated
SUMMED_OVER: tuple[Axis, ...] = ("dp", "dp_cp", "dp_pp", "edp", "stage", "embed", "world")


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions; the default is one rank."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    ring: bool = False
    """True if cp ranks circulate keys and values, with chunks in zigzag order; else they exchange heads."""
    embed_on: tuple[int, ...] = (0,)
    """pp indices of the ranks that hold the embedding."""
    shard_size: int | None = None
    """Consecutive ranks that together have all shards; None: all ranks with equal weights."""

    @classmethod
    def of(cls, config: ParallelConfig, world_size: int) -> Layout:
        """Return the layout of ``world_size`` ranks; the remaining factor is dp. *Raises* ConfigError."""
        given = {name: getattr(config, name) for name in ("tp", "cp", "pp")}
        rest = math.prod(given.values())
        words = " * ".join(f"parallel.{name}={value}" for name, value in given.items())
        if world_size % rest:
            raise ConfigError(
                f"{words} = {rest} does not divide the {world_size} rank{'s' * (world_size > 1)} "
                f"(launch.nproc * nodes); use a "
                f"multiple of {rest} ranks, or smaller dimensions"
            )
        dp = world_size // rest
        if config.dp not in (None, dp):
            raise ConfigError(
                f"parallel.dp={config.dp} * {words} = {config.dp * rest} is not the number of ranks, "
                f"{world_size}; use parallel.dp={dp}, or leave it out"
            )
        ring = config.cp > 1 and config.cp_method is ContextMethod.ring
        sizes = dp, config.tp, config.cp, config.pp, config.ep, config.etp
        shard_size = config.dp_shard_size if config.dp_shard is DpShard.fsdp2 else None
        layout = cls(*sizes, ring, shard_size=shard_size)
        stage, experts = layout.size("stage"), config.ep * config.etp
        if stage % experts:
            valid = ", ".join(map(str, divisors(stage)))
            raise ConfigError(
                f"parallel.ep={config.ep} * parallel.etp={config.etp} = {experts} does not divide the "
                f"{stage} ranks of a pipeline stage (parallel.dp={dp} * parallel.cp={config.cp} * "
                f"parallel.tp={config.tp}); use parallel.ep * parallel.etp of {valid}"
                + (f", or launch.nproc={experts * config.pp}" if stage < experts else "")
            )
        if shard_size and stage > 0 and shard_size not in (blocks := _blocks(stage, config.tp, experts)):
            raise ConfigError(
                f"parallel.dp_shard_size={shard_size} does not divide the {stage} ranks of a pipeline stage, "
                f"with parallel.tp={config.tp} and parallel.ep * parallel.etp = {experts} of them in a row; "
                f"use {', '.join(map(str, blocks))}, or null"
            )
        return layout

    def shard_groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """Return the ranks of each group of the axis that shard its weights together."""
        groups, most = self.groups(axis), self.shard_size or self.size("world")
        return [tuple(part) for group in groups for _, part in groupby(group, lambda rank: rank // most)]

    def replica_groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """Return the ranks of each group of the axis that have the same shards."""
        parts, shards = self.shard_groups(axis), self.num_shards(axis)
        each = self.size(axis) // shards
        groups = [parts[i : i + each] for i in range(0, len(parts), each)]
        return [ranks for group in groups for ranks in zip(*group, strict=True)]

    def num_shards(self, axis: Axis) -> int:
        return len(self.shard_groups(axis)[0])

    @property
    def edp(self) -> int:
        """Number of data-parallel copies of each expert in a pipeline stage."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    def size(self, axis: Axis) -> int:
        """Return the number of ranks in a group of the axis; group ``embed``: ranks with the embedding."""
        if axis == "embed":
            return self.size("dp_cp") * len(self.embed_on)
        return math.prod(getattr(self, name) for name in _SPANS[axis][1])

    def index(self, axis: Axis, rank: int) -> int:
        """Return a rank's index in its group of the axis."""
        return self.group(axis, rank).index(rank)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        return next(group for group in self.groups(axis) if rank in group)

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        if axis == "embed":
            of_place = np.array(self.groups("dp_cp")).reshape(self.pp, self.tp, -1)
            holders = np.concatenate([of_place[place] for place in self.embed_on], axis=1)
            others = np.delete(of_place, self.embed_on, axis=0).reshape(-1, of_place.shape[2])
            return [*map(tuple, holders.tolist()), *map(tuple, others.tolist())]
        folding, spanned = _SPANS[axis]
        ranks = np.arange(self.size("world")).reshape([getattr(self, name) for name in folding])
        outside = [i for i, name in enumerate(folding) if name not in spanned]
        inside = [i for i, name in enumerate(folding) if name in spanned]
        return [*map(tuple, ranks.transpose(outside + inside).reshape(-1, self.size(axis)).tolist())]


def _blocks(stage: int, *rows: int) -> list[int]:
    """Return the sizes of equal blocks of consecutive ranks that cut none of the ``rows``, or them evenly."""
    return [size for size in divisors(stage) if not any(size % row and row % size for row in rows)]


ALONE = Layout()


@dataclass(frozen=True)
class Cut:
    """A dimension of a parameter that is sharded over a mesh axis."""

    dim: int
    axis: Axis
    pieces: int = 1
    """Equal pieces along the dimension, each sharded separately: 2 for stacked gate and up rows."""


@dataclass(frozen=True)
class ParameterLayout:
    """Sharding of a parameter, and the axis of the ranks that hold the same part and sum its gradient."""

    cuts: tuple[Cut, ...] = ()
    # tp ranks see other tokens, so a replicated parameter's gradients are reduced over tp too
    summed_over: Axis = "stage"
    """Axis whose ranks hold the same part: they reduce its gradients and shard its optimizer state.

    ``stage`` for a replicated parameter, ``dp_cp`` if tp shards it, ``edp`` for experts.
    """
    is_bias: bool = False
    """True for biases that have a dimension of experts, and so the shape of a matrix."""
    is_shared: bool = False
    """True for the embedding and the head if several segments read them."""


REPLICATED = ParameterLayout()


@functools.lru_cache(maxsize=4096)
def ranks_of(layout: Layout, axis: Axis) -> object:
    """Return a key that is equal for axes with the same process groups: rank 0's group, or None if alone."""
    return None if layout.size(axis) == 1 else layout.groups(axis)[0]


def layout_of(parameter: object) -> ParameterLayout:
    """Return the ``parallel`` layout that the model's constructor set on a parameter, else replicated."""
    found = getattr(parameter, "parallel", REPLICATED)
    assert isinstance(found, ParameterLayout)
    return found


def own_part(whole: Tensor, parallel: ParameterLayout, layout: Layout, rank: int) -> Tensor:
    """Return a rank's part of a whole parameter: a copy if sharded, else the parameter itself."""
    import torch

    for cut in parallel.cuts:
        count, index = layout.size(cut.axis), layout.index(cut.axis, rank)
        pieces = whole.chunk(cut.pieces, dim=cut.dim)
        whole = torch.cat([piece.chunk(count, dim=cut.dim)[index] for piece in pieces], dim=cut.dim)
    return whole


def ranks_of_axes(sizes: Mapping[str, int], *, has_experts: bool) -> str:
    """Return, as text, the sizes of the parallel axes of dense parts, then of those of experts."""
    dense, experts = (
        " * ".join(f"{axis} {sizes[axis]}" for axis in axes)
        for axes in (("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp"))
    )
    return f"ranks of all that is dense: {dense}; of experts: {experts}" if has_experts else f"ranks: {dense}"


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of a positive number in order, up to ``most``."""
    below = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    found = sorted({*below, *(number // d for d in below)})
    return [d for d in found if most is None or d <= most]
