"""Tables of all schedules: they can be run, keep what they promise, and take the published time."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.plan.pipeline import Action, Placement, Together
from graphmoe.plan.pipeline.check import check, needs, peak_activations
from graphmoe.plan.pipeline.schedules import SCHEDULES, make_table, placement_of
from graphmoe.plan.pipeline.schedules.one_f_one_b import forward_only
from graphmoe.plan.pipeline.simulate import Costs, simulate

VARIANTS = [("gpipe", 1), ("1f1b", 1), ("zb1p", 1), ("zbv", 2), ("dualpipe_v", 2)]
VARIANTS += [("v_half", 2), ("v_min", 2)]
VARIANTS += [("interleaved", virtual) for virtual in (2, 3, 4)]
RANKS = range(1, 9)
MICRO_BATCHES = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16)


def timed(name, num_ranks, num_micro_batches, virtual=None, unit=1000):
    """The timeline with F = I = W for a rank's whole stage, and free communication."""
    table = make_table(name, num_ranks, num_micro_batches, virtual)
    return simulate(table, Costs.of_rank(table.placement, unit, unit, unit))


def promised(name, num_ranks, virtual):
    """The most activations of a rank's whole stage that a schedule keeps, of many micro-batches."""
    return {
        "gpipe": math.inf,
        "dualpipe_v": num_ranks + 1,
        "v_half": min(num_ranks, num_ranks / 2 + 1),
        "v_min": min(num_ranks, round(2 * (num_ranks + 4) / 3) / 2),
        "interleaved": (2 * (num_ranks - 1) + (virtual - 1) * num_ranks + 1) / virtual,
    }.get(name, num_ranks)


def least(placement, num_micro_batches):
    """The makespan of F = I = W = 1 per stage that no table can beat."""
    for_one = 2 * placement.num_stages + 1
    work = [3 * num_micro_batches * len(placement.stages_of(rank)) for rank in range(placement.num_ranks)]
    return max(for_one, *(placement.stages_of(rank)[0] + busy for rank, busy in enumerate(work)))


