"""Dispatcher symm: dispatch and combine with sizes unknown to the host.

A row is one token as sent to one rank. Suffixes: T tokens, K choices of a token, P ranks of ``ep_etp``, W
possible rows of a token (`ops.dispatch`), R = T * W, N rows of the receive buffer (fixed), D hidden.

Collectives of the peers set by ``use_peers``: kernels (`exchange`: no device sync, capturable) or
torch.distributed (`collective`: CPUs, fp64, the reference).

Rank s sends ``arrivals_PP[s, p]`` rows to rank p. In its receive buffer, row j from s has the index

    s * block + j                                                     if j < block,
    P * block + sum over q < s of max(0, arrivals[q, p] - block) + j - block      otherwise.

Rows with an index of N or more are dropped; they count as 0 in combine. Unused ("dead") rows of the buffer
are undefined, except for -1 in ``number_NK``. The first ``block`` rows of a source are its *block*.

Rows sent in fp8 are bitwise as if quantized on arrival. Autograd needs received tensors in the model's dtype,
so they are in a tensor of that dtype, the **carrier**: N * D bytes of values, then 4 * N of row scales. Never
add or cast it.
"""

from typing import Any

import torch
from torch import Tensor

import graphmoe.ops.permute  # noqa: F401  # registers unpermute
from graphmoe.ops.dispatch import SendPlan, register_exchange
from graphmoe.ops.fp8 import fp8_dtype
from graphmoe.ops.replicas.exchange import Prefetch, use_peers
from graphmoe.ops.symm import collective
from graphmoe.ops.symm.peers import CollectivePeers, Peers, Sizes, exchange_of, forget_graphs, reserve

__all__ = ["CollectivePeers", "Sizes", "forget_graphs", "reserve", "use_peers"]


