"""Dispatcher ``symm``: ranks of one node read each other's memory. No host sync, so it can be captured.

Its operations are in `graphmoe.ops.symm`.

Suffixes: T tokens, K slots, P ranks of ``ep_etp``, N receive capacity, D hidden.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.config.schema import ConfigError
from graphmoe.ops import IN_USE
from graphmoe.ops.collectives import index_along
from graphmoe.ops.symm import CollectivePeers
from graphmoe.ops.symm.axes import SharedAxis
from graphmoe.ops.symm.peers import Peers, Region, Side, Sizes
from graphmoe.ops.waits import waiting
from graphmoe.plan.experts import Load
from graphmoe.plan.layout import Axis
from graphmoe.runtime.ranks import Mesh, Ranks
from graphmoe.runtime.torch_compat import symmetric_memory

SHARED_AXES: tuple[Axis, ...] = ("tp", "cp", "cp_tp")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Symm:
    """Each rank of a token's experts reads the token once; the token's rank reads their sums back."""

    handle: ClassVar[tuple[str, ...]] = ("arrivals",)  # rows from rank to rank, int32 [P, P]

    chunk: ClassVar[None] = None
    capacity: Load
    num_experts: int  # of each rank, with its replica slots
    etp: int
    block: int = 0  # rows of each pair of ranks that copy engines send; a kernel fetches the rest
    sends_weights: bool = False  # replica weights are sent with rows
    keeps_weights: bool = False  # and saved for the backward

    def dispatch(
        self, h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *plan: Tensor, along: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """As ``Dispatcher.dispatch``; ``along``: own expert weights, ids of experts to replicate. No sync."""
        sizes = self.capacity.rows, self.num_experts, self.etp, self.block
        h_ND, weight_NK, number_NK, arrivals_PP = torch.ops.graphmoe.symm_dispatch(
            h_TD, weight_TK, expert_TK, *plan, *sizes, *along
        )
        alone = len(arrivals_PP) == 1
        here = arrivals_PP.new_zeros(1) if alone else index_along("ep_etp", arrivals_PP).view(1)
        arrived_P = arrivals_PP.index_select(1, here).squeeze(1)
        room = len(arrived_P) * self.block + (arrived_P - self.block).clamp_min(0).sum()
        return h_ND, weight_NK, number_NK, room.int(), arrivals_PP

    def combine(self, sum_ND: Tensor, *plan_and_handle: Tensor, along: Sequence[Tensor] = ()) -> Tensor:
        """Return each token's sum over ranks [T, D]; ``along`` as in dispatch, for the backward. No sync."""
        return torch.ops.graphmoe.symm_combine(sum_ND, *plan_and_handle, self.block, *along)


def make_peers(mesh: Mesh, device: torch.device) -> Peers:
    """Connect this rank to the ranks of ``ep_etp``; on CPUs, or for one rank, without shared memory."""
    group = mesh.group("ep_etp")
    return CollectivePeers(group) if group is None or device.type != "cuda" else SymmetricPeers(group)


