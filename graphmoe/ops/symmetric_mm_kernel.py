"""The kernel of `graphmoe.ops.symmetric_mm`: tiles on and below the diagonal, stored at both places.

Suffixes: N matrices, M rows and columns of a product, C contracted.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.ops import num_warps
from graphmoe.ops.grouped_mlp.rows_kernel import halves
from graphmoe.ops.grouped_mlp.triton_backend import descriptor
from graphmoe.ops.grouped_mlp.tuning import Config, kind_of, units_of

TILES = {
    # measured on an H200, 23 matrices of 1408 x 2048
    "hopper": Config(128, 128, 64, 128, 3, subtiles=4, per_unit=2),
    "cpu": Config(16, 32, 16, 128, 1, subtiles=2, per_unit=3),
}


def launch(
    x_NRC: Tensor, of_columns: bool, scale: float = 1.0, add: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """Return `symmetric_mm` of contiguous x, whose rows and products' rows are multiples of 16 bytes."""
    tile, (N, *sizes) = TILES[kind_of(x_NRC.device)], x_NRC.shape
    M, C = reversed(sizes) if of_columns else sizes
    out_NMM = x_NRC.new_empty(N, M, M)
    part = tile.block_n // tile.subtiles
    left, right = (
        descriptor(x_NRC, (1, tile.block_k, size) if of_columns else (1, size, tile.block_k))
        for size in (tile.block_m, tile.block_n)
    )
    wide, rows = tile.block_n // tile.block_m, triton.cdiv(M, tile.block_m)
    groups = rows // wide
    tiles = wide * groups * (groups + 1) // 2 + rows % wide * (groups + 1)
    _kernel[(min(tiles * N, tile.per_unit * units_of(x_NRC.device)),)](
        left, right, descriptor(x_NRC, (1, tile.block_m, part)) if add else None,
        descriptor(out_NMM, (1, tile.block_m, part)), descriptor(out_NMM, (1, part, tile.block_m)),
        scale, add, diagonal, tiles, tiles * N,
        SIZE=M, C=C, OF_COLUMNS=of_columns, UPCAST=not x_NRC.is_cuda, WIDE=wide,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_C=tile.block_k, SUBTILES=tile.subtiles,
        FLATTEN=tile.flatten, num_warps=num_warps(tile.threads), num_stages=tile.stages,
    )  # fmt: skip
    return out_NMM


@triton.jit
def _load(x, matrix, first, c, OF_COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    if OF_COLUMNS:
        return x.load([matrix, c, first]).reshape(BLOCK_C, BLOCK).T
    else:
        return x.load([matrix, first, c]).reshape(BLOCK, BLOCK_C)


@triton.jit
def _store(
    product, x, out, mirrored, scale, add, diagonal, matrix, row, column, beyond,
    M: tl.constexpr, N: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    if SUBTILES == 1:
        product *= scale
        if x is not None:
            product += add * x.load([matrix, row, column]).reshape(M, N).to(tl.float32)
        on_diagonal = (row + tl.arange(0, M))[:, None] == (column + tl.arange(0, N))[None, :]
        product = tl.where(on_diagonal, product + diagonal, product).to(out.dtype)
        out.store([matrix, row, column], product.reshape(1, M, N))
        mirrored.store([matrix, column + beyond, row], product.T.reshape(1, N, M))
    else:
        left, right = halves(product, M, N)
        H: tl.constexpr = N // 2
        to = (scale, add, diagonal, matrix, row)
        _store(left, x, out, mirrored, *to, column, beyond, M, H, SUBTILES // 2)
        _store(right, x, out, mirrored, *to, column + H, beyond, M, H, SUBTILES // 2)


@triton.jit(do_not_specialize=["scale", "add", "diagonal", "tiles", "all_tiles"])
def _kernel(
    left_x, right_x, x, out, mirrored, scale, add, diagonal, tiles, all_tiles,
    SIZE: tl.constexpr, C: tl.constexpr, OF_COLUMNS: tl.constexpr, UPCAST: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, SUBTILES: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """Store ``scale * x @ x.T + add * x + diagonal * I``; arguments but numbers are descriptors.

    A group is WIDE rows of tiles, as high as a tile is wide; group g has g + 1 tiles in a row.
    """
    for index in tl.range(tl.program_id(0), all_tiles, tl.num_programs(0), flatten=FLATTEN):
        matrix, tile = index // tiles, index % tiles
        group = ((tl.sqrt(8.0 * tile / WIDE + 1) - 1) / 2).to(tl.int32)
        group -= (WIDE * group * (group + 1) // 2 > tile).to(tl.int32)  # a root may be rounded
        group += (WIDE * (group + 1) * (group + 2) // 2 <= tile).to(tl.int32)
        tile -= WIDE * group * (group + 1) // 2
        row, across = (WIDE * group + tile // (group + 1)) * BLOCK_M, tile % (group + 1)
        column = across * BLOCK_N
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for c in range(0, C, BLOCK_C):
            left = _load(left_x, matrix, row, c, OF_COLUMNS, BLOCK_M, BLOCK_C)
            right = _load(right_x, matrix, column, c, OF_COLUMNS, BLOCK_N, BLOCK_C)
            if UPCAST:  # the interpreter multiplies bf16 wrongly
                left, right = left.to(tl.float32), right.to(tl.float32)
            product = tl.dot(left, right.T, product)
        # tiles on the diagonal have no mirrored place: what is stored beyond the last row is dropped
        beyond = tl.where(across < group, 0, SIZE)
        _store(
            product, x, out, mirrored, scale, add, diagonal, matrix, row, column, beyond,
            BLOCK_M, BLOCK_N, SUBTILES,
        )  # fmt: skip
