"""Launches of the kernels of `fp8_blocks.reference`; no call waits for the device."""

import math

import torch
from torch import Tensor

from graphmoe.ops import num_warps
from graphmoe.ops.fp8 import BLOCK
from graphmoe.ops.fp8_blocks.reference import KIND, MX_BLOCK, block_of, is_mx, mx_like, squares_like
from graphmoe.ops.grouped_mlp.tuning import kind_of

# rows, columns and contracted numbers of a tile of an mxfp8 GEMM, and its threads
TILE, INTERPRETED = (128, 256, 128, 256), (32, 32, 128, 128)
ALIGNED_ROWS = 4  # of a blockwise GEMM: cuBLASLt reads 16 bytes of scales


def squares(w_NK: Tensor, *, turned: bool) -> tuple[Tensor, Tensor]:
    from graphmoe.ops.fp8_blocks.kernels import squares_kernel

    w_NK = w_NK.contiguous()
    N, K = w_NK.shape
    q, scale = squares_like(w_NK, *((K, N) if turned else (N, K)))
    squares_kernel[tuple(scale.shape)](
        w_NK, q, scale, N=N, K=K, PADDED=scale.shape[1], TURNED=turned, BLOCK=BLOCK,
        num_warps=num_warps(256),
    )  # fmt: skip
    return q, scale


def quantise_mx(x: Tensor) -> tuple[Tensor, Tensor]:
    from graphmoe.ops.fp8_blocks.kernels import mx_rows_kernel

    x = x.contiguous()
    *rows, C = x.shape
    R, (q, scale) = math.prod(rows), mx_like(x, *x.shape)
    mx_rows_kernel[(-(-R // 8), -(-C // 512))](
        x, q, scale, R, C=C, ROWS=8, COLUMNS=512, BLOCK=MX_BLOCK, num_warps=num_warps(128)
    )
    return q, scale


def turned(x_RC: Tensor, of_x: Tensor | None) -> tuple[Tensor, Tensor]:
    """Transpose x [..., R, C], quantize it along R -> q, scales; in the format of ``of_x``, else mxfp8."""
    from graphmoe.ops.fp8_blocks.kernels import turned_kernel

    x_RC = x_RC.contiguous()
    (*E, R, C), mx = x_RC.shape, of_x is None or is_mx(of_x)
    block = MX_BLOCK if of_x is None else block_of(of_x)
    padded = R + -R % block
    if mx:
        q, scale = mx_like(x_RC, *E, C, padded)
    else:
        q = x_RC.new_empty(C, padded, dtype=KIND)
        scale = x_RC.new_empty(padded // block, C, dtype=torch.float32)
    if padded:
        turned_kernel[(-(-padded // 128), -(-C // 64), math.prod(E))](
            x_RC, None if of_x is None else of_x.contiguous(), q, scale, R, padded,
            C=C, MX=mx, ROWS=128, COLUMNS=64, BLOCK=block, num_warps=num_warps(256),
        )  # fmt: skip
    return q, scale


def product(
    q_RK: Tensor, scale: Tensor, q_NK: Tensor, of_w: Tensor, squares: bool, dtype: torch.dtype
) -> Tensor:
    if is_mx(scale):
        return mx_product(q_RK, scale, q_NK, of_w, dtype)
    R = len(q_RK)
    if extra := -R % ALIGNED_ROWS:
        bytes_RK = torch.nn.functional.pad(q_RK.view(torch.uint8), (0, 0, 0, extra))
        q_RK, scale = bytes_RK.view(KIND), torch.nn.functional.pad(scale, (0, extra), value=1.0)
    return blockwise_product(q_RK, scale, q_NK, of_w, squares, dtype)[:R]


def blockwise_product(
    q_RK: Tensor, scale_BR: Tensor, q_NK: Tensor, of_w: Tensor, squares: bool, dtype: torch.dtype
) -> Tensor:
    """Return x @ w.T [R, N] by torch's scaled GEMM, with scales in the column-major layout that it needs."""
    from torch.nn.functional import ScalingType, scaled_mm

    kind = ScalingType.BlockWise128x128 if squares else ScalingType.BlockWise1x128
    of_x, of_w = (
        each.contiguous().as_strided(each.shape[::-1], (1, each.shape[1])) for each in (scale_BR, of_w)
    )
    x, w = q_RK.contiguous(), q_NK.contiguous().t()
    return scaled_mm(x, w, of_x, ScalingType.BlockWise1x128, of_w, kind, output_dtype=dtype)


def mx_product(q_RC: Tensor, xs: Tensor, q_NC: Tensor, ws: Tensor, dtype: torch.dtype) -> Tensor:
    from graphmoe.ops.fp8_blocks.kernels import mx_product_kernel

    (R, C), N = q_RC.shape, len(q_NC)
    out = q_RC.new_empty(R, N, dtype=dtype)
    kind = kind_of(q_RC.device)
    block_m, block_n, block_c, threads = INTERPRETED if kind == "cpu" else TILE
    if R:
        mx_product_kernel[(-(-R // block_m) * -(-N // block_n),)](
            *(each.contiguous() for each in (q_RC, xs, q_NC, ws)), out, R, C, N=N, EVEN=C % block_c == 0,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_C=block_c, BLOCK=MX_BLOCK, GROUP=8, SUBTILES=2,
            UPCAST=not q_RC.is_cuda, num_warps=num_warps(threads),
            num_stages=4 if kind == "hopper" else 2,
        )  # fmt: skip
    return out
