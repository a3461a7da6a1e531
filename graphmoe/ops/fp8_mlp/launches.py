"""Launches of the kernels of the grouped MLP in fp8, as `reference.MlpSteps`.

No call waits for the device, and every sum has a fixed order.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from graphmoe.ops import num_warps
from graphmoe.ops.fp8 import BLOCK, Stored, fp8_dtype, rounding_of
from graphmoe.ops.fp8_mlp.reference import Activation, Known, MlpSteps
from graphmoe.ops.grouped_mlp.reference import Plan
from graphmoe.ops.grouped_mlp.triton_backend import Part, descriptor, grids, parts_of, row_tiles, weight_sums
from graphmoe.ops.grouped_mlp.tuning import BLOCK_R, Config, fp8_config, height_of, kind_of, units_of

ROWS = {
    "hopper": Config(128, 256, 128, 256, 3, subtiles=2, flatten=True),
    "instinct": Config(64, 256, 64, 256, 2, subtiles=2),
}
WEIGHTS = {
    "hopper": Config(128, 128, BLOCK_R, 128, 3, subtiles=8, per_unit=2),
    "instinct": Config(128, 128, BLOCK_R, 256, 1, subtiles=2),
}


def rows(w: Tensor, *, whole: bool = False) -> Stored:
    from graphmoe.ops.fp8_mlp.kernels import quantise_rows_kernel

    w = w.contiguous()
    q, scale = torch.empty_like(w, dtype=fp8_dtype()), w.new_empty(*w.shape[:-1], 1, dtype=torch.float32)
    count = scale.numel()
    if count:
        above, exponent = rounding_of(q.dtype)
        quantise_rows_kernel[(-(-count // 8),)](
            w, q, scale, _largest(w) if whole else None, count,
            N=w.shape[-2] if whole else 1, C=w.shape[-1], ABOVE=above, EXPONENT=exponent, ROWS=8, COLUMNS=512,
            num_warps=num_warps(256),
        )  # fmt: skip
    return q, scale


def columns(w_ENC: Tensor, *, whole: bool = False) -> Stored:
    from graphmoe.ops.fp8_mlp.kernels import quantise_columns_kernel

    w_ENC = w_ENC.contiguous()
    E, N, C = w_ENC.shape
    q, scale = w_ENC.new_empty(E, C, N, dtype=fp8_dtype()), w_ENC.new_empty(E, C, 1, dtype=torch.float32)
    above, exponent = rounding_of(q.dtype)
    quantise_columns_kernel[(-(-C // 64), E)](
        w_ENC, q, scale, _largest(w_ENC) if whole else None,
        N=N, C=C, ABOVE=above, EXPONENT=exponent, ROWS=128, COLUMNS=64, num_warps=num_warps(256),
    )  # fmt: skip
    return q, scale


def _largest(w: Tensor) -> Tensor:
    return torch.linalg.vector_norm(w, torch.inf, (-2, -1)).float().view(-1)


def _swiglu(
    x: Stored, h_RH: Tensor, weight_TK: Tensor | None, plan: Plan, known: Known | None, act: Activation
) -> tuple[Stored, Stored | None]:
    R, H = h_RH.shape
    h, a = (x[0].new_empty(R, H), x[1].new_empty(R, 2 * -(-(H // 2) // BLOCK))), None
    if weight_TK is not None:
        weight_TK, a = weight_TK.contiguous(), (x[0].new_empty(R, H // 2), x[1].new_empty(R, 1))
    scale, largest = known or (None, None)
    of_rows = (h_RH, weight_TK, plan.slot_R, plan.ends_E, *h, *(a or (None, None)), scale)
    _by_rows("swiglu_kernel", of_rows, largest, plan, H // 2, 32, act)
    return h, a


def _swiglu_grad(
    dy: Stored, da_RF: Tensor, h: Stored, weight_TK: Tensor, plan: Plan,
    known_a: Tensor | None, known: Known | None, act: Activation,
) -> tuple[Stored, Stored, Tensor]:  # fmt: skip
    (R, F), of_dy = da_RF.shape, dy[1].new_empty
    dh, a = (dy[0].new_empty(R, 2 * F), of_dy(R, 1)), (h[0].new_empty(R, F), of_dy(R, 1))
    dweight_1R = of_dy(1, R)
    of_rows = (da_RF, *h, weight_TK.contiguous(), plan.slot_R, plan.ends_E, *dh, *a, dweight_1R)
    scale, largest = known or (None, None)
    _by_rows("swiglu_grad_kernel", (*of_rows, known_a, scale), largest, plan, F, 16, act)
    return dh, a, weight_sums(dweight_1R, plan.row_TK)


def _wgrad(
    dy: Stored, x: Stored, dh: Stored, a: Stored, plan: Plan,
    totals: tuple[Tensor, Tensor], *, add: bool = False, of_more: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    import triton

    from graphmoe.ops.fp8_mlp.kernels import expert_scales_kernel

    E, K, device = len(plan.ends_E), plan.row_TK.shape[1], plan.ends_E.device
    scale_2E = torch.empty(2, E, dtype=torch.float32, device=device)
    tile_E1 = torch.empty(E + 1, dtype=torch.int32, device=device)
    expert_scales_kernel[(E,)](
        dh[1], x[1], a[1], dy[1], plan.slot_R, plan.ends_E, scale_2E, tile_E1,
        K=K, E=E, BLOCK_E=triton.next_power_of_2(E), BLOCK_R=BLOCK_R, BLOCK=1024, num_warps=num_warps(256),
    )  # fmt: skip
    table = row_tiles(plan.ends_E, len(plan.slot_R))(BLOCK_R)
    sides = {
        "dh": _transposed(dh, x[1], scale_2E[0], plan, table),
        "x": _transposed((x[0], None), None, None, plan, table),
        "dy": _transposed((dy[0], None), None, None, plan, table),
        "a": _transposed(a, dy[1], scale_2E[1], plan, table),
    }
    own, results = len(totals[0]), ((totals[0], *of_more[:1]), (totals[1], *of_more[1:]))
    for names, scale_E, (total, *more) in zip((("dh", "x"), ("dy", "a")), scale_2E, results, strict=True):
        left, right = (sides[name] for name in names)
        _weight_grad(left, right, scale_E, tile_E1, total, add=add)
        for each in more:
            _weight_grad(left, right, scale_E[own:], tile_E1[own:], each, behind=True)


def _product(
    x: Stored, weights: Sequence[Stored], out: Tensor, plan: Plan, parts: Sequence[Part],
    *, gathers: bool = False,
) -> None:  # fmt: skip
    from graphmoe.ops.fp8_mlp.kernels import rows_kernel

    (q, scale), E = x, len(weights[0][0])
    kind = kind_of(q.device)
    tile = _with_height(fp8_config(ROWS, kind), kind, len(plan.slot_R) // E)
    for programs, ends_E, table, max_tiles, (w_q, w_s) in grids(parts, weights, tile):
        _, N, C = w_q.shape
        rows_kernel[(programs,)](
            q, scale, descriptor(w_q, (1, tile.block_n, tile.block_k)), w_s, out,
            plan.slot_R, ends_E, table, max_tiles,
            C=C, N=N, K=plan.row_TK.shape[1], GATHER=gathers,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_C=tile.block_k, GROUP=8, SUBTILES=tile.subtiles,
            FLATTEN=tile.flatten, UPCAST=not q.is_cuda, num_warps=num_warps(tile.threads),
            num_stages=tile.stages,
        )  # fmt: skip


def _by_rows(
    name: str, tensors: Sequence[Tensor | None], largest: Tensor | None, plan: Plan, F: int, of_thread: int,
    act: Activation,
) -> None:  # fmt: skip
    """Launch kernel ``name``, whose programs process whole rows, with ``of_thread`` columns per thread.

    ``largest`` [1], a running maximum, is updated in place.
    """
    import triton

    from graphmoe.ops.fp8_mlp import kernels
    from graphmoe.ops.swiglu_kernels import block_of_ends

    width = max(triton.next_power_of_2(F), BLOCK)
    count, kind = max(128 * of_thread // width, 1), fp8_dtype()
    (above, exponent), R = rounding_of(kind), len(plan.slot_R)
    if not R:
        return
    programs = -(-R // count)
    partial = None if largest is None else largest.new_zeros(programs)
    getattr(kernels, name)[(programs,)](
        *tensors, partial, act.b_gate_up, len(plan.ends_E), R,
        F=F, LIMIT=act.limit, BLOCK_E=block_of_ends(plan.ends_E, act.b_gate_up),
        ABOVE=above, EXPONENT=exponent, MOST=torch.finfo(kind).max,
        ROWS=count, BLOCKS=width // BLOCK, BLOCK=BLOCK,
        num_warps=num_warps(count * width // of_thread),
    )  # fmt: skip
    if largest is not None and partial is not None:
        largest.copy_(torch.maximum(largest, partial.amax()))


def _transposed(
    of: tuple[Tensor, Tensor | None], other: Tensor | None, scale_E: Tensor | None, plan: Plan, table: Tensor
) -> Tensor:
    """Transpose experts' rows -> [C, padded]; without ``scale_E``, gather them from tokens."""
    from graphmoe.ops.fp8_mlp.kernels import transposed_kernel

    (q, own), max_tiles, C = of, len(table) // 2, of[0].shape[1]
    padded = max_tiles * BLOCK_R
    result = q.new_empty(C, padded)
    if max_tiles:
        transposed_kernel[(max_tiles, -(-C // 128))](
            q, own, other, plan.slot_R, scale_E, plan.ends_E, table, result, max_tiles, padded,
            C=C, K=plan.row_TK.shape[1], GATHER=own is None, BLOCK_R=BLOCK_R, COLUMNS=128,
            num_warps=num_warps(128),
        )  # fmt: skip
    return result


def _weight_grad(
    left: Tensor, right: Tensor, scale_E: Tensor, tile_E1: Tensor, total: Tensor,
    *, add: bool = False, behind: bool = False,
) -> None:  # fmt: skip
    import triton

    from graphmoe.ops.fp8_mlp.kernels import weight_grad_kernel

    (E, M, N), tile = total.shape, fp8_config(WEIGHTS, kind_of(left.device))
    if not left.numel():
        if not add:
            total.zero_()
        return
    across = E * -(-M // tile.block_m) * -(-N // tile.block_n)
    described = kind_of(left.device) == "hopper" and not add
    out = descriptor(total, (1, tile.block_m, tile.block_n // tile.subtiles)) if described else total
    weight_grad_kernel[(min(across, units_of(left.device) * tile.per_unit),)](
        descriptor(left, (tile.block_m, BLOCK_R)), descriptor(right, (tile.block_n, BLOCK_R)), scale_E,
        tile_E1, out, E, M=M, N=N, ADD=add, DESCRIBED=described,
        BEHIND=behind, BLOCK_E=triton.next_power_of_2(E),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_R=BLOCK_R, SUBTILES=tile.subtiles,
        UPCAST=not left.is_cuda,
        num_warps=num_warps(tile.threads), num_stages=tile.stages,
    )  # fmt: skip


def _with_height(tile: Config, kind: str, rows_per_expert: int) -> Config:
    height = height_of(tile, rows_per_expert)
    if height == tile.block_m:
        return tile
    threads = tile.threads if kind == "instinct" else tile.threads // 2  # with half, gfx950 spills registers
    return replace(tile, block_m=height, threads=threads, flatten=False)


STEPS = MlpSteps(parts_of, _product, _swiglu, _swiglu_grad, _wgrad)
