"""Sources of timelines: schedules with costs that are given or modelled, and recordings of runs."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from graphmoe.config.schema import ConfigError
from graphmoe.pipeline_view.bars import Panel
from graphmoe.plan.costs.segment_times import SegmentTime
from graphmoe.plan.pipeline.actions import Action, Placement, Together
from graphmoe.plan.pipeline.check import TableError
from graphmoe.plan.pipeline.simulate import Costs, Timeline, simulate, table_of
from graphmoe.runtime.pipeline.recorder import FILE_NAME, read_timelines

MS_PER_US = 1e-3


def modelled_costs(
    stages: Sequence[SegmentTime], placement: Placement, forward: float, equal: Costs
) -> Costs:
    """Scale modelled costs of stages so that a rank's forward takes ``forward`` in the mean of ranks.

    Transfers, savings and activations are those of ``equal``.
    """
    scale = forward * placement.num_ranks / sum(stage.forward for stage in stages)
    return dataclasses.replace(
        equal,
        forward=tuple(stage.forward * scale for stage in stages),
        backward_input=tuple(stage.inputs * scale for stage in stages),
        backward_weight=tuple(stage.weights * scale for stage in stages),
    )


def recorded_panels(run: Path, step: int | None, comm: float) -> list[Panel]:
    """Return a step as a run recorded it, by default the last one, and as simulated with the run's own times.

    *Raises* ConfigError where the run recorded nothing, not this step, or only a part of it.
    """
    path = run / FILE_NAME
    timelines = read_timelines(path)
    if not timelines:
        raise ConfigError(f"{path} has no steps; let the run go on for some with profile.pipeline=true")
    if step is None:
        step = max(timelines)
    if step not in timelines:
        raise ConfigError(
            f"step={step} is not in {path}; use one of {', '.join(map(str, sorted(timelines)))}"
        )
    recorded = timelines[step]
    costs = median_costs(timelines.values(), comm / MS_PER_US)
    table = table_of(recorded.schedule, recorded.placement, recorded.num_micro_batches, recorded.spans)
    try:
        simulated = simulate(table, costs)
    except TableError as error:
        raise ConfigError(f"step {step} of {path} is no whole step: {error}") from error
    name = recorded.schedule
    return [
        Panel(f"{name}, step {step} as recorded", recorded, "ms", MS_PER_US),
        Panel(f"{name}, simulated with the run's median times", simulated, "ms", MS_PER_US),
    ]


def median_costs(timelines: Iterable[Timeline], comm: float) -> Costs:
    """Return the median times of a run's steps by stage and kind, in the unit of the timelines.

    A forward and a backward that take turns give only the time that they save: the median of all such pairs.
    For a stage that never runs one of them alone, half of a pair's time is taken.
    """
    durations: dict[tuple[str, int], list[float]] = defaultdict(list)
    halves: dict[tuple[str, int], list[float]] = defaultdict(list)
    pairs: list[tuple[Together, float]] = []
    placement = None
    for timeline in timelines:
        placement = timeline.placement
        for span in timeline.spans:
            if span.track != "compute":
                continue
            took = span.end - span.start
            if isinstance(span.step, Together):
                pairs.append((span.step, took))
                for action in span.step:
                    halves[action.kind, action.stage].append(took / 2)
            else:
                durations[span.step.kind, span.step.stage].append(took)
    assert placement is not None

    def of(kind: str, stage: int) -> float:
        known = durations.get((kind, stage)) or halves.get((kind, stage))
        return statistics.median(known) if known else 0.0

    def alone(action: Action) -> float:
        return of(action.kind, action.stage)

    saved = [alone(pair.forward) + alone(pair.backward) - took for pair, took in pairs]
    stages = range(placement.num_stages)
    return Costs(
        tuple(of("F", stage) for stage in stages),
        tuple(of("I", stage) or of("B", stage) for stage in stages),  # B is I and W in one
        tuple(of("W", stage) for stage in stages),
        comm,
        max(statistics.median(saved), 0.0) if saved else 0.0,
    )
