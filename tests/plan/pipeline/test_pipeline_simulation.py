"""check: a table that cannot be run says which rank fails at which action; simulate: cases by hand."""

import random
from dataclasses import replace

import pytest

from graphmoe.plan.pipeline import Action, Placement, Table, Together
from graphmoe.plan.pipeline.check import TableError, check, in_order, peak_activations, peaks
from graphmoe.plan.pipeline.schedules import SCHEDULES, make_table, placement_of
from graphmoe.plan.pipeline.schedules.one_f_one_b import forward_only
from graphmoe.plan.pipeline.simulate import Costs, makespan_of, simulate


def act(text):
    kind = next(letter for letter in text if letter in "FBIW")
    return Action(kind, *map(int, text.split(kind)))


def written(schedule, placement, num_micro_batches, *ranks):
    """A table from the texts of its ranks; actions joined by a plus are together."""
    steps = []
    for text in ranks:
        actions = [[act(part) for part in step.split("+")] for step in text.split()]
        steps.append(tuple(Together(*pair) if len(pair) == 2 else pair[0] for pair in actions))
    return Table(schedule, placement, num_micro_batches, tuple(steps))


TWO, ALONE = Placement.loop(2), Placement.loop(1)
WHOLE = make_table("1f1b", 2, 3)  # 0F0 0F1 0B0 0F2 0B1 0B2 and 1F0 1B0 1F1 1B1 1F2 1B2
EVALUATION = forward_only(TWO, 2)


def edited(rank, old, new, table=WHOLE):
    texts = [" ".join(map(str, steps)) for steps in table.ranks]
    assert old in texts[rank]
    texts[rank] = texts[rank].replace(old, new)
    return written(table.schedule, table.placement, table.num_micro_batches, *texts)


BROKEN = [
    (
        edited(1, "1F1 ", ""),
        r"1f1b: rank 1 does B of stage 1 for micro-batch 1; F and B or F and I and W must",
    ),
    (edited(0, " 0B2", ""), r"1f1b: rank 0 does F of stage 0 for micro-batch 2; F and B or"),
    (edited(0, "0B1", "0I1"), r"1f1b: rank 0 does F and I of stage 0 for micro-batch 1"),
    (edited(0, "0B1", "0B1 0W1"), r"1f1b: rank 0 does F and B and W of stage 0 for micro-batch 1"),
    (edited(1, "1F1", "1F1 1F1"), r"1f1b: rank 1 does F and F and B of stage 1"),
    (edited(1, "1F1", "0F1"), r"1f1b: rank 1 does 0F1, and has the stages 1 and 3 micro-batches"),
    (edited(1, "1F1", "1F3"), r"1f1b: rank 1 does 1F3, and has the stages 1 and 3 micro-batches"),
    (edited(0, "0F0 0F1", "0F1 0F0"), r"rank 0 does 0F0 after 0F1; .* stage go forward in increasing order"),
    (
        edited(1, "1B1 1F2 1B2", "1F2 1B2 1B1"),
        r"rank 1 does 1B1 after 1B2; .* go backward in increasing order",
    ),
    (edited(1, "1F0 1B0", "1B0 1F0"), r"rank 1 at 1B0 waits for 1F0, which is later on rank 1$"),
    (edited(0, "0F1 0B0", "0F1+0B1"), r"0F1\+0B1 of rank 0 must be of two micro-batches"),
    (edited(0, "0F1 0B0", "0B0+0F1"), r"0B0\+0F1 of rank 0 is not a forward and a backward"),
    (
        edited(0, "0I0 0W0", "0W0 0I0", make_table("zb1p", 2, 2)),
        r"rank 0 at 0W0 waits for 0I0, which is later on rank 0",
    ),
    (edited(1, "1F0", "1F0 1B0", EVALUATION), r"rank 1 does F and B of stage 1 for micro-batch 0; F must"),
    (replace(EVALUATION, schedule="1f1b"), r"rank 0 does F of stage 0 for micro-batch 0; F and B or"),
    (replace(WHOLE, ranks=WHOLE.ranks[:1]), r"steps of 1 ranks, but its placement has 2"),
    (replace(WHOLE, placement=Placement((0, 5), 2)), r"stages \[1\] are on none of 2 ranks"),
]


@pytest.mark.parametrize(("table", "message"), BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_a_broken_table_says_what_is_wrong(table, message):
    with pytest.raises(TableError, match=message):
        check(table)


def test_pairs_that_need_each_other_are_a_deadlock():
    second = "1F0 1F1+1B0 1B1"
    said = r"rank 0 at 0F1\+0B0 waits for 1B0.*rank 1 at 1F1\+1B0 waits for 0F1"
    with pytest.raises(TableError, match=said):
        check(written("1f1b", TWO, 2, "0F0 0F1+0B0 0B1", second))
    check(written("1f1b", TWO, 2, "0F0 0F1 0B0 0B1", second))


def test_ranks_that_wait_for_each_other_are_named_with_their_actions():
    placement = Placement.loop(3)  # rank 0 waits too, for rank 1, but nothing waits for it
    stuck = written("1f1b", placement, 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1")
    message = (
        "1f1b: rank 1 at 1B0 waits for 2B0, which is later on rank 2; "
        "rank 2 at 2F1 waits for 1F1, which is later on rank 1"
    )
    for walk in (check, lambda table: simulate(table, Costs.of_rank(placement, 1, 1, 1))):
        with pytest.raises(TableError) as caught:
            walk(stuck)
        assert str(caught.value) == message
    table = edited(1, "1B0 ", "", make_table("1f1b", 2, 2))
    with pytest.raises(TableError, match="rank 0 at 0B0 waits for 1I0, which no rank computes"):
        simulate(table, Costs.of_rank(TWO, 1, 1, 1))


def test_an_activation_is_kept_until_its_weight_gradients_are_made():
    for ranks, peak in (("0F0 0I0 0F1 0I1 0W0 0W1", 2), ("0F0 0I0 0W0 0F1 0I1 0W1", 1)):
        assert peak_activations(written("zb1p", ALONE, 2, ranks)) == (peak,)
    of_two_stages = written("zbv", Placement.folded(1), 1, "0F0 1F0 1I0 1W0 0I0 0W0")
    assert peak_activations(of_two_stages) == (1,) and peaks(of_two_stages, (10, 30)) == (40,)


def rows(timeline, track="compute"):
    found = [[] for _ in range(timeline.table.placement.num_ranks)]
    for span in timeline.spans:
        if span.track == track:
            found[span.rank].append((str(span.step), span.start, span.end))
    return found


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
    timeline = simulate(make_table("zbv", 2, 1), Costs((1,) * 4, (1,) * 4, (1,) * 4, comm=1))
    times = {name: (start, end) for row in rows(timeline) for name, start, end in row}
    assert [times[f"{stage}F0"] for stage in range(4)] == [(0, 1), (2, 3), (3, 4), (5, 6)]
    assert [times[f"{stage}I0"] for stage in range(4)] == [(11, 12), (9, 10), (8, 9), (6, 7)]
    assert timeline.makespan == 13
    assert rows(timeline, "comm")[1] == [("1F0", 1, 2), ("2I0", 7, 8)]
    one_rank = simulate(make_table("zbv", 1, 3), Costs((1,) * 2, (1,) * 2, (1,) * 2, comm=9))
    assert rows(one_rank, "comm") == [[]]


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
            computed = {(span.rank, span.step) for span in timeline.spans if span.track == "compute"}
            assert {*in_order(table)} == computed
