"""The kernels of linear cross-entropy, run by Triton's interpreter on CPU tensors.

Collected by tests/ops/test_linear_cross_entropy.py; see tests/ops/interpreted.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from graphmoe.ops import linear_cross_entropy_kernels as kernels
from tests.ops.loss_cases import (
    CASES,
    IGNORED,
    Case,
    assert_matches_fp64,
    assert_small_probabilities_count,
    inputs_of,
)

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that the loops over a row and over tokens go round."""
    monkeypatch.setattr(kernels, "BLOCK", 256)
    monkeypatch.setattr(kernels, "TOTAL_BLOCK", 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_loss_kernels_match_fp64(name, dtype):
    assert_matches_fp64(kernels.forward, CASES[name], dtype)


def test_loss_kernels_match_fp64_with_blocks_of_their_own_size(monkeypatch):
    monkeypatch.undo()
    assert_matches_fp64(kernels.forward, Case(3, 2 * kernels.BLOCK + 17, z=0.01), torch.float32)


def test_loss_kernels_count_small_probabilities():
    assert_small_probabilities_count(kernels.forward)


def test_loss_kernels_give_large_logits_a_finite_loss():
    h, w = torch.full((2, 1), 200.0), torch.arange(-2.0, 3).unsqueeze(1)
    total, *_, dh, dw = kernels.forward(h, w, torch.tensor([0, 4]), IGNORED, 0.0, 2, 0, True, 128)
    assert total.item() == 800.0 and bool(dh.isfinite().all()) and bool(dw.isfinite().all())


@pytest.mark.parametrize("label", [-1, 50, 10**9])
def test_loss_kernels_make_the_loss_of_an_impossible_label_nan(label):
    h, w, labels = inputs_of(Case(6, 50, ignored="none"))
    labels[3] = label
    total, _, z_sum, count, dh, _ = kernels.forward(h, w, labels, IGNORED, 0.0, 6, 0, True, 128)
    assert math.isnan(total) and math.isfinite(z_sum) and count == 6 and bool(dh.isfinite().all())


def test_loss_kernels_show_nan_inputs_in_the_loss():
    h, w, labels = inputs_of(Case(6, 50, ignored="none"))
    h[2, 0] = math.nan
    assert math.isnan(kernels.forward(h, w, labels, IGNORED, 0.0, 6, 0, True, 128)[0])


def test_loss_kernels_take_no_tokens():
    h, w = torch.zeros(0, 4), torch.ones(5, 4)
    total, _, _, count, dh, dw = kernels.forward(h, w, torch.zeros(0).long(), IGNORED, 0.1, 1, 0, True, 128)
    assert (total.item(), count.item(), dh.shape) == (0.0, 0, (0, 4)) and not bool(dw.any())


def test_loss_kernels_take_views_and_int32_labels():
    case = Case(9, 70, rows=4)
    h, w, labels = inputs_of(case)
    expected = kernels.forward(h, w, labels, *case.settings(), True, case.rows)
    views = (h.t().contiguous().t(), w.t().contiguous().t(), labels.int().repeat_interleave(2)[::2])
    for actual, wanted in zip(kernels.forward(*views, *case.settings(), True, 4), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def refuse(error):
    def product(*args, **kwargs):
        raise error

    return product


def test_the_loss_says_once_that_weight_gradients_are_rounded_where_fp32_products_are_refused(
    monkeypatch, caplog
):
    kernels._has_fp32_products.cache_clear()
    monkeypatch.setattr(torch, "addmm", refuse(RuntimeError("no such kernel")))
    for _ in range(2):
        assert_matches_fp64(kernels.forward, CASES["odd sizes, three chunks"], torch.bfloat16)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "rounded to torch.bfloat16" in record.message
    kernels._has_fp32_products.cache_clear()


def test_the_loss_does_not_take_a_lack_of_memory_for_a_lack_of_products(monkeypatch):
    kernels._has_fp32_products.cache_clear()
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "mm", refuse(torch.OutOfMemoryError("full")))
        kernels._has_fp32_products("cpu", torch.bfloat16)
    assert kernels._has_fp32_products.cache_info().currsize == 0
