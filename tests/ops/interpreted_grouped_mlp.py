"""The Triton kernels of the grouped MLP in the interpreter; run by test_grouped_mlp_kernels.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphmoe.ops import grouped_mlp  # noqa: F401  # registers the ops that sum rows
from tests.ops.mlp_cases import (
    CASES,
    COUNTS,
    Directions,
    assert_dead_rows_are_left_alone,
    assert_directions_match,
    interpreter_slack,
    make_problem,
    poison,
)
from tests.ops.row_cases import fresh_memory_is_nan

DTYPES = (torch.float32, torch.bfloat16)


def kernels():
    from graphmoe.ops.grouped_mlp import triton_backend

    return Directions(triton_backend.forward, triton_backend.dgrad, triton_backend.wgrad)


@pytest.fixture
def defaults(monkeypatch):
    """Call it with fields of `Config` to change the default config of the interpreter."""
    from graphmoe.ops.grouped_mlp import tuning

    def change(**fields):
        monkeypatch.setattr(tuning, "_INTERPRETER", replace(tuning._INTERPRETER, **fields))

    return change


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_match_fp64(case, dtype):
    if "512" in case:  # 1,000 tiles of weights would take 10 s
        case = (*CASES[case][:4], 100, *CASES[case][5:])
    assert_directions_match(kernels(), make_problem(case, dtype), interpreter_slack(dtype))


@pytest.mark.parametrize("case", COUNTS, ids=str)
def test_any_number_of_rows_may_be_live(case):
    assert_directions_match(kernels(), make_problem(case, torch.float32))


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
    ],
    ids=str,
)
def test_every_way_to_launch_gives_the_same_results(fields, defaults):
    defaults(**fields)
    assert_directions_match(kernels(), make_problem("skewed, dead rows", torch.float32))


def test_rows_that_descriptors_cannot_describe_are_loaded_by_pointer(defaults):
    defaults(descriptors="both")
    assert_directions_match(kernels(), make_problem("odd sizes", torch.float32))


@pytest.mark.parametrize("case", ["skewed, dead rows", "some slots are not routed here"])
def test_dead_rows_are_neither_read_nor_written(case):
    assert_dead_rows_are_left_alone(kernels(), make_problem(case, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["skewed, dead rows", "empty experts", "odd sizes"])
def test_weight_gradients_are_stored_in_fp32_or_added_to_it(case, dtype):
    from graphmoe.ops.grouped_mlp import triton_backend

    p = make_problem(case, dtype)
    _, h_RH = kernels().forward(*p.inputs, *p.plan)
    _, _, dh_RH, a_RF = kernels().dgrad(p.dy_TD, h_RH, *p.inputs[1:], *p.plan)
    poison(p, dh_RH, a_RF)
    given = (p.dy_TD, p.x_TD, dh_RH, a_RF, *p.plan)
    totals = tuple(torch.full(w.shape, torch.nan) for w in (p.w_gate_up, p.w_down))
    for factor in (1, 2):  # NaN must be overwritten; then the same sums on top
        assert triton_backend.wgrad(*given, totals, add=factor == 2) == totals
        for total, plain in zip(totals, kernels().wgrad(*given), strict=True):
            rounding = 0.0 if dtype == torch.float32 else 2**-7  # the interpreter cuts bits off
            torch.testing.assert_close(total / factor, plain.float(), rtol=rounding, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case", ["skewed, dead rows", "some slots are not routed here", "no slot is routed here"]
)
@pytest.mark.parametrize("fields", [{}, {"descriptors": "both", "flatten": True, "subtiles": 2}], ids=str)
def test_h_alone_is_bitwise_that_of_the_forward(case, dtype, fields, defaults):
    from graphmoe.ops.grouped_mlp import triton_backend

    defaults(**fields)
    p = make_problem(case, dtype)
    _, expected = kernels().forward(*p.inputs, *p.plan)
    with fresh_memory_is_nan():
        h_RH = triton_backend.hidden(*p.inputs[:2], *p.plan)
    assert torch.equal(h_RH[: p.live], expected[: p.live]) and h_RH.shape == expected.shape
    assert bool(h_RH[p.live :].isnan().all())


@pytest.mark.parametrize("size", [(3, 5), (2, 4096), (0, 4)])
def test_a_bf16_gradient_is_stored_in_fp32_or_added(size):
    from graphmoe.ops.grouped_mlp.triton_steps import into

    gradient, total = torch.randn(size).bfloat16(), torch.full(size, torch.nan)
    into(total, gradient, add=False)
    assert torch.equal(total, gradient.float())
    into(total, gradient, add=True)
    assert torch.equal(total, 2 * gradient.float())


def test_parts_of_dweight_are_added_in_order_and_slots_without_rows_get_zero():
    from graphmoe.ops.grouped_mlp.triton_steps import weight_sums

    p = make_problem("some slots are not routed here", torch.float32)
    row_TK = p.plan[1]
    partial = torch.randn(3, len(p.plan[0]), generator=torch.Generator().manual_seed(7))
    poison(p, *(part for part in partial))
    expected = ((0.0 + partial[0]) + partial[1] + partial[2])[row_TK.clamp(min=0)].masked_fill(row_TK < 0, 0)
    assert torch.equal(weight_sums(partial, row_TK), expected)


def test_two_runs_are_bitwise_equal():
    p, run = make_problem("random", torch.float32), kernels()
    first, again = (
        run.dgrad(p.dy_TD, run.forward(*p.inputs, *p.plan)[1], *p.inputs[1:], *p.plan) for _ in "ab"
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_no_row_at_all_gives_zeros():
    case = ("random", 0, 8, 8, 3, 2, 0)
    p = make_problem(case, torch.float32)
    y_TD, h_RH = kernels().forward(*p.inputs, *p.plan)
    dx_TD, dweight_TK, dh_RH, a_RF = kernels().dgrad(p.dy_TD, h_RH, *p.inputs[1:], *p.plan)
    dws = kernels().wgrad(p.dy_TD, p.x_TD, dh_RH, a_RF, *p.plan)
    assert (y_TD.shape, dx_TD.shape, dweight_TK.shape) == ((0, 8), (0, 8), (0, 2))
    assert (h_RH.shape, dh_RH.shape, a_RF.shape) == ((0, 16), (0, 16), (0, 8))
    assert not any(bool(dw.any()) for dw in dws)


@pytest.mark.parametrize("height", [16, 64])
@pytest.mark.parametrize(
    "counts", [[0, 70, 0, 0, 5, 64, 0], [1, 0] * 256, [0, 0, 0], [129]], ids=lambda c: str(c)[:20]
)
def test_the_table_of_row_tiles_covers_each_expert_once(counts, height):
    from graphmoe.ops.grouped_mlp.triton_steps import row_tiles

    ends_E = torch.tensor(counts).cumsum(0).int()
    table = row_tiles(ends_E, sum(counts) + 7)(height).tolist()
    bound, expected = len(table) // 2, []
    for expert, (end, count) in enumerate(zip(ends_E.tolist(), counts, strict=True)):
        expected += [(expert, row) for row in range(end - count, end, height)]
    assert table[0] == len(expected) <= bound
    assert (
        list(zip(table[1 : 1 + len(expected)], table[1 + bound :], strict=False))[: len(expected)] == expected
    )
