"""The report of a compilation: what passes left is counted and explained for what is trained."""

from torch import fx

from graphmoe.passes.table import PassRunner, PassSpec, Rewrites
from graphmoe.runtime.compile.executor import UnitReport
from graphmoe.runtime.compile.report import to_json, to_text

CACHE = {"fx_hits": 0}


def one_of_two(graph: fx.Graph) -> Rewrites:
    return Rewrites(1, ("sin_1: it has 2 users",), "nothing to see")


def no_candidates(graph: fx.Graph) -> Rewrites:
    return Rewrites(0, (), "0 sorts, none of expert ids")


SPECS = [
    PassSpec("one_of_two", one_of_two, "forward", "bitwise"),
    PassSpec("no_candidates", no_candidates, "forward", "bitwise", ("moe_experts",)),
]


def report(unit: str, trains: bool) -> UnitReport:
    rows = PassRunner(SPECS).run("forward", fx.symbolic_trace(lambda x: x + x), unit, (unit,))
    return UnitReport(unit, trains, 3 if trains else 1, 0.5, CACHE, rows)


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if f" {name} " in line and "left by" not in line]
    return line.replace("│", " ").split()[1:-1]


def test_what_trained_units_leave_is_counted_and_explained():
    text = to_text([report("mlp", True), report("attn", True), report("mlp", False)])
    assert row(text, "one_of_two")[:3] == ["2", "of", "4"]
    reasons = [line for line in text.splitlines() if "left by" in line]
    assert reasons == [f"left by one_of_two in {unit}: sin_1: it has 2 users" for unit in ("mlp", "attn")]


def test_a_pass_without_candidates_is_mentioned_only_where_it_should_have_some(passes_may_miss):
    assert row(to_text([report("mlp", True)]), "no_candidates")[:1] == ["0"]
    text = to_text([report("moe_experts", True)])
    assert row(text, "no_candidates")[:3] == ["0", "of", "1"]
    assert "left by no_candidates in moe_experts: 0 sorts, none of expert ids" in text


def test_the_document_has_the_reasons_of_every_unit():
    (unit,) = to_json([report("mlp", False)], 0, "")["units"]
    assert [row["left"] for row in unit["passes"]] == [("sin_1: it has 2 users",), ()]
