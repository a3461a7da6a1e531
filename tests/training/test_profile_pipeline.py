"""Spans of several ranks in one time, and a setting that records nothing."""

from __future__ import annotations

from graphmoe.plan.pipeline.actions import Action
from graphmoe.plan.pipeline.simulate import Span
from graphmoe.training.profile import _Part, in_common_time


def part(host: str, rank: int, began_ns: int) -> _Part:
    return _Part(host, began_ns, [Span(rank, "compute", Action("F", rank, 0), 1.0, 3.0)], None)


def test_on_one_host_spans_are_moved_by_its_clock():
    found = in_common_time([part("a", 0, 5_000), part("a", 1, 7_500)])
    assert [(span.rank, span.start, span.end) for span in found] == [(0, 1.0, 3.0), (1, 3.5, 5.5)]


def test_on_several_hosts_whose_clocks_differ_all_begin_at_the_barrier():
    found = in_common_time([part("a", 0, 5_000), part("b", 1, 7_500)])
    assert [(span.start, span.end) for span in found] == [(1.0, 3.0)] * 2
