"""The kernels of symm: in the interpreter, between emulated ranks, and compiled for GPUs ahead of time."""

from __future__ import annotations

import pytest

from tests.ops.ahead_of_time import TARGETS, assert_sound, compiled
from tests.ops.interpreted import assert_passed, names_of

INTERPRETED = "tests/ops/interpreted_symm.py"


@pytest.mark.parametrize("name", names_of(INTERPRETED))
def test_in_the_interpreter(name):
    assert_passed(INTERPRETED, name)


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_ahead_of_time(target):
    facts = compiled("tests.ops.compiled_symm", target)
    assert_sound(facts)
    assert not {name: fact.atomics for name, fact in facts.items() if fact.atomics}
    # 16 bytes at a time: 64 of each thread that pulls or puts; packing one vector, beside four of counts and
    # ends, which is stored in up to six blocks, where it is received, and as a token; summing one of each
    # place.
    wide = {"pull": (4, 4), "put": (4, 4), "pack": (5, 8), "sum 6": (6, 1), "sum 16": (16, 1)}
    assert wide == {name: (facts[name].wide_loads, facts[name].wide_stores) for name in wide}
