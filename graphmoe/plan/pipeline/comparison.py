"""A schedule that is slower than 1f1b, in words that name what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from graphmoe.config.schema import ConfigError
from graphmoe.plan.pipeline.plan import pipeline_of
from graphmoe.plan.pipeline.schedules import SCHEDULES
from graphmoe.plan.pipeline.simulate import simulate
from graphmoe.plan.pipeline.timeline import Timeline
from graphmoe.plan.plan import Plan

PLAIN = "1f1b"
SIMULATED = 16
"""Most micro-batches, for each rank of a pipeline, that are simulated: tables of thousands take seconds."""


def run_slower_than_1f1b(plan: Plan) -> str | None:
    """Return `slower_than_1f1b` of a run's own schedule, by modelled or given times. *Raises* ConfigError."""
    config, layout = plan.config, plan.layout
    if plan.pipeline is None or config.pipeline.ep_overlap or config.pipeline.schedule == PLAIN:
        return None  # what pairs hide is not known here
    most = SIMULATED * layout.pp * config.train.micro_batch_size * layout.dp
    train = replace(config.train, global_batch_size=min(config.train.global_batch_size, most))

    def timeline_of(name: str) -> Timeline | None:
        own = replace(config.pipeline, microbatches=None)
        if name != own.schedule:
            own = replace(own, schedule=name, virtual_stages=None, layout=None)
        try:
            pipeline = pipeline_of(replace(config, train=train, pipeline=own), layout)
        except ConfigError:
            return None
        return simulate(pipeline.table, pipeline.costs) if pipeline else None

    words = slower_than_1f1b(config.pipeline.schedule, timeline_of)
    if words is None or train == config.train:
        return words
    return f"{words} ({SIMULATED * layout.pp} of {plan.num_micro_batches} micro-batches)"


def slower_than_1f1b(schedule: str, timeline_of: Callable[[str], Timeline | None]) -> str | None:
    """Return words that name a schedule to use instead; None where ``schedule`` is no slower than 1f1b.

    ``timeline_of`` simulates a schedule with the same ranks and micro-batches; None where it can't run.
    """
    if schedule == PLAIN:
        return None
    own, plain = timeline_of(schedule), timeline_of(PLAIN)
    if own is None or plain is None or own.makespan <= plain.makespan * (1 + 1e-9):
        return None
    kept = max(own.peak_activations)
    found = ((name, timeline_of(name)) for name in SCHEDULES if name not in (schedule, PLAIN))
    others = {PLAIN: plain, **{name: timeline for name, timeline in found if timeline}}
    fitting = {name: t for name, t in others.items() if max(t.peak_activations) <= kept}
    best = min(fitting, key=lambda name: fitting[name].makespan, default=None)
    if best is None or fitting[best].makespan >= own.makespan:
        instead = "no schedule that keeps so few is faster"
    else:
        instead = f"use {best}, the fastest that keeps no more: {_shown(fitting[best])}"
    return (
        f"{schedule} is slower than {PLAIN} by simulation: {_shown(own)}, {PLAIN} {_shown(plain)}; {instead}"
    )


def _shown(timeline: Timeline) -> str:
    return f"bubble {timeline.bubble:.1%} with {max(timeline.peak_activations):g} activations"
