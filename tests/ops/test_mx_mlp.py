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
from graphmoe.ops.fp8_mlp.reference import rows_of_experts
from graphmoe.ops.grouped_mlp.reference import Plan
from graphmoe.ops.grouped_mlp.triton_backend import row_tiles
from tests.ops.ahead_of_time import launches_of_layers
from tests.ops.interpreted import KERNELS, device_of
from tests.ops.test_fp8_mlp import WIDE, decibels, every_step, layer, same

ops, by_kernels = torch.ops.graphmoe, launches.STEPS
SHAPES = {"small": (48, 2, 5, 64, 160), "narrow": (40, 1, 3, 96, 32), "wide": (96, 4, 8, 128, 256)}
"""T, K, E, D, F."""
COMPILED = WIDE | {"uneven": (576, 480, 8, 2)}


def along(q: Tensor, scale: Tensor) -> Tensor:
    return q.double() * torch.exp2(scale.double() - 127).repeat_interleave(MX_BLOCK, -1)


def sizes_apart(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """`layer`, with tokens of 1e-6 and of 1e4, in x and in dy."""
    (x, *rest), plan, dy = layer(shape, dtype, device)
    x[5:9] *= 1e-6
    x[9:12] *= 1e4
    dy[7:10] *= 1e-6
    dy[10:14] *= 1e4
    return (x, *rest), plan, dy


def test_products_are_those_of_the_stored_numbers():
    (x, w_gate_up, w_down, weight_TK), plan, dy = sizes_apart(SHAPES["small"])
    of_x, of_dy, up = quantise_mx(x), quantise_mx(dy), ops.mx_rows(w_gate_up)
    token_R = plan.slot_R.long() // plan.row_TK.shape[1]
    h = x.new_empty(len(token_R), up[0].shape[1])
    by_torch.product(of_x, [up], h, plan, by_torch.parts(plan, 0), gathers=True)
    made = by_torch.dgrad(
        of_dy, quantise_mx(h), ops.mx_columns(w_gate_up), ops.mx_columns(w_down), weight_TK, plan, x.dtype
    )
    dw_gate_up, _ = by_torch.wgrad(of_dy, of_x, made[2:4], made[4:6], plan)
    for expert, rows in rows_of_experts(plan):
        token = token_R[rows]
        exact = along(*of_x)[token] @ along(up[0][expert], up[1][expert]).T
        torch.testing.assert_close(h[rows].double(), exact, rtol=1e-5, atol=float(exact.abs().amax()) * 1e-6)
        sides = [turned_rows(*(part[at] for part in of)) for of, at in ((made[2:4], rows), (of_x, token))]
        exact = along(*sides[0]) @ along(*sides[1]).T
        torch.testing.assert_close(
            dw_gate_up[expert].double(), exact, rtol=1e-5, atol=float(exact.abs().amax()) * 1e-6
        )


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("matrices", [(5, 128, 96), (3, 64, 160)])
def test_weights_of_experts_are_stored_as_each_alone(backend, matrices):
    w = torch.randn(matrices, generator=torch.Generator().manual_seed(0)).to(device_of(backend))
    w[1] *= 1e-6
    w[2, 7], w[2, :, 9] = 0, 1e4
    for found, one in ((blocks.quantise_mx(w), w), (blocks.turned(w, None), w.mT.contiguous())):
        q, scale = quantise_mx(one)
        same(found[0], q)
        assert found[1].equal(scale) and scale.shape == (*one.shape[:-1], one.shape[-1] // MX_BLOCK)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=[*SHAPES])
def test_kernels_are_the_plain_form(backend, shape):
    (x, w_gate_up, w_down, weight_TK), plan, dy = sizes_apart(shape, device=device_of(backend))
    rows, columns = ([store(w) for w in (w_gate_up, w_down)] for store in (ops.mx_rows, ops.mx_columns))
    of_x, of_dy, live = quantise_mx(x), quantise_mx(dy), int(plan.ends_E[-1])
    (y, *h), (y_plain, *h_plain) = (
        steps.forward(of_x, *rows, weight_TK, plan, x.dtype) for steps in (by_kernels, by_torch)
    )
    almost(y, y_plain, 45)
    for one, other in zip(h, by_kernels.hidden(of_x, rows[0], plan, x.dtype), strict=True):
        same(one, other, live)
    stored_alike(h, h_plain, live)
    given = of_dy, tuple(h_plain), *columns, weight_TK, plan, x.dtype
    found, wanted = by_kernels.dgrad(*given), by_torch.dgrad(*given)
    for one, other in zip(found[:2], wanted[:2], strict=True):
        almost(one, other, 45)
    stored_alike(found[2:4], wanted[2:4], live)
    stored_alike(found[4:], wanted[4:], live)
    sides = of_dy, of_x, wanted[2:4], wanted[4:], plan
    totals = tuple(torch.full_like(w, 2) for w in (w_gate_up, w_down))
    filled = tuple(torch.full_like(w, float("nan")) for w in (w_gate_up, w_down))
    by_kernels.wgrad(*sides, totals, add=True)
    by_kernels.wgrad(*sides, filled)
    for one, total, full, other in zip(
        by_kernels.wgrad(*sides), totals, filled, by_torch.wgrad(*sides), strict=True
    ):
        for expert in range(len(plan.ends_E)):
            almost(one[expert], other[expert])
        assert full.equal(one) and total.equal(one + 2) and not one[1].any()


def almost(found: Tensor, wanted: Tensor, least: float = 70) -> None:
    """Compare sums in fp32 in another order; on a GPU by signal over noise, in dB."""
    assert found.dtype == wanted.dtype
    if found.is_cuda:
        assert decibels(found, wanted) > least or found.equal(wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=float(wanted.abs().amax()) * 2e-6)


def stored_alike(found: Any, wanted: Any, live: int) -> None:
    """Compare stored sums, which differ in their last bits: few differ in 8 bits, by a step of these."""
    (q, scale), (q_wanted, scale_wanted) = ([each[:live] for each in of] for of in (found, wanted))
    assert q.dtype == q_wanted.dtype and scale.dtype == scale_wanted.dtype and q.shape == q_wanted.shape
    assert (q.float() == q_wanted.float()).double().mean() > 0.999
    assert (scale == scale_wanted).double().mean() > 0.999
    assert decibels(along(q, scale), along(q_wanted, scale_wanted)) > 45


@pytest.mark.parametrize("backend", KERNELS)
def test_numbers_and_scales_of_kernels_are_bitwise_those_of_the_plain_form(backend):
    """Sums and the exponential, which differ in their last bits, are left out."""
    device = device_of(backend)
    (x, w_gate_up, *_), plan, _ = sizes_apart(SHAPES["small"], device=device)
    R, H = len(plan.slot_R), w_gate_up.shape[1]
    h = torch.randn(R, H, generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 4, R)[:, None]
    h[4] = 0
    h = h.to(device)
    stored = h.new_empty(R, H, dtype=KIND), h.new_empty(R, H // MX_BLOCK, dtype=torch.uint8)
    of_tiles = h, None, plan.slot_R, plan.ends_E, *stored, None, None
    launches._by_tiles("swiglu_kernel", of_tiles, plan, H // 2, 128)
    for found, wanted in zip(stored, quantise_mx(h), strict=True):
        same(found, wanted)
    token_R, table = plan.slot_R.long() // plan.row_TK.shape[1], row_tiles(plan.ends_E, R)(launches.BLOCK_R)
    of_x = quantise_mx(x)
    for of, gathers in ((of_x, True), (stored, False)):
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


@pytest.mark.parametrize("backend", KERNELS)
def test_no_live_rows_at_all_have_gradients_of_zero(backend):
    with torch.device(device_of(backend)):
        x, w, weight_TK = torch.ones(4, 64), torch.ones(2, 64, 64), torch.ones(4, 1)
        slot_R, row_TK, ends_E = torch.zeros(8).int(), torch.full((4, 1), -1).int(), torch.zeros(2).int()
    of_x, plan, halves = quantise_mx(x), Plan(slot_R, row_TK, ends_E), (w, w[..., :32])
    y, *h = by_kernels.forward(of_x, *map(ops.mx_rows, halves), weight_TK, plan, x.dtype)
    turned = map(ops.mx_columns, halves)
    dx, dweight, *made = by_kernels.dgrad(of_x, tuple(h), *turned, weight_TK, plan, x.dtype)
    gradients = by_kernels.wgrad(of_x, of_x, tuple(made[:2]), tuple(made[2:]), plan)
    assert not any(each.any() for each in (y, dx, dweight, *gradients))


def ahead_of_time_cases() -> list[dict[str, Any]]:
    """The kernels of layers; products are those of the GPUs that have them in mxfp8."""
    every = functools.partial(every_step, launches, (blocks.quantise_mx, lambda w: blocks.turned(w, None)))
    cases = launches_of_layers(COMPILED, every)
    return [case | {"only": case["only"]["UPCAST" in case["constexprs"] :]} for case in cases]
