"""Collectives along an axis whose ranks read each other's memory."""

import math

from torch import Tensor, complex128

from graphmoe.ops.symm import launches
from graphmoe.ops.symm.peers import ALIGNMENT, SharedMemory


class SharedAxis:
    """Exchanges one tensor at a time; one stream orders them. No device sync once the memory is large enough.

    A rank copies its tensor in, passes a barrier, and reads each part to its place in the result. Sums are in
    fp32, in the order of ranks, rounded once.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self.last: int | None = None  # half of the memory; None: unknown, as `forget_halves` sets it

    def exchange(self, x: Tensor, whole: Tensor, split: int | None, join: int) -> Tensor:
        """Fill ``whole`` along ``join`` with each rank's part along ``split``, or with all of it if None."""
        memory, length = self.memory, whole.shape[join] // self.memory.size
        x = x.contiguous()
        offset = self._put(x)
        # each rank starts with its successor, to spread reads over ranks
        for rank in [(memory.rank + 1 + i) % memory.size for i in range(memory.size)]:
            part = x if rank == memory.rank else memory.view(rank, offset, tuple(x.shape), x.dtype)
            if split is not None:
                part = part.chunk(memory.size, dim=split)[memory.rank]
            into, part = _wide(whole.narrow(join, rank * length, length), part)
            into.copy_(part)
        return whole

    def reduce(self, x: Tensor, part: Tensor, dim: int) -> Tensor:
        """Fill ``part`` with this rank's part along ``dim`` of the ranks' sum."""
        offset, outer = self._put(x.contiguous()), math.prod(x.shape[:dim])
        launches.sum_parts(self.memory, offset, part, outer)
        return part

    def _put(self, x: Tensor) -> int:
        # Halves alternate, so one barrier is enough: after it all ranks have written one and read the other.
        memory, last = self.memory, self.last
        memory.reserve(2 * (-(-x.nbytes // ALIGNMENT) * ALIGNMENT))
        if last is None:
            memory.barrier()
        self.last = 0 if last is None else 1 - last
        offset = self.last * memory.num_bytes // 2
        memory.view(memory.rank, offset, tuple(x.shape), x.dtype).copy_(x)
        memory.barrier()
        return offset


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    # a copy between strides loads one element a thread: 16 bytes rather than 2
    size, width = tensors[0].element_size(), complex128.itemsize
    aligned = all(
        x.stride(-1) == 1
        and not x.data_ptr() % width
        and not any(n * size % width for n in (x.shape[-1], *x.stride()[:-1]))
        for x in tensors
    )
    return tuple(x.view(complex128) for x in tensors) if aligned else tensors
