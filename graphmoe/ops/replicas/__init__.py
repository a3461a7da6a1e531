"""Replica plan: which hot experts are also computed on other ranks, to equalize the ranks' rows.

A replica slot holds one expert's weights for a micro-batch; a row is one token routed to one expert.
Suffixes: R ranks, E experts, S replica slots of a rank, T tokens, K choices of a token.
"""

import torch
from torch import Tensor

from graphmoe.ops import num_warps
from graphmoe.ops.permute import routing_plan
from graphmoe.ops.replicas import reference
from graphmoe.ops.symm.peers import exchange_of
from graphmoe.plan.experts import slack_of


@torch.library.custom_op("graphmoe::replica_plan", mutates_args=())
def plan(counts_RE: Tensor, slots: int, slack: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return int32 rows kept by owners [E], and expert (-1: none) and rows of each replica slot [R, S].

    ``counts_RE``: rows that each rank routes to each expert, int32. With E / R ``slots``, no rank gets more
    than ceil(mean) + ``slack`` rows. No device sync on a GPU.
    """
    R = len(counts_RE)
    if counts_RE.device.type == "cpu":
        rows_E = counts_RE.sum(0).tolist()
        found = reference.plan(rows_E, R, slots, -(-sum(rows_E) // R) + slack)
        made = (found.home_E, found.expert_RS, found.rows_RS)
        home_E, expert_RS, rows_RS = (torch.tensor(each, dtype=torch.int32) for each in made)
        return home_E, expert_RS.view(R, slots), rows_RS.view(R, slots)
    return by_kernel(counts_RE, slots, slack)


def by_kernel(counts_RE: Tensor, slots: int, slack: int) -> tuple[Tensor, Tensor, Tensor]:
    import triton

    from graphmoe.ops.replicas.kernels import plan_kernel

    R, E = counts_RE.shape
    home_E, expert_RS = counts_RE.new_empty(E), counts_RE.new_full((R, slots), -1)
    rows_RS, padded = torch.zeros_like(expert_RS), (triton.next_power_of_2(n) for n in (R, E // R))
    block_r, block_h = padded
    plan_kernel[(1,)](
        counts_RE.contiguous(), home_E, expert_RS, rows_RS, slack,
        R=R, H=E // R, S=slots, BLOCK_R=block_r, BLOCK_H=block_h, num_warps=num_warps(128),
    )  # fmt: skip
    return home_E, expert_RS, rows_RS


@torch.library.custom_op("graphmoe::replica_places", mutates_args=())
def places(counts_RE: Tensor, home_E: Tensor, expert_RS: Tensor, rows_RS: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 [E, R]: this rank's rows per expert sent to ranks 0 to r, and number of the copy on r.

    Rank r numbers its copies from ``r * (E / R + S)``: own experts, then replicas; -1 is no copy. No device
    sync on a GPU.
    """
    rank = exchange_of(len(counts_RE)).peers.rank
    return (plain_places if counts_RE.device.type == "cpu" else places_by_kernel)(
        counts_RE, home_E, expert_RS, rows_RS, rank
    )


def plain_places(
    counts_RE: Tensor, home_E: Tensor, expert_RS: Tensor, rows_RS: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    R, E = counts_RE.shape
    found = reference.Replicas(*(each.tolist() for each in (home_E, expert_RS, rows_RS)))
    sent = [reference.split(counts_RE[:, e].tolist(), found.copies(e))[rank] for e in range(E)]
    places = [found.places(e) for e in range(E)]
    ends_ER = torch.tensor(sent, dtype=torch.int32).view(E, R).cumsum(1).int()
    return ends_ER, torch.tensor(places, dtype=torch.int32).view(E, R)


def places_by_kernel(
    counts_RE: Tensor, home_E: Tensor, expert_RS: Tensor, rows_RS: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    import triton

    from graphmoe.ops.replicas.kernels import places_kernel

    (R, E), slots = counts_RE.shape, expert_RS.shape[1]
    ends_ER, place_ER = counts_RE.new_empty(E, R), counts_RE.new_empty(E, R)
    places_kernel[(E,)](
        counts_RE.contiguous(), home_E, expert_RS, rows_RS, ends_ER, place_ER, rank,
        R=R, H=E // R, S=slots, BLOCK_R=triton.next_power_of_2(R), BLOCK_S=triton.next_power_of_2(slots),
        num_warps=num_warps(64),
    )  # fmt: skip
    return ends_ER, place_ER


def place_of_slots(expert_TK: Tensor, ranks: int, experts: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return int32 rows per expert [E], `places` copy number per choice [T, K], replicas' experts [R, S].

    A collective. No device sync on a GPU.
    """
    ops, chosen_TK = torch.ops.graphmoe, expert_TK.long()
    counts_E, ends_E, row_TK, _ = routing_plan(expert_TK, experts)
    counts_RE = ops.replica_counts(counts_E, ranks)
    found = ops.replica_plan(counts_RE, slots, slack_of(expert_TK.numel()))
    ends_ER, place_ER = ops.replica_places(counts_RE, *found)
    number_TK = row_TK - (ends_E - counts_E)[chosen_TK]
    to_TK = (ends_ER[chosen_TK] <= number_TK.unsqueeze(2)).sum(2)
    return counts_E, place_ER[chosen_TK, to_TK], found[1]


def with_replicas(w: Tensor, expert_RS: Tensor | None) -> Tensor:
    """Concatenate weights of own experts [L, ...] and of this rank's replicas -> [L + S, ...]."""
    return w if expert_RS is None else torch.cat([w, torch.ops.graphmoe.replica_weights(w, expert_RS)])


plan.register_fake(
    lambda counts_RE, slots, slack: (
        counts_RE.new_empty(counts_RE.shape[1]),
        counts_RE.new_empty(counts_RE.shape[0], slots),
        counts_RE.new_empty(counts_RE.shape[0], slots),
    )
)
places.register_fake(
    lambda counts_RE, *_: tuple(counts_RE.new_empty(counts_RE.shape[::-1]) for _ in range(2))
)
