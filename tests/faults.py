"""A pass that changes nothing, in a module that slows or breaks the worker that imports it.

For workers in processes of their own, which a test reaches by ``passes.extra`` and the environment only.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
import torch.fx

from graphmoe.trainer import Trainer

WORDS = ("passes.extra=[tests.faults:nothing]",)
STEP_S = "FAULT_STEP_S"
"""Seconds that each step takes longer."""
RAISE_AT = "FAULT_RAISE_AT"
"""'rank:attempt:step ...': where a worker raises, before that step."""
HANG_AT = "FAULT_HANG_AT"
"""The same for where it sleeps for an hour."""
SIGNAL_AT = {number: f"FAULT_{number.name}_AT" for number in (signal.SIGKILL, signal.SIGSTOP)}
"""The same for where it sends itself a signal."""
HOLD = "FAULT_HOLD"
"""Set: a thread is always inside an operation of torch, as one of gloo may be that lets go of a tensor."""

_whole_step = Trainer._train_step


def nothing(graph: torch.fx.Graph) -> int:
    """The pass."""
    return 0


def _step(self: Trainer) -> None:
    time.sleep(float(os.environ.get(STEP_S, "0")))
    if _is_due(self, RAISE_AT):
        raise RuntimeError(f"the cause, before step {self.step + 1}")
    if _is_due(self, HANG_AT):
        time.sleep(3600)
    for number, name in SIGNAL_AT.items():
        if _is_due(self, name):
            os.kill(os.getpid(), number)
    _whole_step(self)


def _is_due(trainer: Trainer, name: str) -> bool:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return f"{trainer.world.rank}:{attempt}:{trainer.step + 1}" in os.environ.get(name, "").split()


def _hold() -> None:
    numbers = torch.rand(3_000_000)
    while True:
        torch.sort(numbers)


if HOLD in os.environ:
    threading.Thread(target=_hold, daemon=True).start()
Trainer._train_step = _step  # type: ignore[method-assign]
