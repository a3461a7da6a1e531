"""The grouped MLP in mxfp8: products of its plain form against fp64, its kernels against it."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from graphmoe.ops import fp8_mlp, grouped_mlp, permute  # noqa: F401  # registers the operations
from graphmoe.ops.fp8_blocks import launches as blocks
from graphmoe.ops.fp8_blocks.reference import KIND, MX_BLOCK, quantise_mx
from graphmoe.ops.fp8_blocks.reference import turned as turned_rows
from graphmoe.ops.fp8_mlp import mx_launches as launches
from graphmoe.ops.fp8_mlp.reference import BY_BLOCKS as by_torch
from graphmoe.ops.fp8_mlp.reference import PLAIN, rows_of_experts
from graphmoe.ops.grouped_mlp.triton_backend import row_tiles
from tests.ops.ahead_of_time import CROSSED, launches_of_layers
from tests.ops.interpreted import KERNELS, device_of
from tests.ops.test_fp8_mlp import EMPTY, SHAPES, WIDE, case_of, decibels, every, every_step, same

WITH_MX = SHAPES | {"narrow": (40, 1, 3, 96, 32)}
COMPILED = WIDE | {"uneven": (576, 480, 8, 2)}


def along(q: Tensor, scale: Tensor) -> Tensor:
    return q.double() * torch.exp2(scale.double() - 127).repeat_interleave(MX_BLOCK, -1)


def test_products_are_those_of_the_stored_numbers():
    case = case_of("mxfp8", "plain")
    up, plan = case.rows[0], case.plan
    token_R = plan.slot_R.long() // plan.row_TK.shape[1]
    h = torch.empty(len(token_R), up[0].shape[1])
    by_torch.product(case.x, [up], h, plan, by_torch.parts(plan, 0), gathers=True)
    found = every(by_torch, case)
    for expert, rows in rows_of_experts(plan):
        token = token_R[rows]
        exact = along(*case.x)[token] @ along(up[0][expert], up[1][expert]).T
        assert_sums_close(h[rows].double(), exact, 1e-5, 1e-6)
        parts = ((found.dgrad[2:4], rows), (case.x, token))
        left, right = (along(*turned_rows(*(part[at] for part in of))) for of, at in parts)
        assert_sums_close(found.gradients[0][expert].double(), left @ right.T, 1e-5, 1e-6)


def assert_sums_close(found: Tensor, wanted: Tensor, rtol: float, of_largest: float) -> None:
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=float(wanted.abs().amax()) * of_largest)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("shape", WITH_MX.values(), ids=[*WITH_MX])
def test_kernels_have_the_results_of_the_plain_form(backend, shape):
    case = case_of("mxfp8", backend, shape)
    found = every(launches.STEPS, case, of=(wanted := every(by_torch, case)))
    (y, *h), (dx, dweight, *made) = found.forward, found.dgrad
    for one, other in zip((y, dx, dweight), (wanted.forward[0], *wanted.dgrad[:2]), strict=True):
        almost(one, other, 45)
    for one, other in zip(h, found.hidden, strict=True):
        same(one, other)
    for one, other in ((h, wanted.forward[1:]), (made[:2], wanted.dgrad[2:4]), (made[2:], wanted.dgrad[4:])):
        stored_alike(one, other)
    for one, total, other in zip(found.gradients, found.sums, wanted.gradients, strict=True):
        for expert in range(len(other)):
            almost(one[expert], other[expert])
        assert total.equal(2 * one) and not one[1].any() and not one[-EMPTY:].any()


def almost(found: Tensor, wanted: Tensor, least: float = 70) -> None:
    """Compare sums in fp32 in another order; on a GPU by signal over noise, in dB."""
    assert found.dtype == wanted.dtype
    if found.is_cuda:
        assert decibels(found, wanted) > least or found.equal(wanted)
    else:
        assert_sums_close(found, wanted, 2e-5, 2e-6)


def stored_alike(found: Any, wanted: Any) -> None:
    """Compare stored sums, which differ in their last bits: few differ in 8 bits, by a step of these."""
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one.float() == other.float()).double().mean() > 0.999
    assert decibels(along(*found), along(*wanted)) > 45


@pytest.mark.parametrize("backend", KERNELS)
def test_numbers_and_scales_of_kernels_are_bitwise_those_of_the_plain_form(backend):
    """Sums and the exponential, which differ in their last bits, are left out."""
    case = case_of("mxfp8", backend)
    plan, R, H = case.plan, len(case.plan.slot_R), case.rows[0][0].shape[1]
    h = torch.randn(R, H, generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 4, R)[:, None]
    h[4] = 0
    h, live = h.to(device_of(backend)), int(plan.ends_E[-1])
    stored = h.new_empty(R, H, dtype=KIND), h.new_empty(R, H // MX_BLOCK, dtype=torch.uint8)
    of_tiles = h, None, plan.slot_R, plan.ends_E, *stored, None, None
    launches._by_tiles("swiglu_kernel", of_tiles, plan, H // 2, 128, PLAIN)
    for found, wanted in zip(stored, quantise_mx(h), strict=True):
        same(found[:live], wanted[:live])
    token_R, table = plan.slot_R.long() // plan.row_TK.shape[1], row_tiles(plan.ends_E, R)(launches.BLOCK_R)
    for of, gathers in ((case.x, True), (stored, False)):
        q, scale = launches.turned_rows(of, plan, table, gathers=gathers)
        tile = 0
        for _, rows in rows_of_experts(plan):
            one = turned_rows(*(part[token_R[rows] if gathers else rows] for part in of))
            room = -(-(rows.stop - rows.start) // launches.BLOCK_R) * launches.BLOCK_R
            for found, wanted, block in ((q, one[0], 1), (scale, one[1], MX_BLOCK)):
                part = found[:, tile // block : (tile + room) // block]
                same(part[:, : wanted.shape[1]], wanted)
                assert not part[:, wanted.shape[1] :].float().any()
            tile += room


def ahead_of_time_cases() -> list[dict[str, Any]]:
    """The kernels of layers; products are those of the GPUs that have them in mxfp8.

    A layer with biases and one with tails are compiled on one target of a kind each.
    """
    every = functools.partial(every_step, launches, (blocks.quantise_mx, lambda w: blocks.turned(w, None)))
    cases = []
    for case in launches_of_layers(COMPILED, every):
        *_, kind, shape = case["name"].split()
        targets = case["only"]["UPCAST" in case["constexprs"] :]
        if shape in ("gpt_oss", "uneven"):
            targets = tuple(each for each in targets if (each in CROSSED[kind]) == (shape == "gpt_oss"))
        cases.append(case | {"only": targets})
    return cases
