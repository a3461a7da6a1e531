"""Compiled units whose graphs run operation by operation: for tensors without data."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from graphmoe.runtime.compile.code import Compiled
from graphmoe.runtime.compile.cut import said_of
from graphmoe.runtime.compile.executor import CompiledSegments, UnitReport
from graphmoe.runtime.torch_compat import without_modes
from graphmoe.segments import Executor, Segment

log = logging.getLogger(__name__)


class CurrentSegment:
    """Name of the segment whose operations run."""

    segment = ""


class GraphSegments(CompiledSegments):
    """``CompiledSegments`` up to the compiler: traced, rewritten by passes, cut into F, I and W.

    So what is kept between forward and backward is what a compiled run keeps. Inside a graph each
    operation has a result of its own, where a compiler would join several.
    """

    def __init__(self, current: CurrentSegment, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._current = current

    def _compile(self, *arguments: Any) -> Any:
        with without_modes():  # a trace has a mode of its own, and nothing that it makes is of the step
            code, report = super()._compile(*arguments)
            code.compile_rest()
            return code, report

    def _compile_graph(self, report: UnitReport, graph: fx.GraphModule) -> Compiled:
        report.graphs += 1
        # A new interpreter each time: an old one would hold what it has computed.
        return lambda *tensors: _NotingInterpreter(graph, self._current).run(*tensors)

    def _add(self, report: UnitReport) -> None:
        self.reports.append(report)
        log.info("traced %s: %d graphs in %.1f s", report.unit, report.graphs, report.seconds)


class _NotingInterpreter(fx.Interpreter):
    """Interpreter of a graph that notes the segment of each operation."""

    def __init__(self, graph: fx.GraphModule, current: CurrentSegment) -> None:
        super().__init__(graph)
        self._current = current

    def run_node(self, n: fx.Node) -> Any:
        self._current.segment = said_of(n, "segment") or ""
        return super().run_node(n)


class NotedSegments:
    """Executor that notes each segment that an eager one runs."""

    def __init__(self, execute: Executor, current: CurrentSegment) -> None:
        self._execute, self._current = execute, current

    def __call__(
        self, segments: Sequence[Segment], tensors: dict[str, Tensor], keep: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        told = [replace(segment, run=functools.partial(self._run, segment)) for segment in segments]
        return self._execute(told, tensors, keep)

    def _run(self, segment: Segment, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        self._current.segment = segment.name
        return segment.run(*tensors)
