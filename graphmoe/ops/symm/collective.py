"""The operations of `graphmoe.ops.symm` by collectives of torch.distributed, with sizes that the host knows.

The kernels must equal them. Suffixes as in the package, S rows sent, A rows that arrived (in the order of
sources, and of tokens within a source).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.ops.collectives import all_gather_into
from graphmoe.ops.dispatch import SendPlan
from graphmoe.ops.symm.peers import CollectivePeers


def dispatch(
    peers: CollectivePeers,
    h_TD: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    plan: SendPlan,
    rows: int,
    experts: int,
    etp: int,
    block: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``graphmoe::symm_dispatch``."""
    counts_P = plan.send_counts_P
    arrivals_PP = counts_P.new_empty(peers.size, peers.size)
    if peers.group is None:
        arrivals_PP.copy_(counts_P)
    else:
        all_gather_into(arrivals_PP.view(-1), counts_P.contiguous(), group=peers.group)
    there = _there(peers, arrivals_PP)
    token_S = _sent_tokens(plan, there[0])
    at_A = positions(arrivals_PP, peers.rank, block)
    first = peers.rank // etp * experts
    number_SK = _transfer(peers, expert_TK[token_S], *there) - first
    number_SK = number_SK.masked_fill((number_SK < 0) | (number_SK >= experts), -1).int()
    weight_SK, h_SD = (_transfer(peers, x[token_S], *there) for x in (weight_TK, h_TD))
    received = (
        _placed(h_SD, at_A, rows, float("nan")),
        _placed(weight_SK, at_A, rows, float("nan")),
        _placed(number_SK, at_A, rows, -1),
    )
    return *received, arrivals_PP


def combine_grad(
    peers: CollectivePeers, dy_TD: Tensor, plan: SendPlan, arrivals_PP: Tensor, rows: int, block: int
) -> Tensor:
    """As ``graphmoe::symm_combine_grad``."""
    there = _there(peers, arrivals_PP)
    dy_AD = _transfer(peers, dy_TD[_sent_tokens(plan, there[0])], *there)
    return _placed(dy_AD, positions(arrivals_PP, peers.rank, block), rows, float("nan"))


def combine(
    peers: CollectivePeers, y_ND: Tensor, ends_P: Tensor, row_TW: Tensor, arrivals_PP: Tensor, block: int
) -> Tensor:
    """As ``graphmoe::symm_combine``: the sum over each token's places of the ranks' rows."""
    sent, arrived = _there(peers, arrivals_PP)
    at_A = positions(arrivals_PP, peers.rank, block)
    fits_A = at_A < len(y_ND)
    y_AD = y_ND.new_zeros(len(at_A), y_ND.shape[1])
    y_AD[fits_A] = y_ND[at_A[fits_A]]
    y_SD = _transfer(peers, y_AD, arrived, sent)
    # Its forward reads no slots.
    return torch.ops.graphmoe.unpermute(y_SD, row_TW.flatten(), row_TW, ends_P, None)


def dispatch_grad(
    peers: CollectivePeers, dreceived_ND: Tensor, dweight_NK: Tensor, *way: Any
) -> tuple[Tensor, Tensor]:
    """As ``graphmoe::symm_dispatch_grad``."""
    return combine(peers, dreceived_ND, *way), combine(peers, dweight_NK, *way)


def positions(arrivals_PP: Tensor, rank: int, block: int) -> Tensor:
    """Position in the received tensors of each row that arrived -> int64 [A].

    The first ``block`` rows of each source lie in its block; the rest of all follow the last block.
    """
    counts_P = arrivals_PP[:, rank].long()
    rest_P = (counts_P - block).clamp(min=0)
    number_A = torch.arange(int(counts_P.sum()), device=counts_P.device)
    source_A = torch.arange(len(counts_P), device=counts_P.device).repeat_interleave(counts_P)
    row_A = number_A - (counts_P.cumsum(0) - counts_P)[source_A]
    rest_A = len(counts_P) * block + (rest_P.cumsum(0) - rest_P)[source_A] + row_A - block
    return torch.where(row_A < block, source_A * block + row_A, rest_A)


def _there(peers: CollectivePeers, arrivals_PP: Tensor) -> tuple[list[int], list[int]]:
    both = torch.stack([arrivals_PP[peers.rank], arrivals_PP[:, peers.rank]]).tolist()
    return both[0], both[1]


def _sent_tokens(plan: SendPlan, sent: list[int]) -> Tensor:
    return plan.send_slot_R[: sum(sent)].long() // plan.send_row_TW.shape[1]


def _transfer(peers: CollectivePeers, x: Tensor, sent: list[int], arrived: list[int]) -> Tensor:
    """``sent[p]`` rows of x to rank p, and ``arrived[p]`` rows from it, in the order of ranks."""
    if peers.group is None:
        return x
    received = x.new_empty(sum(arrived), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), arrived, sent, group=peers.group)
    return received


def _placed(x_AD: Tensor, at_A: Tensor, rows: int, dead: float) -> Tensor:
    x_ND = x_AD.new_full((rows, x_AD.shape[1]), dead)
    fits_A = at_A < rows
    x_ND[at_A[fits_A]] = x_AD[fits_A]
    return x_ND
