"""A pass that changes nothing, in a module that slows or breaks the worker that imports it.

For workers in processes of their own, which a test reaches by ``passes.extra`` and the environment only.
"""

import os
import signal
import threading
import time

import torch
import torch.fx

from graphmoe.training.micro_batches import Pipelined
from graphmoe.training.trainer import Trainer

WORDS = ("passes.extra=[tests.faults:nothing]",)
STEP_S = "FAULT_STEP_S"
"""Seconds that each step takes longer."""
RAISE_AT = "FAULT_RAISE_AT"
"""'rank:attempt:step ...': where a worker raises, before that step."""
HANG_AT = "FAULT_HANG_AT"
"""The same for where it sleeps for an hour."""
SIGNAL_AT = {number: f"FAULT_{number.name}_AT" for number in (signal.SIGKILL, signal.SIGSTOP)}
"""The same for where it sends itself a signal."""
IN_STAGE = {name: f"FAULT_{name}_IN_STAGE_AT" for name in ("RAISE", "SIGKILL")}
"""The same for what happens inside the step: in a stage of a pipeline, in its second micro-batch."""
HOLD = "FAULT_HOLD"
"""Switch that keeps a thread inside an operation of torch, as gloo's may be when it frees a tensor."""

_whole_step = Trainer._train_step
_whole_stage = Pipelined._run
_of_stage = []
"""Fault of the next second micro-batch."""


def nothing(graph: torch.fx.Graph) -> int:
    return 0


def _step(self):
    time.sleep(float(os.environ.get(STEP_S, "0")))
    if _is_due(self, RAISE_AT):
        raise RuntimeError(f"the cause, before step {self.step + 1}")
    if _is_due(self, HANG_AT):
        time.sleep(3600)
    for number, name in SIGNAL_AT.items():
        if _is_due(self, name):
            os.kill(os.getpid(), number)
    for name, fault in (("RAISE", _raise), ("SIGKILL", _kill)):
        if _is_due(self, IN_STAGE[name]):
            _of_stage.append(fault)
    _whole_step(self)


def _stage(self, number, micro_batch, received):
    if micro_batch == 1 and _of_stage:
        _of_stage.pop()()
    return _whole_stage(self, number, micro_batch, received)


def _raise():
    raise RuntimeError("the cause, in a stage")


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _is_due(trainer, name):
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return f"{trainer.ranks.rank}:{attempt}:{trainer.step + 1}" in os.environ.get(name, "").split()


def _hold():
    numbers = torch.rand(3_000_000)
    while True:
        torch.sort(numbers)


if HOLD in os.environ:
    threading.Thread(target=_hold, daemon=True).start()
Trainer._train_step = _step
Pipelined._run = _stage
