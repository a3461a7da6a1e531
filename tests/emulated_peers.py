"""Ranks of `graphmoe.ops.symm` in one process: threads, of which one runs until it comes to a barrier.

On a CPU kernels run in Triton's interpreter, on a GPU all ranks use one device. Regions begin as NaN or -1.
"""

from __future__ import annotations

import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphmoe.ops import IN_USE
from graphmoe.ops.replicas.exchange import Exchange
from graphmoe.ops.symm.axes import SharedAxis
from graphmoe.ops.symm.peers import Region

GUARD = 512
"""Bytes before and behind a region."""


class Emulation:
    def __init__(self, size, device="cpu"):
        self.size, self.device = size, device
        self.region = None
        self.memory, self.replicas, self.of_axis = Regions(self), Regions(self), Regions(self)
        self.axes = [SharedAxis(EmulatedMemory(self.of_axis, rank)) for rank in range(size)]
        self.peers = [EmulatedPeers(self, rank) for rank in range(size)]
        self.exchanges = [Exchange(peers) for peers in self.peers]
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._running = []

    def run(self, body):
        results = [None] * self.size
        errors = []

        def thread(rank):
            self._turns[rank].acquire()
            self._enter(rank)
            try:
                results[rank] = body(self.peers[rank])
            except BaseException as error:
                errors.append(error)
            self.pass_on(rank, ends=True)

        threads = [threading.Thread(target=thread, args=(rank,), daemon=True) for rank in range(self.size)]
        self._running = list(range(self.size))
        for each in threads:
            each.start()
        self._turns[0].release()
        for each in threads:
            each.join()
        IN_USE.exchange = None
        IN_USE.shared.clear()
        if errors:
            raise errors[0]
        return results

    def pass_on(self, rank, ends=False):
        """Let the next rank run, and this one when its turn comes again."""
        if ends:
            self._running.remove(rank)
        later = [other for other in self._running if other > rank]
        for following in [*later, *self._running][:1]:
            self._turns[following].release()
        if not ends:
            self._turns[rank].acquire()
            self._enter(rank)

    def _enter(self, rank):
        IN_USE.exchange, IN_USE.shared["tp"] = self.exchanges[rank], self.axes[rank]

    def reserve(self, sizes):
        joined = sizes if self.region is None else self.region.sizes.joined(sizes)
        if self.region is None or joined != self.region.sizes:
            self.region = Region.with_room_for(joined, self.size)
            self.memory.renew(self.region.num_bytes)
        return self.region

    def assert_guards_are_whole(self):
        for memory in (*self.memory.of_ranks, *self.replicas.of_ranks):
            assert bool((memory[:GUARD] == 255).all()) and bool((memory[-GUARD:] == 255).all())


class Regions:
    def __init__(self, emulation):
        self.emulation, self.num_bytes = emulation, 0
        self.of_ranks = []
        self._kept = []

    def renew(self, num_bytes):
        self._kept.append(self.of_ranks)
        self.num_bytes, length, device = num_bytes, num_bytes + 2 * GUARD, self.emulation.device
        self.of_ranks = [
            torch.full((length,), 255, dtype=torch.uint8, device=device) for _ in range(self.emulation.size)
        ]


class EmulatedMemory:
    """One rank's view of regions: a `graphmoe.ops.symm.peers.SharedMemory`."""

    def __init__(self, regions, rank):
        self._regions = regions
        self.rank, self.size = rank, regions.emulation.size
        self.barriers = 0

    @property
    def num_bytes(self):
        return self._regions.num_bytes

    @property
    def addresses(self):
        bases = [memory.data_ptr() + GUARD for memory in self._regions.of_ranks]
        return torch.tensor(bases, device=self._regions.emulation.device)

    def reserve(self, num_bytes):
        if num_bytes > self._regions.num_bytes:
            self._regions.emulation.pass_on(self.rank)  # all come to it before the first makes more
        if num_bytes > self._regions.num_bytes:
            self._regions.renew(num_bytes)

    def view(self, rank, offset_bytes, shape, dtype):
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        assert offset_bytes + num_bytes <= self._regions.num_bytes
        start = GUARD + offset_bytes
        return self._regions.of_ranks[rank][start : start + num_bytes].view(dtype).view(shape)

    def barrier(self):
        self.barriers += 1
        self._regions.emulation.pass_on(self.rank)


class EmulatedPeers(EmulatedMemory):
    def __init__(self, emulation, rank):
        super().__init__(emulation.memory, rank)
        self._emulation, self.replicas = emulation, EmulatedMemory(emulation.replicas, rank)
        self.last = "back", False
        self.streams = ()
        if emulation.device == "cuda":
            self.streams = [torch.cuda.Stream() for _ in range(self.size - 1)]

    def reserve(self, sizes):  # as MemoryPeers do
        return self._emulation.reserve(sizes)


class GuardedMemory(TorchDispatchMode):
    """New tensors without values are full of NaN or -1 inside it, with guards around them."""

    MAKERS = ("aten::empty.memory_format", "aten::new_empty", "aten::empty_like", "aten::empty_strided")

    def __init__(self):
        super().__init__()
        self.memory = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.name() not in self.MAKERS:
            return made
        num_bytes = made.numel() * made.element_size()
        self.memory.append(torch.full((num_bytes + 2 * GUARD,), 255, dtype=torch.uint8, device=made.device))
        return self.memory[-1][GUARD : GUARD + num_bytes].view(made.dtype).view(made.shape)

    def assert_guards_are_whole(self):
        assert self.memory
        for memory in self.memory:
            assert bool((memory[:GUARD] == 255).all()) and bool((memory[-GUARD:] == 255).all())
