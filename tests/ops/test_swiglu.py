"""The SwiGLU op: values and gradients against fp64, dead rows, fakes, and its kernels."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from graphmoe.config.schema import ModelConfig
from graphmoe.model.moe import Experts
from graphmoe.ops import swiglu as _registers_the_ops  # noqa: F401
from tests.ops.ahead_of_time import TARGETS, assert_sound, compiled
from tests.ops.interpreted import assert_passed, names_of
from tests.ops.row_cases import NAN, assert_swiglu_matches_fp64, swiglu_in_fp64, values
from tests.tolerances import assert_forward_close, assert_gradient_close

ops = torch.ops.graphmoe
DTYPES = (torch.float32, torch.bfloat16)
INTERPRETED = "tests/ops/interpreted_swiglu.py"
ENDS_E = torch.tensor([2, 2, 7], dtype=torch.int32)
LIVE, ROWS = 7, 10


def with_dead_rows(x):
    return torch.cat([x, x.new_full((ROWS - LIVE, *x.shape[1:]), NAN)])


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 13, 64])
def test_values_and_gradients_match_fp64(width, dtype, weighted):
    assert_swiglu_matches_fp64(ops.swiglu, ops.swiglu_backward, 21, 30, width, dtype, weighted=weighted)


@pytest.mark.parametrize(("live", "rows"), [(0, 9), (9, 9), (1, 40), (0, 0)])
def test_dead_rows_do_not_reach_live_ones(live, rows):
    assert_swiglu_matches_fp64(ops.swiglu, ops.swiglu_backward, live, rows, 20, torch.float32)


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1)], ids=["R", "R1"])
def test_autograd_gives_the_gradients_in_the_shapes_of_the_inputs(shape):
    h = with_dead_rows(values(LIVE, 12)).requires_grad_()
    weight = with_dead_rows(values(LIVE, seed=1)).view(shape).requires_grad_()
    da = with_dead_rows(values(LIVE, 6, seed=2))
    a = ops.swiglu(h, weight, ENDS_E)
    dh, dweight = torch.autograd.grad(a, (h, weight), da)
    assert dweight.shape == weight.shape
    exact = [t.detach()[:LIVE].double().requires_grad_() for t in (h, weight)]
    expected = swiglu_in_fp64(*exact)
    assert_forward_close(a[:LIVE], expected)
    for actual, wanted in zip(
        (dh, dweight), torch.autograd.grad(expected, exact, da[:LIVE].double()), strict=True
    ):
        assert_gradient_close(actual[:LIVE], wanted)


def test_the_gradients_match_finite_differences():
    h, weight = values(LIVE, 6).double().requires_grad_(), values(LIVE, 1).double().requires_grad_()
    run = ops.swiglu
    assert torch.autograd.gradcheck(
        lambda h, w: run(with_dead_rows(h), with_dead_rows(w), ENDS_E)[:LIVE], (h, weight)
    )
    assert torch.autograd.gradcheck(lambda h: run(with_dead_rows(h), None, ENDS_E)[:LIVE], h)


def test_it_is_the_activation_of_the_model():
    """One expert whose projections are identities, in fp32: they round nothing away."""
    h, weight = values(ROWS, 24), values(ROWS, 1, seed=1)
    model = Experts(ModelConfig(hidden_size=24, num_experts=1, expert_ffn_size=12))
    model.load_state_dict({"w_gate_up": torch.eye(24)[None], "w_down": torch.eye(24, 12)[None]})
    ends, row = torch.tensor([ROWS], dtype=torch.int32), torch.arange(ROWS, dtype=torch.int32)
    expected = model(h, weight, ends, row.view(-1, 1), row)[:, :12]
    assert_forward_close(ops.swiglu(h, weight, ends), expected)


def test_large_gates_keep_values_and_gradients_finite():
    h = torch.tensor([[-200.0, 200.0, 1.0, 2.0]], requires_grad=True)
    a = ops.swiglu(h, None, torch.tensor([1], dtype=torch.int32))
    assert torch.equal(a, torch.tensor([[0.0, 400.0]]))
    assert torch.equal(torch.autograd.grad(a.sum(), h)[0], torch.tensor([[0.0, 2.0, 0.0, 200.0]]))


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_fake_tensors_have_the_shape_and_strides_of_real_ones(dtype, weighted):
    def results(h, weight, ends, da):
        return ops.swiglu(h, weight, ends), *ops.swiglu_backward(da, h, weight, ends)

    weight = values(ROWS, 1) if weighted else None
    inputs = (values(ROWS, 14, dtype=dtype), weight, ENDS_E, values(ROWS, 7, dtype=dtype))
    with FakeTensorMode() as mode:
        fakes = results(*[None if t is None else mode.from_tensor(t) for t in inputs])
    for fake, real in zip(fakes, results(*inputs), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_accepts_the_ops(dtype):
    h, weight = values(LIVE, 6, dtype=dtype), values(LIVE, 1)
    opcheck(ops.swiglu_backward.default, (values(LIVE, 3, dtype=dtype), h, weight, ENDS_E))
    opcheck(ops.swiglu_backward.default, (values(LIVE, 3, dtype=dtype), h, None, ENDS_E))
    opcheck(ops.swiglu.default, (h.requires_grad_(), weight.requires_grad_(), ENDS_E))
    opcheck(ops.swiglu.default, (h, None, ENDS_E))


@pytest.mark.parametrize("name", names_of(INTERPRETED))
def test_in_the_interpreter(name):
    assert_passed(INTERPRETED, name)


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_ahead_of_time(target):
    facts = compiled("tests.ops.compiled_swiglu", target)
    assert_sound(facts)
    assert not {name: fact.atomics for name, fact in facts.items() if fact.atomics}
    forward, backward = facts["_forward_kernel"], facts["_backward_kernel"]
    assert (forward.wide_loads, forward.wide_stores) == (2, 1)  # gate, up; a: 16 bytes at a time
    assert (backward.wide_loads, backward.wide_stores) == (3, 2)
