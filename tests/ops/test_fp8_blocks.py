"""Recipes with a scale for each block: scales and products of the plain form, kernels against it."""

import functools
from itertools import product as product_of
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from graphmoe.config.formats import FORMATS
from graphmoe.ops import formats
from graphmoe.ops.fp8 import BLOCK, INPUT, block_values, quantise, quantise_blocks, reason_against, recipes_of
from graphmoe.ops.fp8_blocks import launches, product, squares, squares_turned, turned
from graphmoe.ops.fp8_blocks.reference import (
    KIND,
    LARGEST,
    MX_BLOCK,
    mx_powers,
    quantise_blockwise,
    quantise_mx,
    square_values,
    values,
)
from tests.ops.ahead_of_time import launches_of
from tests.ops.interpreted import CUDA, KERNELS, device_of
from tests.ops.test_fp8_mlp import NOT_FINITE, decibels, of_all_sizes, same

QUANTISE = {"blockwise": quantise_blockwise, "mxfp8": quantise_mx}
BY_ROWS = ("rowwise", "tensorwise")
R, N, K = 150, 256, 384
"""150 rows are no whole blocks of either recipe."""
SMALL = (72, 96, 64)
"""R, N, K of recipes without blocks: torch takes seconds for a large product of them on a CPU."""


