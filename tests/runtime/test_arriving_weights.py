"""Segments run once the weights of their modules are there, and wait for no others."""

from __future__ import annotations

import torch
from torch import nn

from graphmoe.model.build import build_model
from graphmoe.optim.reduction import ArrivingWeights
from graphmoe.runtime.compile.units import owner_of
from graphmoe.segments import Segment, run_segments
from tests.runs import config


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def plus(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def plain(x: torch.Tensor) -> torch.Tensor:
    return x


def test_each_call_waits_for_its_modules_and_their_methods():
    one, other, third = Scale(), Scale(), Scale()
    events = []

    def execute(segments, tensors, keep):
        events.append("run")
        return run_segments(segments, tensors, keep)

    run = ArrivingWeights(execute, lambda weights: events.extend(weights))
    calls = [[("attn", one), ("mlp", other.plus)], [("embed", plain)], [("loss", third.plus)]]
    for call in calls:
        segments = [Segment(name, function, ("x",), ("x",)) for name, function in call]
        run(segments, {"x": torch.ones(())}, ("x",))
    wanted = [one.weight, other.weight, "run", "run", third.weight, "run"]
    assert [id(event) for event in events] == [id(event) for event in wanted]


def test_a_model_waits_for_each_parameter_before_it_runs_what_holds_it():
    words = config("model.mtp_depth=1")
    model = build_model(words.model, seed=0, execution=words.moe)
    arrived: set[int] = set()

    def execute(segments, tensors, keep):
        for segment in segments:
            owner = owner_of(segment.run)
            assert owner is None or all(id(weight) in arrived for weight in owner.parameters())
        return run_segments(segments, tensors, keep)

    def wait(weights):
        arrived.update(map(id, weights))

    tokens = torch.randint(64, (2, 9))
    model.loss(tokens[:, :-1], tokens[:, 1:], ArrivingWeights(execute, wait))
    assert arrived == {id(weight) for weight in model.parameters()}