@pytest.mark.parametrize(
    ("name", "virtual", "makespan", "peak"),
    [
        ("1f1b", 1, 117_000, 8), ("zb1p", 1, 103_000, 8), ("zbv", 2, 99_500, 8), ("dualpipe_v", 2, 99_500, 9),
        ("interleaved", 2, 106_500, 11.5), ("interleaved", 4, 101_250, 9.75),
        ("v_half", 2, 104_500, 5), ("v_min", 2, 109_000, 4),
    ],
)  # fmt: skip
def test_makespan_bubble_and_peak_are_the_published_ones(name, virtual, makespan, peak):
    timeline = timed(name, 8, 32, virtual)
    if name in ("v_half", "v_min"):  # limits
        assert timeline.makespan <= makespan and max(timeline.peak_activations) <= peak
    else:
        assert (timeline.makespan, max(timeline.peak_activations)) == (makespan, peak)
        assert timeline.bubble == (makespan - 96_000) / makespan


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(("name", "virtual"), VARIANTS)
def test_any_number_of_micro_batches_can_be_run_within_the_promised_memory(name, virtual, num_ranks):
    for number in MICRO_BATCHES:
        table = make_table(name, num_ranks, number, virtual)
        check(table)
        assert max(peak_activations(table)) <= min(number, promised(name, num_ranks, virtual))
        makespan = simulate(table, Costs.of_rank(table.placement, virtual, virtual, virtual)).makespan
        # No worse than one micro-batch after the other through the bubble of 1F1B.
        assert least(table.placement, number) <= makespan <= 3 * virtual * (number + 2 * num_ranks - 1)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_rounds_that_are_not_full_are_no_slower_than_full_ones_nor_than_1f1b(num_ranks):
    for number in MICRO_BATCHES:
        full = -(-number // num_ranks) * num_ranks
        for virtual in (2, 4):
            makespan = timed("interleaved", num_ranks, number, virtual).makespan
            assert makespan <= timed("interleaved", num_ranks, full, virtual).makespan
            assert makespan <= timed("1f1b", num_ranks, number).makespan


@pytest.mark.parametrize("num_ranks", RANKS)
def test_bubbles_and_makespans_follow_the_formulas(num_ranks):
    for number in (num_ranks, 2 * num_ranks, 5 * num_ranks):
        for name, virtual in (("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
            bubble = timed(name, num_ranks, number, virtual, unit=1000 * virtual).bubble
            assert bubble == (num_ranks - 1) / (num_ranks - 1 + number * virtual)
    for number in (num_ranks, 2 * num_ranks + 1, 20):  # zero bubbles wait only for the first forward
        assert timed("zb1p", num_ranks, number, unit=2).makespan == 6 * number + 2 * (num_ranks - 1)
        for name in ("zbv", "dualpipe_v"):
            assert timed(name, num_ranks, number, unit=2).makespan == 6 * number + num_ranks - 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_line_of_a_schedule_says_what_its_table_has(name):
    schedule = SCHEDULES[name]
    table = make_table(name, 2, 4)
    assert table.schedule == name and table.num_micro_batches == 4
    assert table.placement.num_stages == 2 * schedule.virtual_stages[0]
    kinds = {action.kind for rank in range(2) for action in table.actions(rank)}
    assert kinds == ({"F", "I", "W"} if schedule.splits_backward else {"F", "B"})
    assert (schedule.virtual_stages[1] == 2) == (table.placement == Placement.folded(2))
    for rank in range(4):
        made = [action for action in make_table(name, 4, 6).actions(rank) if action.kind == "W"]
        assert sorted(made, key=lambda action: action.stage) == sorted(made)  # sums do not differ by schedule


def test_small_tables_are_those_of_the_papers():
    def written(name, *numbers):
        return [" ".join(map(str, steps)) for steps in make_table(name, *numbers).ranks]

    assert written("gpipe", 2, 2) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert written("1f1b", 2, 3) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert written("zb1p", 2, 2) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]
    assert written("interleaved", 2, 2, 2) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]


LOOPS = Placement.loop(1), Placement.loop(4), Placement.loop(4, 3)


@pytest.mark.parametrize("number", [1, 3, 4, 9])
@pytest.mark.parametrize("placement", [*LOOPS, Placement.folded(4)])
def test_evaluation_runs_all_forwards_and_keeps_nothing(placement, number):
    table = forward_only(placement, number)
    check(table)
    kinds = {action.kind for rank in range(placement.num_ranks) for action in table.actions(rank)}
    virtual = placement.num_stages // placement.num_ranks
    assert kinds == {"F"} and set(peak_activations(table)) == {1 / virtual}
    makespan = simulate(table, Costs.of_rank(placement, virtual, 0, 0)).makespan
    assert makespan < number * virtual + placement.num_stages
    if number % placement.num_ranks == 0 and placement in LOOPS:
        assert makespan == number * virtual + placement.num_ranks - 1


@pytest.mark.parametrize(("numbers", "said"), [
    ((0, 8), "parallel.pp=0 is not a number of ranks; use 1 or more"),
    ((4, 0), "pipeline.microbatches=0 leaves nothing to do; use 1 or more"),
    ((4, 8, 0), "pipeline.virtual_stages=0 .* which has 1 on each rank; use 1$"),
])  # fmt: skip
def test_numbers_of_which_no_table_can_be_made_are_named(numbers, said):
    with pytest.raises(ConfigError, match=said):
        make_table("1f1b", *numbers)


PAIRED = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4)]


def pairs_of(table):
    return [[step for step in steps if isinstance(step, Together)] for steps in table.ranks]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(("name", "virtual"), [*PAIRED, ("zb1p", 1), ("zbv", 2)])
def test_tables_with_pairs_can_be_run_with_any_number_of_micro_batches(name, virtual, num_ranks):
    for number in MICRO_BATCHES:
        table = make_table(name, num_ranks, number, virtual, overlap=True)
        check(table)
        assert table.schedule == name
        pairs = [pair for of_rank in pairs_of(table) for pair in of_rank]
        assert all(pair.forward.micro_batch != pair.backward.micro_batch for pair in pairs)
        assert bool(pairs) == (number > 1) or name == "zbv" and number < 2 * num_ranks
        limit = num_ranks + 1 if name == "zbv" else (virtual + 1) * num_ranks / virtual
        assert max(peak_activations(table)) <= min(number, limit)


