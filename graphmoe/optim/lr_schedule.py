"""Learning-rate schedules as functions of a device step counter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.config.choices import look_up
from graphmoe.config.schema import OptimConfig

# map decay progress, 0 to 1, to a position between floor (0) and peak (1)
DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "cosine": lambda progress: 0.5 * (1 + torch.cos(math.pi * progress)),
    "wsd": lambda progress: 1 - progress.sqrt(),
}


class LrNumbers(NamedTuple):
    """Numbers of a schedule, as floats or fp32 device scalars."""

    peak: Any
    floor: Any
    """Final over peak learning rate."""
    warmup: Any
    start: Any
    span: Any

    @classmethod
    def of(cls, config: OptimConfig, total_steps: int) -> LrNumbers:
        decay = config.decay_steps(total_steps)
        return cls(
            config.lr, config.min_lr_ratio, float(config.warmup_steps), float(decay.start), float(len(decay))
        )


def learning_rate(schedule: str, numbers: LrNumbers, done: Tensor) -> Tensor:
    """Return the learning rate after ``done`` applied steps; fp32 scalar, no device sync.

    Linear warm-up, then constant; cosine (arXiv 1608.03983); wsd: constant, then 1 - sqrt decay over the last
    steps (arXiv 2405.18392, section 4); or a plug-in. Decays end at floor * peak.
    """
    step = done.float() + 1
    factor = torch.ones_like(step)
    if schedule != "constant":
        decay = look_up(DECAYS, schedule, "optim.schedule")
        progress = ((step - numbers.start) / numbers.span).clamp(0, 1)
        factor = numbers.floor + (1 - numbers.floor) * decay(progress)
    rising = step / numbers.warmup.clamp_min(1.0)
    return numbers.peak * torch.where(step < numbers.warmup, rising, factor)
