"""The Triton kernels of the grouped MLP: ways to launch them, single steps, machine code without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from graphmoe.ops.grouped_mlp.triton_backend import (
    TABLE_BLOCK,
    row_tiles,
    rows_constants,
    weight_grad_constants,
)
from graphmoe.ops.grouped_mlp.tuning import STEPS, Config, default
from graphmoe.ops.grouped_mlp.weight_grad_kernel import INTO_BLOCK, into
from tests.ops.ahead_of_time import TARGETS, assert_sound, compiled
from tests.ops.interpreted import KERNELS, assert_passed_in_the_interpreter, device_of
from tests.ops.mlp_cases import assert_directions_match, make_problem, ops_of

CASES = "tests.ops.test_grouped_mlp_kernels"
TARGETS_OF = {"hopper": ("sm_90", "sm_100"), "instinct": ("gfx942", "gfx950"), "small": ("sm_90",)}
"""Targets on which the table of a kind of device is compiled."""
SHAPES = {"wide": (2048, 1408, 64, 6), "odd": (200, 72, 12, 3)}
"""D, F, E, K: DeepSeek-V2-Lite, and one with a tail in each axis."""


@pytest.fixture
def defaults(monkeypatch):
    """Call it with fields of `Config` to change the default config of the interpreter."""
    from graphmoe.ops.grouped_mlp import tuning

    def change(**fields):
        monkeypatch.setattr(tuning, "_INTERPRETER", replace(tuning._INTERPRETER, **fields))

    return change


@pytest.mark.parametrize(
    "fields",
    [
        {"descriptors": "weights"},
        {"descriptors": "both", "flatten": True, "subtiles": 2},
        {"subtiles": 2, "block_n": 64, "group": 1},
        {"per_unit": 0},
        {"subtiles": 4, "block_n": 64, "ahead": 2},
        {"subtiles": 2, "ahead": 2},
        {"per_unit": 1, "block_m": 32, "block_k": 32},
        {"descriptors": "both"},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", KERNELS)
def test_every_way_to_launch_gives_the_same_results(backend, fields, defaults):
    defaults(**fields)
    case = "odd sizes" if fields == {"descriptors": "both"} else "skewed, dead rows"  # loaded by pointer
    p, run = make_problem(case, torch.float32, device_of(backend)), ops_of(backend)
    assert_directions_match(run, p)
    expected = run.forward(*p.inputs, *p.plan)[1]
    assert torch.equal(run.hidden(*p.inputs[:2], *p.plan)[: p.live], expected[: p.live])


@pytest.mark.parametrize("size", [(3, 5), (2, 4096), (0, 4)])
@pytest.mark.parametrize("backend", KERNELS)
def test_a_bf16_gradient_is_stored_in_fp32_or_added(backend, size):
    device = device_of(backend)
    gradient, total = torch.randn(size, device=device).bfloat16(), torch.full(size, torch.nan, device=device)
    into(total, gradient, add=False)
    assert torch.equal(total, gradient.float())
    into(total, gradient, add=True)
    assert torch.equal(total, 2 * gradient.float())


@pytest.mark.parametrize("backend", KERNELS)
def test_two_runs_are_bitwise_equal(backend):
    p, run = make_problem("random", torch.float32, device_of(backend)), ops_of(backend)
    first, again = (
        run.dgrad(p.dy_TD, run.forward(*p.inputs, *p.plan)[1], *p.inputs[1:], *p.plan) for _ in "ab"
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("backend", KERNELS)
def test_no_row_at_all_gives_zeros(backend):
    case = ("random", 0, 8, 8, 3, 2, 0)
    p = make_problem(case, torch.float32, device_of(backend))
    y_TD, h_RH = ops_of(backend).forward(*p.inputs, *p.plan)
    dx_TD, dweight_TK, dh_RH, a_RF = ops_of(backend).dgrad(p.dy_TD, h_RH, *p.inputs[1:], *p.plan)
    dws = ops_of(backend).wgrad(p.dy_TD, p.x_TD, dh_RH, a_RF, *p.plan)
    assert (y_TD.shape, dx_TD.shape, dweight_TK.shape) == ((0, 8), (0, 8), (0, 2))
    assert (h_RH.shape, dh_RH.shape, a_RF.shape) == ((0, 16), (0, 16), (0, 8))
    assert not any(bool(dw.any()) for dw in dws)


@pytest.mark.parametrize("height", [16, 64])
@pytest.mark.parametrize(
    "counts", [[0, 70, 0, 0, 5, 64, 0], [1, 0] * 256, [0, 0, 0], [129]], ids=lambda c: str(c)[:20]
)
@pytest.mark.parametrize("backend", KERNELS)
def test_the_table_of_row_tiles_covers_each_expert_once(backend, counts, height):
    ends_E = torch.tensor(counts, device=device_of(backend)).cumsum(0).int()
    table = row_tiles(ends_E, sum(counts) + 7)(height).tolist()
    bound, expected = len(table) // 2, []
    for expert, (end, count) in enumerate(zip(ends_E.tolist(), counts, strict=True)):
        expected += [(expert, row) for row in range(end - count, end, height)]
    assert table[0] == len(expected) <= bound
    assert (
        list(zip(table[1 : 1 + len(expected)], table[1 + bound :], strict=False))[: len(expected)] == expected
    )


@pytest.mark.slow
def test_the_kernels_pass_in_the_interpreter():
    assert_passed_in_the_interpreter(__file__)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_bf16_products_use_matrix_instructions_wide_loads_and_no_atomics(target):
    for name, fact in compiled(CASES, target).items():
        assert fact.atomics == 0, name
        if "bf16" in name:
            assert fact.matrix_ops > 0, name
            # NVIDIA loads by asynchronous copies, and AMD may store straight from the matrix registers.
            assert (fact.wide_loads if target.startswith("gfx") else fact.wide_stores) > 0, name


@pytest.mark.slow
def test_every_step_of_every_kind_of_device_is_compiled():
    for target, kinds in {"sm_90": ("hopper", "small"), "gfx942": ("instinct",)}.items():
        names = compiled(CASES, target)
        for kind in kinds:
            assert all(any(n.startswith(f"{step} {kind} ") for n in names) for step in STEPS)


def ahead_of_time_cases() -> list[dict[str, Any]]:
    """Every step in the default configs of every kind of device: bf16, many and few rows, and fp32."""
    from graphmoe.ops.grouped_mlp import rows_kernel as rows
    from graphmoe.ops.grouped_mlp.weight_grad_kernel import into_kernel

    cases = [
        {
            "kernel": rows.tiles_kernel,
            "signature": {"ends_ptr": "*i32:16", "table_ptr": "*i32:16", "max_tiles": "i32"},
            "constexprs": {"E": 512, "BLOCK_E": 512, "BLOCK_M": 128, "BLOCK": TABLE_BLOCK},
            "threads": 256,
        },
        {
            "kernel": rows.weight_sums_kernel,
            "signature": {
                **{"partial_ptr": "*fp32:16", "row_ptr": "*i32:16", "sum_ptr": "*fp32:16"},
                **{"num_slots": "i32", "num_rows": "i32"},
            },
            "constexprs": {"PARTS": 6, "BLOCK": 256},
        },
        {
            "kernel": into_kernel,
            "signature": {"gradient_ptr": "*bf16:16", "total_ptr": "*fp32:16", "size": "i32"},
            "constexprs": {"ADD": True, "BLOCK": INTO_BLOCK},
            "threads": 256,
        },
    ]
    for kind, targets in TARGETS_OF.items():
        for step in STEPS:
            many, few = (default(step, kind, torch.bfloat16, rows) for rows in (1 << 20, 20))
            named = {("wide", "bf16", "many"): many, ("odd", "bf16", "many"): many}
            if step in ("up", "down_dgrad"):
                named["wide", "bf16", "few"] = few
            if kind == "small":
                named = {("odd", "fp32", "many"): default(step, kind, torch.float32, 1 << 20)}
            for (shape, dtype, count), config in named.items():
                name = f"{step} {kind} {shape} {dtype} {count}"
                cases.append(step_case(step, config, SHAPES[shape], dtype) | {"name": name, "only": targets})
                if step == "up":
                    case = step_case("hidden", config, SHAPES[shape], dtype)
                    cases.append(case | {"name": f"hidden {name}", "only": targets})
                if step.endswith("wgrad"):
                    kept = torch.bfloat16 if dtype == "bf16" else torch.float32
                    config = default(f"{step}_into", kind, kept, 1 << 20)
                    case = step_case(step, config, SHAPES[shape], dtype, into=True)
                    cases.append(case | {"name": f"{name} into", "only": targets})
    return cases


def step_case(
    step: str, config: Config, shape: tuple[int, int, int, int], dtype: str, *, into: bool = False
) -> dict[str, Any]:
    """One launch of a step as a case of tests/ops/ahead_of_time.py; ``into`` adds to fp32 gradients."""
    options = {"threads": config.threads, "num_stages": config.stages}
    if step.endswith("wgrad"):
        return _weight_grad(step, config, shape, f"*{dtype}:16", into) | options
    return _rows(step, config, shape, f"*{dtype}:16") | options


def _weight_grad(
    step: str, config: Config, shape: tuple[int, int, int, int], pointer: str, into: bool
) -> dict[str, Any]:
    from graphmoe.ops.grouped_mlp.weight_grad_kernel import weight_grad_kernel

    D, F, E, K = shape
    M, N = (D, F) if step == "down_wgrad" else (2 * F, D)
    rows = F if step == "down_wgrad" else 2 * F
    flags = {"DESCRIPTOR": config.descriptors != "none" and rows % 8 == 0, "ADD": into, "UPCAST": False}
    return {
        "kernel": weight_grad_kernel,
        "signature": {
            **dict.fromkeys(("left_ptr", "right_ptr"), pointer),
            "out_ptr": "*fp32:16" if into else pointer,
            **dict.fromkeys(("slot_ptr", "ends_ptr"), "*i32:16"),
        },
        "constexprs": weight_grad_constants(step, config, (E, M, N), K) | flags,
    }


def _rows(step: str, config: Config, shape: tuple[int, int, int, int], pointer: str) -> dict[str, Any]:
    from graphmoe.ops.grouped_mlp.rows_kernel import rows_kernel

    D, F, _, K = shape
    sizes = {"down": (F, D), "up_dgrad": (2 * F, D)}.get(step, (D, F))
    routed, aligned = step in ("up", "hidden", "down_dgrad"), all(size % 8 == 0 for size in sizes)
    load_w = config.descriptors != "none" and aligned
    load_x = config.descriptors == "both" and aligned and not routed
    m, n, k, element = config.block_m, config.block_n, config.block_k, pointer[1:-3]
    pair = f"2, {n // 2}, {k}"
    block = {"up": pair, "hidden": pair, "down": f"1, {n}, {k}"}.get(step, f"1, {k}, {n}")
    weights = f"tensordesc<{element}[{block}]>" if load_w else pointer
    signature = {
        "x_ptr": f"tensordesc<{element}[{m}, {k}]>" if load_x else pointer,
        **{"w_ptr": weights, "ends_ptr": "*i32:16", "table_ptr": "*i32:16"},
        **{"max_tiles": "i32", "num_rows": "i32"},
    }
    if routed:
        signature |= {"h_ptr": pointer, "slot_ptr": "*i32:16"}
    if step in ("up", "down_dgrad"):
        signature |= {"a_ptr": pointer, "weight_ptr": "*fp32:16"}
    if step not in ("up", "hidden"):
        signature["out_ptr"] = pointer
    if step == "down_dgrad":
        signature["partial_ptr"] = "*fp32:16"
    absent = {name: None for name in rows_kernel.arg_names if name.endswith("_ptr")}
    constants = rows_constants(step, config, sizes, load_w)
    flags = {"K": K if routed else 1, "X_DESCRIPTOR": load_x, "UPCAST": False}
    return {
        "kernel": rows_kernel,
        "signature": signature,
        "constexprs": {name: None for name in absent if name not in signature} | constants | flags,
    }
