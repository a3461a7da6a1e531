"""Replica traffic by kernels over peer memory: no device sync, capturable."""

import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from graphmoe.ops import num_warps
from graphmoe.ops.replicas import kernels
from graphmoe.ops.symm.launches import PULL, PUT, WIDEST
from graphmoe.ops.symm.peers import COUNT_BYTES, Regions, SharedMemory, offsets

# fp32 tiles of 8 KiB: 4 MiB in flight per link, without register spills
HOME_TILE, HOME_THREADS, HOME_PROGRAMS = 2048, 256, 512
WORD_BYTES = 4
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


def gather_counts(memory: SharedMemory, counts_E: Tensor) -> Tensor:
    assert counts_E.nbytes <= COUNT_BYTES, counts_E.shape
    memory.reserve(COUNT_BYTES)
    of_ranks = [memory.view(rank, 0, tuple(counts_E.shape), counts_E.dtype) for rank in range(memory.size)]
    memory.barrier()
    of_ranks[memory.rank].copy_(counts_E)
    memory.barrier()
    return torch.stack(of_ranks)


def pull(memory: SharedMemory, weights: Sequence[Tensor], expert_RS: Tensor) -> list[Tensor]:
    # behind the first barrier peers have read the old content
    memory.reserve(COUNT_BYTES + offsets([w_LX.nbytes for w_LX in weights])[-1])
    memory.barrier()
    put(memory, COUNT_BYTES, weights, expert_RS)
    memory.barrier()
    return pulled(memory, COUNT_BYTES, weights, expert_RS)


def put(memory: Regions, first: int, weights: Sequence[Tensor], expert_RS: Tensor) -> None:
    """Copy weights of own experts that have replicas to this rank's peer memory, from byte ``first``."""
    for start, w_LX in zip(offsets([w_LX.nbytes for w_LX in weights]), map(_words, weights), strict=False):
        to_LN = memory.view(memory.rank, first + start, tuple(w_LX.shape), w_LX.dtype)
        put_held(to_LN, w_LX, expert_RS, memory.rank)


def pulled(memory: Regions, first: int, weights: Sequence[Tensor], expert_RS: Tensor) -> list[Tensor]:
    """Return this rank's replica weights [S, X], read from the owners' peer memory after their `put`."""
    found = [w_LX.new_empty(expert_RS.shape[1], *w_LX.shape[1:]) for w_LX in weights]
    for start, w_SX in zip(offsets([w_LX.nbytes for w_LX in weights]), found, strict=False):
        pull_slots(memory, first + start, _words(w_SX), expert_RS, len(weights[0]))
    return found


def gradient_room(
    memory: SharedMemory, shapes: Sequence[tuple[int, ...]], like: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Return buffers for replica gradients in own peer memory, once peers have read the old ones."""
    *starts, end = _starts(shapes, dtype)
    memory.reserve(end)
    memory.barrier()
    return [
        memory.view(memory.rank, start, shape, dtype) for start, shape in zip(starts, shapes, strict=True)
    ]


def home(memory: SharedMemory, expert_RS: Tensor, made: Sequence[Tensor], totals: Sequence[Tensor]) -> None:
    """After a barrier, add gradients of own experts' replicas, in all ranks' `gradient_room`, to totals."""
    memory.barrier()
    add_made(memory, expert_RS, made, totals)


def add_made(
    memory: SharedMemory, expert_RS: Tensor, made: Sequence[Tensor], totals: Sequence[Tensor]
) -> None:
    """Add gradients of own experts' replicas, in all ranks' `gradient_room`, to totals, without a barrier."""
    starts = _starts([tuple(made_SX.shape) for made_SX in made], made[0].dtype)
    for start, made_SX, total_LX in zip(starts, made, totals, strict=False):
        add_home(memory, start, made_SX, total_LX, expert_RS)


def put_held(to_LN: Tensor, from_LN: Tensor, expert_RS: Tensor, rank: int) -> None:
    kernels.put_kernel[(PUT.programs,)](
        from_LN, to_LN, expert_RS, from_LN.shape[1], rank,
        H=len(from_LN), TILE=PUT.tile_bytes // WORD_BYTES, num_warps=num_warps(PUT.threads),
        **_slots(expert_RS),
    )  # fmt: skip


def pull_slots(memory: Regions, start: int, to_SN: Tensor, expert_RS: Tensor, owned: int) -> None:
    kernels.pull_kernel[(PULL.programs,)](
        memory.addresses, to_SN, expert_RS, start, to_SN.shape[1], memory.rank,
        H=owned, S=len(to_SN), BLOCK_S=triton.next_power_of_2(len(to_SN)), TILE=PULL.tile_bytes // WORD_BYTES,
        ALIGNMENT=math.gcd(WIDEST, to_SN[:1].nbytes), num_warps=num_warps(PULL.threads),
    )  # fmt: skip


def add_home(memory: SharedMemory, start: int, made_SX: Tensor, total_LX: Tensor, expert_RS: Tensor) -> None:
    assert made_SX.dtype in GRADIENTS and total_LX.dtype in GRADIENTS, (made_SX.dtype, total_LX.dtype)
    assert total_LX.is_contiguous()
    total_LN = total_LX.view(len(total_LX), -1)
    kernels.home_kernel[(HOME_PROGRAMS,)](
        memory.addresses, made_SX, total_LN, expert_RS, start, total_LN.shape[1], memory.rank,
        H=len(total_LN), S=expert_RS.shape[1], TILE=HOME_TILE,
        ALIGNMENT=math.gcd(WIDEST, made_SX[:1].nbytes),
        num_warps=num_warps(HOME_THREADS), **_slots(expert_RS),
    )  # fmt: skip


def _words(w_LX: Tensor) -> Tensor:
    # int32 words, or bytes for odd sizes: copies ignore dtypes
    bytes_LN = w_LX.view(len(w_LX), -1).view(torch.uint8)
    return bytes_LN if bytes_LN.shape[1] % WORD_BYTES else bytes_LN.view(torch.int32)


def _starts(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[int]:
    sizes = [dtype.itemsize * torch.Size(shape).numel() for shape in shapes]
    return [COUNT_BYTES + each for each in offsets(sizes)]


def _slots(expert_RS: Tensor) -> dict[str, int]:
    return {"RS": expert_RS.numel(), "BLOCK_RS": triton.next_power_of_2(expert_RS.numel())}
