"""Graphs of several micro-batches in flight, in memory that they do share: the numbers of the same units."""

import pytest
import torch

from graphmoe.runtime.compile import report
from tests.runtime.test_lanes import MIXED, ONE, ONE_F_ONE_B, SCOPES, ZERO_BUBBLE, Stage


@pytest.mark.parametrize("names", SCOPES, ids="-".join)
@pytest.mark.parametrize("times", [1, 2])
def test_every_schedule_gives_the_numbers_of_the_uncaptured_units(names, times, monkeypatch):
    monkeypatch.setattr(report, "compile_graph", lambda graph: graph)  # what is captured is of no concern
    device = torch.device("cuda")
    plain, captured = Stage((), times, device), Stage(names, times, device)
    schedules = [ONE, ONE, ZERO_BUBBLE, ONE_F_ONE_B, MIXED, ZERO_BUBBLE, ONE_F_ONE_B, MIXED]
    for seed, schedule in enumerate(schedules):
        wanted = plain.step(schedule.replace("I", "B").replace("W", "_"), seed)
        for found, expected in zip(captured.step(schedule, seed), wanted, strict=True):
            torch.testing.assert_close(found, expected)
    assert captured.capture.report.on == "device" and captured.graphs
