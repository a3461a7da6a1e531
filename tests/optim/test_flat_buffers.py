"""Positions of parameters in flat buffers, and the owner of each element."""

import itertools

import pytest
import torch

from graphmoe.plan.buckets import ALIGNMENT, BufferLayout
from graphmoe.plan.slots import GAP, Use, slots_of

SHAPES = ((37, 5), (11,), (20, 20), (3, 9, 8), (70,), (41, 7), (1,), (2, 1000))
WEIGHTS = [torch.empty(shape) for shape in SHAPES]
LIMITS = (100, 700, 1e9)


def placements(num_ranks: int, limit: float) -> list[BufferLayout]:
    return [BufferLayout.of(WEIGHTS, num_ranks, index, limit) for index in range(num_ranks)]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_each_element_is_owned_once_and_shards_have_no_gaps(num_ranks, limit):
    ranks = placements(num_ranks, limit)
    owners = torch.zeros(ranks[0].size, dtype=torch.int)
    for placement in ranks:
        assert placement.starts == ranks[0].starts and placement.size == ranks[0].size
        end = 0
        for bucket, first in zip(placement.buckets, ranks[0].buckets, strict=True):
            assert (bucket.whole, bucket.members, bucket.shard) == (first.whole, first.members, first.shard)
            assert bucket.shard.start == end and bucket.own.start % ALIGNMENT == 0
            end = bucket.shard.stop
            assert bucket.own.stop - bucket.own.start == bucket.shard.stop - bucket.shard.start
            owners[bucket.own] += 1
        assert end * num_ranks == placement.size
    assert (owners == 1).all()


@pytest.mark.parametrize("limit", LIMITS)
def test_buckets_hold_neighbours_of_one_kind_up_to_the_limit_and_what_decays_comes_first(limit):
    (placement, _) = placements(2, limit)
    members = [i for bucket in placement.buckets for i in bucket.members]
    assert members == sorted(members, key=lambda i: (WEIGHTS[i].dim() == 1, i))
    for bucket in placement.buckets:
        kinds = {WEIGHTS[i].dim() > 1 for i in bucket.members}
        assert kinds == {bucket.shard.stop <= placement.decayed}
        assert len(bucket.members) == 1 or bucket.whole.stop - bucket.whole.start <= limit + 2 * ALIGNMENT
        for i, j in itertools.pairwise(bucket.members):
            end = placement.starts[i] + WEIGHTS[i].numel()
            assert 0 <= placement.starts[j] - end < ALIGNMENT
    assert len(placement.buckets) == {100: 8, 700: 4, 1e9: 2}[limit]


def test_buckets_of_a_slot_are_of_distant_layers_and_a_deep_model_needs_no_more_slots():
    def uses(layers: int) -> list[Use]:
        large, small = ([Use(i, i, length) for i in range(layers)] for length in (900, 70))
        pairs = [Use(i, i + 1, 300) for i in range(0, layers - 1, 2)]
        return [*large, *small, *pairs, Use(0, layers - 1, 50), Use(0, 0, 5000, alone=True)]

    for given in (uses(24), uses(48)):
        slots = slots_of(given)
        for slot, length in enumerate(slots.lengths):
            own = [use for use, of in zip(given, slots.of_buckets, strict=True) if of == slot]
            assert length == max(use.length for use in own)
            assert len(own) == 1 or not any(use.alone for use in own)
            for one, other in itertools.combinations(sorted(own), 2):
                assert other.first - one.last >= GAP
    # two layers of each kind, three of the pairs, and the buckets alone
    assert sum(slots.lengths) <= 2 * 970 + 3 * 300 + 50 + 5000
    assert sum(slots.lengths) == sum(slots_of(uses(24)).lengths)
