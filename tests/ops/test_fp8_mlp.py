"""The grouped MLP in 8 bits: its plain form against fp64, its kernels against its plain form."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from graphmoe.config.formats import FORMATS
from graphmoe.ops import formats, fp8_mlp, grouped_mlp, permute  # noqa: F401  # registers the operations
from graphmoe.ops.fp8 import GRADIENT, INPUT, Stored, fp8_dtype, quantise, recipes_of, wide_dtype
from graphmoe.ops.fp8_mlp import launches, reference
from graphmoe.ops.fp8_mlp.reference import PLAIN, Activation, Known
from graphmoe.ops.grouped_mlp import triton_backend
from graphmoe.ops.grouped_mlp.reference import Plan
from graphmoe.ops.swiglu_kernels import expert_sums
from tests.ops.ahead_of_time import CROSSED, launches_of_layers
from tests.ops.interpreted import BACKENDS, INTERPRETING, KERNELS, device_of, in_turn
from tests.ops.row_cases import NAN, store_in_both

by_kernels, by_torch = launches.STEPS, reference.BY_ROWS
SHAPES = {"small": (48, 2, 5, 64, 160), "narrow": (40, 1, 3, 48, 32), "wide": (96, 4, 8, 128, 256)}
"""T, K, E, D, F."""
if INTERPRETING:
    SHAPES["wide"] = (70, 3, 4, 128, 256)  # still two tiles of rows of expert 0
WIDE = {"v2_lite": (2048, 1408, 64, 6), "v3": (7168, 2048, 32, 8), "gpt_oss": (2880, 2880, 32, 4)}
"""D, F, E, K of the layers that are compiled ahead of time; gpt-oss with biases and clamps."""
KIND = torch.float8_e4m3fn
NOT_FINITE = (torch.inf, -torch.inf, torch.nan)


def layer(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[tuple[Tensor, ...], Plan, Tensor]:
    """x, both weights and the weights of slots; the plan; the gradient of y.

    A token is all zeros, expert 1 has no rows, and expert 0 has most.
    """
    T, K, E, D, F = shape
    normal = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x = normal(T, D) * torch.logspace(-1, 1, T)[:, None]
    x[3] = 0
    weights, dy = (normal(E, 2 * F, D) / 8, normal(E, D, F) / 12), normal(T, D)
    logits = normal(T, E, generator=torch.Generator().manual_seed(1))
    logits[:, 1] = -1e9
    logits[:, 0] += 2
    weight_TK, expert_TK = (each.to(device) for each in logits.softmax(-1).topk(K))
    _, ends_E, row_TK, slot_R = torch.ops.graphmoe.routing_plan(expert_TK.int(), E)
    tensors = (*(each.to(device, dtype) for each in (x, *weights)), weight_TK)
    return tensors, Plan(slot_R, row_TK, ends_E), dy.to(device, dtype)


WITH_EXPERTS = ("rowwise", "tensorwise", "mxfp8")
EMPTY = 2


class Case(NamedTuple):
    """A layer as the operations get it."""

    x: Stored
    dy: Stored
    rows: list[Stored]  # both weights, stored for the forward
    columns: list[Stored]  # for the backward
    weight_TK: Tensor
    plan: Plan
    dtype: torch.dtype
    known: list[Tensor]  # scales of the activation and of dh, if they are known
    act: Activation = PLAIN


def case_of(recipe: str, backend: str, shape: Sequence[int] = SHAPES["small"]) -> Case:
    """A `layer` with 24 dead rows of any slots, and `EMPTY` experts without rows behind the last.

    In mxfp8 tokens of 1e-6 and of 1e4 are in x and in dy.
    """
    device, is_mx, is_delayed = device_of(backend), recipe == "mxfp8", FORMATS[recipe].is_delayed
    dtype = torch.bfloat16 if device == "cuda" and not is_mx else torch.float32
    (x, *weights, weight_TK), plan, dy = layer(shape, dtype, device)
    for tensor, start, middle, end in ((x, 5, 9, 12), (dy, 7, 10, 14)) if is_mx else ():
        tensor[start:middle] *= 1e-6
        tensor[middle:end] *= 1e4
    slot_R, ends_E = plan.slot_R, plan.ends_E
    dead = torch.tensor([7, 0, -1, 2**30] * 6, dtype=slot_R.dtype, device=device)
    plan = Plan(torch.cat([slot_R, dead]), plan.row_TK, torch.cat([ends_E, ends_E[-1:].expand(EMPTY)]))
    weights, by = [torch.cat([w, w[:EMPTY]]) for w in weights], formats.KERNELS[recipe]

    def tokens(of: Tensor, w: Tensor, side: str) -> Stored:
        q, scale = by.quantize(of, w, side)
        return q, scale.expand(len(of), 1).contiguous() if is_delayed else scale

    rows, columns = ([store(w) for w in weights] for store in (by.weight, by.transposed))
    known = [torch.tensor([2.0**n], device=device) for n in (-5, -14)] if is_delayed else []
    sides = tokens(x, weights[0], INPUT), tokens(dy, weights[1], GRADIENT)
    return Case(*sides, rows, columns, weight_TK, plan, dtype, known)


class Results(NamedTuple):
    """Of all steps, in live rows."""

    forward: list[Tensor]
    hidden: list[Tensor]
    dgrad: list[Tensor]
    largest: list[Tensor]
    gradients: list[Tensor]
    sums: list[Tensor]  # with the gradients added to them once more

    @property
    def of_rows(self) -> list[Tensor]:
        return [*self.forward, *self.hidden, *self.dgrad, *self.largest]


def every(steps: Any, case: Case, own: int | None = None, of: Results | None = None) -> Results:
    """Run all steps, the later ones on what the earlier ones of ``of`` made, with NaN in its dead rows.

    Weights from ``own`` on are a second list, whose gradients are stored again, not added.
    """
    plan, E, live = case.plan, len(case.plan.ends_E), int(case.plan.ends_E[-1])
    own, largest = E if own is None else own, [torch.zeros_like(each) for each in case.known]

    def lists(weights: list[Stored]) -> tuple[list[Any], dict[str, Any]]:
        parts = [[tuple(part[at] for part in w) for w in weights] for at in (slice(own), slice(own, None))]
        return parts[0], {"more": parts[1]} if own < E else {}

    def with_nan(each: Tensor) -> Tensor:
        size, nan = (len(plan.slot_R) - live, *each.shape[1:]), 255 if each.dtype == torch.uint8 else NAN
        return torch.cat(
            [each, torch.full(size, nan, dtype=torch.float32, device=each.device).to(each.dtype)]
        )

    (weights, more), how = lists(case.rows), (case.weight_TK, plan, case.dtype)
    known = [Known(case.known[0], largest[0])] if largest else []
    y, *h = steps.forward(case.x, *weights, *how, *known, **more, act=case.act)
    forward, first = [y, *(each[:live] for each in h)], {name: each[:1] for name, each in more.items()}
    hidden = [each[:live] for each in steps.hidden(case.x, weights[0], *how[1:], **first)]
    weights, more = lists(case.columns)
    known = [case.known[0], Known(case.known[1], largest[1])] if largest else []
    h = tuple(map(with_nan, (of.forward if of else forward)[1:]))
    dx, dweight, *made = steps.dgrad(case.dy, h, *weights, *how, *known, **more, act=case.act)
    dgrad = [dx, dweight, *(each[:live] for each in made)]
    dhq, dhs, aq, a_s = map(with_nan, (of.dgrad if of else dgrad)[2:])
    sides, (H, D, F) = (case.dy, case.x, (dhq, dhs), (aq, a_s), plan), (x.shape[1] for x in (dhq, y, aq))
    sums = [y.new_full((E, *size), NAN, dtype=torch.float32) for size in ((H, D), (D, F))]
    parts = tuple(total[:own] for total in sums)
    behind = {"of_more": [total[own:] for total in sums]} if more else {}
    store_in_both(functools.partial(steps.wgrad, *sides, **behind), parts)
    gradients = [each.clone() for each in sums]
    steps.wgrad(*sides, parts, add=True, **behind)
    return Results(forward, hidden, dgrad, largest, gradients, sums)


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


FLOORS = {"rowwise": (22, 19), "mxfp8": (20, 18)}
"""dB of y and of gradients. A product leaves 27; y has gone through two, gradients three and a stored h."""
WITHIN_8_BITS = [
    *(("rowwise", shape, dtype) for shape in SHAPES.values() for dtype in (torch.float32, torch.bfloat16)),
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
    tensors, plan, _ = layer(SHAPES["small"])
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


def same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


def of_all_sizes(w: Tensor) -> Tensor:
    sizes = torch.tensor([1.0, 1e22, 1e38, 1e-30, 1e-38, 0.0], device=w.device)
    w = w * sizes.repeat(w.shape[-2])[: w.shape[-2], None].to(w.dtype)
    w[..., 7, 9] = torch.inf
    return w


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=[*SHAPES])
def test_numbers_and_scales_of_kernels_are_bitwise_those_of_the_plain_form(backend, shape):
    dtype = torch.float32 if backend == "interpreted" else torch.bfloat16
    _, up, down, _ = layer(shape, dtype, device_of(backend))[0]
    for w, whole in ((up, False), (down, False), (of_all_sizes(down), False), (up, True), (down, True)):
        found, wanted = (
            (*of.rows(w, whole=whole), *of.columns(w, whole=whole)) for of in (launches, reference)
        )
        for one, other in zip(found, wanted, strict=True):
            same(one, other)


LEAST = {"rowwise": (45, 40), "tensorwise": (35, 35)}
"""dB of forward and dgrad: sums in another order, rounded to 8 bits."""
PAIRS = [(n, recipe) for at, recipe in enumerate(LEAST) for n in in_turn(["wide", "small", "narrow"], at)]


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("shape", "recipe"), PAIRS)
def test_kernels_have_the_results_of_the_plain_form(backend, shape, recipe):
    case = case_of(recipe, backend, SHAPES[shape])
    found = every(by_kernels, case, of=(wanted := every(by_torch, case)))
    for least, ones, others in zip(LEAST[recipe], (found[0], found[2]), (wanted[0], wanted[2]), strict=True):
        for one, other in zip(ones, others, strict=True):
            assert decibels(one, other) > least
    for one, other in zip(found.hidden, found.forward[1:], strict=True):
        same(one, other)
    torch.testing.assert_close(
        found.largest, wanted.largest, rtol=1e-2 if backend == "cuda" else 1e-5, atol=0
    )
    least = 100 if backend == "interpreted" else 70  # Hopper keeps 14 bits of a sum of 8-bit products
    for one, total, other in zip(found.gradients, found.sums, wanted.gradients, strict=True):
        assert decibels(one, other) > least and total.equal(2 * one)
        assert not one[1].any() and not one[-EMPTY:].any()
    for known, scale in zip(case.known, (found.dgrad[5], found.dgrad[3]), strict=bool(case.known)):
        assert scale.eq(known).all()


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("shape", in_turn([*SHAPES], 0))
def test_what_is_beyond_the_largest_number_becomes_that(backend, shape):
    case = case_of("tensorwise", backend, SHAPES[shape])
    tiny = [torch.full_like(scale, 2.0**-40) for scale in case.known]
    _, _, dhq, _, aq, _ = every(by_kernels, case._replace(known=tiny)).dgrad
    assert dhq.dtype == wide_dtype() and aq.dtype == fp8_dtype() and aq.float().isfinite().all()
    for numbers in (aq, dhq):
        assert numbers.float().abs().max() == torch.finfo(numbers.dtype).max


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", WITH_EXPERTS)
def test_no_live_rows_at_all_have_gradients_of_zero(backend, recipe):
    case = case_of(recipe, backend)
    slot_R, row_TK, ends_E = case.plan
    case = case._replace(plan=Plan(slot_R, torch.full_like(row_TK, -1), torch.zeros_like(ends_E)))
    found = every(formats.KERNELS[recipe].experts(backend != "plain"), case)
    assert not any(each.any() for each in (found.forward[0], *found.dgrad[:2], *found.gradients, *found.sums))


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


def results_of(recipe: str, backend: str, plan: Plan, *tensors: Tensor, **clamps: Any) -> list[Tensor]:
    """y, and gradients of x, both weights and the weights of slots; dy comes last."""
    *leaves, dy = (each.clone().requires_grad_() for each in tensors)
    steps_of = formats.KERNELS[recipe].experts
    changed = {"_rounding": lambda _: launches, "_steps": lambda *_: steps_of(True)}
    with mock.patch.dict(fp8_mlp.__dict__, changed if backend == "interpreted" else {}):
        y = torch.ops.graphmoe.fp8_mlp(*leaves, *plan, recipe, **clamps)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


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


def ahead_of_time_cases() -> list[dict[str, Any]]:
    every = functools.partial(every_step, launches, (launches.rows, launches.columns))
    cases = launches_of_layers(WIDE, every)
    for case in cases:
        *_, kind, shape = case["name"].split()
        case["only"] = CROSSED[kind] if shape == "gpt_oss" else case["only"]
    for rows in (16, 32):  # of an expert: lower tiles, here of AMD
        few = launches_of_layers({f"v3 {rows}": WIDE["v3"]}, functools.partial(every, rows=rows))
        named = [case for case in few if case["name"].startswith("rows_kernel")]
        cases += [case for case in named if "gfx942" in case["only"]][:2]
    return cases


def every_step(
    of: Any, stores: Sequence[Any], kind: str, D: int, F: int, E: int, K: int, rows: int = 1536
) -> None:
    meta, R = functools.partial(torch.empty, device="meta"), E * rows
    plan = Plan(*(meta(size, dtype=torch.int32) for size in ((R,), (R // K, K), (E,))))
    x, *experts = (meta(size, dtype=torch.bfloat16) for size in ((R // K, D), (E, 2 * F, D), (E, D, F)))
    fixed = {"kind_of": lambda device: kind, "units_of": lambda device: 132}
    with mock.patch.multiple(of, **fixed), mock.patch.multiple(triton_backend, **fixed):
        steps, weight_TK, dtype = of.STEPS, meta(R // K, K), torch.bfloat16
        act = Activation(meta(E, 2 * F, dtype=dtype), 7.0) if D == F else PLAIN
        rows, weights, turned = stores[0](x), *([store(w) for w in experts] for store in stores)
        _, *h = steps.forward(rows, *weights, weight_TK, plan, dtype, act=act)
        steps.hidden(rows, weights[0], plan, dtype)
        _, _, *made = steps.dgrad(rows, tuple(h), *turned, weight_TK, plan, dtype, act=act)
        expert_sums(made[0], plan.ends_E, made[1])
        sides = rows, rows, tuple(made[:2]), tuple(made[2:]), plan
        totals = tuple(meta(w.shape, dtype=torch.float32) for w in experts)
        steps.wgrad(*sides, totals)
        steps.wgrad(*sides, totals, add=True)
        of_both = plan._replace(ends_E=meta(2 * E, dtype=torch.int32))
        steps.wgrad(*sides[:4], of_both, totals, of_more=totals)
        if of is launches:
            steps.wgrad(*sides, tuple(experts)), [store(experts[1], whole=True) for store in stores]
            gradient, known = (rows[0].to(wide_dtype()), rows[1]), Known(meta(1), meta(1))
            steps.forward(rows, *weights, weight_TK, plan, dtype, known, act=act)
            how = plan, dtype, meta(1), known
            _, _, *made = steps.dgrad(gradient, tuple(h), *turned, weight_TK, *how, act=act)
            steps.wgrad(gradient, rows, tuple(made[:2]), tuple(made[2:]), plan, totals)
            formats.by_kernel(*rows, R // K)
