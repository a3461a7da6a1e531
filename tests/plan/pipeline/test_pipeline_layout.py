"""Layout strings: what they mean, where their errors point, and those that balance a pipeline's ranks."""

import itertools
import random

import pytest
import torch

from graphmoe.config.schema import ConfigError, ModelConfig, MoEConfig
from graphmoe.model.layer import DenseLayer, MoELayer
from graphmoe.plan.costs.activations import DENSE_SEGMENTS, MOE_SEGMENTS
from graphmoe.plan.pipeline import Placement, balance
from graphmoe.plan.pipeline.balance import balanced_layout, measured_parts
from graphmoe.plan.pipeline.layouts import MAX_SIGNS, StagePieces, parse_layout, pieces_of, short_layout


def error_of(text: str, *model: int) -> tuple[str, str, int]:
    """Problem that the error names in its first line, the string it shows, and the column of its caret."""
    with pytest.raises(ConfigError) as caught:
        pieces_of(text, *model) if model else parse_layout(text)
    problem, shown, caret = str(caught.value).split("\n")
    assert problem.startswith("pipeline.layout: ") and set(caret) == {" ", "^"}
    return problem.removeprefix("pipeline.layout: "), shown[2:], caret.index("^") - 2


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("Et|(tt|)*6L", "Et tt tt tt tt tt tt L"), ("Et*3|t*2L", "Ettt ttL"),
        ("E t, t | t t, L", "Ett ttL"), ("E t * 3 | L", "Ettt L"),
        ("E(t)*2|(t|(tt|)*2)*2mL", "Ett t tt tt t tt tt mL"), ("E|(t(m))L", "E tmL"), ("(E|t)L", "E tL"),
        ("Et|tm|L", "Et tm L"), ("Et*010L", "EttttttttttL"), ("Et(|t)*2L", "Et t tL"), ("EL", "EL"),
    ],
)  # fmt: skip
def test_a_layout_is_written_out_as_pieces(text, pieces):
    assert parse_layout(text) == pieces.split()


def test_pieces_number_layers_over_the_whole_model():
    assert pieces_of("Et|ttt|tm|mL", num_layers=5, mtp_depth=2, num_stages=4) == (
        StagePieces(True, range(0, 1), range(0, 0), False),
        StagePieces(False, range(1, 4), range(0, 0), False),
        StagePieces(False, range(4, 5), range(0, 1), False),
        StagePieces(False, range(5, 5), range(1, 2), True),
    )


@pytest.mark.parametrize(
    "text, message, column",
    [
        ("Et|xt|L", "'x' is not a letter of a layout; use E (embedding), t (layer)", 3),
        ("Et|2t|L", "'2' is not a letter", 3),
        ("Et|(tt|*6L", "this parenthesis is not closed; write )", 3),
        ("Et|((t|)*6L", "this parenthesis is not closed", 3),
        ("Et|tt)*6L", "no parenthesis is open here; take this one away", 5),
        ("Et*|L", "a number above 0 must follow the star; write such as t*3 or (tt|)*3", 2),
        ("E(tt|)*00L", "a number above 0 must follow the star", 6),
        ("Et*-2L", "a number above 0 must follow the star", 2), ("Et*1 2L", "'2' is not a letter", 5),
        ("*3tL", "there is nothing here to repeat; write such as t*3 or (tt|)*3", 0),
        ("E(*3t)L", "there is nothing here to repeat", 2), ("Et*2*3L", "there is nothing here to repeat", 4),
        ("E(, )L", "nothing is in these parentheses", 1),
        ("tt|L", "the letters are E once, then every t, then every m, then L once", 0),
        ("Et|EL", "the letters are E once", 3), ("E*2tL", "the letters are E once", 0),
        ("Et|tt", "the letters are E once", 4), ("Et|Lt", "the letters are E once", 4),
        ("EtL|tL", "the letters are E once", 4), ("Etm|tL", "the letters are E once", 4),
        ("Et||L", "a stage beside this border is empty", 2),
        ("|EtL", "a stage beside this border is empty", 0),
        ("E(|t)*2||L", "a stage beside this border is empty", 7),
        ("E(t|)*2", "a stage beside this border is empty", 3),
        ("", "it is empty; write such as 'Ett|ttL'", 0), (" , ", "it is empty", 0),
    ],
)  # fmt: skip
def test_an_error_points_at_the_character(text, message, column):
    problem, shown, caret = error_of(text)
    assert problem.startswith(message) and (shown, caret) == (text, column)


@pytest.mark.parametrize("text, model, message, column", [
    ("Et|(tt|)*6L", (12, 0, 8), "t occurs 13 times, but model.num_layers=12; take 1 away", 5),
    ("Et|(tt|)*6L", (20, 0, 8), "t occurs 13 times, but model.num_layers=20; add 7", 5),
    ("EL", (2, 0, 1), "t occurs 0 times, but model.num_layers=2; add 2", 1),
    ("EtmmL", (1, 1, 1), "m occurs 2 times, but model.mtp_depth=1; take 1 away", 3),
    ("EtL", (1, 1, 1), "m occurs 0 times, but model.mtp_depth=1; add 1", 2),
    ("Et|t|L", (2, 0, 2), "3 pieces, and parallel.pp * pipeline.virtual_stages = 2; use 1 border |", 4),
    ("Et|t|L", (2, 0, 4), "3 pieces, and parallel.pp * pipeline.virtual_stages = 4; use 3 borders |", 5),
])  # fmt: skip
def test_a_layout_that_does_not_fit_names_the_key_and_both_numbers(text, model, message, column):
    problem, shown, caret = error_of(text, *model)
    assert problem.startswith(message) and (shown, caret) == (text, column)


