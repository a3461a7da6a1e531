"""Linear cross-entropy on the CPU: results, gradients, fakes; its kernels interpreted and compiled."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from graphmoe.ops import linear_cross_entropy as module
from graphmoe.ops.linear_cross_entropy import LOGITS_BYTES, plain, rows_per_chunk
from tests.ops.ahead_of_time import TARGETS, assert_sound, compiled
from tests.ops.interpreted import assert_passed, names_of
from tests.ops.loss_cases import (
    CASES,
    IGNORED,
    assert_close,
    assert_matches_fp64,
    assert_small_probabilities_count,
    inputs_of,
    written_out,
)
from tests.ops.seen_ops import SeenOps

ops = torch.ops.graphmoe
DTYPES = (torch.float32, torch.bfloat16)
INTERPRETED = "tests/ops/interpreted_loss.py"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_plain_form_matches_fp64(name, dtype):
    assert_matches_fp64(plain, CASES[name], dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["odd sizes, three chunks", "labels shifted by one", "everything ignored"])
def test_the_mean_loss_and_its_gradients_match_fp64_autograd(name, dtype, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr(module, "ROWS_MULTIPLE", 1)
    monkeypatch.setattr(module, "LOGITS_BYTES", 5 * case.V * dtype.itemsize)
    h, w, labels = (x.requires_grad_(x.is_floating_point()) for x in inputs_of(case, dtype))
    total, cross_entropy, z_sum, count, _, _ = ops.linear_cross_entropy(h, w, labels, *case.settings(), True)
    (total / count.clamp_min(1)).backward()
    expected = written_out(case, h, w, labels)
    kind = torch.float32 if dtype == torch.float64 else dtype
    for name, actual, wanted in zip(
        ("total", "ce", "z"), (total, cross_entropy, z_sum), expected, strict=False
    ):
        assert_close(name, actual, wanted, kind)
    for name, actual, wanted in (("dh", h.grad, expected[4]), ("dw", w.grad, expected[5])):
        assert actual.dtype == dtype
        assert_close(name, actual, wanted / count.clamp_min(1), kind)


def test_small_probabilities_count():
    assert_small_probabilities_count(plain)


def test_an_impossible_label_raises_on_the_cpu():
    h, w, labels = inputs_of(CASES["one chunk"])
    labels[2] = 64
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        ops.linear_cross_entropy(h, w, labels, *CASES["one chunk"].settings(), True)


def test_the_gradients_are_scaled_in_fp32():
    case, factor = CASES["one chunk"], torch.tensor(1 / 12345)
    h, w, labels = inputs_of(case, torch.bfloat16)
    total, *_, dh, dw = ops.linear_cross_entropy(
        h.requires_grad_(), w.requires_grad_(), labels, *case.settings(), True
    )
    total.backward(factor)
    assert torch.equal(h.grad, (dh.float() * factor).bfloat16())
    assert torch.equal(w.grad, (dw * factor).bfloat16())


def test_only_the_total_has_a_gradient():
    h, w, labels = inputs_of(CASES["one chunk"])
    outputs = ops.linear_cross_entropy(h.requires_grad_(), w, labels, *CASES["one chunk"].settings(), True)
    assert [o.requires_grad for o in outputs] == [True] + [False] * 5


class Made(TorchDispatchMode):
    """Tensors of a shape that operations return inside the context, but for views."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.dtypes = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == self.shape and "out" not in (kwargs or {}):
            self.dtypes.append(result.dtype)
        return result


def test_the_backward_makes_no_tensor_as_large_as_the_weight_but_its_gradient():
    case = CASES["odd sizes, three chunks"]
    h, w, labels = (x.requires_grad_(x.is_floating_point()) for x in inputs_of(case, torch.bfloat16))
    total = ops.linear_cross_entropy(h, w, labels, *case.settings(), True)[0]
    with Made(w.shape) as made:
        torch.autograd.grad(total, (h, w))
    assert made.dtypes == [torch.bfloat16]


def test_without_gradients_made_the_backward_says_so():
    h, w, labels = inputs_of(CASES["one chunk"])
    outputs = ops.linear_cross_entropy(h.requires_grad_(), w, labels, *CASES["one chunk"].settings(), False)
    with pytest.raises(AssertionError, match="needs_grad was false"):
        outputs[0].backward()


@pytest.mark.parametrize("wanted", ["h", "w", "both"])
def test_only_the_gradients_that_are_wanted_are_there(wanted):
    h, w, labels = inputs_of(CASES["one chunk"])
    h.requires_grad_(wanted != "w"), w.requires_grad_(wanted != "h")
    with SeenOps() as seen:
        ops.linear_cross_entropy(h, w, labels, *CASES["one chunk"].settings(), True)[0].backward()
    assert seen.names == ["graphmoe::linear_cross_entropy"]
    assert ((h.grad is not None), (w.grad is not None)) == (wanted != "w", wanted != "h")


def test_chunks_are_few_and_equal_and_their_logits_fit_into_the_buffer():
    assert rows_per_chunk(16384, 102400, 2) == 5504
    assert rows_per_chunk(16384, 102400, 4) == 2816
    assert rows_per_chunk(100, 320, 2) == 128
    assert rows_per_chunk(0, 320, 2) == 128
    assert rows_per_chunk(4096 + 1, 102400, 2) == 4224  # not a chunk of 4096 and one of 1
    assert rows_per_chunk(1000, 10**9, 2) == 128
    for T in (1, 127, 129, 5000, 16384, 65536):
        for V in (320, 32000, 102400, 129280, 262144):
            rows = rows_per_chunk(T, V, 2)
            assert rows % 128 == 0 and rows * V * 2 <= LOGITS_BYTES
            num_chunks = -(-T // rows)
            assert num_chunks * rows - T < 128 * num_chunks


def test_tokens_must_be_whole_sequences_where_labels_are_shifted():
    h, w, labels = inputs_of(CASES["one chunk"])
    with pytest.raises(AssertionError, match="5"):
        ops.linear_cross_entropy(h, w, labels, IGNORED, 0.0, 5, 1, True)


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_tensors_have_the_shape_and_strides_of_real_ones(dtype, needs_grad):
    case = CASES["odd sizes, three chunks"]

    def results(h, w, labels):
        outputs = ops.linear_cross_entropy(
            h.requires_grad_(), w.requires_grad_(), labels, *case.settings(), needs_grad
        )
        return *outputs, *(torch.autograd.grad(outputs[0], (h, w)) if needs_grad else ())

    inputs = inputs_of(case, dtype)
    with FakeTensorMode() as mode:
        fake_results = results(*(mode.from_tensor(t) for t in inputs))
    for fake, real in zip(fake_results, results(*inputs), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_accepts_the_ops(dtype):
    case = CASES["labels shifted by one"]
    h, w, labels = inputs_of(case, dtype)
    leaves = (h.requires_grad_(), w.requires_grad_(), labels)
    opcheck(ops.linear_cross_entropy.default, (*leaves, *case.settings(), True))
    opcheck(ops.linear_cross_entropy.default, (h.detach(), w.detach(), labels, *case.settings(), False))


@pytest.mark.parametrize("name", names_of(INTERPRETED))
def test_in_the_interpreter(name):
    assert_passed(INTERPRETED, name)


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_ahead_of_time(target):
    facts = compiled("tests.ops.compiled_loss", target)
    assert_sound(facts)
    rows = {name: fact for name, fact in facts.items() if "warps" in name}
    assert len(rows) == 3
    for name, fact in rows.items():
        assert fact.atomics == 0
        assert fact.wide_stores or "gradient" not in name, name
