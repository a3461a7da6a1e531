"""The grouped MLP in 8 bits: its plain form against fp64, its kernels against its plain form."""

import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from graphmoe.ops import formats, fp8_mlp, grouped_mlp, permute  # noqa: F401  # registers the operations
from graphmoe.ops.fp8 import (
    BLOCK,
    INPUT,
    block_values,
    fp8_dtype,
    quantise,
    quantise_blocks,
    recipes_of,
    wide_dtype,
)
from graphmoe.ops.fp8_mlp import launches, reference
from graphmoe.ops.fp8_mlp.reference import Known
from graphmoe.ops.grouped_mlp import triton_backend
from graphmoe.ops.grouped_mlp.reference import Plan
from tests.ops.ahead_of_time import launches_of_layers
from tests.ops.interpreted import BACKENDS, KERNELS, device_of

by_kernels, by_torch = launches.STEPS, reference.BY_ROWS
SHAPES = {"small": (48, 2, 5, 64, 160), "narrow": (40, 1, 3, 48, 32), "wide": (96, 4, 8, 128, 256)}
"""T, K, E, D, F."""
WIDE = {"v2_lite": (2048, 1408, 64, 6), "v3": (7168, 2048, 32, 8)}
"""D, F, E, K of the layers that are compiled ahead of time."""
KIND = torch.float8_e4m3fn
NOT_FINITE = (torch.inf, -torch.inf, torch.nan)


