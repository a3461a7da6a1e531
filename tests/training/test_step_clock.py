"""Time of steps, and pauses between them that count for none."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphmoe.plan.layout import Layout
from graphmoe.training import profile as pipeline_profile
from graphmoe.training.profile import PipelineProfile
from graphmoe.training.step_rows import StepClock, seconds
from tests.runs import config, metrics, trainer_in


class Time:
    """Clock of the host and of an instant device: it advances only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(
            "graphmoe.training.step_rows.time", SimpleNamespace(perf_counter=lambda: self.now)
        )
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        self._monkeypatch = monkeypatch

    def takes(self, owner: object, name: str, seconds: float) -> None:
        """Let each call of this function take so much longer."""
        function: Callable[..., Any] = getattr(owner, name)

        def slow(*arguments: Any, **named: Any) -> Any:
            self.now += seconds
            return function(*arguments, **named)

        self._monkeypatch.setattr(owner, name, slow)

    def _event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(elapsed_time=lambda end: (end.at - event.at) * 1e3)
        event.record = lambda: setattr(event, "at", self.now)
        return event


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_pause_is_in_no_interval_and_those_before_it_stay(time, device):
    clock = StepClock(torch.device(device))
    for step_s in (1.0, 2.0):
        time.now += step_s
        clock.mark()
    for pause_s in (100.0, 200.0):
        time.now += 0.25
        with clock.paused():
            time.now += pause_s
    time.now += 0.5
    clock.mark()
    time.now += 8.0
    clock.mark()
    assert [seconds(interval) for interval in clock.hand_over(4)] == [1.0, 2.0, 1.0, 8.0]


def test_the_profiler_and_the_report_of_the_first_step_are_in_the_time_of_no_step(time, tmp_path):
    words = ("train.steps=7", "train.log_interval=7", "train.val_batches=0", "checkpoint.enabled=false")
    trainer = trainer_in(tmp_path, *words, "profile.steps=[3,4]")
    time.takes(trainer.steps, "run", 1.0)
    for name in ("_started", "_write"):
        time.takes(trainer.trace, name, 1000.0)
    for name in ("report", "keep_code"):
        time.takes(trainer.execution, name, 100.0)
    time.takes(trainer.ranks, "gather", 10.0)  # other ranks start and write
    assert trainer.run()
    assert [row["step_s"] for row in metrics(tmp_path)] == [1.0] * 7
    assert time.now >= 7 + 2 * (1000 + 100 + 10)


def test_bringing_a_recorded_pipeline_together_is_in_the_time_of_no_step(time, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline_profile.dist, "new_subgroups_by_enumeration", lambda *a, **k: (None, []))
    layout = Layout(dp=1, cp=1, tp=1, pp=2, ep=1, etp=1)
    mesh = SimpleNamespace(rank=0, layout=layout, index=lambda axis: 0)
    clock = StepClock(torch.device("cpu"))
    run = config("train.steps=4", "train.log_interval=2")
    plan = SimpleNamespace(config=run, pipeline=SimpleNamespace(table=None))
    profile = PipelineProfile(plan, SimpleNamespace(), torch.device("cpu"), mesh, clock, tmp_path, 0)
    kept: list[int] = []
    monkeypatch.setattr(profile, "_keep", lambda number, part: kept.append(number))
    time.takes(profile._recorder, "spans", 100.0)
    time.takes(profile, "_keep", 1000.0)
    for number in range(1, 5):
        with profile.step(number):
            time.now += 1.0
            clock.mark()
    assert kept == [2, 4] and [seconds(interval) for interval in clock.hand_over(4)] == [1.0] * 4
