"""Layout strings: what they stand for, how they are shortened, and where their errors point."""

import random

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.plan.pipeline.layouts import MAX_SIGNS, StagePieces, parse_layout, pieces_of, short_layout

EXAMPLE = "Et|(tt|)*6L"


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
        (EXAMPLE, ["Et", *["tt"] * 6, "L"]),
        ("Et*3|t*2L", ["Ettt", "ttL"]),
        ("E t, t | t t, L", ["Ett", "ttL"]),
        ("E t * 3 | L", ["Ettt", "L"]),
        ("E(t)*2|(t|(tt|)*2)*2mL", ["Ett", "t", "tt", "tt", "t", "tt", "tt", "mL"]),
        ("E|(t(m))L", ["E", "tmL"]),
        ("(E|t)L", ["E", "tL"]),
        ("Et|tm|L", ["Et", "tm", "L"]),
        ("Et*010L", ["Etttttttttt" + "L"]),
        ("Et(|t)*2L", ["Et", "t", "tL"]),
        ("EL", ["EL"]),
    ],
)
def test_a_layout_is_written_out_as_pieces(text, pieces):
    assert parse_layout(text) == pieces


def test_pieces_number_layers_over_the_whole_model():
    stages = pieces_of("Et|ttt|tm|mL", num_layers=5, mtp_depth=2, num_stages=4)
    assert stages == (
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
        ("Et*-2L", "a number above 0 must follow the star", 2),
        ("Et*1 2L", "'2' is not a letter", 5),
        ("*3tL", "there is nothing here to repeat; write such as t*3 or (tt|)*3", 0),
        ("E(*3t)L", "there is nothing here to repeat", 2),
        ("Et*2*3L", "there is nothing here to repeat", 4),
        ("E(, )L", "nothing is in these parentheses", 1),
        ("tt|L", "the letters are E once, then every t, then every m, then L once", 0),
        ("Et|EL", "the letters are E once", 3),
        ("E*2tL", "the letters are E once", 0),
        ("Et|tt", "the letters are E once", 4),
        ("Et|Lt", "the letters are E once", 4),
        ("EtL|tL", "the letters are E once", 4),
        ("Etm|tL", "the letters are E once", 4),
        ("Et||L", "a stage beside this border is empty", 2),
        ("|EtL", "a stage beside this border is empty", 0),
        ("E(|t)*2||L", "a stage beside this border is empty", 7),
        ("E(t|)*2", "a stage beside this border is empty", 3),
        ("", "it is empty; write such as 'Ett|ttL'", 0),
        (" , ", "it is empty", 0),
    ],
)
def test_an_error_points_at_the_character(text, message, column):
    problem, shown, caret = error_of(text)
    assert problem.startswith(message) and (shown, caret) == (text, column)


@pytest.mark.parametrize(
    "text, model, message, column",
    [
        (EXAMPLE, (12, 0, 8), "t occurs 13 times, but model.num_layers=12; take 1 away", 5),
        (EXAMPLE, (20, 0, 8), "t occurs 13 times, but model.num_layers=20; add 7", 5),
        ("EL", (2, 0, 1), "t occurs 0 times, but model.num_layers=2; add 2", 1),
        ("EtmmL", (1, 1, 1), "m occurs 2 times, but model.mtp_depth=1; take 1 away", 3),
        ("EtL", (1, 1, 1), "m occurs 0 times, but model.mtp_depth=1; add 1", 2),
        ("Et|t|L", (2, 0, 2), "3 pieces, and parallel.pp * pipeline.virtual_stages = 2; use 1 border |", 4),
        ("Et|t|L", (2, 0, 4), "3 pieces, and parallel.pp * pipeline.virtual_stages = 4; use 3 borders |", 5),
    ],
)
def test_a_layout_that_does_not_fit_names_the_key_and_both_numbers(text, model, message, column):
    problem, shown, caret = error_of(text, *model)
    assert problem.startswith(message) and (shown, caret) == (text, column)


def test_a_space_of_any_kind_keeps_the_caret_below_its_character():
    assert error_of("E\tt\n?L") == (error_of("E t ?L")[0], "E t ?L", 4)


@pytest.mark.parametrize("text", [f"Et*{MAX_SIGNS}L", "E((t*1000)*1000)*1000L", f"Et*{'9' * 5000}L"])
def test_a_layout_that_would_fill_the_memory_is_refused(text):
    assert "more than 10000 letters" in error_of(text)[0]


def test_parentheses_in_parentheses_may_be_as_many_as_one_likes():
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
