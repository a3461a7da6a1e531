"""The step of a run, or what replays it or parts of it from graphs, as ``graph.scope`` says."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from graphmoe.plan.plan import Plan
from graphmoe.runtime.capture.capture import REPORT_FILE, Capture, Place
from graphmoe.runtime.capture.step import CapturedStep, Step
from graphmoe.runtime.host.files import dispensable

log = logging.getLogger(__name__)


class CapturedRun:
    """Called like the step that it was given."""

    def __init__(
        self,
        step: Step,
        plan: Plan,
        capture: Capture | None,
        device: torch.device,
        places: Mapping[str, Place],
        folder: Path | None,
    ) -> None:
        """``places`` are what graphs find where it lies, ``folder`` where a report is wanted."""
        self._step, self._plan, self._capture, self._folder = step, plan, capture, folder
        if capture is None:
            return
        capture.watch(places)
        if device.type == "cpu":
            scope = capture.report.scope
            log.info("a CPU has no graphs: graph.scope=%s calls its functions on static buffers", scope)
        if plan.captures_step:
            self._step = CapturedStep(step, device, capture)

    def __call__(self, batches: Iterable[Tensor]) -> Tensor:
        if self._capture is None:
            return self._step(batches)
        if self._plan.captures_step:
            row = self._step(batches)
        else:
            with self._capture.step():
                row = self._step(batches)
        if self._capture.is_first_replay:
            self._report(self._capture)
        return row

    def release(self) -> None:
        """End what was captured, before the process groups do. No step may follow."""
        if self._capture:
            self._capture.maker.release()

    def _report(self, capture: Capture) -> None:
        """Write capture_report.json, and log what was captured by now."""
        capture.report.pool_bytes = capture.maker.pool_bytes()
        if self._folder is not None:
            with dispensable(self._folder / REPORT_FILE):
                capture.report.write(self._folder)
        log.info(capture.report.line())
        if isinstance(self._plan.config.graph.scope, str):
            return  # a word stands for segments that a model may lack; the report has them
        for segment, reason in capture.report.not_captured.items():
            log.warning("graph.scope names %s, which is not captured: %s", segment, reason)