def share_axes(mesh: Mesh, ranks: Ranks, device: torch.device) -> None:
    """Let collectives of `use_groups` along tp and cp read peers' memory if all ranks can. Collective."""
    if device.type != "cuda":
        return
    gpus, problem, per_node = range(torch.cuda.device_count()), "", ranks.local_size
    own = all(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in range(a))
    has_peers = all(ranks.gather(own))  # ranks may see different GPUs, and those of an axis must agree
    made: dict[dist.ProcessGroup, SharedAxis] = {}
    for axis in SHARED_AXES:
        if (group := mesh.group(axis)) is None:
            continue
        if not has_peers or len({rank // per_node for rank in mesh.layout.group(axis, mesh.rank)}) > 1:
            log.info("collectives along %s use NCCL: its GPUs do not read each other's memory", axis)
            continue
        if group not in made:  # axes with the same ranks have one group
            memory = SymmetricMemory(group, f"collectives along {axis}", "lower train.micro_batch_size")
            made[group] = SharedAxis(memory)
            try:
                memory.reserve(1 << 20)
            except ConfigError as error:
                problem = str(error).partition(";")[0]
        IN_USE.shared[axis] = made[group]
    if problems := [each for each in ranks.gather(problem) if each]:
        IN_USE.shared.clear()
        log.warning("collectives along tp and cp use NCCL: %s", problems[0])


class SymmetricMemory:
    """Memory that GPUs of one node read from each other, without multicast; implements `SharedMemory`."""

    addresses: Tensor

    def __init__(self, group: dist.ProcessGroup, purpose: str, instead: str) -> None:
        """``purpose``: what the memory is for, and ``instead`` what to use if it fails, in log and errors."""
        self._group, self._purpose, self._instead = group, purpose, instead
        self.rank, self.size, self.num_bytes = dist.get_rank(group), group.size(), 0
        self._buffers: list[Tensor] = []
        self._meet: Callable[[], None] = lambda: None
        self._captured = False  # a graph holds addresses of the region
        # earlier regions whose addresses a graph holds
        self._of_graphs: list[tuple[list[Tensor], Callable[[], None], Tensor]] = []

    def reserve(self, num_bytes: int) -> None:
        """Grow each rank's region to ``num_bytes`` if it is smaller: a collective that syncs the device."""
        if num_bytes > self.num_bytes:
            self.renew(num_bytes)

    def renew(self, num_bytes: int) -> None:
        """Allocate a new region on each rank. Collective, not in a capture. Syncs the device."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self._purpose} needs {num_bytes} shared bytes in a new region (it has {self.num_bytes}), "
                f"and a capture cannot allocate; run the step uncaptured once, or reserve the sizes at start"
            )
        # after this and the rendezvous no rank reads the old region
        torch.cuda.synchronize()
        if self._captured:
            self._of_graphs.append((self._buffers, self._meet, self.addresses))
        try:
            self._buffers, self._meet = symmetric_memory(num_bytes, self._group)
        except RuntimeError as error:  # of the driver, which a container may forbid to share
            raise ConfigError(
                f"GPUs cannot share {num_bytes / 2**20:.0f} MiB for {self._purpose} "
                f"({str(error).partition(chr(10))[0]}); free memory, or {self._instead}"
            ) from error
        self.addresses = torch.tensor(
            [buffer.data_ptr() for buffer in self._buffers], device=self._buffers[0].device
        )
        self.num_bytes, self._captured = num_bytes, False
        log.info("symm: %.0f MiB that %d ranks share for %s", num_bytes / 2**20, self.size, self._purpose)

    def forget_graphs(self) -> None:
        """Free earlier regions, of which only released graphs had the addresses."""
        self._of_graphs.clear()
        self._captured = False

    def view(self, rank: int, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._buffers[rank][offset_bytes : offset_bytes + num_bytes].view(dtype).view(shape)

    def barrier(self) -> None:
        self._captured |= torch.cuda.is_current_stream_capturing()
        with waiting():
            self._meet()


class SymmetricPeers:
    """`MemoryPeers` with a `SymmetricMemory` for rows, one for replicas; streams must order exchanges."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rows, self.replicas = (
            SymmetricMemory(group, f"moe.dispatcher=symm, the {purpose}", "use moe.dispatcher=alltoall")
            for purpose in ("exchange of rows", "traffic of replicas")
        )
        self.rank, self.size = self._rows.rank, self._rows.size
        self.view, self.barrier = self._rows.view, self._rows.barrier
        self.last: tuple[Side, bool] | None = "back", False  # nothing is read yet
        self.streams = [torch.cuda.Stream() for _ in range(self.size - 1)]
        self._region: Region | None = None

    @property
    def addresses(self) -> Tensor:
        return self._rows.addresses

    def forget_graphs(self) -> None:
        self._rows.forget_graphs()
        self.replicas.forget_graphs()

    def reserve(self, sizes: Sizes) -> Region:
        """Return offsets for ``sizes``. A collective; syncs the device if the region must grow."""
        joined = sizes if self._region is None else self._region.sizes.joined(sizes)
        if self._region is None or joined != self._region.sizes:
            region = Region.with_room_for(joined, self.size)
            self._rows.renew(region.num_bytes)
            log.info("symm: allocated shared memory for %s", joined)
            self._region = region
        return self._region