@torch.library.custom_op("graphmoe::symm_dispatch", mutates_args=())
def _dispatch(
    h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, send_counts_P: Tensor, send_ends_P: Tensor,
    send_row_TW: Tensor, send_slot_R: Tensor,
    rows: int, experts: int, etp: int, block: int,
    w_gate_up: Tensor | None = None, w_down: Tensor | None = None, expert_RS: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return received_ND, weight_NK, number_NK int32 (local expert, else -1), arrivals_PP int32.

    ``etp`` ranks hold parts of the same experts. With expert weights, it also fetches those of replicas.
    """
    assert block * len(send_counts_P) <= rows, (block, rows)
    run, peers = _peers(len(send_counts_P))
    plan = SendPlan(send_counts_P, send_ends_P, send_row_TW, send_slot_R)
    along = Prefetch.of(w_gate_up, w_down, expert_RS)
    return run.bring(peers, h_TD, plan, (weight_TK, expert_TK), None, rows, block, experts, etp, along=along)


@torch.library.custom_op("graphmoe::symm_dispatch_grad", mutates_args=())
def _dispatch_grad(
    dreceived_ND: Tensor, dweight_NK: Tensor, send_ends_P: Tensor, send_row_TW: Tensor, arrivals_PP: Tensor,
    block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dh_TD, dweight_TK: each sums a token's rows from all ranks, in order, in fp32, rounded once."""
    run, peers = _peers(len(arrivals_PP))
    return run.sums(peers, dreceived_ND, dweight_NK, send_ends_P, send_row_TW, arrivals_PP, block)


@torch.library.custom_op("graphmoe::symm_combine", mutates_args=())
def _combine(
    sum_ND: Tensor, send_counts_P: Tensor, send_ends_P: Tensor, send_row_TW: Tensor, send_slot_R: Tensor,
    arrivals_PP: Tensor,
    block: int,
    w_gate_up: Tensor | None = None, w_down: Tensor | None = None, expert_RS: Tensor | None = None,
) -> Tensor:  # fmt: skip
    run, peers = _peers(len(arrivals_PP))
    return run.sums(peers, sum_ND, None, send_ends_P, send_row_TW, arrivals_PP, block)[0]


@torch.library.custom_op("graphmoe::symm_combine_grad", mutates_args=())
def _combine_grad(
    dy_TD: Tensor, send_counts_P: Tensor, send_ends_P: Tensor, send_row_TW: Tensor, send_slot_R: Tensor,
    arrivals_PP: Tensor, w_gate_up: Tensor | None, w_down: Tensor | None, expert_RS: Tensor | None,
    rows: int, block: int,
) -> Tensor:  # fmt: skip
    run, peers = _peers(len(arrivals_PP))
    plan = SendPlan(send_counts_P, send_ends_P, send_row_TW, send_slot_R)
    along = Prefetch.of(w_gate_up, w_down, expert_RS)
    return run.bring(peers, dy_TD, plan, None, arrivals_PP, rows, block, along=along)[0]


@torch.library.custom_op("graphmoe::symm_bring_fp8", mutates_args=())
def _bring_fp8(
    q_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, send_counts_P: Tensor, send_ends_P: Tensor,
    send_row_TW: Tensor, send_slot_R: Tensor,
    rows: int, experts: int, etp: int, block: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Dispatch fp8 rows; return carrier, weight_NK, number_NK, arrivals_PP. Last weight column: scales."""
    run, peers = _peers(len(send_counts_P))
    plan = SendPlan(send_counts_P, send_ends_P, send_row_TW, send_slot_R)
    carrier_ND = q_TD.new_empty(rows, q_TD.shape[1], dtype=dtype)
    q_ND, scale_N1 = parts(carrier_ND)
    sizes = rows, block, experts, etp
    _, weight_NK, *rest = run.bring(
        peers, words(q_TD), plan, (weight_TK, expert_TK), None, *sizes, into_ND=words(q_ND)
    )
    scale_N1.copy_(weight_NK[:, -1:])
    return carrier_ND, weight_NK, *rest


def _peers(size: int) -> tuple[Any, Peers]:
    peers = exchange_of(size).peers
    if isinstance(peers, CollectivePeers):
        return collective, peers
    from graphmoe.ops.symm import exchange

    return exchange, peers


def _received(x_TD: Tensor, weight_TK: Tensor, counts_P: Tensor, rows: int, dtype: torch.dtype) -> Any:
    x_ND, weight_NK = (x.new_empty(rows, x.shape[1]) for x in (x_TD, weight_TK))
    arrivals_PP = counts_P.new_empty(counts_P.shape[0], counts_P.shape[0])
    return x_ND.to(dtype), weight_NK, weight_NK.to(torch.int32), arrivals_PP


_dispatch.register_fake(lambda h, weight, _, counts, *rest: _received(h, weight, counts, rest[3], h.dtype))
_bring_fp8.register_fake(lambda q, weight, _, counts, *rest: _received(q, weight, counts, rest[3], rest[-1]))


@_combine_grad.register_fake
def _(dy_TD: Tensor, *rest: Any) -> Tensor:
    return dy_TD.new_empty(rest[-2], dy_TD.shape[1])


register_exchange(
    _dispatch,
    _dispatch_grad,
    _combine,
    _combine_grad,
    way_back=lambda inputs, output: (inputs[4], inputs[5], output[-1], inputs[10]),
    way_there=lambda inputs: (*inputs[1:6], *inputs[7:], inputs[0].shape[0], inputs[6]),
    token_tensor=lambda way: way[1] if len(way) == 4 else way[2],
)


NO_EXPERT = -1


def parts(carrier_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a contiguous carrier: values [N, D], scales fp32 [N, 1]. D is a multiple of 16."""
    rows, columns = carrier_ND.shape
    assert columns % 16 == 0, columns
    flat = carrier_ND.view(-1)
    q_ND = flat.view(torch.uint8)[: rows * columns].view(fp8_dtype()).view(rows, columns)
    scales = flat.view(torch.float32)[rows * columns // 4 :]
    return q_ND, scales[:rows].view(rows, 1)


def words(q: Tensor) -> Tensor:
    # int32, so that copy kernels need no fp8 type
    return q.contiguous().view(torch.int32)


@torch.library.custom_op("graphmoe::fp8_arrived", mutates_args=())
def arrived(carrier_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of a carrier's q [N, D] and scales fp32 [N, 1] to save: half as large as the carrier."""
    q_ND, scale_N1 = parts(carrier_ND.contiguous())
    return q_ND.clone(), scale_N1.clone()


@arrived.register_fake
def _(carrier_ND: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = carrier_ND.shape
    q_ND = carrier_ND.new_empty(rows, columns, dtype=fp8_dtype())
    return q_ND, carrier_ND.new_empty(rows, 1, dtype=torch.float32)


def dispatch_stored(h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *way: Any) -> tuple[Tensor, ...]:
    *plan, rows, experts, etp, block = way[:8]
    q_TD, scale_T1 = torch.ops.graphmoe.fp8_rows(h_TD)
    weights = torch.cat([weight_TK, scale_T1], dim=1)
    numbers = torch.nn.functional.pad(expert_TK, (0, 1), value=NO_EXPERT)
    carrier_ND, weight_NK, number_NK, arrivals_PP = torch.ops.graphmoe.symm_bring_fp8(
        q_TD, weights, numbers, *plan, rows, experts, etp, block, h_TD.dtype
    )
    return carrier_ND, weight_NK[:, :-1].contiguous(), number_NK[:, :-1].contiguous(), arrivals_PP


def combine_grad_stored(dy_TD: Tensor, *way: Any) -> Tensor:
    *plan, rows, block = (*way[:4], *way[-2:])
    q_TD, scale_T1 = torch.ops.graphmoe.fp8_rows(dy_TD)
    numbers = torch.full_like(scale_T1, NO_EXPERT, dtype=torch.int32)
    sizes = rows, 1, 1, block
    return torch.ops.graphmoe.symm_bring_fp8(q_TD, scale_T1, numbers, *plan, *sizes, dy_TD.dtype)[0]