def random(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers in rows of different sizes; row 3 is zero."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(-2, 2, size[0])[:, None]
    x[3] = 0
    return x.to(dtype)


def fp64_of(q: Tensor, scale: Tensor) -> Tensor:
    if scale.dtype == torch.uint8:
        return q.double() * torch.exp2(scale.double() - 127).repeat_interleave(MX_BLOCK, 1)
    return q.double() * scale.double().t().repeat_interleave(BLOCK, 1)


def test_scales_of_mxfp8_are_bitwise_those_of_the_written_rule():
    amax = torch.tensor([448.0, 449.0, 512.0, 1.0, 1.99, 2.0**-119, 2.0**-120, 2.0**-130, 0.0, 3e38])
    blocks = torch.zeros(len(amax), MX_BLOCK)
    blocks[:, 5] = -amax
    q, scale = quantise_mx(blocks)
    # floor(log2(amax)) - 8 with a bias of 127, at least 0 (2^-127).
    rule = (torch.log2(amax.double()).floor() - 8 + 127).clamp(min=0)
    assert scale.dtype == torch.uint8 and scale[:, 0].double().equal(rule)
    assert mx_powers(scale)[:, 0].double().equal(torch.exp2(rule - 127))
    expected = (amax.double() / torch.exp2(rule - 127)).clamp(max=LARGEST)
    assert q[:, 5].double().equal(-expected.float().to(KIND).double())
    assert q[1, 5] == -LARGEST  # 449 of a scale of 1, which holds 448


def test_blocks_have_scales_of_their_own():
    x = random(6, 256)
    x[:, :BLOCK] *= 1e4
    for name, store in QUANTISE.items():
        q, scale = store(x)
        assert q.dtype == KIND and values(q, scale).double().equal(fp64_of(q, scale))
        assert decibels(values(q, scale)[:, BLOCK:], x[:, BLOCK:]) > 28, name
    assert scale.shape == (6, 8) and quantise_blockwise(x)[1].shape == (2, 6)
    q, scale = quantise_blocks(x[:, :250], KIND)  # of h in rowwise fp8, the last block narrower
    assert q.shape == (6, 250) and scale.shape == (6, 2)
    assert decibels(block_values(q, scale)[:, BLOCK:], x[:, BLOCK:250]) > 30


def test_a_weight_has_the_same_numbers_in_either_direction():
    w = random(N, K)
    (q, scale), (q_t, scale_t) = squares(w), squares_turned(w)
    assert q.float().equal(q_t.float().t()) and scale.shape == (2, 4) and scale_t.shape == (3, 4)
    assert scale[:, :3].equal(scale_t[:, :2].t()) and square_values(q, scale).equal(
        square_values(q_t, scale_t).t()
    )
    whole = scale.log2()
    assert whole.equal(whole.round())
    for n, k in ((0, 0), (1, 2)):
        tile = w[n * BLOCK : (n + 1) * BLOCK, k * BLOCK : (k + 1) * BLOCK].abs().amax()
        assert LARGEST / 2 < tile / scale[n, k] <= LARGEST


@pytest.mark.parametrize("recipe", QUANTISE)
def test_rows_are_stored_anew_with_the_values_that_they_have(recipe):
    x = random(R, K)
    q, scale = QUANTISE[recipe](x)
    q_t, scale_t = turned(q, scale)
    block = {"blockwise": BLOCK, "mxfp8": MX_BLOCK}[recipe]
    assert q_t.shape == (K, R + -R % block) and not q_t[:, R:].float().any()
    found, before = fp64_of(q_t, scale_t)[:, :R], values(q, scale).double().t()
    largest = torch.nn.functional.pad(before, (0, -R % block)).view(K, -1, block).abs().amax(-1)
    largest = largest.repeat_interleave(block, 1)[:, :R]
    # mxfp8 has no numbers between 1.75 times a power of two and the next.
    small, top = before.abs() < largest * 2.0**-13, LARGEST / 512 * 2 ** (largest.log2().floor() + 1)
    held = ~small & (before.abs() <= top)
    assert held.double().mean() > 0.8 and found[held].equal(before[held])
    assert (recipe == "mxfp8") == bool((found != before)[~small].any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", FORMATS)
def test_each_product_is_that_of_the_stored_numbers_and_close_to_that_of_the_plain_ones(recipe, dtype):
    by, (rows, n, k) = formats.KERNELS[recipe], SMALL if recipe in BY_ROWS else (R, N, K)
    x, dy = random(rows, k, dtype=dtype), random(rows, n, seed=1, dtype=dtype).flip(0)
    if recipe == "tensorwise":
        x, dy = x / 8, dy / 8  # for which the first scale has room
    w = (torch.randn(n, k, generator=torch.Generator().manual_seed(2)) / 16).to(dtype)
    ops, stored, gradient = torch.ops.graphmoe, *(by.quantize(each, w, INPUT) for each in (x, dy))
    found = {
        "y": ops.fp8_linear(x, w, "fp8", recipe),
        "dx": ops.fp8_linear_dgrad(dy, w, recipe),
        "dw": ops.fp8_linear_wgrad(dy, x, w, "fp8", recipe),
    }
    in_bf16 = ops.fp8_linear_wgrad(dy, x, w, "bf16", recipe)
    torch.testing.assert_close(in_bf16, dy.t() @ by.values(stored).to(dtype))
    plain = x.double() @ w.double().t(), dy.double() @ w.double(), dy.double().t() @ x.double()
    least = 25, 24 if recipe == "tensorwise" else 25, 22  # dy in e5m2
    for (name, one), other, level in zip(found.items(), plain, least, strict=True):
        assert one.dtype == dtype and decibels(one, other) > level, name
    if recipe in BY_ROWS:
        return
    along, turned = by.weight(w), by.transposed(w)
    of_weight = (lambda q, s: square_values(q, s).double()) if recipe == "blockwise" else fp64_of
    sides = [fp64_of(*ops.fp8_blocks_turned(*each)) for each in (gradient, stored)]
    exact = {
        "y": (by.product(stored, along, torch.float32), fp64_of(*stored) @ of_weight(*along).t()),
        "dx": (by.product(gradient, turned, torch.float32), fp64_of(*gradient) @ of_weight(*turned).t()),
        "dw": (by.wgrad(gradient, stored), sides[0] @ sides[1].t()),
    }
    for name, (of_stored, wanted) in exact.items():
        assert_sums_close(of_stored, wanted)
        assert found[name].equal(of_stored.to(dtype)), name


def assert_sums_close(found: Tensor, wanted: Tensor) -> None:
    """Compare sums in fp32 with those in fp64."""
    atol = float(wanted.abs().amax()) * 1e-6
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=atol)


def products(recipe: str, x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx, and dw in 8 bits and in the dtype of x."""
    ops = torch.ops.graphmoe
    wgrads = [ops.fp8_linear_wgrad(dy, x, w, kind, recipe) for kind in ("fp8", "bf16")]
    return [ops.fp8_linear(x, w, "fp8", recipe), ops.fp8_linear_dgrad(dy, w, recipe), *wgrads]


def operands(recipe: str, device: str) -> list[Tensor]:
    if recipe not in recipes_of(torch.device(device)):
        pytest.skip(f"this GPU has no {recipe}")
    rows, n, k = SMALL if recipe in BY_ROWS and device == "cpu" else (R, BLOCK, N)
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(2)) / 16
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    return [each.to(device, kind) for each in (random(rows, k), w, random(rows, n, seed=1))]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("operand", [0, 1, 2], ids=["x", "w", "dy"])
def test_products_are_not_finite_where_those_without_8_bits_are_not(recipe, operand, device):
    for bad in NOT_FINITE:
        x, w, dy = given = operands(recipe, device)
        given[operand][7, 9] = bad
        plain = x @ w.t(), dy @ w, *[dy.t() @ x] * 2
        for i, each in enumerate(zip(products(recipe, *given), plain, strict=True)):
            found, wanted = (x.isfinite() for x in each)
            assert not (found & ~wanted).any()
            assert i > 1 or found.all(1).equal(wanted.all(1))  # no other row of y and dx


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("recipe", ["rowwise", *QUANTISE])
@pytest.mark.parametrize("power", [100, -90])
def test_products_of_any_size_are_those_of_ordinary_size_times_it(recipe, power, device):
    given, factor = operands(recipe, device), 2.0**power
    plain = products(recipe, *given)
    for operand, linear in enumerate(((0, 2), (0, 1), (1, 2))):
        larger = [each * factor if i == operand else each for i, each in enumerate(given)]
        found = products(recipe, *larger)
        assert all(found[i].equal(plain[i] * factor) for i in linear)


@pytest.mark.slow
def test_compiled_forms_are_bitwise_the_plain_ones():
    def every(x: Tensor) -> list[Tensor]:
        return [*quantise(x, KIND), *quantise_mx(x)]

    x = of_all_sizes(random(24, 256))
    x[9, 9] = torch.nan
    for found, wanted in zip(torch.compile(every)(x), every(x), strict=True):
        same(found, wanted)


def test_devices_have_recipes_and_the_refusal_of_others_says_which(monkeypatch):
    gpu = torch.device("cuda")
    assert recipes_of(torch.device("cpu")) == tuple(FORMATS)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = {}
    for major in (8, 9, 10, 12):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=major: (major, 0))
        found[major] = recipes_of(gpu)
        assert all(reason_against(gpu, name) is None for name in found[major])
    assert found == {8: (), 9: (*BY_ROWS, "blockwise"), 10: (*BY_ROWS, "mxfp8"), 12: BY_ROWS}
    assert reason_against(gpu, "mxfp8") == (
        "needs instructions for blocks of 32: a GPU of compute capability 10.0 or 10.3, or an MI350 (gfx950)"
        ", and this is one of 12.0 with CUDA 13.0; use precision.fp8=rowwise or tensorwise or none"
    )
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert reason_against(gpu, "blockwise").endswith(
        "one of 9.0 with CUDA 12.8; use precision.fp8=rowwise or tensorwise or none"
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name, recipes in {"gfx90a": (), "gfx942": BY_ROWS, "gfx950": (*BY_ROWS, "mxfp8")}.items():
        facts = mock.Mock(gcnArchName=f"{name}:sramecc+")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, facts=facts: facts)
        assert recipes_of(gpu) == recipes
    assert "and this is gfx950; use precision.fp8=rowwise or tensorwise or mxfp8 or none" in reason_against(
        gpu, "blockwise"
    )


def test_torch_is_given_scales_as_it_wants_them():
    """Its own checks, of strides too, on the meta device; on a GPU they precede the call of cuBLASLt."""
    by = formats.KERNELS["blockwise"]
    for rows, n, k in ((150, 256, 640), (256, 128, 128)):
        w = by.weight(plain := random(n, k))
        x = by.quantize(random(rows, k), plain, INPUT)
        gradient, back = turned(*by.quantize(random(rows, n), plain, INPUT)), turned(*x)
        for one, other, of_squares in ((x, w, True), (gradient, back, False)):
            (q, scale), (q_w, of_w) = ([t.to("meta") for t in each] for each in (one, other))
            y = launches.product(q, scale, q_w, of_w, of_squares, torch.bfloat16)
            assert y.shape == (len(q), len(q_w)) and y.dtype == torch.bfloat16
            if torch.__version__ < "2.15":  # later checks are of the GPU alone
                with pytest.raises((RuntimeError, ValueError), match="scale.b must have"):
                    launches.product(q, scale, q_w, of_w[:, 1:], of_squares, torch.bfloat16)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_and_scales_of_kernels_are_bitwise_those_of_the_plain_form(backend, dtype):
    device, w, x = device_of(backend), of_all_sizes(random(N, K)).to(dtype), random(R, K, dtype=dtype)
    w[128:168, :40] *= 1e-3
    experts = torch.stack([w, w * 1e-3])[:, :224, :352]
    on, experts_on = w.to(device), experts.to(device)
    cases = {  # behind these blocks of scales is padding
        "squares": (squares(w), launches.squares(on, turned=False), 3),
        "squares turned": (squares_turned(w), launches.squares(on, turned=True), 2),
        "rows": (quantise_mx(experts), launches.quantise_mx(experts_on), None),
        "columns": (quantise_mx(experts.mT.contiguous()), launches.turned(experts_on, None), None),
    }
    for name, store in QUANTISE.items():
        stored = store(x)
        cases[name] = turned(*stored), launches.turned(*(each.to(device) for each in stored)), None
    for (q, scale), found, blocks in cases.values():
        same(found[0].cpu(), q)
        same(found[1].cpu()[:, :blocks], scale[:, :blocks])


@pytest.mark.parametrize("backend", ["interpreted"] if KERNELS == ["interpreted"] else [])
@pytest.mark.parametrize("columns", [K, 96])
def test_the_kernel_of_products_in_mxfp8_is_that_of_the_stored_numbers(backend, columns):
    x, w = quantise_mx(random(70, columns)), quantise_mx(random(80, columns, seed=1))
    found = launches.mx_product(*x, *w, torch.float32)
    wanted = fp64_of(*x) @ fp64_of(*w).t()
    assert_sums_close(found, wanted)
    assert found.equal(product(*x, *w, False, torch.float32)) or decibels(found, wanted) > 100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recipe", QUANTISE)
@pytest.mark.parametrize("rows", [R, 512])
def test_products_of_a_gpu_are_those_of_the_stored_numbers(recipe, rows):
    """Sums of Hopper have fewer bits than fp32 within a block."""
    if recipe not in recipes_of(torch.device("cuda")):
        pytest.skip(f"this GPU has no {recipe}")
    by, x, dy = formats.KERNELS[recipe], random(rows, K), random(rows, N, seed=1)
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(2)) / 16
    stored, gradient = (by.quantize(each, w, INPUT) for each in (x, dy))
    along, back = by.weight(w), by.transposed(w)

    def on(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0].cuda(), pair[1].cuda()

    for one, other in ((stored, along), (gradient, back)):
        wanted = by.product(one, other, torch.float32)
        for dtype, least in ((torch.float32, 50), (torch.bfloat16, 45)):
            assert decibels(by.product(on(one), on(other), dtype).cpu(), wanted) > least
    assert decibels(by.wgrad(on(gradient), on(stored)).cpu(), by.wgrad(gradient, stored)) > 50


def ahead_of_time_cases() -> list[dict[str, Any]]:
    """The kernels of a layer of DeepSeek-V2-Lite, and products in mxfp8 for the GPUs that have them."""
    meta = functools.partial(torch.empty, device="meta")
    bytes_of = functools.partial(meta, dtype=torch.uint8)
    x, w = meta(16384, 2048, dtype=torch.bfloat16), meta(2816, 2048, dtype=torch.bfloat16)
    q, bytes_RB = meta(16384, 2048, dtype=KIND), bytes_of(16384, 64)
    calls = {
        "": lambda: launches.squares(w, turned=False),
        "turned": lambda: launches.squares(w, turned=True),
        "weight": lambda: launches.quantise_mx(w),
        "weight turned": lambda: launches.turned(w, None),
        "blockwise": lambda: launches.turned(q, meta(16, 16384)),
        "mxfp8": lambda: launches.turned(q, bytes_RB),
    }
    cases = [case for name, call in calls.items() for case in launches_of(name, call)]
    even = q, bytes_RB, meta(2816, 2048, dtype=KIND), bytes_of(2816, 64)
    uneven = x[:, :576].to(KIND), bytes_RB[:, :18], meta(2816, 576, dtype=KIND), bytes_of(2816, 18)
    sides = {"even": even, "uneven": uneven}
    targets = {"hopper": "sm_100", "instinct": "gfx950"}
    for name, kind, dtype in product_of(sides, targets, (torch.bfloat16, torch.float32)):
        call = functools.partial(launches.mx_product, *sides[name], dtype)
        with mock.patch.object(launches, "kind_of", lambda device, kind=kind: kind):
            (case,) = launches_of(f"{name} {dtype} {kind}", call)
        case["constexprs"]["UPCAST"] = False
        cases.append(case | {"only": (targets[kind],)})
    return cases
