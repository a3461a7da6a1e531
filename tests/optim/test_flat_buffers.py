"""Positions of parameters in flat buffers, and the owner of each element."""

import itertools

import pytest
import torch

from graphmoe.plan.buckets import ALIGNMENT, BufferLayout

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
