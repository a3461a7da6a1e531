"""Learning-rate schedules as functions of a device step counter."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphmoe.config import LrSchedule, OptimConfig


def learning_rate(config: OptimConfig, total_steps: int, done: Tensor) -> Tensor:
    """Learning rate of the step that follows ``done`` applied steps; fp32 scalar, no device sync.

    Linear warm-up from lr / warmup_steps, then constant; or a cosine down to min_lr_ratio * lr at the
    last step (arXiv 1608.03983); or wsd: stable, then a 1 - sqrt decay over the last
    wsd_decay_fraction of the steps (arXiv 2405.18392, section 4).
    """
    step = done.float() + 1
    factor = torch.ones_like(step)
    if config.schedule is LrSchedule.cosine:
        span = max(total_steps - config.warmup_steps, 1)
        progress = ((step - config.warmup_steps) / span).clamp(0, 1)
        factor = _between(config.min_lr_ratio, 0.5 * (1 + torch.cos(math.pi * progress)))
    elif config.schedule is LrSchedule.wsd:
        span = max(round(total_steps * config.wsd_decay_fraction), 1)
        progress = ((step - (total_steps - span)) / span).clamp(0, 1)
        factor = _between(config.min_lr_ratio, 1 - progress.sqrt())
    if config.warmup_steps:
        factor = torch.where(step < config.warmup_steps, step / config.warmup_steps, factor)
    return config.lr * factor


def _between(floor: float, share: Tensor) -> Tensor:
    return floor + (1 - floor) * share
