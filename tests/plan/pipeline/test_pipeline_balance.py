"""Layouts that balance the ranks of a pipeline, and times of parts, segments or units that they follow."""

import itertools
import random

import pytest
import torch

from graphmoe.config.schema import ConfigError, ModelConfig, MoEConfig
from graphmoe.model.layer import DenseLayer, MoELayer
from graphmoe.plan.costs.activations import DENSE_SEGMENTS, MOE_SEGMENTS
from graphmoe.plan.pipeline import Placement
from graphmoe.plan.pipeline import balance as pipeline_balance
from graphmoe.plan.pipeline.balance import balanced_layout, measured_parts
from graphmoe.plan.pipeline.layouts import parse_layout


def parts_of(costs: list[float]) -> tuple[tuple[str, float], ...]:
    return tuple(zip("E" + "t" * (len(costs) - 2) + "L", costs, strict=True))


def sums_of(layout: str, costs: list[float]) -> list[float]:
    lengths = map(len, parse_layout(layout))
    rest = iter(costs)
    return [sum(itertools.islice(rest, length)) for length in lengths]


@pytest.mark.parametrize("num_stages", [0, 5])
def test_more_stages_than_parts_are_refused(num_stages):
    with pytest.raises(ConfigError, match=rf"= {num_stages}, and the model has 4 parts \(EttL\).*use 1 to 4"):
        balanced_layout(parts_of([0, 1, 1, 1]), range(num_stages))


def costs_of(layout: str, costs: list[float], rank_of: tuple[int, ...]) -> tuple[float, float, float]:
    """Costs of the busiest rank and of the largest stage, and the sum of squares of all stages."""
    stages = sums_of(layout, costs)
    ranks = [sum(s for s, on in zip(stages, rank_of, strict=True) if on == rank) for rank in {*rank_of}]
    return max(ranks), max(stages), sum(s * s for s in stages)


def models_and_ranks():
    """Integer costs of the parts of small models, and the ranks of their stages, some of several stages."""
    draw = random.Random(1)
    for _ in range(100):
        num_ranks = draw.choice((2, 3))
        alone = Placement.loop(draw.randrange(1, 7))
        placement = draw.choice((Placement.folded(num_ranks), Placement.loop(num_ranks, 2), alone))
        num_parts = draw.randrange(max(placement.num_stages, 3), 11)
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


def test_no_layout_gives_the_busiest_rank_less_nor_more_even_stages():
    for costs, rank_of in models_and_ranks():
        found = costs_of(balanced_layout(parts_of(costs), rank_of), costs, rank_of)
        assert found == best_of_all(costs, rank_of)


def test_ranks_are_even_to_one_part_where_not_all_layouts_are_tried(monkeypatch):
    monkeypatch.setattr(pipeline_balance, "MOST_TRIED", 0)
    misses = []
    for costs, rank_of in models_and_ranks():
        found = costs_of(balanced_layout.__wrapped__(parts_of(costs), rank_of), costs, rank_of)
        best = best_of_all(costs, rank_of)
        assert found[0] <= best[0] + min(cost for cost in costs if cost)
        misses.append(found[0] / best[0] - 1)
    assert sum(misses) / len(misses) < 0.02


def test_the_segments_of_layers_are_those_that_layers_have():
    config = ModelConfig()
    with torch.device("meta"):
        dense, moe = DenseLayer(config).segments(), MoELayer(config, MoEConfig()).segments()
    assert (tuple(s.name for s in dense), tuple(s.name for s in moe)) == (DENSE_SEGMENTS, MOE_SEGMENTS)


MODEL = ModelConfig(num_layers=3, num_dense_layers=1, mtp_depth=1)


@pytest.mark.parametrize(
    "measured",
    [
        {"dense": 2.0, "moe": 5.0, "loss": 3.0},
        {"attn..mlp": 2.0, "attn..moe_combine": 5.0, "loss": 3.0},
        {
            "attn": 1.5,
            "mlp": 0.5,
            "moe_router..moe_preprocess": 1.0,
            "moe_dispatch..moe_combine": 2.5,
            "loss": 3,
        },
        {"dense": 2.0, "moe": 5.0, "loss": 3.0, "embed": 0.0, "mtp": 8.0},
    ],
)
def test_times_may_be_of_parts_segments_or_units(measured):
    mtp = measured.get("mtp", 5.0)
    expected = [("E", 0.0), ("t", 2.0), ("t", 5.0), ("t", 5.0), ("m", mtp), ("L", 3.0)]
    assert measured_parts(MODEL, measured) == expected
    assert balanced_layout(tuple(expected), range(2)) == "Ettt|mL"
