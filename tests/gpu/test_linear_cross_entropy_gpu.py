"""Linear cross-entropy on a GPU: values, memory, capture, determinism.

Suffixes as in graphmoe/ops/linear_cross_entropy.py.
"""

import pytest
import torch

from graphmoe.ops import linear_cross_entropy as module
from tests.gpu.sleeping import assert_repeats, assert_replays
from tests.ops.test_linear_cross_entropy import (
    IGNORED,
    Case,
    assert_close,
    assert_matches_fp64,
    inputs_of,
    written_out,
)
from tests.tolerances import relative_error

ops = torch.ops.graphmoe
DTYPES = (torch.float32, torch.bfloat16)
MIB = 1 << 20


def by_kernels(*args):
    from graphmoe.ops import linear_cross_entropy_kernels

    return linear_cross_entropy_kernels.forward(*args)


def mean_loss_and_gradients(h, w, labels):
    """Sum of the loss, count and gradients of the mean as a trainer takes them."""
    loss, count, *_ = ops.linear_cross_entropy(h, w, labels, IGNORED)
    return loss, count, *torch.autograd.grad(loss / count.clamp_min(1), (h, w))


def leaves(case, dtype=torch.bfloat16):
    h, w, labels = inputs_of(case, dtype, "cuda")
    return h.requires_grad_(), w.requires_grad_(), labels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [8192, 10000, 10007, 32001, 50257])
def test_vocabularies_of_any_size_match_fp64(V, dtype):
    assert_matches_fp64(by_kernels, Case(300, V, 256, rows=128), dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes_run_the_plain_form(dtype):
    case = Case(40, 300)
    h, w, labels = leaves(case, dtype)
    total, *_ = mean_loss_and_gradients(h, w, labels)
    assert_close("total", total, written_out(h, w, labels)[0], torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean_loss_and_its_gradients_match_fp64_autograd(dtype, monkeypatch):
    case = Case(1000, 5003, 128)
    monkeypatch.setattr(module, "LOGITS_BYTES", 384 * case.V * dtype.itemsize)
    h, w, labels = leaves(case, dtype)
    loss, count, dh, dw = mean_loss_and_gradients(h, w, labels)
    expected = written_out(h, w, labels)
    assert_close("loss", loss, expected[0], dtype)
    assert (dh.dtype, dw.dtype) == (dtype, dtype)
    assert_close("dh", dh, expected[2] / count, dtype)
    assert_close("dw", dw, expected[3] / count, dtype)


def test_chunks_do_not_cost_the_weight_gradient_its_fp32_sums():
    """64 chunks against one: bf16 sums of them would be off by 1e-2, other GEMM kernels are by far less."""
    case = Case(4096, 1000, 64)
    h, w, labels = inputs_of(case, torch.bfloat16, "cuda")
    many, one = (by_kernels(h, w, labels, IGNORED, rows)[3] for rows in (64, 4096))
    assert relative_error(many, one) < 2e-4


def test_the_peak_of_memory_is_one_buffer_of_logits_above_the_results(monkeypatch):
    case = Case(4096, 50001, 512)
    buffer = 64 * MIB
    monkeypatch.setattr(module, "LOGITS_BYTES", buffer)
    h, w, labels = leaves(case)
    ops.linear_cross_entropy(h, w, labels, IGNORED)  # the library's own workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = ops.linear_cross_entropy(h, w, labels, IGNORED)
    above = torch.cuda.max_memory_allocated() - before
    results = sum(o.numel() * o.element_size() for o in outputs)
    logits = case.T * case.V * 2
    assert above - results < buffer + 4 * MIB < logits / 4


def test_runs_are_bitwise_equal(monkeypatch):
    case = Case(2000, 10007, 256)
    monkeypatch.setattr(module, "LOGITS_BYTES", 512 * case.V * 2)
    inputs = leaves(case)
    assert_repeats(lambda: mean_loss_and_gradients(*inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_loss_replays_on_new_inputs(dtype, monkeypatch):
    case = Case(1000, 10007, 256)
    monkeypatch.setattr(module, "LOGITS_BYTES", 384 * case.V * dtype.itemsize)
    inputs = leaves(case, dtype)

    def changes():
        for seed, ignored in ((5, "some"), (6, "all"), (7, "none")):
            new = Case(1000, 10007, 256, ignored=ignored, seed=seed)
            with torch.no_grad():
                for target, source in zip(inputs, inputs_of(new, dtype, "cuda"), strict=True):
                    target.copy_(source)
            yield ignored

    assert_replays(lambda: mean_loss_and_gradients(*inputs), changes())
