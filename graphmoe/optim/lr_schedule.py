"""Learning-rate schedules as functions of a device step counter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.config.schema import LrSchedule, OptimConfig


class LrNumbers(NamedTuple):
    """A schedule's numbers: fp32 scalars on the device, so that others need no other code, or floats."""

    peak: Any
    floor: Any
    """Final learning rate over the peak."""
    warmup: Any
    """Steps of linear warm-up."""
    start: Any
    """Steps before the decay."""
    span: Any
    """Steps of the decay."""

    @classmethod
    def of(cls, config: OptimConfig, total_steps: int) -> LrNumbers:
        """The numbers of a configuration, as floats."""
        start, span = config.warmup_steps, max(total_steps - config.warmup_steps, 1)
        if config.schedule is LrSchedule.wsd:
            span = max(round(total_steps * config.wsd_decay_fraction), 1)
            start = total_steps - span
        return cls(config.lr, config.min_lr_ratio, float(config.warmup_steps), float(start), float(span))


def learning_rate(schedule: LrSchedule, numbers: LrNumbers, done: Tensor) -> Tensor:
    """Learning rate of the step that follows ``done`` applied steps; fp32 scalar, no device sync.

    Linear warm-up from peak / warmup, then constant; or a cosine down to floor * peak at the last step
    (arXiv 1608.03983); or wsd: stable, then a 1 - sqrt decay over the last steps (arXiv 2405.18392,
    section 4). ``numbers`` are scalar tensors.
    """
    step = done.float() + 1
    factor = torch.ones_like(step)
    progress = ((step - numbers.start) / numbers.span).clamp(0, 1)
    if schedule is LrSchedule.cosine:
        factor = _between(numbers.floor, 0.5 * (1 + torch.cos(math.pi * progress)))
    elif schedule is LrSchedule.wsd:
        factor = _between(numbers.floor, 1 - progress.sqrt())
    rising = step / numbers.warmup.clamp_min(1.0)
    return numbers.peak * torch.where(step < numbers.warmup, rising, factor)


def _between(floor: Tensor, share: Tensor) -> Tensor:
    return floor + (1 - floor) * share


def lr_schedule_rules(config: OptimConfig, total_steps: int) -> Iterator[str]:
    """Name what a wsd schedule cannot do: a decay of no steps, or one that begins inside the warm-up."""
    fraction, warmup = config.wsd_decay_fraction, config.warmup_steps
    if fraction == 0:
        yield "optim.wsd_decay_fraction=0 never decays; use a share above 0, or optim.schedule=constant"
    if config.schedule is not LrSchedule.wsd or not 0 < fraction <= 1:
        return
    start = int(LrNumbers.of(config, total_steps).start)
    if start < warmup <= total_steps:
        yield (
            f"optim.warmup_steps={warmup} ends after the decay of optim.schedule=wsd begins: of "
            f"train.steps={total_steps} those from {start} on decay (optim.wsd_decay_fraction={fraction}); "
            f"use at most optim.warmup_steps={start}, or optim.schedule=cosine"
        )
