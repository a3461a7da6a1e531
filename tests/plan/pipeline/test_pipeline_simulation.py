"""simulate: small cases computed by hand."""

import random

import pytest

from graphmoe.plan.pipeline.check import in_order
from graphmoe.plan.pipeline.schedules import SCHEDULES, make_table, placement_of
from graphmoe.plan.pipeline.simulate import Costs, Timeline, makespan_of, simulate


def rows(timeline: Timeline, track="compute"):
    num_ranks = timeline.table.placement.num_ranks
    return [
        [
            (str(span.step), span.start, span.end)
            for span in timeline.spans
            if (span.rank, span.track) == (rank, track)
        ]
        for rank in range(num_ranks)
    ]


def test_uneven_stages_and_transfers_take_the_times_computed_by_hand():
    costs = Costs((2, 3), (1, 2), (1, 1), comm=1, activation_bytes=(10, 30))
    timeline = simulate(make_table("1f1b", 2, 2), costs)
    assert rows(timeline) == [
        [("0F0", 0, 2), ("0F1", 2, 4), ("0B0", 10, 12), ("0B1", 16, 18)],
        [("1F0", 3, 6), ("1B0", 6, 9), ("1F1", 9, 12), ("1B1", 12, 15)],
    ]
    assert rows(timeline, "comm") == [[("0B0", 9, 10), ("0B1", 15, 16)], [("1F0", 2, 3), ("1F1", 4, 5)]]
    assert timeline.makespan == 18 and timeline.bubble == 16 / 36
    assert timeline.peak_activations == (2, 1) and timeline.peak_bytes == (20, 30)


def test_a_split_backward_sends_before_it_makes_weight_gradients():
    timeline = simulate(make_table("zb1p", 2, 1), Costs((1, 1), (2, 2), (3, 3)))
    assert rows(timeline) == [
        [("0F0", 0, 1), ("0I0", 4, 6), ("0W0", 6, 9)],
        [("1F0", 1, 2), ("1I0", 2, 4), ("1W0", 4, 7)],
    ]
    assert rows(timeline, "comm") == [[], []]


def test_neighbouring_stages_of_one_rank_need_no_transfer():
    table = make_table("zbv", 2, 1)
    timeline = simulate(table, Costs((1,) * 4, (1,) * 4, (1,) * 4, comm=1))
    times = {name: (start, end) for row in rows(timeline) for name, start, end in row}
    assert [times[f"{stage}F0"] for stage in range(4)] == [(0, 1), (2, 3), (3, 4), (5, 6)]
    assert [times[f"{stage}I0"] for stage in range(4)] == [(11, 12), (9, 10), (8, 9), (6, 7)]
    assert timeline.makespan == 13
    assert rows(timeline, "comm")[1] == [("1F0", 1, 2), ("2I0", 7, 8)]
    assert rows(simulate(make_table("zbv", 1, 3), Costs((1,) * 2, (1,) * 2, (1,) * 2, comm=9)), "comm") == [
        []
    ]


@pytest.mark.parametrize(("hidden", "pair"), [(0, 10), (1, 9), (4, 6), (50, 6)])
def test_a_pair_saves_what_is_hidden_up_to_its_shorter_half(hidden, pair):
    timeline = simulate(make_table("1f1b", 1, 2, overlap=True), Costs((4,), (3,), (3,), hidden=hidden))
    assert rows(timeline) == [[("0F0", 0, 4), ("0F1+0B0", 4, 4 + pair), ("0B1", 4 + pair, 10 + pair)]]
    assert timeline.bubble == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_makespan_without_spans_is_the_same_to_the_bit(name):
    draw = random.Random(name)
    for overlap in (False, True)[: 1 + bool(SCHEDULES[name].build_overlapped)]:
        for num_ranks, number in ((1, 3), (2, 5), (4, 11)):
            stages = placement_of(name, num_ranks).num_stages
            times = (tuple(draw.uniform(0.1, 2) for _ in range(stages)) for _ in range(3))
            costs = Costs(*times, comm=draw.choice((0.0, 0.3)), hidden=0.2 * overlap)
            table = make_table(name, num_ranks, number, overlap=overlap, costs=costs)
            timeline = simulate(table, costs)
            assert makespan_of(table, costs) == timeline.makespan
            assert timeline.makespan == max(span.end for span in timeline.spans)
            assert {(rank, step) for rank, step in in_order(table)} == {
                (span.rank, span.step) for span in timeline.spans if span.track == "compute"
            }
