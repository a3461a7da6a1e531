"""The routed experts of a layer as one operation: gather, SwiGLU MLP of each expert, weighted sum.

A slot is a (token, k-th choice) pair, its row the token's copy for that expert, in expert order. Suffixes: T
tokens, K choices, E experts, R rows, D hidden, F expert width, H = 2F (h: gate, then up).

With ``expert_RS`` it also computes on replicas of other ranks' experts (`graphmoe.ops.replicas`): it fetches
the replicas' weights and reduces their gradients to the owners.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphmoe.config.choices import look_up
from graphmoe.ops.gradients import Gradient, have_begun, report_added
from graphmoe.ops.grouped_mlp import triton_backend, vendor
from graphmoe.ops.grouped_mlp.reference import KEY, TORCH, Backend, Experts, Plan, store
from graphmoe.ops.symm.peers import exchange_of

# values of moe.experts except auto; each imports its package when it is called
BACKENDS: dict[str, Backend] = {
    "torch": TORCH,
    "triton": triton_backend,
    "turbo": vendor.TURBO,
    "te": vendor.TE,
}
# vendors' fp8 GEMMs by recipe: selected by the pass fp8_experts, not by a key
FP8_BACKENDS: dict[str, Backend] = {f"turbo.{recipe}": each for recipe, each in vendor.TURBO_FP8.items()}
DIRECTIONS = ("forward", "dgrad", "wgrad")
# operands of the two weight gradients: dy_TD, x_TD, dh_RH, a_RF
Sides = tuple[Tensor, Tensor, Tensor, Tensor]


def row_of(name: str) -> Backend:
    """Return the backend with this name or import path. Raises ConfigError if there is none."""
    return FP8_BACKENDS.get(name) or look_up(BACKENDS, name, KEY, Backend)


def backend_of(backend: str, direction: str) -> str:
    """Return the backend for one of `DIRECTIONS`, from "triton" or "triton,triton,torch"."""
    names = backend.split(",")
    names = names * 3 if len(names) == 1 else names
    assert len(names) == 3 and all(n in BACKENDS | FP8_BACKENDS or ":" in n for n in names), backend
    return names[DIRECTIONS.index(direction)]


def _kernels(backend: str, direction: str, x: Tensor) -> Backend:
    name = backend_of(backend, direction)
    return TORCH if name == "triton" and not x.is_cuda else row_of(name)


@torch.library.custom_op("graphmoe::grouped_mlp", mutates_args=())
def _forward(
    x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, weight_TK: Tensor, slot_R: Tensor, row_TK: Tensor,
    ends_E: Tensor,
    backend: str, expert_RS: Tensor | None = None,
    more_gate_up: Tensor | None = None, more_down: Tensor | None = None,
    b_gate_up: Tensor | None = None, limit: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y [T, D], the sum of weight * down(silu(gate) * up) over a token's experts, and h [R, H].

    ``w_gate_up`` [E, 2F, D] and ``w_down`` [E, D, F] in the dtype of x (bf16 or fp32; fp64 with torch),
    ``weight_TK`` fp32, the plan of `graphmoe.ops.permute`. ``backend``: of `BACKENDS`, an import path, or
    three for "forward,dgrad,wgrad". No device sync with triton and turbo. Raises ConfigError if a backend's
    package is missing.

    ``b_gate_up`` [E, 2F] is added to h in the activation, which a ``limit`` clamps as in `ops.swiglu`; h is
    returned without it, for `grouped_mlp_dgrad`. Replicas have no biases.

    ``expert_RS`` [ranks, S] are the experts in each rank's replica slots; then ``ends_E`` has S more entries,
    and all ranks make the same calls. Replicas' weights are fetched here and in the backward, or passed:
    ``more_gate_up`` [S, 2F, D], ``more_down`` [S, D, F].
    """
    assert b_gate_up is None or expert_RS is None, "biases of replicas are not fetched"
    up, down = _pulled((w_gate_up, w_down), expert_RS, (more_gate_up, more_down)) or (None, None)
    experts = Experts(w_gate_up, w_down, weight_TK, slot_R, row_TK, ends_E, up, down, b_gate_up, limit)
    return _kernels(backend, "forward", x_TD).forward(x_TD, experts)