def test_the_last_stage_pairs_a_backward_with_the_forward_after_it():
    table = make_table("1f1b", 4, 8, overlap=True)
    assert [str(pair) for pair in pairs_of(table)[3]] == [f"3F{n + 1}+3B{n}" for n in range(7)]
    table = make_table("interleaved", 4, 8, 2, overlap=True)
    assert sum(pair.backward.stage == 7 for pair in pairs_of(table)[3]) == 7  # none follows the last forward


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "virtual"), PAIRED)
def test_every_pair_of_the_last_rank_wins_its_hidden_time_alone(name, virtual, num_ranks):
    number = 4 * num_ranks
    plain, table = (make_table(name, num_ranks, number, virtual, overlap=on) for on in (False, True))
    costs = Costs.of_rank(table.placement, *[4 * virtual] * 3)
    before, unhidden = (simulate(each, costs).makespan for each in (plain, table))
    hidden = simulate(table, replace(costs, hidden=2)).makespan
    assert before == unhidden == hidden + 2 * len(pairs_of(table)[-1])
    assert len(pairs_of(table)[-1]) == number * virtual - 1 - (virtual - 1) * num_ranks


ON_A_V = ("zbv", "v_half", "v_min")
RATIOS = [  # F, I and W
    (1, 1, 0.5), (1, 1.3, 0.7), (1, 1, 1), (1, 1.2, 2.4), (1, 2, 1), (1, 2, 0), (1, 2.3, 0.6), (1, 3, 0.4),
]  # fmt: skip


def bubble_for(name, num_micro_batches, ratio):
    """The bubble of eight ranks whose table was made for these costs of a rank's whole stage."""
    costs = Costs.of_rank(placement_of(name, 8), *ratio)
    return simulate(make_table(name, 8, num_micro_batches, costs=costs), costs).bubble


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("zbv", ratio) for ratio in RATIOS]
    + [("v_half", (f, i, w)) for f, i, w in RATIOS if w + 2 * i >= 2 * f and w + 2 * f >= 2 * i]
    + [("v_min", (1, 1, 1)), ("v_min", (1, 1.2, 2.4))],
)
def test_bubbles_shrink_with_micro_batches_and_zbv_beats_1f1b(name, ratio):
    """arXiv 2405.15362: V-half where W + 2 I >= 2 F and W + 2 F >= 2 I, V-min where F = I = W."""
    few, many = (bubble_for(name, number, ratio) for number in (32, 128))
    assert many < few / 3.3
    for number in (16, 64) if name == "zbv" else ():
        assert bubble_for("zbv", number, ratio) < bubble_for("1f1b", number, ratio)


def test_v_min_keeps_what_its_paper_says_where_3_divides_the_ranks():
    table = make_table("v_min", 6, 24)
    assert max(peak_activations(table)) == 3.5 < max(peak_activations(make_table("v_half", 6, 24)))
    for num_ranks in range(1, 17):
        peak = max(peak_activations(make_table("v_min", num_ranks, 3 * num_ranks)))
        assert peak <= min(num_ranks, (num_ranks + 4) / 3 + 0.25)


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("ratio", [(18.5, 18.1, 9.3), (1, 1.3, 0.7), (1, 2, 0), (1, 3, 0.4)])
def test_tables_by_costs_are_no_slower_than_those_that_ignore_them(ratio, num_ranks):
    costs = Costs.of_rank(Placement.folded(num_ranks), *ratio, comm=0.03 * ratio[0])
    for name, number in itertools.product(ON_A_V, (2 * num_ranks, 64)):
        own, plain = (make_table(name, num_ranks, number, costs=by) for by in (costs, None))
        assert simulate(own, costs).makespan <= simulate(plain, costs).makespan
        assert max(peak_activations(own)) <= promised(name, num_ranks, 2)


