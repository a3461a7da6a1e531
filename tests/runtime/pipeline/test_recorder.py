"""Recorder: spans of a step, from a zero that several ranks can share."""

from __future__ import annotations

import time

import torch

from graphmoe.plan.pipeline.actions import Action
from graphmoe.plan.pipeline.schedules import make_table
from graphmoe.plan.pipeline.timeline import timeline_of
from graphmoe.runtime.pipeline.recorder import Recorder, read_timelines, write_timelines

F0, B0 = Action("F", 0, 0), Action("B", 0, 0)
CPU = torch.device("cpu")


def step(recorder):
    recorder.start()
    for action in (F0, B0):
        with recorder.span("comm", action):
            time.sleep(0.002)
        with recorder.span("compute", action):
            time.sleep(0.004)


def test_spans_have_the_times_of_their_blocks_in_microseconds():
    recorder = Recorder(CPU)
    step(recorder)
    spans = recorder.spans(3)
    assert [(s.rank, s.track, s.step) for s in spans] == [
        (3, track, action) for action in (F0, B0) for track in ("comm", "compute")
    ]
    assert all(s.end - s.start >= (2000 if s.track == "comm" else 4000) for s in spans)
    ends = [0.0, *(s.end for s in spans)]
    assert all(before <= s.start for before, s in zip(ends, spans, strict=False))


def test_a_start_forgets_the_step_before_and_waits_for_the_barrier_first():
    calls = []
    recorder = Recorder(CPU, lambda: calls.append(time.time_ns()))
    for _ in range(2):
        step(recorder)
    assert len(recorder.spans(0)) == 4 and len(calls) == 2 and recorder.began_ns >= calls[1]


def test_spans_of_two_recorders_can_be_put_on_one_axis():
    first, second = Recorder(CPU), Recorder(CPU)
    step(first)
    step(second)
    origin = first.began_ns
    assert first.spans(0, origin) == first.spans(0)
    assert first.spans(0, origin)[-1].end <= second.spans(1, origin)[0].start


def test_a_recording_can_be_written_and_read(tmp_path):
    recorder = Recorder(CPU)
    step(recorder)
    table = make_table("1f1b", 1, 1)
    timeline = timeline_of(table.schedule, table.placement, 1, recorder.spans(0))
    write_timelines(tmp_path / "pipeline.json", {4: timeline})
    assert read_timelines(tmp_path / "pipeline.json")[4].spans == timeline.spans
