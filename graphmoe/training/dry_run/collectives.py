"""Collectives of a step by axis, and the check of their process groups against the layout.

A collective is a c10d operation, which names a process group, or an operation of
``graphmoe.ops.collectives``, which names an axis.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from graphmoe.plan.layout import AXES, SUMMED_OVER, Axis, Layout
from graphmoe.runtime.ranks import Mesh
from graphmoe.runtime.torch_compat import process_group_in

NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "recv_": "receive",
}
MESSAGES = ("send", "recv_")  # c10d operations between two pipeline ranks
# rank order of docs/parallel.md; not from the layout, which it checks
FOLDINGS: tuple[tuple[Axis, ...], ...] = (("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp"))
# c10d operations that only one axis uses: dispatch and combine
AXIS_OF: dict[str, Axis] = {"alltoall_base_": "ep_etp"}
LOCAL = frozenset({"index_along"})  # graphmoe operations that name an axis but send nothing


class WrongGroup(RuntimeError):
    """Process group whose ranks or their order differ from the layout's."""


class Collective(NamedTuple):
    """Kind of collective; calls with equal values are counted together."""

    phase: str
    operation: str
    axes: tuple[Axis, ...]  # the axis; all axes with the same ranks if the operation names a process group
    ranks: tuple[int, ...]  # in the order of the axis; source and destination of a message
    shape: tuple[int, ...]  # larger of input and output on each rank
    dtype: str
    bytes: int


class CollectiveLog:
    """Count of collectives by kind. *Raises* WrongGroup for a group outside the mesh's layout."""

    def __init__(self, mesh: Mesh) -> None:
        check_groups(mesh)
        self.counts: Counter[Collective] = Counter()
        self._mesh = mesh
        self._axes: dict[tuple[int, ...], tuple[Axis, ...]] = {}
        for axis in AXES:
            if mesh.layout.size(axis) > 1:
                ranks = mesh.layout.group(axis, mesh.rank)
                self._axes[ranks] = *self._axes.get(ranks, ()), axis
        for axis in SUMMED_OVER if mesh.layout.shard_size else ():
            for group in (*mesh.layout.shard_groups(axis), *mesh.layout.replica_groups(axis)):
                self._axes.setdefault(group, (axis,))

    def saw(self, func: Any, args: tuple[Any, ...], result: Any, phase: str) -> None:
        """Count an operation if it is a collective."""
        layout, own = self._mesh.layout, self._mesh.rank
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            group = next((g for a in args if (g := process_group_in(a)) is not None), None)
            if group is None:
                return
            ranks, holding = tuple(dist.get_process_group_ranks(group)), args
            if name in MESSAGES:
                axes: tuple[Axis, ...] = ("pp",)
                ranks = self._way(name, ranks)
            elif ranks not in self._axes:
                raise WrongGroup(
                    f"{name} runs among ranks {list(ranks)}, which are not the group of any axis"
                )
            else:
                axes = self._axes[ranks]
                if (wanted := AXIS_OF.get(name)) is not None and wanted not in axes:
                    raise WrongGroup(
                        f"{name} runs among ranks {list(ranks)}, but the group of {wanted} is "
                        f"{list(layout.group(wanted, own))}"
                    )
        elif namespace == "graphmoe" and name not in LOCAL:
            given = dict(zip([a.name for a in func._schema.arguments], args, strict=False))
            if "axis" not in given:
                return
            axes, holding = (given["axis"],), (args, result)
            ranks = layout.group(axes[0], own)
            if given.get("size", len(ranks)) != len(ranks):
                raise WrongGroup(
                    f"{name} was called for {given['size']} ranks along {axes[0]}, which has {len(ranks)}"
                )
        else:
            return
        tensors = [leaf for leaf in pytree.tree_leaves(holding) if isinstance(leaf, Tensor)]
        largest = max(tensors, key=lambda tensor: tensor.nbytes, default=None)
        shape: tuple[int, ...] = ()
        dtype, size = torch.uint8, 0
        if largest is not None:
            shape, dtype, size = tuple(largest.shape), largest.dtype, largest.nbytes
        operation, of_type = NAMES.get(name, name.strip("_")), str(dtype).removeprefix("torch.")
        self.counts[Collective(phase, operation, axes, ranks, shape, of_type, size)] += 1

    def _way(self, name: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
        pipeline, own = self._mesh.layout.group("pp", self._mesh.rank), self._mesh.rank
        if len(ranks) != 2 or own not in ranks or not {*ranks} <= {*pipeline}:
            raise WrongGroup(f"a message is among ranks {list(ranks)}, but the pipeline has {list(pipeline)}")
        (peer,) = {*ranks} - {own}
        return (own, peer) if name == "send" else (peer, own)

    def to_json(self, times: Mapping[str, int | Fraction]) -> list[dict[str, Any]]:
        """Return each kind with its count in a step; ``times``: factor of counts by phase."""
        counts = {call: Fraction(times.get(call.phase, 1)) * count for call, count in self.counts.items()}
        assert all(count.denominator == 1 for count in counts.values()), "micro-batches are not alike"
        return [{**call._asdict(), "count": int(count)} for call, count in counts.items()]


def check_groups(mesh: Mesh) -> None:
    """Raise WrongGroup if this rank's groups differ from the layout or docs/parallel.md."""
    layout, rank = mesh.layout, mesh.rank
    for axis in AXES:
        group = mesh.group(axis)
        ranks = (rank,) if group is None else tuple(dist.get_process_group_ranks(group))
        if ranks != layout.group(axis, rank):
            raise WrongGroup(
                f"the process group of {axis} has the ranks {list(ranks)}, and the layout "
                f"{list(layout.group(axis, rank))}"
            )
        if group is not None and ranks[dist.get_rank(group)] != rank:
            raise WrongGroup(
                f"rank {rank} has index {dist.get_rank(group)} in the process group of {axis}, but in "
                f"{list(ranks)} this is the index of another rank"
            )
    for folding in FOLDINGS:
        check_order(layout, folding)
    check_experts(layout, layout.group("ep_etp", rank))


def check_order(layout: Layout, folding: Sequence[Axis]) -> None:
    """Check that ranks are numbered by their positions along the axes, the last axis fastest."""
    sizes = [getattr(layout, axis) for axis in folding]
    for i, axis in enumerate(folding):
        stride = math.prod(sizes[i + 1 :])
        for rank, place in _places(layout, axis).items():
            wanted = rank // stride % sizes[i]
            if place != wanted:
                raise WrongGroup(
                    f"rank {rank} has index {place} along {axis}, but {wanted} if ranks are numbered over "
                    f"{' * '.join(folding)} = {' * '.join(map(str, sizes))} with the last axis the fastest"
                )


def check_experts(layout: Layout, ranks: Sequence[int]) -> None:
    """Check that ranks own the experts' blocks in order, etp ranks each, as dispatchers assume."""
    blocks, parts = _places(layout, "ep"), _places(layout, "etp")
    for number, rank in enumerate(ranks):
        block, part = divmod(number, layout.etp)
        if (blocks[rank], parts[rank]) != (block, part):
            raise WrongGroup(
                f"rank {rank} has index {number} in ep_etp, so it receives tokens for index {block} of ep, "
                f"{part} of etp; its experts are of index {blocks[rank]} of ep, {parts[rank]} of etp"
            )


def _places(layout: Layout, axis: Axis) -> dict[int, int]:
    return {rank: place for group in layout.groups(axis) for place, rank in enumerate(group)}