def random_costs(chance, num_ranks):
    """Costs of stages that all differ; some have no weights or take hardly any time."""
    of_kinds = [chance.uniform(0.1, 1.0) for _ in range(3)]
    stages = [
        [kind * chance.choice((1.0, chance.uniform(0.7, 1.3), chance.uniform(0.0, 2.0))) for kind in of_kinds]
        for _ in range(2 * num_ranks)
    ]
    no_weights = chance.random() < 0.2
    forward, inputs, weights = zip(*stages, strict=True)
    return Costs(forward, inputs, tuple(0.0 if no_weights else w for w in weights), chance.choice((0.0, 0.1)))


@pytest.mark.parametrize("seed", range(12))
def test_any_costs_give_tables_that_run_within_their_memory(seed):
    chance = random.Random(seed)
    num_ranks, number = chance.randint(1, 6), chance.randint(1, 14)
    costs = random_costs(chance, num_ranks)
    for name in ON_A_V:
        table = make_table(name, num_ranks, number, costs=costs)
        check(table)
        assert max(peak_activations(table)) <= min(number, promised(name, num_ranks, 2))
        makespan = simulate(table, costs).makespan
        for_one = sum(costs.forward + costs.backward_input + costs.backward_weight)
        assert makespan <= number * (for_one + 4 * num_ranks * costs.comm) + 1e-9
        if name == "zbv" and number > 1:
            ways = costs.forward, costs.backward_input, costs.backward_weight
            joint = (tuple(map(sum, zip(way[:num_ranks], way[::-1], strict=False))) for way in ways)
            loop = Costs(*joint, costs.comm)
            assert makespan <= 1.01 * simulate(make_table("1f1b", num_ranks, number), loop).makespan


def shortest(num_ranks, number, limit, costs):
    """The least makespan of all orders, of whole costs: who does what when, moment by moment."""
    num_stages = 2 * num_ranks
    seconds = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight}
    # by stage how often F, I and W were begun; by rank until when it is busy, and with what
    states = {((0, 0, 0) * num_stages, ((0, None),) * num_ranks)}
    for now in itertools.count():
        following = set()
        for begun, ranks in states:
            running = {action for until, action in ranks if action and until > now}
            if not running and all(count == number for count in begun):
                return now
            options = [[None] for _ in ranks]
            for rank in (rank for rank, (until, _) in enumerate(ranks) if until <= now):
                own = (rank, num_stages - 1 - rank)
                # W of a stage that runs is kept still
                kept = sum(begun[3 * s] - begun[3 * s + 2] for s in own)
                for place, kind in enumerate("FIW"):
                    for action in (Action(kind, stage, begun[3 * stage + place]) for stage in own):
                        is_ready = all(
                            begun[3 * n.stage + "FIW".index(n.kind)] > n.micro_batch and n not in running
                            for n in needs(action, num_stages)
                        )
                        if is_ready and action.micro_batch < number and (kind != "F" or kept < limit):
                            options[rank].append(action)
            for chosen in itertools.product(*options):
                after, busy = list(begun), list(ranks)
                for rank, action in enumerate(chosen):
                    if action:
                        after[3 * action.stage + "FIW".index(action.kind)] += 1
                        busy[rank] = now + seconds[action.kind][action.stage], action
                of_ranks = tuple((u, a) if u > now + 1 else (now + 1, None) for u, a in busy)
                following.add((tuple(after), of_ranks))
        states = following


@pytest.mark.parametrize(
    ("of_stage", "number"), [((1, 1, 1), 3), ((2, 2, 1), 2), ((1, 2, 1), 2), ((1, 1, 2), 2), ((1, 3, 1), 2)]
)
def test_few_micro_batches_take_no_longer_than_in_the_best_of_all_orders(of_stage, number):
    costs = Costs(*((cost,) * 4 for cost in of_stage))
    found = simulate(make_table("zbv", 2, number, costs=costs), costs).makespan
    assert found == shortest(2, number, 4, costs)


def test_a_table_on_a_v_is_made_once_for_the_same_costs():
    costs = [Costs.of_rank(Placement.folded(4), 1, 1.5, 0.5, comm=0.1) for _ in range(2)]
    first, second = (make_table("zbv", 4, 8, costs=each) for each in costs)
    assert second.ranks is first.ranks
    assert make_table("v_min", 4, 8, costs=costs[0]).ranks != first.ranks
