"""The plain form of the plan of replicas, in whole numbers of Python.

The bound: with as many slots as experts a rank owns, no rank has more than ``most`` rows, which is at least
the mean. A rank with more owns an expert with more than ``most`` / H of its rows, for it owns H. So whoever
lacks D rows can be filled with at most ``ceil(D * H / most)`` pieces, each all rows of such an expert or the
last ones that it lacks: no more than H, as D is at most ``most``. A piece may be more than its rank has too
much, which then lacks rows itself, and has all of its slots. Each piece fills a rank, which stays full, or
takes an expert's last rows from its owner: at most R + E pieces in all.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Replicas:
    """A plan: where the rows of experts are computed. Suffixes: E experts, R ranks, S slots."""

    home_E: list[int]
    """Rows of each expert that stay on its owner."""
    expert_RS: list[list[int]]
    """Experts in the slots of each rank; -1 for none."""
    rows_RS: list[list[int]]
    """Rows of them there."""

    def loads(self) -> list[int]:
        """Return the rows of each rank."""
        owned = len(self.home_E) // len(self.rows_RS)
        return [
            sum(self.home_E[rank * owned : (rank + 1) * owned]) + sum(rows)
            for rank, rows in enumerate(self.rows_RS)
        ]

    def copies(self, expert: int) -> list[int]:
        """Return the rows of an expert on each rank."""
        found = [
            sum(rows for other, rows in zip(*both, strict=True) if other == expert)
            for both in zip(self.expert_RS, self.rows_RS, strict=True)
        ]
        found[expert * len(found) // len(self.home_E)] += self.home_E[expert]
        return found

    def places(self, expert: int) -> list[int]:
        """Return the place of an expert on each rank; -1 for none."""
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
    """Place the rows of experts so that no rank has more than ``most``, at least the mean of all.

    Each step moves rows of the largest expert of the fullest rank to the emptiest with a slot: no more than
    the one has too much and the other lacks, unless slots would run out so. With fewer slots than experts of
    a rank some may keep more. Equal ranks and experts go by their number.
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
        if (lacks - moved) * owned > left * most:
            moved = min(lacks, home[expert])
        home[expert] -= moved
        expert_RS[target][used[target]], rows_RS[target][used[target]] = expert, moved
        load[source] -= moved
        load[target] += moved
        used[target] += 1


def split(counts_R: Sequence[int], copies_R: Sequence[int]) -> list[list[int]]:
    """Rows of an expert from each rank (first index) to each rank's copy.

    Rows stay where they are as far as the copy there takes them; the others go, in the order of ranks, to
    what is left of the copies, in that order.
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
