"""The Triton kernels of the grouped MLP: ways to launch them, single steps, machine code without a GPU."""

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from graphmoe.ops.grouped_mlp import triton_backend as kernels
from graphmoe.ops.grouped_mlp.reference import Experts, Plan
from graphmoe.ops.grouped_mlp.triton_backend import row_tiles
from graphmoe.ops.grouped_mlp.weight_grad_kernel import into
from tests.ops.ahead_of_time import launches_of
from tests.ops.interpreted import KERNELS, device_of
from tests.ops.mlp_cases import assert_directions_match, make_problem, ops_of

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


def ahead_of_time_cases() -> list[dict[str, Any]]:
    """Every step in the default configs of every kind of device: bf16, many and few rows, and fp32."""
    cases = []
    for kind, targets in TARGETS_OF.items():
        given = [("wide", "bf16", 1 << 20), ("odd", "bf16", 1 << 20), ("wide", "bf16", 20)]
        for shape, dtype, rows in [("odd", "fp32", 1 << 20)] if kind == "small" else given:
            call = functools.partial(every_step, kind, *SHAPES[shape], dtype, rows)
            launches = launches_of("", call)
            for number, case in enumerate(launches):
                if case["name"] in ("tiles_kernel", "weight_sums_kernel"):
                    if case["name"] not in [other["name"] for other in cases]:
                        cases.append(case)  # for all targets
                elif rows > 20 or case["name"] == "rows_kernel":
                    name = f"{case['name']} {number} {kind} {shape} {dtype} {rows}"
                    case["constexprs"]["UPCAST"] = False
                    cases.append(case | {"name": name, "only": targets})
    gradient, total = (torch.empty(4096, device="meta", dtype=d) for d in (torch.bfloat16, torch.float32))
    return cases + launches_of("", lambda: into(total, gradient, add=True))


def every_step(kind: str, D: int, F: int, E: int, K: int, dtype: str, rows_per_expert: int) -> None:
    """Launch all steps on the meta device, as if on a kind of GPU."""
    kept, R = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], E * rows_per_expert
    meta = functools.partial(torch.empty, device="meta")
    x, weights = meta(R // K, D, dtype=kept), [(E, 2 * F, D), (E, D, F)]
    plan = Plan(*(meta(size, dtype=torch.int32) for size in ((R,), (R // K, K), (E,))))
    experts = Experts(*(meta(size, dtype=kept) for size in weights), meta(R // K, K), *plan)
    totals = tuple(meta(size) for size in weights)
    with mock.patch.multiple(kernels, kind_of=lambda device: kind, units_of=lambda device: 132):
        _, h = kernels.forward(x, experts)
        kernels.hidden(x, experts.w_gate_up, plan)
        _, _, dh, a = kernels.dgrad(x, h, experts)
        kernels.wgrad(x, x, dh, a, plan)
        kernels.wgrad(x, x, dh, a, plan, totals, add=True)
