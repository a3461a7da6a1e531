"""Each schedule against its formula in plain Python."""

import itertools
import math

import pytest
import torch

from graphmoe.config.choices import LR_SCHEDULES
from graphmoe.config.schema import OptimConfig
from graphmoe.optim.rule import LrNumbers, learning_rate

TOTAL = 50


def rate(config: OptimConfig, step: int) -> float:
    numbers = LrNumbers(*torch.tensor(LrNumbers.of(config, TOTAL)))
    return learning_rate(config.schedule, numbers, torch.tensor(float(step - 1))).item()


def cosine(step: int, warmup: int, floor: float) -> float:
    share = (step - warmup) / (TOTAL - warmup)
    return floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2


def wsd(step: int, fraction: float, floor: float) -> float:
    first = TOTAL - round(TOTAL * fraction)
    return 1.0 if step <= first else floor + (1 - floor) * (1 - math.sqrt((step - first) / (TOTAL - first)))


CASES = [
    *itertools.product(LR_SCHEDULES.names, [0.2], [0.0, 0.1, 1.0], [0, 1, 7, 200]),
    *itertools.product(["wsd"], [0.01, 0.5, 1.0], [0.0], [0]),
]


@pytest.mark.parametrize(("schedule", "fraction", "floor", "warmup"), CASES)
def test_every_step_has_the_rate_of_the_formula(schedule, fraction, floor, warmup):
    config = OptimConfig(lr=3e-3, schedule=schedule, min_lr_ratio=floor, warmup_steps=warmup)
    config.wsd_decay_fraction = fraction
    for step in range(1, TOTAL + 1):
        wanted = 1.0
        if step < warmup:
            wanted = step / warmup
        elif schedule == "cosine":
            wanted = cosine(step, warmup, floor)
        elif schedule == "wsd":
            wanted = wsd(step, max(fraction, 1 / TOTAL), floor)
        assert rate(config, step) == pytest.approx(3e-3 * wanted, rel=1e-5, abs=1e-9)
    assert schedule != "wsd" or floor or warmup >= TOTAL or rate(config, TOTAL) == 0.0
