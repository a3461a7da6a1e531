"""The kernel of `graphmoe.ops.waits`: a GPU's clock of real time, in nanoseconds."""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

NVIDIA = tl.constexpr("mov.u64 $0, %globaltimer;")
# Triton's `memrealtime` waits for loads of vectors, but the clock comes as a scalar
AMD = tl.constexpr("s_memrealtime $0\ns_waitcnt lgkmcnt(0)")


def add_clock(total: Tensor, sign: int, on_rocm: bool = torch.version.hip is not None) -> None:
    clock_kernel[(1,)](total, SIGN=sign, ON_ROCM=on_rocm, num_warps=1)


@triton.jit
def clock_kernel(total_ptr, SIGN: tl.constexpr, ON_ROCM: tl.constexpr):
    if ON_ROCM:  # 100 MHz on AMD Instinct
        now = 10 * tl.inline_asm_elementwise(AMD, "=r", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        now = tl.inline_asm_elementwise(NVIDIA, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    # streams may wait at once, and a lost addend would be years
    tl.atomic_add(total_ptr, SIGN * now)
