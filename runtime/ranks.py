"""Ranks of a job: objects that they exchange outside the model, and the process groups of a layout."""

import os
import pickle
import platform
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError
from graphmoe.plan.layout import AXES, SUMMED_OVER, Axis, Layout

T = TypeVar("T")
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""For tensors: other ranks wait in a collective while one compiles. The launcher finds hangs sooner."""
PATIENCE = timedelta(hours=12)
"""For objects: other ranks wait while one tokenises a corpus or compiles."""


class Ranks:
    """All ranks of the job and this one's place among them; one rank alone without a process group.

    They exchange objects, by a gloo group of its own: who talks from another thread makes other Ranks.
    Making one is collective. For tensors there is ``Mesh``.
    """

    def __init__(self, patience: timedelta = PATIENCE) -> None:
        spread = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if spread else 0
        self.size = dist.get_world_size() if spread else 1
        # LOCAL_RANK is 0 on every rank where each sees one GPU only (torch's virtual local rank)
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if spread else 1
        self.local_index = self.rank % self.local_size
        self.group = dist.new_group(backend="gloo", timeout=patience) if spread else None
        """For objects; None where there is one rank."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, item: T) -> list[T]:
        """Return every rank's item, in the order of ranks, on every rank."""
        if self.group is None:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.group)
        return items

    def on_first(self, action: Callable[[], T]) -> T:
        """Return the result of ``action``, run on rank 0 only; its error is raised on every rank."""
        if self.size == 1:
            return action()
        outcome: list[Any] = list(_outcome(action)) if self.is_first else [None, None]
        dist.broadcast_object_list(outcome, group=self.group)
        return _result(*outcome)

    def on_first_of_node(self, action: Callable[[], T]) -> T:
        """Result of ``action``, run on the first rank of each node only; its error is raised on that node.

        A collective of all ranks.
        """
        if self.size == 1:
            return action()
        mine = _outcome(action) if self.local_index == 0 else (None, None)
        return _result(*self.gather(mine)[self.rank - self.local_index])

    def on_each(self, action: Callable[[], None]) -> None:
        """Run ``action`` on every rank. The error of the first rank that has one is raised on all."""
        for outcome in self.gather(_outcome(action)):
            _result(*outcome)

    def barrier(self) -> None:
        """Return when every rank is here."""
        self.gather(None)


class Place(NamedTuple):
    """Machine and number of a rank there."""

    machine: str  # the same for two containers of one machine
    host: str
    local_rank: int  # 0 on every rank if each sees one GPU only (torch's virtual local rank)
    local_size: int


def place_here() -> Place:
    """Return where this rank runs, by torch's variables."""
    host, boot = platform.node(), Path("/proc/sys/kernel/random/boot_id")
    local = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return Place(boot.read_text() if boot.exists() else host, host, *local)


def check_places(places: Sequence[Place]) -> None:
    """Check that rank = node * local size + local rank, which layouts rely on. *Raises* ConfigError."""
    size, virtual = places[0].local_size, not any(place.local_rank for place in places)
    for rank, place in enumerate(places):
        first = places[rank - rank % size]
        if place.local_size != size:
            uneven = f"{number_of(size, 'rank')} on {places[0].host} and {place.local_size} on {place.host}"
            raise ConfigError(f"{uneven}; start equally many on each node")
        if place.machine != first.machine or not (virtual or place.local_rank == rank % size):
            raise ConfigError(
                f"rank {rank} is local rank {place.local_rank} of {place.host}, and must be local rank "
                f"{rank % size} of {first.host}, like rank {rank - rank % size}: {size} ranks in a row "
                f"share a node; use srun --distribution=block, or mpirun --map-by ppr:{size}:node"
            )


class Mesh:
    """The process groups that this rank is in. Making one is collective; one rank alone needs none.

    Axes with the same ranks share a group, but none in which gradients and weights travel beside the model's
    own collectives: a communicator runs one operation after the other, and these would wait for those.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._groups: dict[Axis, dist.ProcessGroup] = {}
        made: dict[tuple[Any, ...], dist.ProcessGroup] = {}
        for axis in AXES:
            groups = layout.groups(axis)
            key = (axis in SUMMED_OVER, *groups)
            if layout.size(axis) > 1 and key not in made:
                made[key], _ = dist.new_subgroups_by_enumeration(
                    [list(group) for group in groups], timeout=COLLECTIVE_TIMEOUT
                )
            if layout.size(axis) > 1:
                self._groups[axis] = made[key]

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """Return the process group of an axis; None where this rank is alone in it."""
        return self._groups.get(axis)

    def index(self, axis: Axis) -> int:
        """Return the place of this rank in its group of the axis."""
        return self.layout.index(axis, self.rank)


def sums(group: dist.ProcessGroup | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Sum each tensor over a group in its own dtype, all by one collective. No device sync on a GPU.

    Sums travel as fp64, which keeps counts exact. Without a group (None) the tensors are returned.
    """
    if group is None:
        return tensors
    total = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    dist.all_reduce(total, group=group)
    parts = total.split([tensor.numel() for tensor in tensors])
    return tuple(p.view_as(t).to(t.dtype) for p, t in zip(parts, tensors, strict=True))


def _result(result: Any, error: Exception | None) -> Any:
    if error is not None:
        raise error
    return result


def _outcome(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, _portable(error)


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def backend_of(device: torch.device) -> str:
    """Return what ``init_process_group`` takes for tensors on a device."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
