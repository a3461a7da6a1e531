"""The segments moe_dispatch and moe_combine, for experts on other ranks.

Suffixes: B batch, S sequence, T = B * S tokens, K choices, N received tokens, C those of a chunk, D hidden, L
local experts, F expert width, H = 2 * F.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphmoe.model.moe_segments import Experts, combine
from graphmoe.ops.dispatch import PLANNED, RECEIVED, Dispatcher, plan_received
from graphmoe.ops.gradients import Gradient, have_begun, report_added
from graphmoe.plan.experts import Load

ROUTED = ("routed", "load")


def has_load(dispatcher: Dispatcher | None) -> bool:
    """Return whether dispatch returns the received load."""
    return dispatcher is not None and (dispatcher.capacity or dispatcher.chunk) is not None


class DispatchSegment(nn.Module):
    def __init__(self, dispatcher: Dispatcher, num_experts: int, along: Experts | None = None) -> None:
        """``along``: experts whose weights are sent to their replicas with the tokens."""
        super().__init__()
        self.dispatcher, self.num_experts, self.along = dispatcher, num_experts, along

    @property
    def writes(self) -> tuple[str, ...]:
        return RECEIVED if self.dispatcher.capacity is None else (*PLANNED, "load")

    def forward(
        self, h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *plan: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the tensors that `writes` names. With `along`, ``plan`` ends with replica slots' experts."""
        more = {}
        if self.along is not None:
            *plan, expert_RS = plan  # type: ignore[assignment]
            more = {"along": (self.along.w_gate_up, self.along.w_down, expert_RS)}
        received = self.dispatcher.dispatch(h_TD, weight_TK, expert_TK, *plan, **more)
        capacity = self.dispatcher.capacity
        if capacity is None:
            return received
        h_ND, weight_NK, number_NK, room, *handle = received
        # capacity known: the experts' plan has static shapes
        return h_ND, weight_NK, *plan_received(number_NK, room, self.num_experts, capacity), *handle


class CombineSegment(nn.Module):
    def __init__(self, dispatcher: Dispatcher, has_shared: bool, along: Experts | None = None) -> None:
        super().__init__()
        self.dispatcher, self.has_shared, self.along = dispatcher, has_shared, along

    def forward(self, x_BSD: Tensor, routed_ND: Tensor, *tensors: Tensor) -> Tensor:
        """Return x + experts' sums. ``tensors``: plan, handle, replica slots (`along`), shared output."""
        rest, more = [*tensors], {}
        shared = [rest.pop()] if self.has_shared else []
        if self.along is not None:
            more = {"along": (self.along.w_gate_up, self.along.w_down, rest.pop())}
        return combine(x_BSD, self.dispatcher.combine(routed_ND, *rest, **more), *shared)


