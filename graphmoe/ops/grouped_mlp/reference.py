"""The grouped MLP in separate steps around a grouped GEMM of torch or of a vendor.

Suffixes as in the package; N and C are the output and contracted width of a GEMM. On a CPU this is the
reference of the op.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from graphmoe.config.packages import is_installed
from graphmoe.ops import grouped_mm, permute, swiglu  # noqa: F401  # registers the ops

KEY = "moe.experts"
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class Plan(NamedTuple):
    """Routing plan, as in `graphmoe.ops.permute`; slots of other ranks' experts have row -1."""

    slot_R: Tensor
    row_TK: Tensor
    ends_E: Tensor  # end row of each expert; rows from the last one on are dead


class Products(NamedTuple):
    """Grouped GEMM and its gradients; the last argument is ``ends_E``. Rows after the last end are unread."""

    rows: Product  # x_RC, w_ENC -> y_RN: y[r] = w[e(r)] @ x[r]
    rows_grad: Product  # dy_RN, w_ENC -> dx_RC: dx[r] = w[e(r)].T @ dy[r]
    weight_grad: Product  # dy_RN, x_RC -> dw_ENC: sum of outer(dy[r], x[r]) over an expert's rows, or zeros


class Experts(NamedTuple):
    """The weights of a layer's experts and the rows routed to them: arguments of the operations after x."""

    w_gate_up: Tensor
    w_down: Tensor
    weight_TK: Tensor
    slot_R: Tensor
    row_TK: Tensor
    ends_E: Tensor
    b_gate_up: Tensor | None = None  # [E, H], added to h
    limit: float = 0.0  # of the activation, as in `ops.swiglu`
    more_gate_up: Tensor | None = None  # weights of replicas of other ranks' experts, whose rows follow
    more_down: Tensor | None = None

    @property
    def plan(self) -> Plan:
        return Plan(*self[3:6])


