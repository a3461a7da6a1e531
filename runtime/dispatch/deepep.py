"""Dispatchers ``deepep`` and ``turbo``: a ``Buffer`` of DeepEP, or of its ROCm port.

The port, ``primus_turbo.pytorch.deep_ep``, has DeepEP's calls and row order; written against its commit
a6a16cdc, not run with the package yet.

Suffixes: T tokens, K slots, P ranks of ``ep``, C channels, N = P * T received rows at most, D hidden.

Rows are in the order of ``alltoall``. Sums are fp32, over ranks in order, rounded once. No host sync.

The package's kernels run on its own stream. Calls without ``async_finish`` order that stream with the current
one: with overlap the transfer stream of `runtime.overlap`, so products run beside them. An asynchronous call
returns an event, which operations of a compiled unit cannot hand on.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.ops.dispatch import register_exchange
from graphmoe.plan.experts import Load

# DeepEP's default of 20 SMs: one of each pair sends, the other receives
CHANNELS = 10
HANDLE = ("rank_prefix", "channel_prefix", "received_prefix", "source", "in_rank", "send_head")
"""Tensors that dispatch returns for combine, in the order of DeepEP's handle."""

# `get_dispatch_config` and `get_nvl_buffer_size_hint` of DeepEP 1.2.1: a channel holds so many tokens for a
# rank of the node, each with room for 128 slots and scales
HELD_TOKENS, RANKS_OF_NODE, EXTRA_BYTES = 256, 8, 128 * (8 + 4 + 4)

_in_use: Any = None


def buffer_bytes(hidden: int, ranks: int) -> int:
    """Return the bytes of the package's buffer of bf16 rows, within a percent."""
    return CHANNELS * min(ranks, RANKS_OF_NODE) * HELD_TOKENS * (2 * hidden + EXTRA_BYTES)


def use_buffer(buffer: Any) -> None:
    """Set the buffer of this process's operations; None unsets it."""
    global _in_use
    _in_use = buffer


def open_buffer(package: ModuleType, group: dist.ProcessGroup, hidden: int) -> Any:
    """Allocate a package's buffer of bf16 rows for all layers. Collective over the group."""
    package.Buffer.set_num_sms(2 * CHANNELS)
    makers = package.Buffer.get_dispatch_config, package.Buffer.get_combine_config
    size = max(of(group.size()).get_nvl_buffer_size_hint(2 * hidden, group.size()) for of in makers)
    return package.Buffer(group, num_nvl_bytes=size, explicitly_destroy=True)


def close_buffer() -> None:
    """Free the buffer in use, if any, after a successful run. Collective over its group."""
    if _in_use is not None:
        _in_use.destroy()
    use_buffer(None)


@dataclass(frozen=True)
class DeepEP:
    """Sends each token once to each rank of its experts, and sums the returned rows."""

    handle: ClassVar[tuple[str, ...]] = HANDLE
    chunk: ClassVar[None] = None

    # All tokens of all ranks: a receiver checks no limit, it would write past the end of fewer rows
    # (csrc/kernels/intranode.cu of 1.2.1; ``num_worst_tokens`` only says how many are allocated).
    capacity: Load
    num_experts: int  # of each rank

    def dispatch(
        self, h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *plan: Tensor
    ) -> tuple[Tensor, ...]:
        rows = self.capacity.rows
        return torch.ops.graphmoe.buffer_dispatch(h_TD, weight_TK, expert_TK, rows, self.num_experts)

    def combine(self, sum_ND: Tensor, *plan_and_handle: Tensor) -> Tensor:
        return torch.ops.graphmoe.buffer_combine(sum_ND, *plan_and_handle[-len(HANDLE) :])


def _buffer(ranks: int) -> Any:
    if _in_use is None:
        raise RuntimeError("no buffer for rows to other ranks: call use_buffer(open_buffer(...))")
    assert _in_use.group_size == ranks, (_in_use.group_size, ranks)
    return _in_use


