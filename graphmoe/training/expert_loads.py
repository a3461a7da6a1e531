"""How full each expert was in the course of a run: expert_load.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from graphmoe.run.files import EXPERT_LOADS_FILE
from graphmoe.run.metrics_file import cut_metrics
from graphmoe.runtime.host.files import LineFile
from graphmoe.training.step_rows import StepRow

MAX_LINES = 200
"""Of a run at most, so that the file of many layers and experts stays small."""


class ExpertLoads:
    """Writes means over steps next to each other, of rows that the host has read anyway."""

    def __init__(self, folder: Path, done: int, total_steps: int) -> None:
        """Go on after step ``done`` of a run of ``total_steps``; what is there of later ones is dropped."""
        self._file = LineFile(folder / EXPERT_LOADS_FILE)
        cut_metrics(folder / EXPERT_LOADS_FILE, done)
        self._last, self._every = total_steps, -(-total_steps // MAX_LINES)
        self._sum_LE: Tensor | None = None
        self._steps = 0

    def write(self, rows: Sequence[StepRow]) -> None:
        """Take the rows of the next steps; a line is due when it stands for enough of them, or for the last.

        It has ``step``, the last of its ``steps`` steps, and ``load``: for each MoE layer the slots of each
        expert over the layer's mean.
        """
        for row in rows:
            if not row.load_LE.numel():
                return
            self._sum_LE = row.load_LE if self._sum_LE is None else self._sum_LE + row.load_LE
            self._steps += 1
        if self._sum_LE is None or (self._steps < self._every and rows[-1].step < self._last):
            return
        load = [[round(x, 3) for x in layer] for layer in (self._sum_LE / self._steps).tolist()]
        self._file.append([json.dumps({"step": rows[-1].step, "steps": self._steps, "load": load})])
        self._sum_LE, self._steps = None, 0

    def close(self) -> None:
        self._file.close()
