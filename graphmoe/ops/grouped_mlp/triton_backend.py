"""The grouped MLP in our Triton kernels: gather in the prologue, activation and its gradient in the
epilogue.

Suffixes as in the package; C and N are the contracted and output width of a GEMM of rows, M and N the axes of
a weight. Replicas have a second launch, which exits at once if they have no rows. No call waits for the
device, and every sum has a fixed order. The module is a `reference.Backend`.
"""

import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from graphmoe.config import packages
from graphmoe.ops import HALF_DTYPES, num_warps
from graphmoe.ops.grouped_mlp.reference import Experts, Plan
from graphmoe.ops.grouped_mlp.tuning import Config, default, kind_of, units_of

TABLE_BLOCK = 16  # entries of the table of row tiles that a program writes
Tiles = Callable[[int], Tensor]  # height of row tiles -> their table


def reason_against(dtype: torch.dtype, device: torch.device, sync_free: bool) -> str | None:
    if device.type != "cuda":
        return f"needs a GPU and the device is {device.type}"
    if not packages.is_installed("triton"):
        return "needs the package triton, which is not installed"
    return None if dtype in (*HALF_DTYPES, torch.float32) else f"has no kernels for {dtype}"


def forward(x_TD: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    slot_R, (E, D, F) = experts.slot_R, experts.w_down.shape
    parts = parts_of(experts.plan, E)
    h_RH, a_RF, y_RD = (x_TD.new_empty(len(slot_R), width) for width in (2 * F, F, D))
    of_rows: dict[str, Any] = {"h": h_RH, "a": a_RF, "weight": experts.weight_TK, "slot": slot_R}
    of_rows |= {"bias": experts.b_gate_up, "limit": experts.limit}
    _rows("up", parts, x_TD, (experts.w_gate_up, experts.more_gate_up), (D, F), **of_rows)
    _rows("down", parts, a_RF, (experts.w_down, experts.more_down), (F, D), out=y_RD)
    return torch.ops.graphmoe.unpermute(y_RD, *experts.plan, None), h_RH


def hidden(x_TD: Tensor, w_gate_up: Tensor, plan: Plan, more_gate_up: Tensor | None = None) -> Tensor:
    E, H, D = w_gate_up.shape
    h_RH, slots = x_TD.new_empty(len(plan.slot_R), H), plan.row_TK.shape[1]
    weights = w_gate_up, more_gate_up
    _rows("hidden", parts_of(plan, E), x_TD, weights, (D, H // 2), slots, h=h_RH, slot=plan.slot_R)
    return h_RH


def dgrad(dy_TD: Tensor, h_RH: Tensor, experts: Experts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slot_R, (E, D, F) = experts.slot_R, experts.w_down.shape
    parts = parts_of(experts.plan, E)
    dh_RH, a_RF = h_RH.new_empty(h_RH.shape), h_RH.new_empty(len(h_RH), F)
    columns = -(-F // _config("down_dgrad", dy_TD, len(slot_R), E).block_n)
    partial = torch.empty(columns, len(h_RH), dtype=torch.float32, device=h_RH.device)
    made: dict[str, Any] = {"out": dh_RH, "a": a_RF, "partial": partial}
    given: dict[str, Any] = {"h": h_RH, "weight": experts.weight_TK, "slot": slot_R}
    given |= {"bias": experts.b_gate_up, "limit": experts.limit}
    _rows("down_dgrad", parts, dy_TD, (experts.w_down, experts.more_down), (D, F), **made, **given)
    dx_RD = dh_RH.new_empty(len(dh_RH), D)
    _rows("up_dgrad", parts, dh_RH, (experts.w_gate_up, experts.more_gate_up), (2 * F, D), out=dx_RD)
    dx_TD = torch.ops.graphmoe.unpermute(dx_RD, *experts.plan, None)
    return dx_TD, weight_sums(partial, experts.row_TK), dh_RH, a_RF


def wgrad(
    dy_TD: Tensor, x_TD: Tensor, dh_RH: Tensor, a_RF: Tensor, plan: Plan,
    totals: tuple[Tensor, Tensor] | None = None, add: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_up, of_down = totals or (None, None)
    dw_gate_up = _weight_grad("up_wgrad", dh_RH, x_TD, plan, of_up, add=add)
    dw_down = _weight_grad("down_wgrad", dy_TD, a_RF, plan, of_down, add=add)
    return dw_gate_up, dw_down


def wgrad_of_more(
    dy_TD: Tensor, x_TD: Tensor, dh_RH: Tensor, a_RF: Tensor, plan: Plan, of_more: Sequence[Tensor]
) -> None:
    """Store weight gradients of the replicas, the last experts of the plan, up to the last one with rows."""
    more = plan._replace(ends_E=plan.ends_E[-len(of_more[0]) :])
    _weight_grad("up_wgrad", dh_RH, x_TD, more, of_more[0], behind=True)
    _weight_grad("down_wgrad", dy_TD, a_RF, more, of_more[1], behind=True)


# ends of consecutive experts whose weights are one tensor, and the tables of their row tiles
Part = tuple[Tensor, Tiles]


def parts_of(plan: Plan, own: int) -> list[Part]:
    """Return ends and tile tables of the own experts, then of replicas if any."""
    ends_E, num_rows = plan.ends_E, len(plan.slot_R)
    parts = [(ends_E[:own], row_tiles(ends_E[:own], num_rows))]
    if len(ends_E) > own:
        parts.append((ends_E[own:], row_tiles(ends_E[own:], num_rows, behind=True)))
    return parts


def row_tiles(ends_E: Tensor, num_rows: int, *, behind: bool = False) -> Tiles:
    """Return a cached function from a tile height to the table of row tiles (`tiles_kernel`).

    ``behind``: ``ends_E`` are those of replicas, a view of a tensor that begins with the ends of own experts.
    """
    import triton

    from graphmoe.ops.grouped_mlp.rows_kernel import tiles_kernel

    E = len(ends_E)

    @functools.cache
    def table_of(height: int) -> Tensor:
        # Each expert may waste all but one row of a tile, and has no more tiles than rows.
        max_tiles = min((num_rows + E * (height - 1)) // height, num_rows)
        table = torch.empty(1 + 2 * max_tiles, dtype=torch.int32, device=ends_E.device)
        if max_tiles:
            tiles_kernel[(triton.cdiv(max_tiles, TABLE_BLOCK),)](
                ends_E, table, max_tiles,
                E=E, BLOCK_E=triton.next_power_of_2(E), BEHIND=int(behind), BLOCK_M=height, BLOCK=TABLE_BLOCK,
                num_warps=num_warps(256),
            )  # fmt: skip
        return table

    return table_of


def weight_sums(partial: Tensor, row_TK: Tensor) -> Tensor:
    """Return ``partial`` [parts, R], summed in order, at each slot's row -> fp32 [T, K]; 0 without a row."""
    from graphmoe.ops.grouped_mlp.rows_kernel import weight_sums_kernel

    sums_TK = torch.empty(row_TK.shape, dtype=torch.float32, device=row_TK.device)
    if slots := sums_TK.numel():
        parts, num_rows = partial.shape
        weight_sums_kernel[(-(-slots // 256),)](
            partial, row_TK.contiguous(), sums_TK, slots, num_rows, PARTS=parts, BLOCK=256
        )
    return sums_TK


def _weight_grad(
    step: str, left: Tensor, right: Tensor, plan: Plan, total: Tensor | None = None, *,
    add: bool = False, behind: bool = False,
) -> Tensor:  # fmt: skip
    """Return a weight's gradient [E, M, N]: "up_wgrad" from dh_RH and x_TD, "down_wgrad" from dy_TD and a_RF.

    ``total``: where to store or add it. If ``behind``, replicas after the last with rows are not written.
    """
    import triton

    from graphmoe.ops.grouped_mlp.weight_grad_kernel import weight_grad_kernel

    (slot_R, row_TK, ends_E), M, N = plan, left.shape[1], right.shape[1]
    E = len(ends_E)
    result = left.new_empty(E, M, N) if total is None else total
    config = _config(step if result.dtype == left.dtype else f"{step}_into", left, len(slot_R), E)
    assert result.is_contiguous() and result.shape == (E, M, N)
    tiles = E * -(-M // config.block_m) * -(-N // config.block_n)
    programs = _programs(config, tiles, left.device)
    if programs:
        left, right = left.contiguous(), right.contiguous()
        rows = right if step == "down_wgrad" else left
        arguments = (left, right, result, slot_R.contiguous(), ends_E)
        launch = functools.partial(
            weight_grad_kernel[(programs,)], *arguments,
            E=E, BLOCK_E=triton.next_power_of_2(E), BEHIND=int(behind),
            M=M, N=N, K=row_TK.shape[1], GATHER_LEFT=step == "down_wgrad",
            DESCRIPTOR=config.descriptors != "none" and _describable(rows),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_R=config.block_k, GROUP=config.group,
            SUBTILES=config.subtiles, ADD=add, UPCAST=not left.is_cuda,
            num_warps=num_warps(config.threads), num_stages=config.stages,
        )  # fmt: skip
        _with_scratch_memory(launch)
    return result


def _with_scratch_memory(launch: Callable[[], Any]) -> None:
    import triton

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device="cuda")

    # the allocator is a context variable, which autograd's thread does not inherit; set for this call only
    context = contextvars.copy_context()
    context.run(triton.set_allocator, allocate)
    context.run(launch)


_EPILOGUES = {
    "up": "swiglu",
    "hidden": "halves",
    "down": "store",
    "down_dgrad": "swiglu_grad",
    "up_dgrad": "store",
}


def _rows(
    step: str, parts: Sequence[Part], x: Tensor, weights: Sequence[Tensor | None], sizes: tuple[int, int],
    slots: int = 1, limit: float = 0.0, **tensors: Tensor | None,
) -> None:  # fmt: skip
    names = ("out", "h", "a", "partial", "bias", "weight", "slot")
    given = [None if (each := tensors.get(name)) is None else each.contiguous() for name in names]
    weight, slot = given[-2:]
    num_rows = len(x if slot is None else slot)
    # the config of the first part, so that results have the same bits with and without replicas
    config = _config(step, x, num_rows, len(parts[0][0]))
    slots = slots if weight is None else weight.shape[1]
    for part, w in zip(parts, weights, strict=False):
        assert w is not None
        _launch_rows(step, config, part, x.contiguous(), w.contiguous(), given, sizes, num_rows, slots, limit)


def _launch_rows(
    step: str, config: Config, part: Part, x: Tensor, w: Tensor, given: Sequence[Tensor | None],
    sizes: tuple[int, int], num_rows: int, slots: int, limit: float,
) -> None:  # fmt: skip
    from graphmoe.ops.grouped_mlp.rows_kernel import rows_kernel

    ends_E, tiles = part
    table = tiles(config.block_m)
    max_tiles = len(table) // 2
    columns = config.block_n // 2 if step in ("up", "hidden") else config.block_n
    programs = _programs(config, max_tiles * -(-sizes[1] // columns), x.device)
    if programs == 0:
        return
    *_, bias, _, slot = given
    load_w = config.descriptors != "none" and _describable(w)
    load_x = config.descriptors == "both" and slot is None and _describable(x)
    (C, N), contract_last = sizes, not step.endswith("dgrad")
    # a flattened loop carries the column mask, whose structure the compiler then cannot see: it would load
    # element by element
    flatten = config.flatten and (contract_last or load_w or N % config.block_n == 0)
    subtiles, ahead = config.subtiles, min(config.ahead, config.subtiles)
    if ahead and (limit or bias is not None):  # these need the registers of half a part of h
        subtiles, ahead = 2 * subtiles, 2 * ahead
    rows_kernel[(programs,)](
        descriptor(x, (config.block_m, config.block_k)) if load_x else x,
        _weight_descriptor(w, step, config) if load_w else w, *given, ends_E, table, max_tiles, num_rows,
        C=C, N=N, K=slots, EPILOGUE=_EPILOGUES[step], LIMIT=limit,
        CONTRACT_LAST=contract_last, X_DESCRIPTOR=load_x, W_DESCRIPTOR=load_w,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_C=config.block_k, GROUP=config.group,
        SUBTILES=subtiles, AHEAD=ahead, FLATTEN=flatten,
        UPCAST=not x.is_cuda, num_warps=num_warps(config.threads), num_stages=config.stages,
    )  # fmt: skip


def _config(step: str, x: Tensor, num_rows: int, num_experts: int) -> Config:
    step = "up" if step == "hidden" else step
    return default(step, kind_of(x.device), x.dtype, num_rows // num_experts)


def _programs(config: Config, tiles: int, device: torch.device) -> int:
    return min(tiles, units_of(device) * config.per_unit) if config.per_unit else tiles


def _describable(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.shape[-1] * x.element_size() % 16 == 0


def descriptor(x: Tensor, block: tuple[int, ...]) -> Any:
    # made on the host at each launch, so no scratch memory is needed
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, list(block))


def _weight_descriptor(w: Tensor, step: str, config: Config) -> Any:
    n, k = config.block_n, config.block_k
    if step in ("up", "hidden"):  # the same columns of both halves in one load
        return descriptor(w.view(2 * len(w), -1, w.shape[2]), (2, n // 2, k))
    return descriptor(w, (1, k, n) if step.endswith("dgrad") else (1, n, k))


def grids(
    parts: Sequence[Part], weights: Sequence[tuple[Tensor, Tensor]], tile: Config
) -> Iterator[tuple[int, Tensor, Tensor, int, tuple[Tensor, Tensor]]]:
    """Yield (programs, ends_E, tile table, its capacity, weights): own experts, then replicas if any."""
    for (ends_E, tiles), weight in zip(parts, weights, strict=True):
        table, columns = tiles(tile.block_m), weight[0].shape[1]
        max_tiles = len(table) // 2
        programs = _programs(tile, max_tiles * -(-columns // tile.block_n), table.device)
        if programs:
            yield programs, ends_E, table, max_tiles, weight
