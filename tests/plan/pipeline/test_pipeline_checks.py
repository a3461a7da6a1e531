"""check: a table that cannot be run says which rank and which action it fails at."""

from dataclasses import replace

import pytest

from graphmoe.plan.pipeline import Action, Placement, Table, Together
from graphmoe.plan.pipeline.check import TableError, check, peak_activations, peaks
from graphmoe.plan.pipeline.schedules import make_table
from graphmoe.plan.pipeline.schedules.one_f_one_b import forward_only
from graphmoe.plan.pipeline.simulate import Costs, simulate


def act(text):
    kind = next(letter for letter in text if letter in "FBIW")
    stage, micro_batch = map(int, text.split(kind))
    return Action(kind, stage, micro_batch)


def written(schedule, placement, num_micro_batches, *ranks):
    """A table from the texts of its ranks; actions joined by a plus are together."""
    steps = []
    for text in ranks:
        actions = [[act(part) for part in step.split("+")] for step in text.split()]
        steps.append(tuple(Together(*pair) if len(pair) == 2 else pair[0] for pair in actions))
    return Table(schedule, placement, num_micro_batches, tuple(steps))


def edited(table, rank, old, new):
    texts = [" ".join(map(str, steps)) for steps in table.ranks]
    assert old in texts[rank]
    texts[rank] = texts[rank].replace(old, new)
    return written(table.schedule, table.placement, table.num_micro_batches, *texts)


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        # 0F0 0F1 0B0 0F2 0B1 0B2 and 1F0 1B0 1F1 1B1 1F2 1B2
        (1, "1F1 ", "", r"1f1b: rank 1 does B of stage 1 for micro-batch 1; F and B or F and I and W must"),
        (0, " 0B2", "", r"1f1b: rank 0 does F of stage 0 for micro-batch 2; F and B or"),
        (0, "0B1", "0I1", r"1f1b: rank 0 does F and I of stage 0 for micro-batch 1"),
        (0, "0B1", "0B1 0W1", r"1f1b: rank 0 does F and B and W of stage 0 for micro-batch 1"),
        (1, "1F1", "1F1 1F1", r"1f1b: rank 1 does F and F and B of stage 1"),
        (1, "1F1", "0F1", r"1f1b: rank 1 does 0F1, and has the stages 1 and 3 micro-batches"),
        (1, "1F1", "1F3", r"1f1b: rank 1 does 1F3, and has the stages 1 and 3 micro-batches"),
        (0, "0F0 0F1", "0F1 0F0", r"rank 0 does 0F0 after 0F1; .* stage go forward in increasing order"),
        (1, "1B1 1F2 1B2", "1F2 1B2 1B1", r"rank 1 does 1B1 after 1B2; .* go backward in increasing order"),
        (1, "1F0 1B0", "1B0 1F0", r"rank 1 at 1B0 waits for 1F0, which is later on rank 1$"),
        (0, "0F1 0B0", "0F1+0B1", r"0F1\+0B1 of rank 0 is one micro-batch; a pair has two"),
        (0, "0F1 0B0", "0B0+0F1", r"0B0\+0F1 of rank 0 is not a forward and a backward"),
    ],
)
def test_a_broken_table_says_what_is_wrong(rank, old, new, message):
    with pytest.raises(TableError, match=message):
        check(edited(make_table("1f1b", 2, 3), rank, old, new))


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


def test_a_wait_for_what_no_rank_does_ends_in_an_error():
    table = edited(make_table("1f1b", 2, 2), 1, "1B0 ", "")
    with pytest.raises(TableError, match="rank 0 at 0B0 waits for 1I0, which no rank computes"):
        simulate(table, Costs.of_rank(table.placement, 1, 1, 1))


def test_pairs_that_need_each_other_are_a_deadlock():
    placement = Placement.loop(2)
    ranks = "0F0 0F1+0B0 0B1", "1F0 1F1+1B0 1B1"
    said = r"rank 0 at 0F1\+0B0 waits for 1B0.*rank 1 at 1F1\+1B0 waits for 0F1"
    with pytest.raises(TableError, match=said):
        check(written("1f1b", placement, 2, *ranks))
    check(written("1f1b", placement, 2, "0F0 0F1 0B0 0B1", ranks[1]))


def test_weight_gradients_come_after_those_of_inputs():
    table = edited(make_table("zb1p", 2, 2), 0, "0I0 0W0", "0W0 0I0")
    with pytest.raises(TableError, match="rank 0 at 0W0 waits for 0I0, which is later on rank 0"):
        check(table)


def test_evaluation_has_forwards_only():
    table = forward_only(Placement.loop(2), 2)
    with pytest.raises(TableError, match="rank 1 does F and B of stage 1 for micro-batch 0; F must"):
        check(edited(table, 1, "1F0", "1F0 1B0"))
    with pytest.raises(TableError, match="rank 0 does F of stage 0 for micro-batch 0; F and B or"):
        check(replace(table, schedule="1f1b"))


def test_an_activation_is_kept_until_its_weight_gradients_are_made():
    placement = Placement.loop(1)
    late = written("zb1p", placement, 2, "0F0 0I0 0F1 0I1 0W0 0W1")
    early = written("zb1p", placement, 2, "0F0 0I0 0W0 0F1 0I1 0W1")
    assert peak_activations(late) == (2,) and peak_activations(early) == (1,)


def test_virtual_stages_count_their_share():
    placement = Placement.folded(1)
    table = written("zbv", placement, 1, "0F0 1F0 1I0 1W0 0I0 0W0")
    assert peak_activations(table) == (1,) and peaks(table, (10, 30)) == (40,)


def test_ranks_and_stages_have_to_match():
    table = make_table("1f1b", 2, 2)
    with pytest.raises(TableError, match="steps of 1 ranks, but its placement has 2"):
        check(replace(table, ranks=table.ranks[:1]))
    with pytest.raises(TableError, match=r"stages \[1\] are on none of 2 ranks"):
        check(replace(table, placement=Placement((0, 5), 2)))
