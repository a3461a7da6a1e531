"""``profile.steps`` and ``profile.pipeline``: what is recorded, by whom, and that nothing else changes."""

import gzip
import json
import os
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from graphmoe.plan.pipeline import Action
from graphmoe.plan.pipeline.simulate import Span
from graphmoe.runtime.host.logs import without_text
from graphmoe.segments import profiler_range, ranges_wanted
from graphmoe.training.profile import MARKERS, _Part, in_common_time
from tests.runs import numbers, train_in, trainer_in

SHORT = ("train.steps=4", "train.val_batches=0", "checkpoint.interval=2")
RECORDED = ("profile.steps=[2,3]",)


def trace_of(folder: Path, rank: int = 0) -> dict[str, Any]:
    with gzip.open(folder / "profile" / f"rank{rank}.trace.json.gz") as file:
        return json.load(file)


def ranges_of(trace: dict[str, Any]) -> Counter[str]:
    names = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    return Counter(name for name in names if not name.startswith("## Call"))


def test_first_and_last_step_are_recorded_with_segments_as_ranges(tmp_path, caplog, capfd):
    caplog.set_level("INFO")
    train_in(tmp_path, *SHORT, *RECORDED)
    assert "profiler_st" not in capfd.readouterr().err
    trace = trace_of(tmp_path)
    ranges = ranges_of(trace)
    assert {name for name in ranges if name.startswith("Prof")} == {"ProfilerStep#2", "ProfilerStep#3"}
    layers = 2 * 2 * 2  # steps, layers, micro-batches
    assert (ranges["attn:F"], ranges["mlp:F"], ranges["moe_experts:F"]) == (layers, layers / 2, layers / 2)
    assert (ranges["loss:F"] % 4, ranges["optimizer:update"]) == (0, 2)
    facts = trace["graphmoe"]
    assert (facts["run"], facts["rank"], facts["num_ranks"], facts["steps"]) == ("mini", 0, 1, [2, 3])
    assert not (tmp_path / "profile" / "rank0.memory.pickle").exists()
    assert [message for message in caplog.messages if "profile" in message or "trace" in message] == [
        "profile.steps: a CPU has no history of memory; times are those of the host",
        f"traces of steps 2 to 3 are in {tmp_path / 'profile'}: rank0.trace.json.gz",
        f"to read the traces: python -m graphmoe.trace run={tmp_path}",
    ]


LAYERS = ("compile.enabled=true", "compile.cache=false", "graph.scope=layer", "graph.warmup_steps=1")


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), LAYERS])
def test_a_profiled_run_has_the_numbers_of_any_other(tmp_path, words, as_traced):
    train_in(tmp_path / "plain", *SHORT, *words)
    train_in(tmp_path / "recorded", *SHORT, *words, *RECORDED)
    assert numbers(tmp_path / "plain") == numbers(tmp_path / "recorded")
    if words:  # a unit with I and W in one graph, as its stand-in on a CPU calls them
        ranges = ranges_of(trace_of(tmp_path / "recorded"))
        replays = ranges["attn..moe_combine:B"]
        assert replays == 4 == ranges["attn..moe_combine:I"] == ranges["attn..moe_combine:W"]
        assert {"embed:F", "embed:W", "loss:F", "loss:I", "loss:W", "attn..mlp:F"} <= ranges.keys()


def test_a_captured_step_is_one_range(tmp_path):
    words = ("compile.enabled=false", "graph.scope=full_iteration", "graph.warmup_steps=1")
    train_in(tmp_path, *SHORT, *words, "profile.steps=[3]")
    assert ranges_of(trace_of(tmp_path))["full_iteration:replay"] == 1


def test_a_run_that_ends_early_has_the_steps_until_then(tmp_path, monkeypatch):
    trainer = trainer_in(tmp_path, *SHORT, *RECORDED)
    monkeypatch.setattr(trainer.stop_flag, "signal", lambda own: "SIGTERM" if trainer.step == 2 else None)
    assert not trainer.run()
    assert trace_of(tmp_path)["graphmoe"]["steps"] == [2]
    again = train_in(tmp_path, *SHORT, *RECORDED)
    assert again.step == 4 and trace_of(tmp_path)["graphmoe"]["steps"] == [3]


def test_an_error_in_a_recorded_step_stops_the_profiler(tmp_path, monkeypatch):
    trainer = trainer_in(tmp_path, *SHORT, *RECORDED)
    run = trainer.steps.run
    monkeypatch.setattr(trainer.steps, "run", lambda batches: run(batches) if trainer.step < 2 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert not (tmp_path / "profile").exists() and trainer.trace._profiler is None


def test_all_but_the_markers_of_the_profiler_reaches_stderr(capfd):
    with pytest.raises(ZeroDivisionError), without_text(MARKERS):
        os.write(2, b"USDT:2026-01-01 1:1 Handler.cpp:5] profiler_start\nERROR: no counters\n")
        os.write(2, b"USDT:1] profiler_stop")
        raise ZeroDivisionError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "ERROR: no counters\nafter\n"


def test_ranges_are_nothing_while_nobody_wants_them():
    for wanted in (nullcontext(), ranges_wanted(), nullcontext()):
        with wanted:
            is_same = profiler_range("attn", "F") is profiler_range("mlp", "F")
        assert is_same == isinstance(wanted, nullcontext)


@pytest.mark.parametrize(("host", "start"), [("a", 3.5), ("b", 1.0)])
def test_spans_are_moved_by_the_clock_of_one_host_and_several_begin_at_the_barrier(host, start):
    given = (("a", 5_000), (host, 7_500))
    spans = [[Span(rank, "compute", Action("F", rank, 0), 1.0, 3.0)] for rank in (0, 1)]
    found = in_common_time([_Part(*each, own, None) for each, own in zip(given, spans, strict=True)])
    assert [(span.rank, span.start, span.end) for span in found] == [(0, 1.0, 3.0), (1, start, start + 2)]
