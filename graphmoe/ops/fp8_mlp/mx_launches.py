"""Launches of the kernels of the grouped MLP in mxfp8, as `reference.MlpSteps`.

No call waits for the device, and every sum has a fixed order.
"""

from collections.abc import Sequence

from torch import Tensor

from graphmoe.ops import num_warps
from graphmoe.ops.fp8 import Stored
from graphmoe.ops.fp8_blocks.reference import MX_BLOCK, mx_like
from graphmoe.ops.fp8_mlp.reference import Activation, Known, MlpSteps
from graphmoe.ops.grouped_mlp.reference import Plan
from graphmoe.ops.grouped_mlp.triton_backend import Part, grids, parts_of, row_tiles, weight_sums
from graphmoe.ops.grouped_mlp.tuning import BLOCK_R, Config, fp8_config, kind_of, units_of

COLUMNS = 128  # of a program of SwiGLU, of its gradient, and of requantized rows
ROWS = {
    "hopper": Config(128, 256, 128, 256, 3, subtiles=2, flatten=True),
    "instinct": Config(128, 256, 128, 256, 2, subtiles=2),
}
# only hopper and instinct have mxfp8 GEMMs
WEIGHTS = {
    "hopper": Config(128, 256, BLOCK_R, 256, 3, subtiles=4),
    "instinct": Config(128, 256, BLOCK_R, 256, 2, subtiles=4),
}


def _swiglu(
    x: Stored, h_RH: Tensor, weight_TK: Tensor | None, plan: Plan, known: Known | None, act: Activation
) -> tuple[Stored, Stored | None]:
    (R, H), a = h_RH.shape, None
    h = mx_like(h_RH, R, H)
    if weight_TK is not None:
        weight_TK, a = weight_TK.contiguous(), mx_like(h_RH, R, H // 2)
    of_tiles = (h_RH, weight_TK, plan.slot_R, plan.ends_E, *h, *(a or (None, None)))
    _by_tiles("swiglu_kernel", of_tiles, plan, H // 2, 128, act)
    return h, a


def _swiglu_grad(
    dy: Stored, da_RF: Tensor, h: Stored, weight_TK: Tensor, plan: Plan,
    known_a: Tensor | None, known: Known | None, act: Activation,
) -> tuple[Stored, Stored, Tensor]:  # fmt: skip
    R, F = da_RF.shape
    dh, a = mx_like(da_RF, R, 2 * F), mx_like(da_RF, R, F)
    partial = weight_TK.new_empty(-(-F // COLUMNS), R)
    of_tiles = (da_RF, *h, weight_TK.contiguous(), plan.slot_R, plan.ends_E, *dh, *a, partial)
    _by_tiles("swiglu_grad_kernel", of_tiles, plan, F, 256, act)
    return dh, a, weight_sums(partial, plan.row_TK)


def _wgrad(
    dy: Stored, x: Stored, dh: Stored, a: Stored, plan: Plan,
    totals: tuple[Tensor, Tensor], *, add: bool = False, of_more: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    table = row_tiles(plan.ends_E, len(plan.slot_R))(BLOCK_R)
    sides, results = ((dh, x), (dy, a)), ((totals[0], *of_more[:1]), (totals[1], *of_more[1:]))
    for pair, (total, *more), of_left in zip(sides, results, (False, True), strict=True):
        left = turned_rows(pair[0], plan, table, gathers=of_left)
        right = turned_rows(pair[1], plan, table, gathers=not of_left)
        _weight_grad(left, right, plan, total, add=add)
        for each in more:
            _weight_grad(left, right, plan, each, in_front=len(total))
        del left, right  # frees them before those of the next GEMM


def turned_rows(of: Stored, plan: Plan, table: Tensor, *, gathers: bool) -> Stored:
    """Transpose and requantize experts' rows, or if ``gathers`` their tokens -> q [C, padded] and scales."""
    from graphmoe.ops.fp8_mlp.mx_kernels import turned_kernel

    max_tiles, C = len(table) // 2, of[0].shape[1]
    padded = max_tiles * BLOCK_R
    result = mx_like(of[0], C, padded)
    if max_tiles:
        turned_kernel[(max_tiles, -(-C // COLUMNS))](
            *of, plan.slot_R, plan.ends_E, table, *result, max_tiles, padded,
            C=C, K=plan.row_TK.shape[1], GATHER=gathers, BLOCK_R=BLOCK_R, COLUMNS=COLUMNS, BLOCK=MX_BLOCK,
            num_warps=num_warps(256),
        )  # fmt: skip
    return result


def _product(
    x: Stored, weights: Sequence[Stored], out: Tensor, plan: Plan, parts: Sequence[Part],
    *, gathers: bool = False,
) -> None:  # fmt: skip
    from graphmoe.ops.fp8_mlp.mx_kernels import rows_kernel

    (q, scale), tile = x, fp8_config(ROWS, kind_of(x[0].device))
    for programs, ends_E, table, max_tiles, (w_q, w_s) in grids(parts, weights, tile):
        _, N, C = w_q.shape
        rows_kernel[(programs,)](
            q.contiguous(), scale.contiguous(), w_q, w_s, out, plan.slot_R, ends_E, table, max_tiles, C,
            N=N, K=plan.row_TK.shape[1], GATHER=gathers, EVEN=C % tile.block_k == 0,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_C=tile.block_k, BLOCK=MX_BLOCK, GROUP=8,
            SUBTILES=tile.subtiles, FLATTEN=tile.flatten, UPCAST=not q.is_cuda,
            num_warps=num_warps(tile.threads), num_stages=tile.stages,
        )  # fmt: skip


def _by_tiles(
    name: str, tensors: Sequence[Tensor | None], plan: Plan, F: int, threads: int, act: Activation
) -> None:
    from graphmoe.ops.fp8_mlp import mx_kernels
    from graphmoe.ops.swiglu_kernels import block_of_ends

    R = len(plan.slot_R)
    if R:
        getattr(mx_kernels, name)[(-(-R // 32), -(-F // COLUMNS))](
            *tensors, act.b_gate_up, len(plan.ends_E), R,
            F=F, LIMIT=act.limit, BLOCK_E=block_of_ends(plan.ends_E, act.b_gate_up),
            ROWS=32, COLUMNS=COLUMNS, BLOCK=MX_BLOCK, num_warps=num_warps(threads),
        )  # fmt: skip


def _weight_grad(
    left: Stored, right: Stored, plan: Plan, total: Tensor, *, add: bool = False, in_front: int = 0
) -> None:
    import triton

    from graphmoe.ops.fp8_mlp.mx_kernels import weight_grad_kernel

    (E, M, N), tile = total.shape, fp8_config(WEIGHTS, kind_of(total.device))
    if not left[0].numel():
        if not add:
            total.zero_()
        return
    across = E * -(-M // tile.block_m) * -(-N // tile.block_n)
    weight_grad_kernel[(min(across, units_of(total.device) * tile.per_unit),)](
        *left, *right, plan.ends_E, total, E, in_front, left[0].shape[1],
        M=M, N=N, ADD=add, BLOCK_E=triton.next_power_of_2(in_front + E), BEHIND=in_front > 0,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_R=BLOCK_R, BLOCK=MX_BLOCK, SUBTILES=tile.subtiles,
        UPCAST=not total.is_cuda, num_warps=num_warps(tile.threads), num_stages=tile.stages,
    )  # fmt: skip


STEPS = MlpSteps(parts_of, _product, _swiglu, _swiglu_grad, _wgrad)