@torch.library.custom_op("graphmoe::grouped_mlp_dgrad", mutates_args=())
def _dgrad(
    dy_TD: Tensor, h_RH: Tensor, w_gate_up: Tensor, w_down: Tensor, weight_TK: Tensor, slot_R: Tensor,
    row_TK: Tensor, ends_E: Tensor,
    backend: str, expert_RS: Tensor | None = None,
    more_gate_up: Tensor | None = None, more_down: Tensor | None = None,
    b_gate_up: Tensor | None = None, limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx_TD, dweight_TK, and for wgrad dh_RH and a_RF, the activation times its routing weight."""
    assert b_gate_up is None or expert_RS is None, "biases of replicas are not fetched"
    up, down = _pulled((w_gate_up, w_down), expert_RS, (more_gate_up, more_down)) or (None, None)
    experts = Experts(w_gate_up, w_down, weight_TK, slot_R, row_TK, ends_E, up, down, b_gate_up, limit)
    return _kernels(backend, "dgrad", dy_TD).dgrad(dy_TD, h_RH, experts)


@torch.library.custom_op("graphmoe::grouped_mlp_wgrad", mutates_args=())
def _wgrad(
    dy_TD: Tensor, x_TD: Tensor, dh_RH: Tensor, a_RF: Tensor, slot_R: Tensor, row_TK: Tensor,
    ends_E: Tensor,
    backend: str, expert_RS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dw_gate_up [E, H, D] and dw_down [E, D, F]; exactly zero for experts without rows.

    Gradients of replicas are summed in fp32 and rounded once.
    """
    kernels, given = _kernels(backend, "wgrad", dy_TD), (dy_TD, x_TD, dh_RH, a_RF)
    plan = Plan(slot_R, row_TK, ends_E)
    if expert_RS is None:
        return kernels.wgrad(*given, plan)
    shapes = weight_shapes(x_TD, dh_RH, a_RF, ends_E, expert_RS)
    dtype = torch.promote_types(dh_RH.dtype, torch.float32)
    of_gate_up, of_down = (dh_RH.new_empty(shape, dtype=dtype) for shape in shapes)
    _with_replicas(kernels, given, plan, (of_gate_up, of_down), False, expert_RS, may_defer=False)
    return of_gate_up.to(dh_RH.dtype), of_down.to(dh_RH.dtype)


@torch.library.custom_op("graphmoe::grouped_mlp_wgrad_into", mutates_args=("of_gate_up", "of_down"))
def _wgrad_into(
    dy_TD: Tensor, x_TD: Tensor, dh_RH: Tensor, a_RF: Tensor, slot_R: Tensor, row_TK: Tensor,
    ends_E: Tensor, of_gate_up: Tensor, of_down: Tensor,
    backend: str, add: bool, expert_RS: Tensor | None = None,
) -> None:  # fmt: skip
    """Store dw_gate_up and dw_down in fp32, or ``add`` them; backends other than triton round them first."""
    kernels, given = _kernels(backend, "wgrad", dy_TD), (dy_TD, x_TD, dh_RH, a_RF)
    plan, totals = Plan(slot_R, row_TK, ends_E), (of_gate_up, of_down)
    if expert_RS is None:
        kernels.wgrad(*given, plan, totals, add)
    else:
        _with_replicas(kernels, given, plan, totals, add, expert_RS, may_defer=True)


@torch.library.custom_op("graphmoe::grouped_mlp_hidden", mutates_args=())
def _hidden(
    x_TD: Tensor, w_gate_up: Tensor, slot_R: Tensor, row_TK: Tensor, ends_E: Tensor,
    backend: str, expert_RS: Tensor | None = None, more_gate_up: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Recompute h [R, H] of ``grouped_mlp``, bitwise equal. Has no gradient."""
    plan = Plan(slot_R, row_TK, ends_E)
    more = _pulled((w_gate_up,), expert_RS, (more_gate_up,), again=True)
    return _kernels(backend, "forward", x_TD).hidden(x_TD, w_gate_up, plan, *more)


def _pulled(
    weights: Sequence[Tensor], expert_RS: Tensor | None, given: Sequence[Tensor | None], *,
    again: bool = False,
) -> list[Tensor]:  # fmt: skip
    passed = [more for more in given if more is not None]
    if passed or expert_RS is None:
        return passed
    pulled: list[Tensor] = exchange_of(len(expert_RS)).pull(weights, expert_RS, again=again)
    return pulled


def _with_replicas(
    kernels: Backend, given: Sides, plan: Plan, totals: tuple[Tensor, Tensor], add: bool,
    expert_RS: Tensor, *, may_defer: bool,
) -> None:  # fmt: skip
    # other backends round to the model's dtype, so their gradients are sent in that dtype
    dtype = totals[0].dtype if kernels is triton_backend else given[0].dtype
    exchange = exchange_of(len(expert_RS))
    with exchange.slot_gradients(totals, expert_RS, dtype, may_defer=may_defer) as made:
        wgrad_in_two(kernels, given, plan, totals, add, made)


def wgrad_in_two(
    kernels: Backend, given: Sides, plan: Plan, totals: tuple[Tensor, Tensor], add: bool,
    of_more: Sequence[Tensor],
) -> None:  # fmt: skip
    """Store or add weight gradients of own experts in ``totals``; store those of replicas in ``of_more``.

    ``of_more``: of gate and up, then down, [replicas, ...]; those after the last with rows are not written.
    """
    # Backends other than triton write zeros for each expert without rows. On a GPU they compute the first
    # half, as all are seldom used, and kernels that skip experts without rows compute the others.
    own, slots = len(plan.ends_E) - len(of_more[0]), len(of_more[0])
    skips = triton_backend.reason_against(given[0].dtype, given[0].device, True) is None
    until = own + (0 if kernels is triton_backend else slots // 2 if skips else slots)
    if until == own:
        kernels.wgrad(*given, plan._replace(ends_E=plan.ends_E[:own]), totals, add)
    else:
        gradients = kernels.wgrad(*given, plan._replace(ends_E=plan.ends_E[:until]))
        store(totals, [each[:own] for each in gradients], add=add)
        first = [each[: until - own] for each in of_more]
        store(first, [each[own:] for each in gradients], add=False, ends_E=plan.ends_E[own:until])
    if until < own + slots:
        triton_backend.wgrad_of_more(*given, plan, [each[until - own :] for each in of_more])


def weight_shapes(
    x_TD: Tensor, dh_RH: Tensor, a_RF: Tensor, ends_E: Tensor, expert_RS: Tensor | None
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the shapes of own w_gate_up and w_down, without replicas."""
    (H, D), F = (dh_RH.shape[1], x_TD.shape[1]), a_RF.shape[1]
    E = ends_E.shape[0] - (0 if expert_RS is None else expert_RS.shape[1])
    return (E, H, D), (E, D, F)


@_forward.register_fake
def _(x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, weight_TK: Tensor, slot_R: Tensor, *_: Any) -> Any:
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(slot_R.shape[0], w_gate_up.shape[1])


_hidden.register_fake(lambda x_TD, w_gate_up, slot_R, *_: x_TD.new_empty(slot_R.shape[0], w_gate_up.shape[1]))


@_dgrad.register_fake
def _(dy_TD: Tensor, h_RH: Tensor, w_gate_up: Tensor, w_down: Tensor, weight_TK: Tensor, *_: Any) -> Any:
    dh_RH, a_RF = h_RH.new_empty(h_RH.shape), h_RH.new_empty(h_RH.shape[0], w_down.shape[2])
    return dy_TD.new_empty(dy_TD.shape), weight_TK.new_empty(weight_TK.shape), dh_RH, a_RF


@_wgrad.register_fake
def _(dy_TD: Tensor, x_TD: Tensor, dh_RH: Tensor, a_RF: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _, _, ends_E, _, expert_RS = (*rest, None)[:5]
    shapes = weight_shapes(x_TD, dh_RH, a_RF, ends_E, expert_RS)
    return dh_RH.new_empty(shapes[0]), dh_RH.new_empty(shapes[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.backend, expert_RS, more_gate_up, more_down, b_gate_up, ctx.limit = inputs
    ctx.save_for_backward(*tensors, expert_RS, more_gate_up, more_down, b_gate_up, output[1])
    ctx.set_materialize_grads(False)  # the gradient of h would be zeros of the largest size here


def _row_gradients(
    ctx: Any, dy_TD: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor | None, Tensor | None]:
    """Return dx_TD, dweight_TK, the tensor arguments of ``_wgrad``, expert_RS, and db_gate_up."""
    x_TD, *experts, expert_RS, more_gate_up, more_down, b_gate_up, h_RH = ctx.saved_tensors
    rest = expert_RS, more_gate_up, more_down, b_gate_up, ctx.limit
    ops, db_gate_up = torch.ops.graphmoe, None
    dx_TD, dweight_TK, *made = ops.grouped_mlp_dgrad(dy_TD, h_RH, *experts, ctx.backend, *rest)
    if b_gate_up is not None:
        db_gate_up = ops.expert_sums(made[0], experts[-1]).to(b_gate_up.dtype)
    return dx_TD, dweight_TK, (dy_TD, x_TD, *made, *experts[3:]), expert_RS, db_gate_up


def _backward(ctx: Any, dy_TD: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy_TD is None:
        return (None,) * 13
    dx_TD, dweight_TK, made, expert_RS, db_gate_up = _row_gradients(ctx, dy_TD.contiguous())
    dw_gate_up = dw_down = None
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        dw_gate_up, dw_down = torch.ops.graphmoe.grouped_mlp_wgrad(*made, ctx.backend, expert_RS)
    gradients = (dx_TD, dw_gate_up, dw_down, dweight_TK)
    wanted = [g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad, strict=False)]
    return *wanted, *[None] * 7, db_gate_up, None


_forward.register_autograd(_backward, setup_context=_save)


class _Accumulating(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, totals: Sequence[Gradient], backend: str, b_gate_up: Tensor | None, limit: float,
        *arguments: Tensor,
    ) -> Tensor:  # fmt: skip
        y_TD, h_RH = torch.ops.graphmoe.grouped_mlp(*arguments, backend, b_gate_up=b_gate_up, limit=limit)
        ctx.save_for_backward(*arguments, None, None, None, b_gate_up, h_RH)
        ctx.totals, ctx.backend, ctx.limit = totals, backend, limit
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        dx_TD, dweight_TK, made, _, db_gate_up = _row_gradients(ctx, dy_TD.contiguous())
        if ctx.totals[0].key is not None:  # rounded sums
            found = torch.ops.graphmoe.grouped_mlp_wgrad(*made, ctx.backend)
            for gradient, value in zip(ctx.totals, found, strict=True):
                gradient.add(value)
        else:
            totals, add = [gradient.total for gradient in ctx.totals], have_begun(ctx.totals)
            torch.ops.graphmoe.grouped_mlp_wgrad_into(*made, *totals, ctx.backend, add)
            report_added(ctx.totals)
        return None, None, db_gate_up, None, dx_TD, None, None, dweight_TK, None, None, None


def grouped_mlp_into(
    totals: Sequence[Gradient], backend: str, *arguments: Tensor, b_gate_up: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return y of ``graphmoe::grouped_mlp``; the backward adds gradients of both weights to ``totals``.

    Autograd gets the gradient of ``b_gate_up``. Only for code that is not compiled: compiled units add in
    their own graphs (`runtime.compile.code`).
    """
    return _Accumulating.apply(totals, backend, b_gate_up, limit, *arguments)