def routed(T: int, K: int, E: int, device: str = "cpu") -> tuple[Tensor, Plan]:
    """Weights of slots, and a plan in which expert 1 has no rows and expert 0 has most."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(T, E, generator=generator)
    logits[:, 1] = -1e9
    logits[:, 0] += 2
    weight_TK, expert_TK = (each.to(device) for each in logits.softmax(-1).topk(K))
    _, ends_E, row_TK, slot_R = torch.ops.graphmoe.routing_plan(expert_TK.int(), E)
    return weight_TK, Plan(slot_R, row_TK, ends_E)


def layer(
    shape: str | tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[tuple[Tensor, ...], Plan, Tensor]:
    """x, both weights and the weights of slots; the plan; the gradient of y. A token is all zeros."""
    T, K, E, D, F = SHAPES[shape] if isinstance(shape, str) else shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, D, generator=generator) * torch.logspace(-1, 1, T)[:, None]
    x[3] = 0
    weights = (
        torch.randn(E, 2 * F, D, generator=generator) / 8,
        torch.randn(E, D, F, generator=generator) / 12,
    )
    dy = torch.randn(T, D, generator=generator)
    weight_TK, plan = routed(T, K, E, device)
    return (*(each.to(device, dtype) for each in (x, *weights)), weight_TK), plan, dy.to(device, dtype)


def decibels(found: Tensor, wanted: Tensor) -> float:
    noise = (found.double() - wanted.double()).square().sum()
    return float(10 * torch.log10(wanted.double().square().sum() / noise))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2])
def test_scales_are_the_smallest_powers_of_two_that_hold_a_row(kind):
    most = torch.finfo(kind).max
    sizes = [most, most * 1.0001, most / 2, 1.0, 1e-6, 1e4, 1e22, 3e38, 1e-30, 1e-38, 0.0]
    rows = torch.tensor(sizes).unsqueeze(1)
    q, scale = quantise(rows, kind)
    whole = torch.log2(scale)
    assert whole.equal(whole.round()) and scale[9] == 2.0**-126 == scale[10]
    assert scale[:9].flatten().equal(2.0 ** torch.log2(rows[:9] / most).ceil().flatten())
    assert q.float().abs().max() <= most and (q.float() * scale)[:1].equal(rows[:1]) and q[10].float() == 0
    torch.testing.assert_close(q.float() * scale, rows, rtol=1 / 8, atol=0)
    for bad in NOT_FINITE:
        q, scale = quantise(torch.tensor([[1.0, bad, 0.0]]), kind)
        assert q.float().isnan().all() and scale.isnan()


def test_blocks_have_scales_of_their_own():
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    x[:, :BLOCK] *= 1e4
    q, scale = quantise_blocks(x, KIND)
    assert q.shape == x.shape and scale.shape == (5, 3)
    assert decibels(block_values(q, scale)[:, BLOCK:], x[:, BLOCK:]) > 30


FLOORS = {"rowwise": (22, 19), "mxfp8": (20, 18)}
"""dB of y and of gradients. A product leaves 27; y has gone through two, gradients three and a stored h."""
WITHIN_8_BITS = [
    *(("rowwise", SHAPES[name], dtype) for name in SHAPES for dtype in (torch.float32, torch.bfloat16)),
    ("mxfp8", SHAPES["small"], torch.float32),
    ("mxfp8", SHAPES["small"], torch.bfloat16),
    ("mxfp8", (40, 1, 3, 96, 32), torch.float32),
    ("mxfp8", SHAPES["wide"], torch.bfloat16),
]


@pytest.mark.parametrize(("recipe", "shape", "dtype"), WITHIN_8_BITS, ids=str)
def test_values_and_gradients_are_those_of_fp64_within_8_bits(recipe, shape, dtype):
    tensors, plan, dy = layer(shape, dtype)
    exact, stored = ([each.clone().to(d).requires_grad_() for each in tensors] for d in (torch.float64, None))
    expected, _ = torch.ops.graphmoe.grouped_mlp(*exact, *plan, "torch")
    expected.backward(dy.double())
    y = torch.ops.graphmoe.fp8_mlp(*stored, *plan, recipe)
    y.backward(dy)
    of_y, of_gradients = FLOORS[recipe]
    assert y.dtype == dtype and decibels(y.detach(), expected.detach()) > of_y
    for found, wanted in zip(stored, exact, strict=True):
        assert found.grad.dtype == found.dtype and decibels(found.grad, wanted.grad) > of_gradients
    assert not stored[1].grad[1].any() and not stored[2].grad[1].any()  # the expert without rows


def test_each_product_is_that_of_the_stored_numbers():
    tensors, plan, _ = layer("small")
    x, gate_up = quantise(tensors[0], KIND), quantise(tensors[1], KIND)
    token_R, values = plan.slot_R.long() // plan.row_TK.shape[1], x[0].double() * x[1]
    found = torch.empty(len(token_R), gate_up[0].shape[1])
    by_torch.product(x, [gate_up], found, plan, by_torch.parts(plan, 0), gathers=True)
    weights, start = gate_up[0].double() * gate_up[1], 0
    for expert, end in enumerate(plan.ends_E.tolist()):
        wanted = values[token_R[start:end]] @ weights[expert].T
        torch.testing.assert_close(found[start:end].double(), wanted, rtol=1e-5, atol=1e-5)
        plain = tensors[0].double()[token_R[start:end]] @ tensors[1][expert].double().T
        assert end == start or decibels(found[start:end], plain) > 25
        start = end


def same(found: Tensor, wanted: Tensor, live: int | None = None) -> None:
    assert found.dtype == wanted.dtype
    found, wanted = found[:live].float(), wanted[:live].float()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def of_all_sizes(w: Tensor) -> Tensor:
    sizes = torch.tensor([1.0, 1e22, 1e38, 1e-30, 1e-38, 0.0], device=w.device)
    w = w * sizes.repeat(w.shape[-2])[: w.shape[-2], None].to(w.dtype)
    w[..., 7, 9] = torch.inf
    return w


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_and_scales_of_kernels_are_bitwise_those_of_the_plain_form(backend, shape):
    device, kind = device_of(backend), fp8_dtype()
    dtype = torch.float32 if backend == "interpreted" else torch.bfloat16
    (x, w_gate_up, w_down, weight_TK), plan, dy = layer(shape, dtype, device)
    for w in (w_gate_up, w_down, of_all_sizes(w_down)):
        both = *quantise(w, kind), *quantise(w.mT, kind)
        for found, wanted in zip((*launches.rows(w), *launches.columns(w)), both, strict=True):
            same(found, wanted)
    stored = [quantise(each, kind) for each in (x, w_gate_up, w_down)]
    live = int(plan.ends_E[-1])
    y, *h = by_kernels.forward(*stored, weight_TK, plan, dtype)
    y_plain, *h_plain = by_torch.forward(*stored, weight_TK, plan, dtype)
    assert decibels(y, y_plain) > 45
    for found, wanted in zip(h, h_plain, strict=True):
        assert decibels(found[:live], wanted[:live]) > 45  # sums in another order, rounded to 8 bits
    for found, wanted in zip(by_kernels.hidden(*stored[:2], plan, dtype), h, strict=True):
        same(found, wanted, live)
    turned = [launches.columns(w) for w in (w_gate_up, w_down)]
    gradients = quantise(dy, kind), tuple(h_plain), *turned, weight_TK, plan, dtype
    found, wanted = by_kernels.dgrad(*gradients), by_torch.dgrad(*gradients)
    for one, other in zip(found, wanted, strict=True):
        count = len(other) if other.shape[0] == len(x) else live
        assert decibels(one[:count], other[:count]) > 40
    made = quantise(dy, kind), stored[0], wanted[2:4], wanted[4:6], plan
    totals = tuple(torch.full_like(w, 2, dtype=torch.float32) for w in (w_gate_up, w_down))
    by_kernels.wgrad(*made, totals, add=True)
    least = 100 if backend == "interpreted" else 70  # Hopper keeps 14 bits of a sum of 8-bit products
    for one, total, other in zip(by_kernels.wgrad(*made), totals, by_torch.wgrad(*made), strict=True):
        assert decibels(one, other) > least and decibels(total - 2, other) > least - 10
        assert not one[1].any()


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_take_scales_that_are_known_and_find_the_largest_numbers(backend, shape):
    device, kind = device_of(backend), fp8_dtype()
    dtype = torch.float32 if backend == "interpreted" else torch.bfloat16
    (x, w_gate_up, w_down, weight_TK), plan, dy = layer(shape, dtype, device)
    for w in (w_gate_up, w_down):
        both = ((*of.rows(w, whole=True), *of.columns(w, whole=True)) for of in (launches, reference))
        for found, wanted in zip(*both, strict=True):
            same(found, wanted)
    stored = [quantise(x, kind), *(reference.rows(w, whole=True) for w in (w_gate_up, w_down))]
    turned = [reference.columns(w, whole=True) for w in (w_gate_up, w_down)]
    _, *h = by_torch.forward(*stored, weight_TK, plan, dtype)
    live = int(plan.ends_E[-1])

    def numbers(by: Any, of_a: float, of_dh: float) -> tuple[Tensor, ...]:
        a, dh, *largest = (torch.tensor([each], device=device) for each in (of_a, of_dh, 0.0, 0.0))
        y, *_ = by.forward(*stored, weight_TK, plan, dtype, Known(a, largest[0]))
        gradients = quantise(dy, wide_dtype()), tuple(h), *turned, weight_TK, plan, dtype
        return y, *by.dgrad(*gradients, a, Known(dh, largest[1])), *largest

    scales = 2.0**-5, 2.0**-14
    found, wanted = numbers(by_kernels, *scales), numbers(by_torch, *scales)
    for one, other in zip(found, wanted, strict=True):
        count = len(other) if other.shape[0] in (len(x), 1) else live
        assert decibels(one[:count], other[:count]) > 35
    for one, other in zip(found[-2:], wanted[-2:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if device == "cuda" else 1e-5, atol=0)
    assert found[6][:live].eq(scales[0]).all() and found[4][:live].eq(scales[1]).all()
    # What is beyond the largest number becomes that: scales of a tiny part of it.
    _, _, _, dhq, _, aq, *_ = numbers(by_kernels, 2.0**-40, 2.0**-40)
    assert dhq.dtype == wide_dtype() and aq.dtype == kind
    for numbers_of in (aq, dhq):
        assert numbers_of[:live].float().abs().max() == torch.finfo(numbers_of.dtype).max
    assert aq[:live].float().isfinite().all()


def test_what_is_infinite_or_no_number_stays_known_as_such():
    x, largest = torch.tensor([[1.0, -9e4, torch.inf, torch.nan, 0.0]]), torch.ones(1)
    for wide, most in ((False, -448), (True, -57344)):
        q, found = torch.ops.graphmoe.fp8_given(x, torch.ones(1), largest, wide)
        q = q.float()
        assert q[0, :2].tolist() == [1, most] and q[0, 2:4].isnan().all() and q[0, 4] == 0
        assert not found.isfinite()
    finite = x[:, :2].contiguous()
    for before, after in ((2, 9e4), (1e5, 1e5)):
        found = torch.ops.graphmoe.fp8_given(finite, torch.ones(1), torch.tensor([before]).float(), False)[1]
        assert found == after


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("scaled", [False, True])
def test_transposed_rows_are_those_of_the_plain_form(backend, scaled):
    q, scale = quantise(torch.randn(150, 144, generator=torch.Generator().manual_seed(0)), fp8_dtype())
    factor = scale / scale.amax() if scaled else None
    found = formats.by_kernel(*(None if t is None else t.to(device_of(backend)) for t in (q, factor)), 160)
    assert found.cpu().float().equal(torch.ops.graphmoe.fp8_transposed(q, factor).float())


def results_of(recipe: str, backend: str, plan: Plan, *tensors: Tensor) -> list[Tensor]:
    """y, and gradients of x, both weights and the weights of slots; dy comes last."""
    *leaves, dy = (each.clone().requires_grad_() for each in tensors)

    changed = {
        "_rounding": lambda _: launches,
        "_steps": lambda _, recipe: formats.KERNELS[recipe].experts(True),
    }
    with mock.patch.dict(fp8_mlp.__dict__, changed if backend == "interpreted" else {}):
        y = torch.ops.graphmoe.fp8_mlp(*leaves, *plan, recipe)
        y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def small_layer(recipe: str, backend: str) -> tuple[Plan, list[Tensor]]:
    device, interpreted = device_of(backend), backend == "interpreted"
    if recipe not in recipes_of(torch.device(device)):
        pytest.skip(f"this GPU has no {recipe}")
    kind, shape = torch.float32, (12, 1, 2, 32, 32) if interpreted else (40, 2, 3, 64, 32)
    tensors, plan, dy = layer(shape, torch.bfloat16 if device == "cuda" else kind, device)
    return plan, [*tensors, dy]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("operand", [0, 1, 2, 4], ids=["x", "w_gate_up", "w_down", "dy"])
def test_experts_are_finite_only_where_those_without_8_bits_are(recipe, operand, backend):
    plan, tensors = small_layer(recipe, backend)
    for bad in NOT_FINITE[: 1 if backend == "interpreted" else None]:
        given = [each.clone().requires_grad_() for each in tensors]
        with torch.no_grad():
            given[operand][(0, 5, 7)[-given[operand].dim() :]] = bad
        y = torch.ops.graphmoe.grouped_mlp(*given[:4], *plan, "torch")[0]
        plain = y, *torch.autograd.grad(y, given[:4], given[4])
        results = results_of(recipe, backend, plan, *(each.detach() for each in given))
        # Rows of tokens, and weights of experts.
        masks = [[x.isfinite().flatten(1).all(1) for x in each] for each in (results, plain)]
        assert all(found.equal(wanted) for found, wanted in zip(*masks, strict=True))
        assert not all(mask.all() for mask in masks[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
@pytest.mark.parametrize("power", [100, -90])
def test_experts_of_any_size_are_those_of_ordinary_size_times_it(recipe, power, backend):
    plan, given = small_layer(recipe, backend)
    plain, factor = results_of(recipe, backend, plan, *given), 2.0**power
    for operand, linear in ((2, (0, 1)), (4, (1, 2, 3, 4))):  # w_down in y and dx, dy in gradients
        larger = [each * factor if i == operand else each for i, each in enumerate(given)]
        found = results_of(recipe, backend, plan, *larger)
        assert all(found[i].equal(plain[i] * factor) and plain[i].any() for i in linear)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_dead_rows_full_of_nan_are_not_read(recipe, backend):
    plan, (x, *weights, weight_TK, dy) = small_layer(recipe, backend)
    by, room, live = formats.KERNELS[recipe], 24, int(plan.ends_E[-1])
    rows, turned = ([store(w) for w in weights] for store in (by.weight, by.transposed))
    of_x, of_dy = (by.quantize(each, weights[0], INPUT) for each in (x, dy))
    # Behind the last row, slots are any.
    wider = plan._replace(slot_R=torch.cat([plan.slot_R, plan.slot_R.new_full((room,), 7)]))

    def with_nan(tensor: Tensor) -> Tensor:
        is_byte = tensor.dtype == torch.uint8
        extra = torch.full((room, *tensor.shape[1:]), 255 if is_byte else torch.nan, device=x.device)
        return torch.cat([tensor[:live], extra.to(tensor.dtype)])

    (y, *h), found = (
        by.experts(kernels).forward(of_x, *rows, weight_TK, of, x.dtype)
        for kernels, of in ((False, plan), (True, wider))
    )
    assert found[0].isfinite().all() and decibels(found[0], y) > 45
    given = tuple(map(with_nan, h)), *turned, weight_TK, wider, x.dtype
    dx, dweight, *made = by.experts(True).dgrad(of_dy, *given)
    assert dx.isfinite().all() and dweight.isfinite().all()
    gradients = []
    for kernels, of in ((True, with_nan), (False, lambda part: part[:live])):
        dh, a = (tuple(map(of, both)) for both in (made[:2], made[2:]))
        of_plan = wider if kernels else plan
        gradients.append(by.experts(kernels).wgrad(of_dy, of_x, dh, a, of_plan))
    assert all(decibels(one, other) > 60 for one, other in zip(*gradients, strict=True))


def ahead_of_time_cases() -> list[dict[str, Any]]:
    every = functools.partial(every_step, launches, (launches.rows, launches.columns))
    return launches_of_layers(WIDE, every)


def every_step(of: Any, stores: Sequence[Any], kind: str, D: int, F: int, E: int, K: int) -> None:
    meta, R = functools.partial(torch.empty, device="meta"), E * 1536
    plan = Plan(*(meta(size, dtype=torch.int32) for size in ((R,), (R // K, K), (E,))))
    x, *experts = (meta(size, dtype=torch.bfloat16) for size in ((R // K, D), (E, 2 * F, D), (E, D, F)))
    fixed = {"kind_of": lambda device: kind, "units_of": lambda device: 132}
    with mock.patch.multiple(of, **fixed), mock.patch.multiple(triton_backend, **fixed):
        steps, weight_TK, dtype = of.STEPS, meta(R // K, K), torch.bfloat16
        rows, weights, turned = stores[0](x), *([store(w) for w in experts] for store in stores)
        _, *h = steps.forward(rows, *weights, weight_TK, plan, dtype)
        steps.hidden(rows, weights[0], plan, dtype)
        _, _, *made = steps.dgrad(rows, tuple(h), *turned, weight_TK, plan, dtype)
        sides = rows, rows, tuple(made[:2]), tuple(made[2:]), plan
        totals = steps.wgrad(*sides)
        steps.wgrad(*sides, totals, add=True)
        of_both = plan._replace(ends_E=meta(2 * E, dtype=torch.int32))
        steps.wgrad(*sides[:4], of_both, totals, of_more=totals)
        if of is launches:
            launches.rows(experts[1], whole=True), launches.columns(experts[1], whole=True)
            gradient, known = (rows[0].to(wide_dtype()), rows[1]), Known(meta(1), meta(1))
            steps.forward(rows, *weights, weight_TK, plan, dtype, known)
            _, _, *made = steps.dgrad(gradient, tuple(h), *turned, weight_TK, plan, dtype, meta(1), known)
            steps.wgrad(gradient, rows, tuple(made[:2]), tuple(made[2:]), plan)
            formats.by_kernel(*rows, R // K)