class BoundedPath(nn.Module):
    """Dispatch, experts and combine in chunks: memory is bounded; the backward dispatches again.

    Gradients equal those of the unchunked path bitwise if a GEMM's rows do not depend on their number; but an
    expert with more rows than a chunk is summed in fp32.
    """

    def __init__(self, dispatcher: Dispatcher, experts: Experts) -> None:
        super().__init__()
        self.dispatcher, self.experts = dispatcher, experts

    def forward(
        self, h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *plan: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return tokens' sums of expert outputs [T, D], and the received load. Syncs the device."""
        return self._path(_Steps(self.experts), h_TD, weight_TK, expert_TK, *plan)

    def fused(self, backend: str, totals: Sequence[Gradient], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Return `forward`'s results by fused experts; the backward adds weight gradients to ``totals``."""
        if not self.experts.w_down.requires_grad:
            return self.forward(*tensors)
        return self._path(_Fused(self.experts, backend, totals), *tensors)

    def _path(self, work: _Steps | _Fused, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        weights = _trained(self.experts)
        routed_TD, received_load = _Path.apply(self.dispatcher, work, len(weights), *weights, *tensors)
        return routed_TD, received_load


class _Steps:
    """Forward and backward of one ``chunk`` of `BoundedPath`: received h, routing weights, local experts."""

    totals: Sequence[Gradient] = ()
    """If empty, autograd gets the weight gradients."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts

    def forward(self, *chunk: Tensor) -> Tensor:
        return self._experts.received(*chunk)

    def backward(self, dy_CD: Tensor, *chunk: Tensor) -> tuple[Tensor, Tensor]:
        h_CD, weight_CK, number_CK = chunk
        wanted = h_CD.detach().requires_grad_(), weight_CK.detach().requires_grad_()
        dh_CD, dweight_CK = self._gradients(wanted, dy_CD, *wanted, number_CK)
        return dh_CD, dweight_CK

    def weight_gradients(self, into: Sequence[Tensor], dy_CD: Tensor, *chunk: Tensor) -> None:
        # recomputed: the path saves only its inputs
        found = self._gradients(_trained(self._experts), dy_CD, *chunk)
        for total, gradient in zip(into, found, strict=True):
            total.add_(gradient)

    def _gradients(self, wanted: Sequence[Tensor], dy_CD: Tensor, *chunk: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            y_CD = self.forward(*chunk)
        return torch.autograd.grad(y_CD, wanted, dy_CD)


class _Fused:
    def __init__(self, experts: Experts, backend: str, totals: Sequence[Gradient]) -> None:
        self._experts, self._backend, self.totals = experts, backend, totals

    def forward(self, *chunk: Tensor) -> Tensor:
        y_CD: Tensor = self._experts.received_fused(self._backend, (), *chunk)
        return y_CD

    def backward(self, dy_CD: Tensor, *chunk: Tensor) -> tuple[Tensor, Tensor]:
        (_, *plan), dh_CD, dweight_CK, _, _ = self._backward(dy_CD, *chunk)
        if self._experts.b_down is not None:
            dweight_CK = dweight_CK + self._of_down_bias(dy_CD, chunk[1], *plan)[0]
        return dh_CD, dweight_CK

    def weight_gradients(self, into: Sequence[Tensor], dy_CD: Tensor, *chunk: Tensor) -> None:
        plan, _, _, dh_RH, a_RF = self._backward(dy_CD, *chunk)
        if len(dh_RH):
            torch.ops.graphmoe.grouped_mlp_wgrad_into(
                dy_CD, chunk[0], dh_RH, a_RF, *plan, *into[:2], self._backend, True
            )
        if of_biases := into[2:]:
            of_biases[0].add_(torch.ops.graphmoe.expert_sums(dh_RH, plan[2]))
            of_biases[1].add_(self._of_down_bias(dy_CD, chunk[1], *plan[1:])[1])

    def _of_down_bias(self, dy_CD: Tensor, weight_CK: Tensor, *plan: Tensor) -> tuple[Tensor, ...]:
        of_experts = self._experts.b_down
        assert of_experts is not None
        with torch.enable_grad():
            weight_CK = weight_CK.detach().requires_grad_()
            bias_CD = self._experts.down_bias(weight_CK, *plan)
        return torch.autograd.grad(bias_CD, (weight_CK, of_experts), dy_CD)

    def _backward(self, dy_CD: Tensor, *chunk: Tensor) -> tuple[Any, ...]:
        h_CD, weight_CK, number_CK = chunk
        ends_L, row_CK, slot_R = self._experts.plan(number_CK)
        plan = slot_R, row_CK, ends_L
        weights = self._experts.w_gate_up, self._experts.w_down
        if len(slot_R) == 0:  # vendor kernels may refuse empty inputs
            nothing = h_CD.new_empty(0, weights[0].shape[1]), h_CD.new_empty(0, weights[1].shape[2])
            return plan, torch.zeros_like(h_CD), torch.zeros_like(weight_CK), *nothing
        ops, more = torch.ops.graphmoe, self._experts.activation_options
        h_RH = ops.grouped_mlp_hidden(h_CD, weights[0], *plan, self._backend)
        return plan, *ops.grouped_mlp_dgrad(dy_CD, h_RH, *weights, weight_CK, *plan, self._backend, **more)


class _Path(torch.autograd.Function):
    # dispatch is the gradient of combine and vice versa

    @staticmethod
    def forward(
        ctx: Any, dispatcher: Dispatcher, work: _Steps | _Fused, num_weights: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        weights, tensors = tensors[:num_weights], tensors[num_weights:]
        h_TD, weight_TK, expert_TK, *plan = tensors
        ctx.dispatcher, ctx.work, ctx.shapes = dispatcher, work, [weight.shape for weight in weights]
        ctx.save_for_backward(*tensors)
        h_ND, weight_NK, number_NK, *handle = dispatcher.dispatch(h_TD, weight_TK, expert_TK, *plan)
        routed_ND = torch.empty_like(h_ND)
        for rows in _chunks(number_NK, dispatcher):
            routed_ND[rows] = work.forward(h_ND[rows], weight_NK[rows], number_NK[rows])
        received_load = torch.stack(
            [_slots_of(number_NK).new_tensor(len(h_ND)), _slots_of(number_NK).sum()]
        ).int()
        ctx.mark_non_differentiable(received_load)
        return dispatcher.combine(routed_ND, *plan, *handle), received_load

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        h_TD, weight_TK, expert_TK, *plan = ctx.saved_tensors
        dispatcher, work = ctx.dispatcher, ctx.work
        # both dispatches use the same plan, so their rows match
        dy_ND, *_ = dispatcher.dispatch(dy_TD.contiguous(), weight_TK, expert_TK, *plan)
        h_ND, weight_NK, number_NK, *handle = dispatcher.dispatch(h_TD, weight_TK, expert_TK, *plan)
        dweights = _weight_gradients(ctx, dy_ND, h_ND, weight_NK, number_NK)
        dh_ND, dweight_NK = torch.empty_like(h_ND), torch.empty_like(weight_NK)
        for rows in _chunks(number_NK, dispatcher):
            chunk = h_ND[rows], weight_NK[rows], number_NK[rows]
            dh_ND[rows], dweight_NK[rows] = work.backward(dy_ND[rows], *chunk)
        dh_TD = dispatcher.combine(dh_ND, *plan, *handle)
        dweight_TK = dispatcher.combine(dweight_NK, *plan, *handle)
        return None, None, None, *dweights, dh_TD, dweight_TK, *[None] * (1 + len(plan))


def _weight_gradients(ctx: Any, dy_ND: Tensor, *received: Tensor) -> tuple[Tensor | None, ...]:
    *_, number_NK = received
    if not ctx.shapes:
        return ()
    totals = ctx.work.totals
    in_place = bool(totals) and totals[0].key is None  # else chunks are added up in fp32
    if in_place:
        # nothing was added in this step yet
        if not have_begun(totals):
            for gradient in totals:
                gradient.total.zero_()
        into = [gradient.total for gradient in totals]
    else:
        into = [dy_ND.new_zeros(shape, dtype=torch.float32) for shape in ctx.shapes]
    for rows, numbers in _by_expert(number_NK, ctx.shapes[0][0], ctx.dispatcher):
        ctx.work.weight_gradients(into, dy_ND[rows], *(x[rows] for x in received[:2]), numbers)
    if in_place:
        report_added(totals)
    else:
        for gradient, value in zip(totals, into, strict=False):
            gradient.add(value)
    if totals:
        return (None,) * len(into)
    return tuple(gradient.to(dy_ND.dtype) for gradient in into)


def _trained(experts: Experts) -> list[Tensor]:
    return [weight for weight in experts.parameters() if weight.requires_grad]


def _chunks(number_NK: Tensor, dispatcher: Dispatcher) -> Iterator[slice]:
    # syncs the device
    room = dispatcher.chunk
    assert room is not None
    before_N = _slots_of(number_NK).cumsum(0).cpu()
    start, slots = 0, 0
    while start < len(before_N):
        end = int(torch.searchsorted(before_N, slots + room.slots, right=True))
        end = min(max(end, start + 1), start + room.rows)
        yield slice(start, end)
        start, slots = end, int(before_N[end - 1])


def _by_expert(number_NK: Tensor, num_experts: int, dispatcher: Dispatcher) -> Iterator[tuple[slice, Tensor]]:
    # syncs the device
    room = dispatcher.chunk
    assert room is not None
    live_S = number_NK[number_NK >= 0]
    counts = torch.bincount(live_S, minlength=num_experts).tolist()
    # one expert at a time: each weight gradient is one GEMM, as in the unchunked path
    for first, end in _groups(counts, room):
        numbers_NK = number_NK.masked_fill((number_NK < first) | (number_NK >= end), -1)
        if sum(counts[first:end]) <= room.slots:
            yield slice(None), numbers_NK
        else:
            for rows in _chunks(numbers_NK, dispatcher):
                if bool((numbers_NK[rows] >= 0).any()):
                    yield rows, numbers_NK[rows]


def _groups(counts: Sequence[int], room: Load) -> Iterator[tuple[int, int]]:
    first, slots = 0, 0
    for expert, count in enumerate(counts):
        if slots and slots + count > room.slots:
            yield first, expert
            first, slots = expert, 0
        slots += count
    if slots:
        yield first, len(counts)


def _slots_of(number_NK: Tensor) -> Tensor:
    return (number_NK >= 0).sum(dim=1)