@torch.library.custom_op("graphmoe::buffer_dispatch", mutates_args=())
def _dispatch(
    h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, rows: int, experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    # tokens, weights, expert numbers, number of received rows, then the handle
    ranks, left = divmod(rows, len(h_TD))
    assert not left, f"{rows} rows are not a multiple of {len(h_TD)} tokens"
    buffer, chosen_TK = _buffer(ranks), expert_TK.long()
    to_rank_P, _, to_expert_E, in_rank_TP, _ = buffer.get_dispatch_layout(chosen_TK, ranks * experts)
    # Primus-Turbo may return another tensor before the handle
    received_ND, number_NK, weight_NK, *_, handle, _ = buffer.dispatch(
        h_TD.contiguous(),
        num_tokens_per_rank=to_rank_P,
        is_token_in_rank=in_rank_TP,
        num_tokens_per_expert=to_expert_E,
        topk_idx=chosen_TK,
        topk_weights=weight_TK.contiguous(),
        num_worst_tokens=rows,
    )
    # prefix sums over sources: only this rank's column is written
    room = handle[0][-1, buffer.rank].clone()
    return received_ND, weight_NK, number_NK.int(), room, *handle


_HANDLE = ", ".join(f"Tensor {name}" for name in HANDLE)


@torch.library.custom_op(
    "graphmoe::buffer_dispatch_grad",
    mutates_args=(),
    schema=f"(Tensor dreceived, Tensor dweight, Tensor number, {_HANDLE}) -> (Tensor, Tensor)",
)
def _dispatch_grad(
    dreceived_ND: Tensor, dweight_NK: Tensor, number_NK: Tensor, *handle: Tensor
) -> tuple[Tensor, Tensor]:
    # the weight of another rank's expert was unused
    return _sum(dreceived_ND, handle, dweight_NK.masked_fill(number_NK < 0, 0))


@torch.library.custom_op(
    "graphmoe::buffer_combine", mutates_args=(), schema=f"(Tensor rows, {_HANDLE}) -> Tensor"
)
def _combine(sum_ND: Tensor, *handle: Tensor) -> Tensor:
    return _sum(sum_ND, handle, None)[0]


@torch.library.custom_op(
    "graphmoe::buffer_combine_grad", mutates_args=(), schema=f"(Tensor dy, {_HANDLE}) -> Tensor"
)
def _combine_grad(dy_TD: Tensor, *handle: Tensor) -> Tensor:
    # -> [N, D]; dead rows are not written
    return _buffer(len(handle[0])).dispatch(dy_TD.contiguous(), handle=handle)[0]


def _sum(rows_ND: Tensor, handle: tuple[Tensor, ...], weight_NK: Tensor | None) -> tuple[Any, Any]:
    *before, send_head_TP = handle
    buffer = _buffer(send_head_TP.shape[1])
    handle = (*before, send_head_TP.clone())  # combine writes into the heads
    found = buffer.combine(rows_ND.contiguous(), handle, topk_weights=weight_NK)
    return found[0], found[1]


@_dispatch.register_fake
def _(h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, rows: int, experts: int) -> tuple[Tensor, ...]:
    tokens, slots = expert_TK.shape
    ranks = rows // tokens

    def ints(*shape: int) -> Tensor:
        return h_TD.new_empty(shape, dtype=torch.int32)

    return (
        h_TD.new_empty(rows, h_TD.shape[1]),
        weight_TK.new_empty(rows, slots),
        ints(rows, slots),
        ints(),
        ints(ranks, ranks),
        ints(ranks, CHANNELS),
        ints(ranks, CHANNELS),
        ints(rows),
        h_TD.new_empty(tokens, ranks, dtype=torch.bool),
        ints(tokens, ranks),
    )


@_combine_grad.register_fake
def _(dy_TD: Tensor, *handle: Tensor) -> Tensor:
    return dy_TD.new_empty(len(handle[HANDLE.index("source")]), dy_TD.shape[1])


register_exchange(
    _dispatch,
    _dispatch_grad,
    _combine,
    _combine_grad,
    way_back=lambda inputs, output: (output[2], *output[4:]),
    way_there=lambda inputs: inputs[1:],
    token_tensor=lambda way: way[-1],
)
