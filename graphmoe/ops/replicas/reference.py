"""Reference of replicas: the plan in Python integers, the traffic by torch.distributed collectives."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphmoe.ops.collectives import all_gather_into, transfer
from graphmoe.ops.symm.peers import CollectivePeers


@dataclass
class Replicas:
    """Plan of expert replicas. Suffixes: E experts, R ranks, S replica slots of a rank."""

    home_E: list[int]
    """Rows that each expert's owner keeps."""
    expert_RS: list[list[int]]
    """Expert in each replica slot; -1 for none."""
    rows_RS: list[list[int]]

    def copies(self, expert: int) -> list[int]:
        """Return the rows of an expert that each rank computes."""
        found = [
            sum(rows for other, rows in zip(*both, strict=True) if other == expert)
            for both in zip(self.expert_RS, self.rows_RS, strict=True)
        ]
        found[expert * len(found) // len(self.home_E)] += self.home_E[expert]
        return found

    def places(self, expert: int) -> list[int]:
        """Return the number of an expert's copy on each rank, as in `ops.replicas.places`; -1 for none."""
        ranks, slots = len(self.expert_RS), len(self.expert_RS[0])
        owned = len(self.home_E) // ranks
        found = [
            rank * (owned + slots) + owned + experts.index(expert) if expert in experts else -1
            for rank, experts in enumerate(self.expert_RS)
        ]
        owner = expert // owned
        found[owner] = owner * (owned + slots) + expert % owned
        return found


def plan(rows_E: Sequence[int], ranks: int, slots: int, most: int) -> Replicas:
    """Return replicas so that no rank has more than ``most`` rows, which is at least the mean.

    Greedy: the fullest rank's largest expert goes to the emptiest rank with a free slot; ties: lower index.
    With fewer slots than experts per rank, ranks may stay above ``most``.
    """
    owned = len(rows_E) // ranks
    home, load = list(rows_E), [sum(rows_E[r * owned : (r + 1) * owned]) for r in range(ranks)]
    expert_RS, rows_RS = [[-1] * slots for _ in range(ranks)], [[0] * slots for _ in range(ranks)]
    used = [0] * ranks
    while True:
        source = max(range(ranks), key=lambda r: (load[r], -r))
        open_to = [r for r in range(ranks) if used[r] < slots and load[r] < most]
        if load[source] <= most or not open_to:
            return Replicas(home, expert_RS, rows_RS)
        target = min(open_to, key=lambda r: (load[r], r))
        expert = max(range(source * owned, (source + 1) * owned), key=lambda e: (home[e], -e))
        lacks, left = most - load[target], slots - used[target] - 1
        moved = min(lacks, load[source] - most, home[expert])
        # With as many slots as experts per rank (H), no rank ends above ``most``: such a rank owns an expert
        # with more than ``most`` / H rows, so ceil(D * H / most) <= H pieces fill a deficit D. A piece is all
        # rows of that expert or the whole deficit. It may leave its source with a deficit and free slots.
        # Each piece fills a rank for good or moves an expert's last rows: at most R + E pieces.
        if (lacks - moved) * owned > left * most:
            moved = min(lacks, home[expert])
        home[expert] -= moved
        expert_RS[target][used[target]], rows_RS[target][used[target]] = expert, moved
        load[source] -= moved
        load[target] += moved
        used[target] += 1


def split(counts_R: Sequence[int], copies_R: Sequence[int]) -> list[list[int]]:
    """Return the rows of an expert sent from each rank (first index) to each rank's copy.

    A rank's rows use its own copy first; the rest fill the remaining copies in rank order.
    """
    ranks = range(len(counts_R))
    sent = [[min(counts_R[r], copies_R[r]) if r == d else 0 for d in ranks] for r in ranks]
    rest, room = ([of[r] - sent[r][r] for r in ranks] for of in (counts_R, copies_R))
    before = 0
    for r in ranks:
        start = 0
        for d in ranks:
            sent[r][d] += max(min(before + rest[r], start + room[d]) - max(before, start), 0)
            start += room[d]
        before += rest[r]
    return sent


def gather_counts(peers: CollectivePeers, counts_E: Tensor) -> Tensor:
    counts_RE = counts_E.new_empty(peers.size, len(counts_E))
    if peers.group is None:
        return counts_RE.copy_(counts_E)
    all_gather_into(counts_RE.view(-1), counts_E.contiguous(), group=peers.group)
    return counts_RE


def pull(peers: CollectivePeers, weights: Sequence[Tensor], expert_RS: Tensor) -> list[Tensor]:
    # empty slots are 0
    held, owned = expert_RS.tolist(), len(weights[0])
    sent = [[e - peers.rank * owned for e in row if _owner(e, owned) == peers.rank] for row in held]
    slots = [[s for s, e in enumerate(held[peers.rank]) if _owner(e, owned) == r] for r in range(peers.size)]
    pulled = []
    for w_LX in weights:
        w_SX = w_LX.new_zeros(len(held[0]), *w_LX.shape[1:])
        bytes_LX = w_LX.contiguous().view(torch.uint8)
        w_SX.view(torch.uint8)[_flat(slots)] = _transfer(peers, bytes_LX, sent, slots)
        pulled.append(w_SX)
    return pulled


def gradient_room(
    peers: CollectivePeers, shapes: Sequence[tuple[int, ...]], like: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    return [like.new_empty(shape, dtype=dtype) for shape in shapes]


def home(peers: CollectivePeers, expert_RS: Tensor, made: Sequence[Tensor], totals: Sequence[Tensor]) -> None:
    held, owned = expert_RS.tolist(), len(totals[0])
    sent = [[s for s, e in enumerate(held[peers.rank]) if _owner(e, owned) == r] for r in range(peers.size)]
    experts = [[e - peers.rank * owned for e in row if _owner(e, owned) == peers.rank] for row in held]
    for made_SX, total_LX in zip(made, totals, strict=True):
        wide = torch.promote_types(total_LX.dtype, torch.float32)
        sums_LX = total_LX.to(wide)
        for e, gradient in zip(_flat(experts), _transfer(peers, made_SX, sent, experts), strict=True):
            sums_LX[e] += gradient
        total_LX.copy_(sums_LX)


add_made = home  # the collectives order the ranks, so no barrier is left out


def _owner(expert: int, owned: int) -> int:
    return expert // owned  # -1 for an empty slot, too


def _flat(lists: list[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


def _transfer(peers: CollectivePeers, x: Tensor, sent: list[list[int]], arrived: list[list[int]]) -> Tensor:
    return transfer(x[_flat(sent)], [*map(len, sent)], [*map(len, arrived)], peers.group)
