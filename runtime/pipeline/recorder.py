"""Recorder of a rank's steps and waits, and ``pipeline.json`` in the run's folder.

```
{"schedule": "1f1b", "rank_of": [0, 1], "num_micro_batches": 4,
 "steps": [{"step": 12, "peak_bytes": [1, 2], "spans": [[0, "compute", "0F0", 0.0, 310.5], ...]}]}
```

A span is rank, track, action (``0F3+0B1`` if interleaved), start and end in microseconds.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, get_args

import msgspec
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.config.untrusted import read_json
from graphmoe.ops.timing import Moment, moment, seconds_between
from graphmoe.plan.pipeline import Action, Placement, Step, Table, Together
from graphmoe.plan.pipeline.simulate import Span, Timeline, Track, timeline_of
from graphmoe.runtime.host.files import replace_text

FILE_NAME = "pipeline.json"
_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_Row = tuple[int, str, str, float, float]


class StepRecorder(Protocol):
    def start(self) -> None:
        """Begin a step."""

    def span(self, track: Track, step: Step) -> AbstractContextManager[None]:
        """Return the context around a step, or around the wait for a message."""


class Recorder:
    """Records a step by CUDA events or the host's clock; track ``comm`` has the waits. Not capturable."""

    def __init__(self, device: torch.device, barrier: Callable[[], object]) -> None:
        """``barrier`` over all ranks aligns their zero times."""
        self._device, self._barrier = device, barrier
        self._origin: Moment = 0.0
        self._marks: list[tuple[Track, Step, Moment, Moment]] = []
        self.began_ns = 0  # time.time_ns() at zero of the spans

    def start(self) -> None:
        """Set the zero of time to now. Syncs with the device and the other ranks."""
        self._marks.clear()
        torch.get_device_module(self._device).synchronize(self._device)
        self._barrier()
        # Zeros of ranks differ by the exit from the barrier (0.1 ms with gloo), began_ns by the launch of an
        # event (0.01 ms). On one host began_ns is the better common clock.
        self.began_ns = time.time_ns()
        self._origin = moment(self._device)

    @contextmanager
    def span(self, track: Track, step: Step) -> Iterator[None]:
        begin = moment(self._device)
        yield
        self._marks.append((track, step, begin, moment(self._device)))

    def spans(self, rank: int) -> list[Span]:
        """Return spans in microseconds from `start`. Syncs with the device."""
        torch.get_device_module(self._device).synchronize(self._device)
        return [Span(rank, track, step, self._us(a), self._us(b)) for track, step, a, b in self._marks]

    def _us(self, mark: Moment) -> float:
        return seconds_between(self._origin, mark) * 1e6


class _Step(msgspec.Struct):
    step: int
    spans: list[_Row]
    peak_bytes: list[float] | None = None


class _Recording(msgspec.Struct):
    schedule: str
    rank_of: list[int]
    num_micro_batches: int
    steps: list[_Step]


def write_timelines(path: Path, timelines: Mapping[int, Timeline]) -> None:
    """Write a run's timelines, of one schedule. Atomic."""
    first = next(iter(timelines.values())).table
    assert all(replace(timeline.table, ranks=first.ranks) == first for timeline in timelines.values())
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


def read_timelines(path: Path) -> dict[int, Timeline]:
    """Return the timelines by step. *Raises* ConfigError for a missing or invalid file."""
    if not path.exists():
        raise ConfigError(f"there is no {path}; a run with profile.pipeline=true writes it")
    found = read_json(path, _Recording)
    try:
        ranks = set(found.rank_of)
        if ranks != set(range(len(ranks))):
            raise ValueError(f"rank_of={found.rank_of[:20]} must name each rank from 0 on")
        placement = Placement(tuple(found.rank_of), len(ranks))
        like, timelines = Table(found.schedule, placement, found.num_micro_batches, ()), {}
        for step in found.steps:
            spans = [_span(row, placement, found.num_micro_batches) for row in step.spans]
            timelines[step.step] = timeline_of(like, spans, step.peak_bytes)
        return timelines
    except ValueError as error:
        raise ConfigError(f"{path} is not a recording of a pipeline: {error}") from error


def _span(row: _Row, placement: Placement, num_micro_batches: int) -> Span:
    rank, track, text, start, end = row
    if track not in get_args(Track):
        raise ValueError(f"'{track}' is not a track: {', '.join(get_args(Track))}")
    if not 0 <= rank < placement.num_ranks:
        raise ValueError(f"a span names rank {rank}, but the pipeline has {placement.num_ranks} ranks")
    if not 0 <= end - start < math.inf:
        raise ValueError(f"a span is from {start} to {end}; its end must be finite and not before its start")
    actions = [_action(part, placement, num_micro_batches) for part in text.split("+", 1)]
    step = Together(*actions) if len(actions) == 2 else actions[0]
    return Span(rank, track, step, start, end)  # type: ignore[arg-type]  # a Track, as was just seen


def _action(text: str, placement: Placement, num_micro_batches: int) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is not an action such as 3F0")
    stage = int(match[1])
    if stage >= placement.num_stages:
        raise ValueError(f"'{text}' names stage {stage}, but the pipeline has {placement.num_stages}")
    if int(match[3]) >= num_micro_batches:
        raise ValueError(f"'{text}' names micro-batch {match[3]}, but the step has {num_micro_batches}")
    return Action(match[2], stage, int(match[3]))  # type: ignore[arg-type]
