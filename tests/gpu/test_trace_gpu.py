"""Traces of captured runs on a GPU: their kernels belong to segments, and all figures are there."""

import pickle
import time
from collections import Counter

from graphmoe.trace.events import read_trace, traces_of
from graphmoe.trace.summary import summarise
from graphmoe.training.profile import StepTrace
from tests.gpu.tiny import GPU, UNREAD
from tests.runs import metrics, numbers, train_in

RUN = (*GPU, *UNREAD, "compile.enabled=true", "model.num_layers=2", "train.steps=6")
"""Steps 1 to 3 warm up, graphs are made in the 4th."""
NO_SEGMENT = ("(no segment)", "(between steps)", "(unknown)")


def test_most_of_the_time_of_a_captured_run_belongs_to_segments(tmp_path):
    train_in(tmp_path / "layer", *RUN, "graph.scope=layer", "profile.steps=[5,6]")
    summary = summarise(read_trace(traces_of([tmp_path / "layer"], None)[0]), 5)
    print(*((s.segment, s.part, s.calls, s.ms) for s in summary.segments), sep="\n")
    assert summary.on == "gpu" and summary.num_steps == 2 and summary.device
    assert 0 < summary.idle < 1 and summary.launch_ms > 0 and summary.launches > 0
    times = {(s.segment, s.part): s.ms for s in summary.segments}
    named = sum(ms for (segment, _), ms in times.items() if segment not in NO_SEGMENT)
    assert named > 0.8 * sum(times.values())
    assert times.get(("(unknown)", ""), 0.0) == 0.0
    assert {("attn..mlp", "F"), ("attn..mlp", "B"), ("attn..moe_combine", "F")} <= times.keys()
    assert {("attn..moe_combine", "B"), ("loss", "F"), ("optimizer", "update")} <= times.keys()
    with (tmp_path / "layer" / "profile" / "rank0.memory.pickle").open("rb") as file:
        assert any(pickle.load(file)["device_traces"])


def test_a_captured_step_has_the_segments_and_numbers_of_any_other(tmp_path, deterministic_words):
    words = (*RUN, *deterministic_words, "graph.scope=full_iteration")
    train_in(tmp_path / "plain", *words)
    train_in(tmp_path / "recorded", *words, "profile.steps=[5,6]")
    assert numbers(tmp_path / "plain") == numbers(tmp_path / "recorded")
    trace = read_trace(traces_of([tmp_path / "recorded"], None)[0])
    summary = summarise(trace, 5)
    print(*((s.segment, s.part, s.calls, s.ms, s.floor_ms) for s in summary.segments), summary.wall, sep="\n")
    times = {(s.segment, s.part): s.ms for s in summary.segments}
    assert ("full_iteration", "replay") not in times
    named = sum(ms for (segment, _), ms in times.items() if segment not in NO_SEGMENT)
    assert named > 0.8 * sum(times.values())
    assert {("attn..mlp", "F"), ("attn..mlp", "I"), ("attn..moe_combine", "W"), ("loss", "F")} <= times.keys()
    # one stream: kernels start in the order of the nodes, so that the driver lists these as they were made
    names = [name for *_, of_range in trace.graph for name in of_range]
    replays = Counter(a.correlation for a in trace.activities)
    replay = max(replays, key=replays.__getitem__)
    runs = [a for a in trace.activities if a.correlation == replay]
    copies = [a.kind == "memcpy" or a.name.startswith("memcpy") for a in runs]  # small ones are kernels
    ran = [
        "memcpy" if c else a.name if a.kind == "kernel" else a.kind for a, c in zip(runs, copies, strict=True)
    ]
    assert len(names) > 50 and ran == names


def test_starting_the_profiler_and_writing_are_in_the_time_of_no_step(tmp_path, monkeypatch):
    for name in ("_started", "_write"):
        function = getattr(StepTrace, name)

        def slow(*arguments, function=function):
            time.sleep(5)
            return function(*arguments)

        monkeypatch.setattr(StepTrace, name, slow)
    train_in(tmp_path, *GPU, *UNREAD, "compile.enabled=false", "train.steps=8", "profile.steps=[5,6]")
    assert all(row["step_s"] < 2.5 for row in metrics(tmp_path) if row["step"] in (4, 5, 6, 7, 8))


def test_an_eager_run_has_backwards_of_segments(tmp_path):
    train_in(tmp_path, *GPU, *UNREAD, "compile.enabled=false", "train.steps=3", "profile.steps=[3]")
    summary = summarise(read_trace(traces_of([tmp_path], None)[0]), 20)
    times = {(s.segment, s.part): s.ms for s in summary.segments}
    assert {("attn", "F"), ("attn", "B"), ("moe_experts", "F"), ("moe_experts", "B")} <= times.keys()
