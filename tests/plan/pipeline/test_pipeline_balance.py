"""Layouts that balance the ranks of a pipeline, and their stages."""

import itertools
import random

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.plan.pipeline import balance as pipeline_balance
from graphmoe.plan.pipeline.actions import Placement
from graphmoe.plan.pipeline.balance import balanced_layout
from graphmoe.plan.pipeline.layouts import parse_layout


def parts_of(costs: list[float]) -> list[tuple[str, float]]:
    return list(zip("E" + "t" * (len(costs) - 2) + "L", costs, strict=True))


def sums_of(layout: str, costs: list[float]) -> list[float]:
    lengths = map(len, parse_layout(layout))
    rest = iter(costs)
    return [sum(itertools.islice(rest, length)) for length in lengths]


def test_the_largest_stage_is_the_smallest_possible_and_the_others_are_even():
    draw = random.Random(0)
    for _ in range(60):
        costs = [draw.choice((0, 1, 2, 3, 7)) for _ in range(draw.randrange(2, 9))]
        num_stages = draw.randrange(1, len(costs) + 1)
        best = min(
            (max(sums), sum(s * s for s in sums))
            for borders in itertools.combinations(range(1, len(costs)), num_stages - 1)
            for sums in [[sum(costs[a:b]) for a, b in itertools.pairwise([0, *borders, len(costs)])]]
        )
        found = sums_of(balanced_layout(parts_of(costs), range(num_stages)), costs)
        assert len(found) == num_stages and (max(found), sum(s * s for s in found)) == best


@pytest.mark.parametrize("num_stages", [0, 5])
def test_more_stages_than_parts_are_refused(num_stages):
    with pytest.raises(ConfigError, match=rf"= {num_stages}, and the model has 4 parts \(EttL\).*use 1 to 4"):
        balanced_layout(parts_of([0, 1, 1, 1]), range(num_stages))


def costs_of(layout: str, costs: list[float], rank_of: tuple[int, ...]) -> tuple[float, float, float]:
    """Costs of the busiest rank and of the largest stage, and the sum of squares of all stages."""
    stages = sums_of(layout, costs)
    ranks = [sum(s for s, on in zip(stages, rank_of, strict=True) if on == rank) for rank in {*rank_of}]
    return max(ranks), max(stages), sum(s * s for s in stages)


def several_stages_a_rank():
    """Integer costs of the parts of small models, and the ranks of their stages."""
    draw = random.Random(1)
    for _ in range(60):
        num_ranks = draw.choice((2, 3))
        placement = draw.choice((Placement.folded(num_ranks), Placement.loop(num_ranks, 2)))
        num_parts = draw.randrange(placement.num_stages, 11)
        costs = [0, 3, *[draw.choice((2, 2, 2, 5)) for _ in range(num_parts - 3)], draw.choice((1, 4, 9))]
        yield costs[:num_parts], placement.rank_of


def best_of_all(costs: list[float], rank_of: tuple[int, ...]) -> tuple[float, float, float]:
    places = itertools.combinations(range(1, len(costs)), len(rank_of) - 1)
    letters = "".join(letter for letter, _ in parts_of(costs))
    found = ([0, *inner, len(costs)] for inner in places)
    return min(
        costs_of("|".join(letters[a:b] for a, b in itertools.pairwise(borders)), costs, rank_of)
        for borders in found
    )


def test_no_layout_gives_the_busiest_rank_of_several_stages_less():
    for costs, rank_of in several_stages_a_rank():
        found = costs_of(balanced_layout(parts_of(costs), rank_of), costs, rank_of)
        assert found == best_of_all(costs, rank_of)


def test_ranks_are_even_to_one_part_where_not_all_layouts_are_tried(monkeypatch):
    monkeypatch.setattr(pipeline_balance, "MOST_TRIED", 0)
    monkeypatch.setattr(pipeline_balance, "_balanced", pipeline_balance._balanced.__wrapped__)
    misses = []
    for costs, rank_of in several_stages_a_rank():
        found = costs_of(balanced_layout(parts_of(costs), rank_of), costs, rank_of)
        best = best_of_all(costs, rank_of)
        assert found[0] <= best[0] + min(cost for cost in costs if cost)
        misses.append(found[0] / best[0] - 1)
    assert sum(misses) / len(misses) < 0.02
