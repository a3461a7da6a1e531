"""Rules of learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterator

from graphmoe.config.schema import LrSchedule, OptimConfig


def wsd_decay_start(config: OptimConfig, total_steps: int) -> int:
    """Return the number of steps before the decay of optim.schedule=wsd."""
    return total_steps - max(round(total_steps * config.wsd_decay_fraction), 1)


def lr_schedule_rules(config: OptimConfig, total_steps: int) -> Iterator[str]:
    """Name a wsd decay of no steps, or one that begins inside the warm-up."""
    fraction, warmup = config.wsd_decay_fraction, config.warmup_steps
    if fraction == 0:
        yield "optim.wsd_decay_fraction=0 never decays; use a share above 0, or optim.schedule=constant"
    if config.schedule is not LrSchedule.wsd or not 0 < fraction <= 1:
        return
    start = wsd_decay_start(config, total_steps)
    if start < warmup <= total_steps:
        yield (
            f"optim.warmup_steps={warmup} ends after the decay of optim.schedule=wsd begins: of "
            f"train.steps={total_steps} those from {start} on decay (optim.wsd_decay_fraction={fraction}); "
            f"use at most optim.warmup_steps={start}, or optim.schedule=cosine"
        )
