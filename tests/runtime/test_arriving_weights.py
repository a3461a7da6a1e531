"""Segments run once the weights of their modules are there, and wait for no others."""

import torch
from torch import nn

from graphmoe.optim.reduction import ArrivingWeights
from graphmoe.segments import Segment, run_segments


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
