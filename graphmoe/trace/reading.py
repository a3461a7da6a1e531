"""The summary of a trace, without a GPU of the host's time in ranges and operations."""

from __future__ import annotations

from collections import defaultdict

from graphmoe.config.schema import ConfigError
from graphmoe.run.records import STEP
from graphmoe.segments import FULL_ITERATION
from graphmoe.trace.events import Trace
from graphmoe.trace.gpu import of_gpu
from graphmoe.trace.owners import NOBODY, Owner, Owners, owners_of, self_times, step_of, unit_and_part
from graphmoe.trace.summary import OTHER, UNKNOWN, SegmentTime, Summary, calls_of, largest


def summarise(trace: Trace, num_kernels: int) -> Summary:
    """Read a trace's steps. *Raises* ConfigError for one without any."""
    if not trace.steps:
        raise ConfigError(f"{trace.path} has no range {STEP}..., so no steps; profile.steps records such")
    owners = owners_of(trace)
    summary = (of_gpu if trace.activities else _of_cpu)(trace, owners, num_kernels)
    summary.notes += _notes(summary)
    return summary


def _notes(summary: Summary) -> list[str]:
    """Sentences that a reader needs to read the numbers."""
    units = {segment.segment for segment in summary.segments}
    notes = []
    if summary.on == "cpu":
        notes.append(
            "no GPU in this trace: times are the host's. What a row has beyond its operations is Python, and "
            "of several ranks waits for each other"
        )
    if FULL_ITERATION in units:
        notes.append(
            f"one graph has the whole step (graph.scope={FULL_ITERATION}), and its kernels say nothing of "
            f"segments; they are in one row by name. graph.scope=layer tells segments apart"
        )
    if any(".." in unit for unit in units):
        notes.append("a row such as attn..mlp is a compiled unit: its kernels are fused over its segments")
    if UNKNOWN.unit in units:
        notes.append(f"{UNKNOWN.unit}: kernels whose launch is not in the trace")
    return notes


def _of_cpu(trace: Trace, owners: Owners, num_kernels: int) -> Summary:
    """Summarise ranges and operations."""
    steps = len(trace.steps)
    whole = sum(step.end - step.start for step in trace.steps)
    spent = _spent_in_ranges(trace, owners)
    times: dict[Owner, list[tuple[str, float, float | None]]] = defaultdict(list)
    for index, own in self_times(trace):
        event, place = trace.host[index], owners.host[index]
        if step_of(trace.steps, event.start) is None:
            continue
        owner = owners.of(place)
        times[OTHER if owner == NOBODY else owner].append((event.name, own, None))
        if place.sequence is not None and owner != NOBODY:  # an eager backward is in no range
            spent[owner] += own
    spent[OTHER] = max(whole - sum(spent.values()), 0.0)
    calls = calls_of(trace)
    segments = [
        SegmentTime(
            owner.unit,
            owner.part,
            calls[owner] / steps,
            time / steps / 1e3,
            None,
            largest(times[owner], steps, num_kernels),
        )
        for owner, time in sorted(spent.items(), key=lambda pair: -pair[1])
    ]
    return Summary(
        trace=str(trace.path),
        device=trace.device,
        on="cpu",
        facts=trace.facts,
        num_steps=steps,
        step_ms=whole / steps / 1e3,
        segments=segments,
    )


def _spent_in_ranges(trace: Trace, owners: Owners) -> dict[Owner, float]:
    """Microseconds in each range of ours, without those in ranges inside it."""
    spent: dict[Owner, float] = defaultdict(float)
    for event, around in zip(trace.host, owners.around, strict=True):
        named = unit_and_part(event.name) if event.is_range else None
        if named and step_of(trace.steps, event.start) is not None:
            spent[Owner(*named)] += event.end - event.start
            if around.owner != NOBODY:
                spent[around.owner] -= event.end - event.start
    return spent
