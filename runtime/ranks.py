"""Object collectives of a job's ranks; process groups of a layout."""

import operator
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
from graphmoe.ops.waits import waiting
from graphmoe.plan.layout import AXES, SUMMED_OVER, Axis, Layout

T = TypeVar("T")
# for tensors: long enough for one rank to compile; HangWatch detects hangs sooner
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
PATIENCE = timedelta(hours=12)  # for objects: long enough for one rank to tokenize a corpus


class Ranks:
    """Object collectives of all ranks over a dedicated gloo group. Collective; use one per thread."""

    def __init__(self, patience: timedelta = PATIENCE) -> None:
        spread = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if spread else 0
        self.size = dist.get_world_size() if spread else 1
        # LOCAL_RANK is 0 on every rank where each sees one GPU only (torch's virtual local rank)
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if spread else 1
        self.local_index = self.rank % self.local_size
        self.group = dist.new_group(backend="gloo", timeout=patience) if spread else None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, item: T) -> list[T]:
        """Return every rank's item, in rank order."""
        items = self.merged([item], operator.add) or []
        return self.on_first(lambda: items)

    def merged(self, item: T, merge: Callable[[T, T], T]) -> T | None:
        """Return all ranks' items merged in rank order on rank 0, None on others. Collective, by a tree."""
        for step in (1 << i for i in range((self.size - 1).bit_length())):  # torch's ring has 4 n messages
            if self.rank & step:
                dist.send_object_list([item], self.rank - step, group=self.group)
                return None
            if self.rank + step < self.size:
                found: list[Any] = [None]
                dist.recv_object_list(found, self.rank + step, group=self.group)
                item = merge(item, found[0])
        return item

    def on_first(self, action: Callable[[], T], first: int = 0) -> T:
        """Run ``action`` on rank 0, or ``first``; all ranks get its result or error."""
        if self.size == 1:
            return action()
        outcome: list[Any] = list(_outcome(action)) if self.rank == first else [None, None]
        dist.broadcast_object_list(outcome, first, group=self.group)
        return _result(*outcome)

    def on_first_of_node(self, action: Callable[[], T]) -> T:
        """Run ``action`` on each node's first rank; the node's ranks get its result or error. Collective."""
        if self.size == 1:
            return action()
        mine = _outcome(action) if self.local_index == 0 else (None, None)
        return _result(*self.gather(mine)[self.rank - self.local_index])

    def on_each(self, action: Callable[[], None]) -> None:
        """Run ``action`` on every rank; all raise the first error."""
        for outcome in self.gather(_outcome(action)):
            _result(*outcome)

    def barrier(self) -> None:
        self.gather(None)


class Place(NamedTuple):
    machine: str  # the same for two containers of one machine
    host: str
    local_rank: int
    local_size: int


def place_here() -> Place:
    host, boot = platform.node(), Path("/proc/sys/kernel/random/boot_id")
    local = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return Place(boot.read_text() if boot.exists() else host, host, *local)


def check_places(places: Sequence[Place]) -> None:
    """Check rank = node * local size + local rank, which layouts assume. *Raises* ConfigError."""
    size, virtual = places[0].local_size, not any(place.local_rank for place in places)
    for rank, place in enumerate(places):
        first = places[rank - rank % size]
        if place.local_size != size:
            uneven = f"{number_of(size, 'rank')} on {places[0].host} and {place.local_size} on {place.host}"
            raise ConfigError(f"{uneven}; start the same number on each node")
        if place.machine != first.machine or not (virtual or place.local_rank == rank % size):
            raise ConfigError(
                f"rank {rank} is local rank {place.local_rank} of {place.host}, and must be local rank "
                f"{rank % size} of {first.host}, like rank {rank - rank % size}: {size} ranks in a row "
                f"share a node; use srun --distribution=block, or mpirun --map-by ppr:{size}:node"
            )


class Mesh:
    """Process groups of this rank. Construction is collective."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._groups: dict[Axis, dist.ProcessGroup] = {}
        self._shards: dict[Axis, dist.ProcessGroup] = {}
        self._replicas: dict[Axis, dist.ProcessGroup] = {}
        made: dict[tuple[Any, ...], dist.ProcessGroup] = {}
        for axis in AXES:
            groups = layout.groups(axis)
            # Axes with the same ranks share a group. Reduced gradients and gathered weights get their own: a
            # communicator runs its operations in order, and these would wait for the model's collectives.
            key = (axis in SUMMED_OVER, *groups)
            if layout.size(axis) > 1:
                self._groups[axis] = self._shards[axis] = _group(made, key)
            if axis in SUMMED_OVER and layout.num_shards(axis) < layout.size(axis):
                self._shards[axis] = _group(made, (True, *layout.shard_groups(axis)))
                self._replicas[axis] = _group(made, (True, *layout.replica_groups(axis)))

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """Return an axis's process group; None if its size is 1."""
        return self._groups.get(axis)

    def shard_group(self, axis: Axis) -> dist.ProcessGroup | None:
        """Return the ranks that shard what an axis's ranks have alike; None if the axis has one rank."""
        return self._shards.get(axis)

    def replica_group(self, axis: Axis) -> dist.ProcessGroup | None:
        """Return an axis's ranks with the same shards; None if they have different ones."""
        return self._replicas.get(axis)

    def index(self, axis: Axis) -> int:
        return self.layout.index(axis, self.rank)

    def shard_index(self, axis: Axis) -> int:
        return next(ranks.index(self.rank) for ranks in self.layout.shard_groups(axis) if self.rank in ranks)


def _group(made: dict[tuple[Any, ...], dist.ProcessGroup], key: tuple[Any, ...]) -> dist.ProcessGroup:
    if key not in made:
        groups = [list(group) for group in key[1:]]
        made[key], _ = dist.new_subgroups_by_enumeration(groups, timeout=COLLECTIVE_TIMEOUT)
    return made[key]


def sums(group: dist.ProcessGroup | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Sum each tensor over a group by one collective, in its own dtype. No device sync on a GPU."""
    if group is None:
        return tensors
    total = torch.cat([tensor.detach().double().flatten() for tensor in tensors])  # fp64 keeps counts exact
    with waiting():
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
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return None, RuntimeError(f"{type(error).__name__}: {error}")
        return None, error


def backend_of(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
