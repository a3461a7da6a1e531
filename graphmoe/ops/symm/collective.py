"""Reference of `graphmoe.ops.symm` by torch.distributed, with sizes known to the host.

Suffixes as in the package; S rows sent, A rows that arrived (by source, then token).
"""

import torch
from torch import Tensor

from graphmoe.ops.collectives import transfer
from graphmoe.ops.dispatch import SendPlan
from graphmoe.ops.replicas import reference as replicas
from graphmoe.ops.replicas.exchange import Prefetch
from graphmoe.ops.symm.peers import CollectivePeers, exchange_of


def bring(
    peers: CollectivePeers, x_TD: Tensor, plan: SendPlan, of_slots: tuple[Tensor, Tensor] | None,
    arrivals_PP: Tensor | None, rows: int, block: int, experts: int = 1, etp: int = 1,
    into_ND: Tensor | None = None, along: Prefetch | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Dispatch rows: return received_ND; with ``of_slots`` also weight_NK, number_NK, arrivals_PP."""
    exchange_of(peers.size).add_deferred()
    if along:
        exchange_of(peers.size).keep(along, replicas.pull(peers, along.weights, along.expert_RS))
    if arrivals_PP is None:
        arrivals_PP = replicas.gather_counts(peers, plan.send_counts_P)
    sent, arrived = _there(peers, arrivals_PP)
    token_S = plan.send_slot_R[: sum(sent)].long() // plan.send_row_TW.shape[1]
    at_A = positions(arrivals_PP, peers.rank, block)
    fits_A = at_A < rows

    def received(x: Tensor, dead: float, into: Tensor | None = None) -> Tensor:
        x_AD = transfer(x[token_S], sent, arrived, peers.group)
        x_ND = (x.new_empty(rows, x.shape[1]) if into is None else into).fill_(dead)
        x_ND[at_A[fits_A]] = x_AD[fits_A]
        return x_ND

    # -1 sets all bits, which is NaN in fp8 too
    x_ND = received(x_TD, float("nan") if x_TD.is_floating_point() else -1, into_ND)
    if of_slots is None:
        return (x_ND,)
    weight_TK, expert_TK = of_slots
    number_NK = received(expert_TK, -1) - peers.rank // etp * experts
    number_NK = number_NK.masked_fill((number_NK < 0) | (number_NK >= experts), -1).int()
    return x_ND, received(weight_TK, float("nan")), number_NK, arrivals_PP


def sums(
    peers: CollectivePeers, y_ND: Tensor, dweight_NK: Tensor | None, ends_P: Tensor, row_TW: Tensor,
    arrivals_PP: Tensor, block: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    exchange_of(peers.size).add_deferred()
    sent, arrived = _there(peers, arrivals_PP)
    at_A = positions(arrivals_PP, peers.rank, block)
    fits_A = at_A < len(y_ND)

    def summed(y_ND: Tensor) -> Tensor:
        y_AD = y_ND.new_zeros(len(at_A), y_ND.shape[1])
        y_AD[fits_A] = y_ND[at_A[fits_A]]
        y_SD = transfer(y_AD, arrived, sent, peers.group)
        # the forward of unpermute reads no slots
        return torch.ops.graphmoe.unpermute(y_SD, row_TW.flatten(), row_TW, ends_P, None)

    return summed(y_ND), None if dweight_NK is None else summed(dweight_NK)


def positions(arrivals_PP: Tensor, rank: int, block: int) -> Tensor:
    """Return the index in the receive buffer of each row that arrived -> int64 [A]."""
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
