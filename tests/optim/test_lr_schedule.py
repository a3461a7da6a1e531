"""Each schedule against its formula in plain Python."""

import math

import pytest
import torch

from graphmoe.config.choices import LR_SCHEDULES
from graphmoe.config.schema import OptimConfig
from graphmoe.optim.rule import LrNumbers, learning_rate

TOTAL = 50


def rate(config: OptimConfig, step: int) -> float:
    return at(config, torch.tensor(float(step - 1))).item()


def at(config: OptimConfig, done: torch.Tensor) -> torch.Tensor:
    numbers = LrNumbers(*torch.tensor(LrNumbers.of(config, TOTAL)))
    return learning_rate(config.schedule, numbers, done)


def cosine(step: int, warmup: int, floor: float) -> float:
    share = (step - warmup) / (TOTAL - warmup)
    return floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2


def wsd(step: int, fraction: float, floor: float) -> float:
    first = TOTAL - round(TOTAL * fraction)
    return 1.0 if step <= first else floor + (1 - floor) * (1 - math.sqrt((step - first) / (TOTAL - first)))


@pytest.mark.parametrize("warmup", [0, 1, 7, 200])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("schedule", LR_SCHEDULES.names)
def test_every_step_has_the_rate_of_the_formula(schedule, floor, warmup):
    config = OptimConfig(lr=3e-3, schedule=schedule, min_lr_ratio=floor, warmup_steps=warmup)
    for step in range(1, TOTAL + 1):
        if step < warmup:
            wanted = step / warmup
        elif schedule == "cosine":
            wanted = cosine(step, warmup, floor)
        elif schedule == "wsd":
            wanted = wsd(step, 0.2, floor)
        else:
            wanted = 1.0
        assert rate(config, step) == pytest.approx(3e-3 * wanted, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("fraction", [0.01, 0.5, 1.0])
def test_wsd_decays_over_the_last_share_of_the_steps(fraction):
    config = OptimConfig(lr=1.0, schedule="wsd", wsd_decay_fraction=fraction, min_lr_ratio=0.0)
    found = [rate(config, step) for step in range(1, TOTAL + 1)]
    wanted = [wsd(step, max(fraction, 1 / TOTAL), 0.0) for step in range(1, TOTAL + 1)]
    assert found == pytest.approx(wanted, rel=1e-5)
    assert found[-1] == 0.0