def test_a_space_of_any_kind_keeps_the_caret_below_its_character():
    assert error_of("E\tt\n?L") == (error_of("E t ?L")[0], "E t ?L", 4)


def test_a_layout_that_would_fill_the_memory_is_refused():
    for text in (f"Et*{MAX_SIGNS}L", "E((t*1000)*1000)*1000L", f"Et*{'9' * 5000}L"):
        assert "more than 10000 letters" in error_of(text)[0]
    assert parse_layout("E" + "(" * 5000 + "t" + ")" * 5000 + "L") == ["EtL"]


def test_a_shortened_layout_is_parsed_to_the_same_pieces():
    draw = random.Random(0)
    for _ in range(300):
        pieces = ["t" * draw.choice((1, 1, 2, 2, 3, 4, 11)) for _ in range(draw.randrange(1, 12))]
        pieces = [piece for piece in pieces for _ in range(draw.choice((1, 1, 2, 5)))]
        pieces[-1] += "m" * draw.choice((0, 1, 5)) + "L"
        pieces[0] = "E" + pieces[0]
        short = short_layout(pieces)
        assert parse_layout(short) == pieces and len(short) <= len("|".join(pieces))


def parts_of(costs: list[float]) -> tuple[tuple[str, float], ...]:
    return tuple(zip("E" + "t" * (len(costs) - 2) + "L", costs, strict=True))


@pytest.mark.parametrize("num_stages", [0, 5])
def test_more_stages_than_parts_are_refused(num_stages):
    with pytest.raises(ConfigError, match=rf"= {num_stages}, and the model has 4 parts \(EttL\).*use 1 to 4"):
        balanced_layout(parts_of([0, 1, 1, 1]), range(num_stages))


def costs_of(lengths, costs: list[float], rank_of: tuple[int, ...]) -> tuple[float, float, float]:
    """Costs of the busiest rank and of the largest stage, and the sum of squares of all stages."""
    rest = iter(costs)
    stages = [sum(itertools.islice(rest, length)) for length in lengths]
    ranks = [sum(s for s, on in zip(stages, rank_of, strict=True) if on == rank) for rank in {*rank_of}]
    return max(ranks), max(stages), sum(s * s for s in stages)


def models_and_ranks(find):
    """Costs by a function's layouts and by the best of all, and those of the parts, of small models."""
    draw = random.Random(1)
    for _ in range(100):
        num_ranks = draw.choice((2, 3))
        alone = Placement.loop(draw.randrange(1, 7))
        placement = draw.choice((Placement.folded(num_ranks), Placement.loop(num_ranks, 2), alone))
        num_parts, rank_of = draw.randrange(max(placement.num_stages, 3), 11), placement.rank_of
        costs = [0, 3, *[draw.choice((2, 2, 2, 5)) for _ in range(num_parts - 3)], draw.choice((1, 4, 9))]
        costs = costs[:num_parts]
        borders = itertools.combinations(range(1, num_parts), len(rank_of) - 1)
        all_lengths = ([b - a for a, b in itertools.pairwise((0, *inner, num_parts))] for inner in borders)
        found = costs_of(map(len, parse_layout(find(parts_of(costs), rank_of))), costs, rank_of)
        yield found, min(costs_of(lengths, costs, rank_of) for lengths in all_lengths), costs


def test_no_layout_gives_the_busiest_rank_less_nor_more_even_stages():
    assert all(found == best for found, best, _ in models_and_ranks(balanced_layout))


def test_ranks_are_even_to_one_part_where_not_all_layouts_are_tried(monkeypatch):
    monkeypatch.setattr(balance, "MOST_TRIED", 0)
    misses = []
    for found, best, costs in models_and_ranks(balanced_layout.__wrapped__):
        assert found[0] <= best[0] + min(cost for cost in costs if cost)
        misses.append(found[0] / best[0] - 1)
    assert sum(misses) / len(misses) < 0.02


def test_the_segments_of_layers_are_those_that_layers_have():
    config = ModelConfig()
    with torch.device("meta"):
        dense, moe = DenseLayer(config).segments(), MoELayer(config, MoEConfig()).segments()
    assert (tuple(s.name for s in dense), tuple(s.name for s in moe)) == (DENSE_SEGMENTS, MOE_SEGMENTS)


OF_SEGMENTS = {"attn": 1.5, "mlp": 0.5, "moe_router..moe_preprocess": 1.0, "moe_dispatch..moe_combine": 2.5}


@pytest.mark.parametrize(
    "measured",
    [
        {"dense": 2.0, "moe": 5.0}, {"attn..mlp": 2.0, "attn..moe_combine": 5.0}, OF_SEGMENTS,
        {"dense": 2.0, "moe": 5.0, "embed": 0.0, "mtp": 8.0},
    ],
)  # fmt: skip
def test_times_may_be_of_parts_segments_or_units(measured):
    mtp = measured.get("mtp", 5.0)
    expected = [("E", 0.0), ("t", 2.0), ("t", 5.0), ("t", 5.0), ("m", mtp), ("L", 3.0)]
    model = ModelConfig(num_layers=3, num_dense_layers=1, mtp_depth=1)
    assert measured_parts(model, {**measured, "loss": 3}) == expected
    assert balanced_layout(tuple(expected), range(2)) == "Ettt|mL"
