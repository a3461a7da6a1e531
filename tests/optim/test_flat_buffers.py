"""Positions of parameters in flat buffers, and the owner of each element."""

import itertools

import pytest
import torch

from graphmoe.model.sizes import count_parameters, state_bytes
from graphmoe.pipeline_view.plans import load_preset
from graphmoe.plan.buckets import ALIGNMENT, BufferLayout
from graphmoe.plan.layout import Layout

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


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_moments_are_shared_out_to_all_ranks_and_experts_to_theirs(element_bytes):
    model = load_preset("deepseek_v2_lite")
    counts, rounded = count_parameters(model)["total"], element_bytes == 2
    alone, of_eight, with_experts = (
        state_bytes(model, layout, bucket_mb=100.0, element_bytes=element_bytes)
        for layout in (Layout(), Layout(dp=8), Layout(dp=8, ep=4))
    )
    assert sum(alone.values()) == (18 if rounded else 16) * counts["full"]
    assert of_eight["moments"] == with_experts["moments"] == alone["moments"] / 8
    assert of_eight["grads"] == alone["grads"] * 9 / 8
    local = counts["full"] - counts["routed_experts"] * 3 / 4
    assert with_experts["grads"] == pytest.approx(4 * local + 4 * counts["full"] / 8)
    weights = (2 + 2 / 8 + 4 / 8 if rounded else 4 + 4 / 8) * counts["full"]
    assert sum(size for kind, size in of_eight.items() if "params" in kind) == pytest.approx(weights)
