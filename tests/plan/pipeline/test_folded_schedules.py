"""Tables on a V follow the costs of stages: small bubbles, memory as promised, near the best order."""

import itertools
import random

import pytest

from graphmoe.plan.pipeline.actions import Action, Placement
from graphmoe.plan.pipeline.check import check, needs, peak_activations
from graphmoe.plan.pipeline.schedules import make_table
from graphmoe.plan.pipeline.simulate import Costs, simulate

ON_A_V = ("zbv", "v_half", "v_min")
RATIOS = [
    (1, 1, 0.5),
    (1, 1.3, 0.7),
    (1, 1, 1),
    (1, 1.2, 2.4),
    (1, 2, 1),
    (1, 2, 0),
    (1, 2.3, 0.6),
    (1, 3, 0.4),
]
"""F, I and W."""


def limit_of(name, num_ranks):
    """Activations of a rank's whole stage that a schedule may keep."""
    by_name = {
        "zbv": num_ranks,
        "v_half": num_ranks / 2 + 1,
        "v_min": round(2 * (num_ranks + 4) / 3) / 2,
    }
    return min(num_ranks, by_name[name])


def timed(name, num_ranks, num_micro_batches, ratio):
    """The simulation of a table with the costs that it was made for; ``ratio`` is of a rank's whole stage."""
    is_folded = name in ON_A_V
    placement = Placement.folded(num_ranks) if is_folded else Placement.loop(num_ranks)
    costs = Costs.of_rank(placement, *ratio)
    return simulate(make_table(name, num_ranks, num_micro_batches, costs=costs), costs)


@pytest.mark.parametrize("ratio", RATIOS)
def test_zbv_is_faster_than_1f1b_whatever_the_costs(ratio):
    for number in (16, 64):
        assert timed("zbv", 8, number, ratio).bubble < timed("1f1b", 8, number, ratio).bubble


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("zbv", ratio) for ratio in RATIOS]
    + [("v_half", (f, i, w)) for f, i, w in RATIOS if w + 2 * i >= 2 * f and w + 2 * f >= 2 * i]
    + [("v_min", (1, 1, 1)), ("v_min", (1, 1.2, 2.4))],
)
def test_bubbles_shrink_with_the_micro_batches(name, ratio):
    """arXiv 2405.15362: V-half where W + 2 I >= 2 F and W + 2 F >= 2 I, V-min where F = I = W."""
    few, many = (timed(name, 8, number, ratio).bubble for number in (32, 128))
    assert many < few / 3.3


def test_v_min_keeps_what_its_paper_says_where_3_divides_the_ranks():
    table = make_table("v_min", 6, 24)
    assert max(peak_activations(table)) == 3.5 < max(peak_activations(make_table("v_half", 6, 24)))
    for num_ranks in range(1, 17):
        peak = max(peak_activations(make_table("v_min", num_ranks, 3 * num_ranks)))
        assert peak <= min(num_ranks, (num_ranks + 4) / 3 + 0.25)


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
        assert max(peak_activations(table)) <= min(number, limit_of(name, num_ranks))
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
            options = []
            for rank, (until, _) in enumerate(ranks):
                if until > now:
                    options.append([None])
                    continue
                own = (rank, num_stages - 1 - rank)
                # W of a stage that runs is kept still
                kept = sum(begun[3 * s] - begun[3 * s + 2] for s in own)
                ready = []
                for place, kind in enumerate("FIW"):
                    for stage in own:
                        action = Action(kind, stage, begun[3 * stage + place])
                        if action.micro_batch == number or (kind == "F" and kept >= limit):
                            continue
                        inputs = needs(action, num_stages)
                        if all(
                            begun[3 * n.stage + "FIW".index(n.kind)] > n.micro_batch and n not in running
                            for n in inputs
                        ):
                            ready.append(action)
                options.append([*ready, None])
            for chosen in itertools.product(*options):
                after, busy = list(begun), list(ranks)
                for rank, action in enumerate(chosen):
                    if action:
                        after[3 * action.stage + "FIW".index(action.kind)] += 1
                        busy[rank] = now + seconds[action.kind][action.stage], action
                following.add(
                    (tuple(after), tuple((u, a) if u > now + 1 else (now + 1, None) for u, a in busy))
                )
        states = following


@pytest.mark.parametrize(
    ("of_stage", "number"), [((1, 1, 1), 3), ((2, 2, 1), 2), ((1, 2, 1), 2), ((1, 1, 2), 2), ((1, 3, 1), 2)]
)
def test_few_micro_batches_take_no_longer_than_in_the_best_of_all_orders(of_stage, number):
    costs = Costs(*((cost,) * 4 for cost in of_stage))
    found = simulate(make_table("zbv", 2, number, costs=costs), costs).makespan
    assert found == shortest(2, number, 4, costs)
