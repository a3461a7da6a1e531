"""fuse_activation: every spelling of silu(gate) * up * weight; what it leaves, and the numbers."""

import pytest
import torch
import torch.nn.functional as F

from graphmoe.ops.grouped_mm import grouped_mm
from graphmoe.passes.fuse_activation import fuse_activation
from tests.passes.blocks import DTYPES, WIDTH, D, E, R, assert_left, expert_weights, random, traced

HALVES = {
    "chunk": lambda h: h.chunk(2, dim=-1),
    "split": lambda h: h.split([WIDTH, WIDTH], dim=1),
    "slice": lambda h: (h[:, :WIDTH], h[:, WIDTH:]),
    "slice_from_the_end": lambda h: (h[:, :-WIDTH], h[:, -WIDTH:]),
}
PRODUCTS = {
    "plain": lambda gate, up, w: F.silu(gate) * up,
    "up_first": lambda gate, up, w: up * F.silu(gate),
    "weight_last": lambda gate, up, w: F.silu(gate) * up * w,
    "weight_first": lambda gate, up, w: (w * F.silu(gate)) * up,
    "weight_on_up": lambda gate, up, w: F.silu(gate) * (up * w),
    "in_fp32": lambda gate, up, w: F.silu(gate.float()) * up.float() * w,
    "rounded_between": lambda gate, up, w: (F.silu(gate.float()).to(gate.dtype) * up).float() * w,
    "weight_in_the_dtype_of_rows": lambda gate, up, w: F.silu(gate) * up * w.to(gate.dtype),
}
ENDS = {"natural": [7, 20, 21, R], "one_expert": [0, R, R, R], "empty_experts": [0, 15, R, R]}


def run_of(product, halves=HALVES["chunk"]):
    """The product between two grouped ones, so that a look-alike may read whatever it likes."""

    def run(x, gate_up, down, weight, ends):
        h = grouped_mm(x, gate_up, ends)
        return product(h, *halves(h), weight, lambda a: grouped_mm(a, down, ends))

    return run


def inputs(dtype=torch.float32, routing="natural"):
    ends = torch.tensor(ENDS[routing], dtype=torch.int32)
    weight = random(R, 1, seed=5).detach().sigmoid().requires_grad_()
    return [random(R, D, dtype=dtype), *expert_weights(dtype), weight, ends]


SPELLINGS = [(halves, "weight_last", dtype) for halves, dtype in zip(HALVES, DTYPES * 2, strict=True)]
SPELLINGS += [("chunk", product, torch.bfloat16) for product in PRODUCTS]
SPELLINGS += [
    ("chunk", product, torch.float32) for product in ("plain", "up_first", "weight_first", "weight_on_up")
]


@pytest.mark.parametrize(("halves", "product", "dtype"), SPELLINGS)
def test_every_spelling_becomes_one_operation_with_the_same_numbers(halves, product, dtype):
    made = PRODUCTS[product]
    run = run_of(lambda h, gate, up, w, down: down(made(gate, up, w).to(h.dtype)), HALVES[halves])
    plain = traced(run, *inputs(dtype))
    fused, (result,) = plain.rewritten(fuse_activation)
    calls = fused.calls
    assert result.matches == calls["swiglu"] == 1 and result.left == ()
    assert not {"silu", "mul", "split", "split_with_sizes", "slice"} & set(calls), calls
    assert plain.calls["silu"] == 1 and calls["grouped_mm"] == 2
    fused.assert_same(plain, *(inputs(dtype, routing) for routing in ENDS))


ALONE, NO_WEIGHT = "not multiplied with the other half", "not one weight for each row"
LOOK_ALIKES = {
    "halves swapped": (lambda h, g, u, w, down: down(F.silu(u) * g), "the halves are swapped"),
    "half by itself": (lambda h, g, u, w, down: down(F.silu(g) * g), ALONE),
    "no product": (lambda h, g, u, w, down: down(F.silu(g)), ALONE),
    "silu with another reader": (
        lambda h, g, u, w, down: (down((a := F.silu(g)) * u), a),
        "silu (aten.silu.default) has 2 users",
    ),
    "product with another reader": (lambda h, g, u, w, down: (down(a := F.silu(g) * u), a), "has 2 users"),
    "two weights": (lambda h, g, u, w, down: down(F.silu(g) * u * w * (w + 1)), NO_WEIGHT),
    "a weight for each column": (lambda h, g, u, w, down: down(F.silu(g) * u * w[:WIDTH, 0]), NO_WEIGHT),
    "a scale": (lambda h, g, u, w, down: down(F.silu(g) * u * 2.0 + 1), "reads the product"),
    "rows joined in pairs": (
        lambda h, g, u, w, down: down((F.silu(g) * u).view(R // 2, 2 * WIDTH)),
        "the product is torch.float32 [18, 16], not torch.float32 [36, 8]",
    ),
    "interleaved": (
        lambda h, g, u, w, down: down(F.silu(h[:, ::2]) * h[:, 1::2]),
        "1 silu, none of a half of a grouped product",
    ),
    "no grouped product behind": (lambda h, g, u, w, down: (F.silu(g) * u).sum(0), "reads the product"),
}


@pytest.mark.parametrize(("product", "reason"), LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_look_alikes_stay_with_a_reason(product, reason):
    assert_left(traced(run_of(product), *inputs()), reason, fuse_activation)


def test_a_product_in_another_dtype_than_the_rows_is_left():
    x, gate_up, down, weight, ends = inputs(torch.bfloat16)
    run = run_of(lambda h, g, u, w, down: down(F.silu(g) * u * w))
    plain = traced(run, x, gate_up, down.detach().float(), weight, ends)
    assert_left(plain, "the product is torch.float32 [36, 8], not torch.bfloat16 [36, 8]", fuse_activation)


def test_dense_silu_is_left_and_not_reported_beside_experts():
    def dense(x, gate_up, down):
        gate, up = (x @ gate_up.T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ down.T

    given = random(R, D), random(2 * WIDTH, D, seed=1), random(D, WIDTH, seed=2)
    assert_left(traced(dense, *given), "1 silu, none of a half of a grouped product", fuse_activation)
    # the second silu is of the whole product, not of a half
    both = run_of(lambda h, g, u, w, down: (down(F.silu(g) * u), F.silu(h) * h))
    fused, (result,) = traced(both, *inputs()).rewritten(fuse_activation)
    assert result[:2] == (1, ()) and fused.calls["silu"] == 1


def test_the_offsets_are_those_of_the_product_that_reads_it():
    plain = traced(run_of(lambda h, g, u, w, down: down(F.silu(g) * u)), *inputs())
    swiglu = plain.rewritten(fuse_activation)[0].call("swiglu")
    (reader,) = swiglu.users
    assert swiglu.args[1] is None and swiglu.args[2] is reader.args[2]
    assert swiglu.meta["val"].shape == (R, WIDTH) and reader.args[1].meta["val"].shape == (E, D, WIDTH)
