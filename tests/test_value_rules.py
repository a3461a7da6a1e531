"""Single values that no machine has: each is refused by its key."""

from __future__ import annotations

import math
import time

import pytest

from graphmoe.plan.rules.check import BELOW_ONE, NOT_NEGATIVE, POSITIVE, POSITIVE_IF_SET, SHARES, violations
from graphmoe.plan.rules.values import BELOW_ONE as FP32_BELOW_ONE
from graphmoe.plan.rules.values import FP32, MOST, divisors
from tests.test_config_rules import changed

RANGES = [
    *((key, bad, "greater than 0") for key in f"{POSITIVE} {POSITIVE_IF_SET}".split() for bad in (0, -1)),
    *((key, -1, "0 or greater") for key in NOT_NEGATIVE.split()),
    *((key, bad, "at least 0 and below 1") for key in BELOW_ONE.split() for bad in (-0.1, 1.0)),
    *((key, bad, "between 0 and 1") for key in SHARES.split() for bad in (-0.1, 1.1)),
    *(("optim.lr", bad, "finite and greater than 0") for bad in (math.nan, math.inf)),
]


@pytest.mark.parametrize("key, bad, wanted", RANGES, ids=str)
def test_a_value_out_of_its_range_is_named_with_the_range(key, bad, wanted):
    section, name = key.split(".")
    assert f"{key}={bad} must be {wanted}" in violations(changed(**{section: {name: bad}}))


UNHELD = [
    *((key, bad, why) for key in FP32.split() for bad, why in ((1e-46, "too small"), (1e300, "infinite"))),
    *((key, 0.99999999, "1 in fp32; use at most 0.99999994") for key in FP32_BELOW_ONE.split()),
]


@pytest.mark.parametrize("key, bad, why", UNHELD, ids=str)
def test_a_number_that_fp32_cannot_hold_is_refused(key, bad, why):
    section, name = key.split(".")
    found = [
        line for line in violations(changed(**{section: {name: bad}})) if line.startswith(f"{key}={bad} ")
    ]
    in_range = key not in f"{SHARES} {BELOW_ONE}".split() or bad < 1
    assert any(f"{key}={bad} is {why}" in line for line in found) and (len(found) == 1 or not in_range)


def test_numbers_at_the_ends_of_fp32_are_taken():
    optim = {"lr": 3.4e38, "eps": 1.2e-38, "weight_decay": 0.0, "beta1": 0.0, "beta2": 0.99999994}
    assert violations(changed(optim=optim)) == []


def test_half_a_character_is_refused_wherever_it_stands():
    for section, values in (
        ("log", {"wandb_project": "a\ud800"}),
        ("host", {"env": {"A": "\udfff"}}),
        ("host", {"env": {"\ud800": "a"}}),
        ("data", {"val_paths": ["a", "\ud800"]}),
    ):
        (found,) = violations(changed(**{section: values}))
        assert found.startswith(f"{section}.{[*values][0]}=") and "has half a character" in found
        found.encode()


LIMITS = {key: limit for limit, keys in MOST.items() for key in keys.split()}


@pytest.mark.parametrize("key", LIMITS)
def test_a_number_that_takes_hours_or_all_memory_before_a_run_begins_is_refused(key):
    section, name = key.split(".")
    started = time.monotonic()
    for value in (LIMITS[key] + 1, 10**9 + LIMITS[key], 2**63 - 1):
        found = violations(changed(**{section: {name: value}}))
        assert found == [f"{key}={value} is too large; use at most {LIMITS[key]}"]
    wide = [f"{key}=1000000000...(401 digits) needs more than 64 bits; use at most {LIMITS[key]}"]
    assert violations(changed(**{section: {name: 10**400}})) == wide
    violations(changed(**{section: {name: LIMITS[key]}}))
    assert time.monotonic() - started < 10


def test_divisors():
    for number in range(1, 200):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
    assert divisors(36, 5) == [1, 2, 3, 4]
    assert len(divisors(2**31 - 2)) == 192
