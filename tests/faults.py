"""A pass that changes nothing, in a module that slows or breaks the worker that imports it.

For workers in processes of their own, which a test reaches by ``passes.extra`` and the environment only.
"""

from __future__ import annotations

import os
import time

import torch.fx

from graphmoe.trainer import Trainer

WORDS = ("passes.extra=[tests.faults:nothing]",)
STEP_S = "FAULT_STEP_S"
"""Seconds that each step takes longer."""
RAISE_AT = "FAULT_RAISE_AT"
"""'rank:attempt:step ...': where a worker raises, before that step."""

_whole_step = Trainer._train_step


def nothing(graph: torch.fx.Graph) -> int:
    """The pass."""
    return 0


def _step(self: Trainer) -> None:
    time.sleep(float(os.environ.get(STEP_S, "0")))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if f"{self.world.rank}:{attempt}:{self.step + 1}" in os.environ.get(RAISE_AT, "").split():
        raise RuntimeError(f"the cause, before step {self.step + 1}")
    _whole_step(self)


Trainer._train_step = _step  # type: ignore[method-assign]
