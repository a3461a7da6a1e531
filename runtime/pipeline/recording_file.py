"""A run's recording of its pipeline, ``pipeline.json`` in its folder, as timelines by step.

```
{"schedule": "1f1b", "rank_of": [0, 1], "num_micro_batches": 4,
 "steps": [{"step": 12, "peak_bytes": [1, 2], "spans": [[0, "compute", "0F0", 0.0, 310.5], ...]}]}
```

A span is rank, track, action (``0F3+0B1`` where two take turns), start and end in microseconds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import get_args

import msgspec

from graphmoe.config.schema import ConfigError
from graphmoe.config.untrusted import read_json
from graphmoe.plan.pipeline.actions import Action, Placement, Step, Table, Together
from graphmoe.plan.pipeline.check import peak_activations
from graphmoe.plan.pipeline.timeline import Span, Timeline, Track
from graphmoe.runtime.host.files import replace_text

FILE_NAME = "pipeline.json"
_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_Row = tuple[int, str, str, float, float]


class _Step(msgspec.Struct):
    step: int
    spans: list[_Row]
    peak_bytes: list[float] | None = None


class _Recording(msgspec.Struct):
    """The file."""

    schedule: str
    rank_of: list[int]
    num_micro_batches: int
    steps: list[_Step]


def write(path: Path, timelines: Mapping[int, Timeline]) -> None:
    """Write the timelines of a run by step, all of one schedule; the file is there whole or not at all."""
    first = next(iter(timelines.values()))
    for timeline in timelines.values():
        same = (timeline.schedule, timeline.placement, timeline.num_micro_batches)
        assert same == (first.schedule, first.placement, first.num_micro_batches)
    document = {
        "schedule": first.schedule,
        "rank_of": first.placement.rank_of,
        "num_micro_batches": first.num_micro_batches,
        "steps": [
            {
                "step": step,
                "peak_bytes": timeline.peak_bytes,
                "spans": [[s.rank, s.track, str(s.step), s.start, s.end] for s in timeline.spans],
            }
            for step, timeline in timelines.items()
        ],
    }
    replace_text(path, json.dumps(document, separators=(",", ":")))


def read(path: Path) -> dict[int, Timeline]:
    """The timelines by step. *Raises* ConfigError for a file that is not there, or is none of `write`."""
    if not path.exists():
        raise ConfigError(f"there is no {path}; a run with profile.pipeline=true writes it")
    found = read_json(path, _Recording)
    try:
        ranks = set(found.rank_of)
        if ranks != set(range(len(ranks))):
            raise ValueError(f"rank_of={found.rank_of[:20]} must name each rank from 0 on")
        placement = Placement(tuple(found.rank_of), len(ranks))
        timelines = {}
        for step in found.steps:
            spans = [_span(row, placement, found.num_micro_batches) for row in step.spans]
            timelines[step.step] = timeline_of(
                found.schedule, placement, found.num_micro_batches, spans, step.peak_bytes
            )
        return timelines
    except ValueError as error:
        raise ConfigError(f"{path} is no recording of a pipeline: {error}") from error


def timeline_of(
    schedule: str,
    placement: Placement,
    num_micro_batches: int,
    spans: Iterable[Span],
    peak_bytes: Iterable[float] | None = None,
) -> Timeline:
    """A timeline of what was measured; times are counted from the first start.

    The spans of one rank and track must not overlap. They may come in any order.
    """
    measured = sorted(spans, key=lambda span: (span.rank, span.start, span.end))
    if not measured:
        raise ValueError("a step has no spans")
    begin, end = min(span.start for span in measured), max(span.end for span in measured)
    moved = tuple(Span(s.rank, s.track, s.step, s.start - begin, s.end - begin) for s in measured)
    busy = sum(span.end - span.start for span in moved if span.track == "compute")
    makespan = end - begin
    table = table_of(schedule, placement, num_micro_batches, moved)
    return Timeline(
        schedule,
        placement,
        num_micro_batches,
        moved,
        makespan,
        1 - busy / (makespan * placement.num_ranks) if makespan else 0.0,
        tuple(peak_activations(table)),
        None if peak_bytes is None else tuple(float(most) for most in peak_bytes),
    )


def table_of(schedule: str, placement: Placement, num_micro_batches: int, spans: Iterable[Span]) -> Table:
    """Return what each rank computed, in order; the spans of a rank are in the order of time."""
    ranks: list[list[Step]] = [[] for _ in range(placement.num_ranks)]
    for span in spans:
        if span.track == "compute":
            ranks[span.rank].append(span.step)
    return Table(schedule, placement, num_micro_batches, tuple(map(tuple, ranks)))


def _span(row: _Row, placement: Placement, num_micro_batches: int) -> Span:
    """*Raises* ValueError for what is no row of a span."""
    rank, track, text, start, end = row
    if track not in get_args(Track):
        raise ValueError(f"'{track}' is no track, which are {', '.join(get_args(Track))}")
    if not 0 <= rank < placement.num_ranks:
        raise ValueError(f"a span of rank {rank} of a pipeline of {placement.num_ranks} ranks")
    if not 0 <= end - start < math.inf:
        raise ValueError(f"a span from {start} to {end}")
    actions = [_action(part, placement, num_micro_batches) for part in text.split("+", 1)]
    step = Together(*actions) if len(actions) == 2 else actions[0]
    return Span(rank, track, step, start, end)  # type: ignore[arg-type]  # a Track, as was just seen


def _action(text: str, placement: Placement, num_micro_batches: int) -> Action:
    """*Raises* ValueError for what is no action of any stage."""
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is no action such as 3F0")
    stage = int(match[1])
    if stage >= placement.num_stages:
        raise ValueError(f"'{text}' is of stage {stage} of {placement.num_stages} stages")
    if int(match[3]) >= num_micro_batches:
        raise ValueError(f"'{text}' is of micro-batch {match[3]} of {num_micro_batches}")
    return Action(match[2], stage, int(match[3]))  # type: ignore[arg-type]
