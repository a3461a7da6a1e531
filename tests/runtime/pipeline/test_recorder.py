"""Recorder: spans of a step, from a zero that several ranks can share."""

import json
import time

import pytest
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.plan.pipeline import Action, Placement, Table, Together
from graphmoe.plan.pipeline.schedules import make_table
from graphmoe.plan.pipeline.simulate import Costs, Span, Timeline, simulate, timeline_of
from graphmoe.runtime.pipeline.recorder import FILE_NAME, Recorder, read_timelines, write_timelines
from tests.pipeline_timelines import folded_in_turns

F0, B0 = Action("F", 0, 0), Action("B", 0, 0)
CPU = torch.device("cpu")


def test_spans_have_the_times_of_their_blocks_from_the_last_start_behind_the_barrier():
    calls = []
    recorder = Recorder(CPU, lambda: calls.append(time.time_ns()))
    steps = [(track, action) for action in (F0, B0) for track in ("comm", "compute")]
    for _ in range(2):
        recorder.start()
        for track, action in steps:
            with recorder.span(track, action):
                time.sleep(0.002 if track == "comm" else 0.004)
    spans = recorder.spans(3)
    assert [(s.rank, s.track, s.step) for s in spans] == [(3, *step) for step in steps]
    assert all(s.end - s.start >= (2000 if s.track == "comm" else 4000) for s in spans)  # microseconds
    ends = [0.0, *(s.end for s in spans)]
    assert all(before <= s.start for before, s in zip(ends, spans, strict=False))
    assert len(calls) == 2 and recorder.began_ns >= calls[1]


def simulated(name: str, *, overlap: bool = False) -> Timeline:
    table = make_table(name, 3, 5, overlap=overlap)
    costs = Costs.of_rank(table.placement, 3.0, 2.0, 1.5, comm=0.5, hidden=0.25, activation_bytes=7.0)
    return simulate(table, costs)


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / FILE_NAME
    timelines = [simulated(name) for name in ("1f1b", "zb1p", "zbv", "interleaved")]
    for timeline in (*timelines, simulated("interleaved", overlap=True), folded_in_turns()):
        write_timelines(path, {3: timeline, 7: timeline})
        assert read_timelines(path) == {3: timeline, 7: timeline}
    assert [*tmp_path.iterdir()] == [path]


def test_the_file_has_the_words_of_its_description(tmp_path):
    write_timelines(tmp_path / FILE_NAME, {5: folded_in_turns()})
    document = json.loads((tmp_path / FILE_NAME).read_text())
    assert document["schedule"] == "folded" and document["rank_of"] == [0, 1, 1, 0]
    assert document["num_micro_batches"] == 2
    (step,) = document["steps"]
    assert step["step"] == 5 and step["peak_bytes"] == [2**30, 2**31]
    assert step["spans"][:2] == [[0, "compute", "0F0", 0, 1], [0, "compute", "0F1+3B0", 5, 8]]


def test_times_count_from_the_first_start_and_spans_are_put_in_order():
    late = Span(1, "compute", Action("F", 1, 0), 104.0, 106.0)
    early = Span(0, "compute", Action("F", 0, 0), 100.0, 103.0)
    pair = Span(0, "compute", Together(Action("F", 0, 1), Action("B", 0, 0)), 106.0, 110.0)
    timeline = timeline_of(Table("1f1b", Placement.loop(2), 2, ()), [late, pair, early])
    assert [(s.rank, s.start, s.end) for s in timeline.spans] == [(0, 0, 3), (0, 6, 10), (1, 4, 6)]
    assert timeline.makespan == 10 and timeline.bubble == pytest.approx(1 - 9 / 20)
    assert timeline.peak_bytes is None


def with_span(*span: object) -> dict:
    steps = [{"step": 1, "spans": [span]}]
    return {"schedule": "1f1b", "rank_of": [0], "num_micro_batches": 1, "steps": steps}


GOOD = with_span(0, "compute", "0F0", 0.0, 1.0)
OTHER = " is not a recording of a pipeline: "


@pytest.mark.parametrize(
    "document, problem",
    [
        (None, "there is no .*pipeline.json; a run with profile.pipeline=true writes it"),
        ("{", " is not JSON: Expecting property name"),
        ([], ": expected object, found array"),
        ({}, ": object missing required field schedule"),
        ({**GOOD, "rank_of": []}, f"{OTHER}a span names rank 0, but the pipeline has 0 ranks"),
        ({**GOOD, "steps": [{"step": 1, "spans": []}]}, f"{OTHER}.*a step has no spans"),
        ({**GOOD, "steps": [{"spans": []}]}, r": steps.0.: object missing required field step"),
        (with_span(0, "compute", "0F0", 0.0), r": steps.0.\.spans.0.: expected array of length 5, found 4"),
        (with_span(0, "gpu", "0F0", 0.0, 1.0), f"{OTHER}.*'gpu' is not a track: compute, comm"),
        (with_span(0, "compute", "F0", 0.0, 1.0), f"{OTHER}.*'F0' is not an action such as 3F0"),
        (with_span(0, "compute", "0F0+0B1+0W1", 0.0, 1.0), f"{OTHER}.*'0B1.0W1' is not an action"),
        (with_span(3, "compute", "0F0", 0.0, 1.0), f"{OTHER}.*rank 3, but the pipeline has 1 ranks"),
        (with_span(0, "compute", "4F0", 0.0, 1.0), f"{OTHER}.*'4F0' names stage 4, but the pipeline has 1"),
    ],
)
def test_another_file_is_refused_with_what_is_wrong(document, problem, tmp_path):
    path = tmp_path / FILE_NAME
    if document is not None:
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        problem = f"pipeline.json{problem}"
    with pytest.raises(ConfigError, match=problem):
        read_timelines(path)
