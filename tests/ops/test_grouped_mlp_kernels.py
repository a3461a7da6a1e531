"""The Triton kernels of the grouped MLP: values in the interpreter, machine code for absent GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphmoe.ops.grouped_mlp.tuning import STEPS, Config, with_height
from tests.ops.ahead_of_time import TARGETS, assert_sound, compiled
from tests.ops.interpreted import assert_passed, names_of

INTERPRETED = "tests/ops/interpreted_grouped_mlp.py"
CASES = "tests.ops.compiled_grouped_mlp"


@pytest.mark.parametrize("name", names_of(INTERPRETED))
def test_in_the_interpreter(name):
    assert_passed(INTERPRETED, name)


@pytest.mark.parametrize("target", TARGETS)
def test_the_default_configs_compile_without_spills_and_fit_into_shared_memory(target):
    facts = compiled(CASES, target)
    if target.startswith(
        "sm"
    ):  # up to four words in the epilogue of a tile that fills the registers are no loss
        facts = {name: replace(fact, spills=max(fact.spills - 16, 0)) for name, fact in facts.items()}
    assert_sound(facts)
    small = {n: f.shared_bytes for n, f in facts.items() if " small " in n and f.shared_bytes > 99 << 10}
    assert not small, "more than consumer cards have"


@pytest.mark.parametrize("target", TARGETS)
def test_bf16_products_use_matrix_instructions_wide_loads_and_no_atomics(target):
    for name, fact in compiled(CASES, target).items():
        assert fact.atomics == 0, name
        if "bf16" in name:
            assert fact.matrix_ops > 0, name
            # NVIDIA loads by asynchronous copies, and AMD may store straight from the matrix registers.
            assert (fact.wide_loads if target.startswith("gfx") else fact.wide_stores) > 0, name


def test_every_step_of_every_kind_of_device_is_compiled():
    for target, kinds in {"sm_90": ("hopper", "small"), "gfx942": ("instinct",)}.items():
        names = compiled(CASES, target)
        for kind in kinds:
            assert all(any(n.startswith(f"{step} {kind} ") for n in names) for step in STEPS)


@pytest.mark.parametrize(
    ("rows", "height"), [(0, 16), (1, 16), (16, 16), (17, 32), (33, 64), (65, 128), (128, 128), (4000, 128)]
)
def test_row_tiles_are_as_high_as_an_expert_has_rows(rows, height):
    config = Config(128, 256, 64, 256, 4, flatten=True, descriptors="both")
    found = with_height(config, rows)
    assert found.block_m == height
    assert (found == config) == (height == 128)
