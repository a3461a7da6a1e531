"""The plan of replicas: its bound, its place beside the best plan of small sizes, kernels against it."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from graphmoe.ops import replicas
from graphmoe.ops.replicas import reference
from tests.ops.ahead_of_time import launches_of
from tests.ops.interpreted import KERNELS, device_of

SIZES = [(2, 1), (2, 4), (3, 2), (4, 8), (8, 8), (16, 4)]
"""R and E / R."""


def loads(ranks: int, owned: int, seed: int = 0) -> dict[str, Tensor]:
    """Rows of experts: also hot ones, a hot rank, one with all, a rank without any, and barely too many."""
    g, E = torch.Generator().manual_seed(seed), ranks * owned
    made = {"even": torch.randint(0, 1000, (E,), generator=g)}
    made["hot"] = (100 * torch.rand(E, generator=g).clamp(min=1e-3) ** -1.5).long()
    made |= {"rank": made["even"].clone(), "one": made["even"] * 0, "none": made["even"].clone()}
    made |= {"barely": torch.full((E,), 100), "zero": made["even"] * 0}
    made["rank"][:owned] *= 10
    made["one"][torch.randint(0, E, (1,), generator=g)] = 12345
    made["barely"][::owned] += 1
    made["none"][-owned:] = made["barely"][-owned:] = 0
    return made | {"few": torch.randint(0, 2, (E,), generator=g)}


def counts_of(rows_E: Tensor, ranks: int, seed: int = 0) -> Tensor:
    """Counts [R, E] with those sums, spread at random."""
    g = torch.Generator().manual_seed(seed)
    share = torch.rand(ranks, len(rows_E), generator=g).softmax(0)
    counts = (share * rows_E).floor().long()
    counts[seed % ranks] += rows_E - counts.sum(0)
    return counts.int()


@pytest.mark.parametrize(("ranks", "owned"), SIZES)
@pytest.mark.parametrize("name", loads(2, 1))
def test_no_rank_has_more_than_its_share_with_as_many_slots_as_experts_of_a_rank(ranks, owned, name):
    for seed, slack in itertools.product(range(10), (0, 7)):
        rows = loads(ranks, owned, seed)[name].tolist()
        most = -(-sum(rows) // ranks) + slack
        found = reference.plan(rows, ranks, owned, most)
        copies = [found.copies(e) for e in range(len(rows))]
        assert max(map(sum, zip(*copies, strict=True))) <= most and [*map(sum, copies)] == rows
        for rank, experts in enumerate(found.expert_RS):
            held = [e for e in experts if e >= 0]
            assert len({*held}) == len(held)  # one copy on a rank, and none beside the owner's
            assert all(e // owned != rank for e in held)
        pieces = sum(rows > 0 for row in found.rows_RS for rows in row)
        assert pieces <= ranks + len(rows)


def test_with_fewer_slots_the_plan_is_as_good_as_the_best_where_one_slot_is_enough():
    """Two ranks of two experts, with a slot each: the best moves rows of one expert of the fuller rank."""
    for seed in range(30):
        rows = torch.randint(0, 40, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
        found = reference.plan(rows, 2, 1, -(-sum(rows) // 2))
        (less, _), (more, largest) = sorted((sum(own), max(own)) for own in (rows[:2], rows[2:]))
        most = max(map(sum, zip(*map(found.copies, range(4)), strict=True)))
        assert most == min(max(more - moved, less + moved) for moved in range(largest + 1))


@pytest.mark.parametrize("name", loads(2, 1))
def test_rows_are_split_among_copies_and_stay_where_they_can(name):
    ranks, owned = 4, 3
    counts = counts_of(loads(ranks, owned)[name], ranks)
    found = torch.ops.graphmoe.replica_plan(counts, owned, 0)
    ends, places = zip(*(replicas.plain_places(counts, *found, rank) for rank in range(ranks)), strict=True)
    sent = torch.stack(ends, 1).diff(dim=2, prepend=torch.zeros(ranks * owned, ranks, 1))  # [E, R, R]
    assert sent.ge(0).all() and sent.sum(2).equal(counts.t().float())
    as_read = reference.Replicas(*(each.tolist() for each in found))
    copies = torch.tensor([as_read.copies(e) for e in range(ranks * owned)])
    assert sent.sum(1).equal(copies.float())
    assert sent.diagonal(dim1=1, dim2=2).equal(torch.minimum(counts.t(), copies).float())
    assert all(places[0].equal(other) for other in places)
    for expert, of_ranks in enumerate(places[0].tolist()):
        for rank, place in enumerate(of_ranks):
            group = place - rank * 2 * owned
            if group < owned:  # no place, or among the own experts
                assert group == expert - rank * owned if place >= 0 else copies[expert, rank] == 0
            else:
                assert found[1][rank, group - owned] == expert


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("ranks", "owned", "slots"), [(2, 4, 4), (3, 2, 2), (8, 8, 8), (8, 4, 2), (5, 3, 4)])
def test_kernels_make_the_plan_of_the_plain_form(backend, ranks, owned, slots):
    for seed, (name, rows) in enumerate(loads(ranks, owned).items()):
        counts = counts_of(rows, ranks, seed)
        wanted = torch.ops.graphmoe.replica_plan(counts, slots, 3)
        plain = replicas.plain_places(counts, *wanted, seed % ranks)
        found = by_kernels(counts.to(device_of(backend)), slots, 3, seed % ranks)
        for one, other in zip(found, (*wanted, *plain), strict=True):
            assert one.cpu().equal(other), name


def by_kernels(counts: Tensor, slots: int, slack: int, rank: int) -> tuple[Tensor, ...]:
    found = replicas.by_kernel(counts, slots, slack)
    return *found, *replicas.places_by_kernel(counts, *found, rank)


def ahead_of_time_cases() -> Iterator[dict[str, Any]]:
    for ranks, experts in ((8, 256), (64, 384)):
        counts = torch.empty(ranks, experts, dtype=torch.int32, device="meta")
        yield from launches_of(f"{ranks}", functools.partial(by_kernels, counts, experts // ranks, 0, 0))
