"""Timelines of pipelines, made by hand."""

from graphmoe.plan.pipeline import Action, Placement, Table, Together
from graphmoe.plan.pipeline.simulate import Span, timeline_of

F0, B0, I0, W0 = (Action(kind, 0, 0) for kind in ("F", "B", "I", "W"))


def two_ranks():
    """One micro-batch through two ranks; the first splits its backward. Idle: 4 of 12 and 6 of 12."""
    spans = (
        Span(0, "compute", F0, 0, 3), Span(0, "comm", I0, 9, 10), Span(0, "compute", I0, 10, 11),
        Span(0, "compute", W0, 11, 12), Span(1, "comm", Action("F", 1, 0), 3, 4),
        Span(1, "compute", Action("F", 1, 0), 4, 6), Span(1, "compute", Action("B", 1, 0), 6, 9),
    )  # fmt: skip
    return timeline_of(Table("mixed", Placement.loop(2), 1, ()), spans)


def folded_in_turns():
    """Two ranks of two stages each; rank 0 runs a forward and a backward in turns."""
    in_turns = Together(Action("F", 0, 1), Action("B", 3, 0))
    spans = (
        Span(0, "compute", Action("F", 0, 0), 0, 1), Span(0, "compute", in_turns, 5, 8),
        Span(1, "compute", Action("F", 1, 0), 1, 2), Span(1, "compute", Action("F", 2, 0), 2, 3),
    )  # fmt: skip
    return timeline_of(Table("folded", Placement.folded(2), 2, ()), spans, (2.0**30, 2.0**31))