@runtime_checkable
class Backend(Protocol):
    """Kernels of the grouped MLP: an object or module that ``BACKENDS`` lists."""

    def reason_against(self, dtype: torch.dtype, device: torch.device, sync_free: bool) -> str | None:
        """Return why device, dtype or ``sync_free`` rules the backend out; None if nothing does."""

    def forward(self, x_TD: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
        """Return the experts' output y_TD, and h_RH (gate and up, without biases) for the backward."""

    def hidden(
        self, x_TD: Tensor, w_gate_up: Tensor, plan: Plan, more_gate_up: Tensor | None = None
    ) -> Tensor:
        """Return h_RH (gate and up), bitwise equal to that of ``forward``."""

    def dgrad(self, dy_TD: Tensor, h_RH: Tensor, experts: Experts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return dx_TD, dweight_TK, dh_RH, a_RF (the activation times its routing weight)."""

    def wgrad(
        self, dy_TD: Tensor, x_TD: Tensor, dh_RH: Tensor, a_RF: Tensor, plan: Plan,
        totals: tuple[Tensor, Tensor] | None = None, add: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return dw_gate_up and dw_down; with ``totals``, store them there in fp32, or add.

        Rows after the plan's last end are not read: on a GPU they may belong to replicas.
        """


class Stepwise:
    """Backend that runs the MLP in separate steps around the `Products` (GEMMs) of a dtype."""

    def __init__(
        self, products: Callable[[torch.dtype], Products], reason_against: Callable[..., str | None]
    ):
        self._products, self.reason_against = products, reason_against

    def forward(self, x_TD: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
        # the weight is applied before the down GEMM, which then needs no epilogue
        ops, plan = torch.ops.graphmoe, experts.plan
        h_RH = self.hidden(x_TD, experts.w_gate_up, plan, experts.more_gate_up)
        weight_R = row_weights(experts.weight_TK, plan.slot_R)
        a_RF = ops.swiglu(h_RH, weight_R, plan.ends_E, experts.b_gate_up, experts.limit)
        y_RD = self._products(x_TD.dtype).rows(a_RF, _joined(experts.w_down, experts.more_down), plan.ends_E)
        return ops.unpermute(y_RD, *plan, None), h_RH

    def hidden(
        self, x_TD: Tensor, w_gate_up: Tensor, plan: Plan, more_gate_up: Tensor | None = None
    ) -> Tensor:
        x_RD = torch.ops.graphmoe.permute(x_TD, *plan)
        return self._products(x_TD.dtype).rows(x_RD, _joined(w_gate_up, more_gate_up), plan.ends_E)

    def dgrad(self, dy_TD: Tensor, h_RH: Tensor, experts: Experts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # the down GEMM is not recomputed: dweight is <W.T dy, a>
        ops, products, plan = torch.ops.graphmoe, self._products(dy_TD.dtype), experts.plan
        ends_E, weight_R = plan.ends_E, row_weights(experts.weight_TK, plan.slot_R)
        w_gate_up = _joined(experts.w_gate_up, experts.more_gate_up)
        w_down = _joined(experts.w_down, experts.more_down)
        da_RF = products.rows_grad(ops.permute(dy_TD, *plan), w_down, ends_E)
        given = h_RH, weight_R, ends_E, experts.b_gate_up, experts.limit
        dh_RH, dweight_R = ops.swiglu_backward(da_RF, *given)
        a_RF = ops.swiglu(*given)
        dx_RD = products.rows_grad(dh_RH, w_gate_up, ends_E)
        return ops.unpermute(dx_RD, *plan, None), slot_values(dweight_R, plan.row_TK), dh_RH, a_RF

    def wgrad(
        self, dy_TD: Tensor, x_TD: Tensor, dh_RH: Tensor, a_RF: Tensor, plan: Plan,
        totals: tuple[Tensor, Tensor] | None = None, add: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ops, products = torch.ops.graphmoe, self._products(dy_TD.dtype)
        dw_gate_up = products.weight_grad(dh_RH, ops.permute(x_TD, *plan), plan.ends_E)
        dw_down = products.weight_grad(ops.permute(dy_TD, *plan), a_RF, plan.ends_E)
        store(totals or (), (dw_gate_up, dw_down), add=add)
        return dw_gate_up, dw_down


def _joined(w: Tensor, more: Tensor | None) -> Tensor:
    return w if more is None else torch.cat([w, more])


def store(
    totals: Sequence[Tensor], gradients: Sequence[Tensor], *, add: bool, ends_E: Tensor | None = None
) -> None:
    """Copy gradients to ``totals`` of another dtype, or add them.

    On a GPU with ``ends_E`` (of replicas), experts after the last one with rows are left out.
    """
    for total, gradient in zip(totals, gradients, strict=False):
        if total.is_cuda and is_installed("triton"):
            from graphmoe.ops.grouped_mlp.weight_grad_kernel import into

            into(total, gradient, add=add, ends_E=ends_E)
        elif add:
            total.add_(gradient)
        else:
            total.copy_(gradient)


def _reason_against_torch(dtype: torch.dtype, device: torch.device, sync_free: bool) -> str | None:
    waits = device.type == "cuda" and sync_free and not grouped_mm.has_grouped_kernel(dtype, device)
    return f"waits for the host in {dtype} on this device" if waits else None


_PRODUCTS = Products(*(getattr(torch.ops.graphmoe, f"grouped_mm{kind}") for kind in ("", "_dgrad", "_wgrad")))
TORCH = Stepwise(lambda dtype: _PRODUCTS, _reason_against_torch)


def row_weights(weight_TK: Tensor, slot_R: Tensor) -> Tensor:
    """Return the routing weight of each row [R]; arbitrary for rows after the last end."""
    if weight_TK.numel() == 0:
        return weight_TK.new_empty(slot_R.shape)
    return weight_TK.reshape(-1)[slot_R.long().clamp(0, weight_TK.numel() - 1)]


def slot_values(value_R: Tensor, row_TK: Tensor) -> Tensor:
    """Return the value of each slot's row [T, K]; 0 for a slot without a row."""
    if len(value_R) == 0:
        return value_R.new_zeros(row_TK.shape)
    return value_R[row_TK.clamp(min=0)].masked_fill(row_TK < 0, 0)
