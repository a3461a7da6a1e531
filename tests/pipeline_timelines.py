"""Timelines of pipelines, made by hand."""

from graphmoe.plan.pipeline.actions import Action, Kind, Placement, Together
from graphmoe.plan.pipeline.simulate import Span, Timeline

F0, B0, I0, W0 = (Action(kind, 0, 0) for kind in ("F", "B", "I", "W"))


def two_ranks() -> Timeline:
    """One micro-batch through two ranks; the first splits its backward. Idle: 4 of 12 and 6 of 12."""
    spans = (
        Span(0, "compute", F0, 0, 3),
        Span(0, "comm", I0, 9, 10),
        Span(0, "compute", I0, 10, 11),
        Span(0, "compute", W0, 11, 12),
        Span(1, "comm", Action("F", 1, 0), 3, 4),
        Span(1, "compute", Action("F", 1, 0), 4, 6),
        Span(1, "compute", Action("B", 1, 0), 6, 9),
    )
    return Timeline("mixed", Placement.loop(2), 1, spans, 12.0, 14 / 24, (1.0, 1.0))


def folded_in_turns() -> Timeline:
    """Two ranks of two stages each; rank 0 runs a forward and a backward in turns."""
    placement = Placement.folded(2)
    spans = (
        Span(0, "compute", Action("F", 0, 0), 0, 1),
        Span(0, "compute", Together(Action("F", 0, 1), Action("B", 3, 0)), 5, 8),
        Span(1, "compute", Action("F", 1, 0), 1, 2),
        Span(1, "compute", Action("F", 2, 0), 2, 3),
    )
    return Timeline("folded", placement, 2, spans, 8.0, 10 / 16, (1.0, 1.0), (2.0**30, 2.0**31))


def long_timeline(num_ranks: int = 8, num_micro_batches: int = 32) -> Timeline:
    """Every rank does a forward, then the gradients of inputs and weights, of each micro-batch."""
    kinds: tuple[Kind, ...] = ("F", "I", "W")
    spans = tuple(
        Span(rank, "compute", Action(kind, rank, number), 3.0 * number + place, 3.0 * number + place + 1)
        for rank in range(num_ranks)
        for number in range(num_micro_batches)
        for place, kind in enumerate(kinds)
    )
    placement = Placement.loop(num_ranks)
    return Timeline(
        "long", placement, num_micro_batches, spans, 3.0 * num_micro_batches, 0.0, (1.0,) * num_ranks
    )
