"""Peers of the operations of symm: the ranks of ``ep_etp``, with memory in common where they are GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.ops.symm import CollectivePeers
from graphmoe.ops.symm.peers import Peers, Region, Side, Sizes
from graphmoe.runtime.ranks import Mesh
from graphmoe.runtime.torch_compat import symmetric_memory

log = logging.getLogger(__name__)


def make_peers(mesh: Mesh, device: torch.device) -> Peers:
    """The peers of this rank; without GPUs or alone, those that need no memory in common."""
    group = mesh.group("ep_etp")
    return CollectivePeers(group) if group is None or device.type != "cuda" else SymmetricPeers(group)


class SymmetricPeers:
    """GPUs of one node that read each other's memory: a `graphmoe.ops.symm.peers.MemoryPeers`.

    Multicast is not used. One exchange at a time, on one stream or on streams that wait for each other.
    """

    addresses: Tensor

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), group.size()
        self.last: tuple[Side, bool] | None = None
        self.streams = [torch.cuda.Stream() for _ in range(self.size - 1)]
        self._region: Region | None = None
        self._buffers: list[Tensor] = []
        self._meet: Callable[[], None] = lambda: None
        self._captured = False
        """Whether a graph holds addresses of the region."""
        self._of_graphs: list[tuple[list[Tensor], Callable[[], None], Tensor]] = []
        """Earlier regions of which a graph holds addresses."""

    def reserve(self, sizes: Sizes) -> Region:
        """As `MemoryPeers.reserve`. Waits for the device where the region grows."""
        joined = sizes if self._region is None else self._region.sizes.joined(sizes)
        if self._region is not None and joined == self._region.sizes:
            return self._region
        if torch.cuda.is_current_stream_capturing():
            had = None if self._region is None else self._region.sizes
            raise RuntimeError(
                f"an exchange of {sizes} does not fit the memory that ranks share, made for {had}, and no "
                f"capture can make more; run it once before it is captured, or reserve the sizes at start"
            )
        # No rank reads the old region when all have come to the rendezvous.
        torch.cuda.synchronize()
        if self._captured:
            self._of_graphs.append((self._buffers, self._meet, self.addresses))
        region = Region.with_room_for(joined, self.size)
        self._buffers, self._meet = symmetric_memory(region.num_bytes, self._group)
        self.addresses = torch.tensor(
            [buffer.data_ptr() for buffer in self._buffers], device=self._buffers[0].device
        )
        self._region, self._captured = region, False
        log.info("symm: %.0f MiB that %d ranks share, for %s", region.num_bytes / 2**20, self.size, joined)
        return region

    def view(self, rank: int, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `MemoryPeers.view`."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._buffers[rank][offset_bytes : offset_bytes + num_bytes].view(dtype).view(shape)

    def barrier(self) -> None:
        """As `MemoryPeers.barrier`."""
        self._captured |= torch.cuda.is_current_stream_capturing()
        self._meet()
