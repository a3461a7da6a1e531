"""Linear cross-entropy on all backends against fp64. Suffixes as in graphmoe/ops/linear_cross_entropy.py."""

import functools
import math
from dataclasses import dataclass
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from graphmoe.ops import collectives
from graphmoe.ops import linear_cross_entropy as module
from graphmoe.ops.linear_cross_entropy import LOGITS_BYTES, reference, rows_per_chunk
from tests.ops.ahead_of_time import launches_of
from tests.ops.interpreted import BACKENDS, INTERPRETING, KERNELS, device_of
from tests.ops.seen_ops import SeenOps
from tests.tolerances import TOLERANCES, relative_error

ops = torch.ops.graphmoe
DTYPES = (torch.float32, torch.bfloat16)
IGNORED = -100
NAMES = ("loss", "count", "dh", "dw")


@dataclass(frozen=True)
class Case:
    """Sizes and labels of one loss; ``rows`` is the size of a chunk."""

    T: int
    V: int
    D: int = 24
    rows: int = 128
    ignored: str = "some"
    seed: int = 0


CASES = {
    "one chunk": Case(16, 64),
    "odd sizes, three chunks": Case(13, 301, 19, rows=5),
    "more than one block of logits": Case(6, 1100, rows=4),
    "whole blocks of logits": Case(4, 1024),
    "nothing ignored": Case(11, 67, rows=3, ignored="none"),
    "first chunk ignored": Case(12, 67, rows=4, ignored="first"),
    "all but one ignored": Case(9, 33, rows=4, ignored="all but one"),
    "everything ignored": Case(9, 33, rows=4, ignored="all"),
    "one token": Case(1, 40, ignored="none"),
    "one class": Case(5, 1),
    "chunks of one token": Case(3, 10, rows=1),
    "a large vocabulary": Case(3, 20_000),
}


def inputs_of(case, dtype=torch.float32, device="cpu"):
    """h, w and labels; logits of about unit size."""
    generator, token_T = torch.Generator().manual_seed(case.seed), torch.arange(case.T)
    h = torch.randn(case.T, case.D, generator=generator)
    w = torch.randn(case.V, case.D, generator=generator) / case.D**0.5
    labels = torch.randint(0, case.V, (case.T,), generator=generator)
    ignored = {
        "none": token_T < 0,
        "some": torch.rand(case.T, generator=generator) < 0.3,
        "first": token_T < case.rows,
        "all but one": token_T != case.T // 2,
        "all": token_T >= 0,
    }
    labels[ignored[case.ignored]] = IGNORED
    return h.to(device, dtype), w.to(device, dtype), labels.to(device)


def written_out(h_TD, w_VD, labels_T):
    h, w = (x.detach().double().requires_grad_() for x in (h_TD, w_VD))
    loss = F.cross_entropy(h @ w.T, labels_T, ignore_index=IGNORED, reduction="sum")
    return loss, (labels_T != IGNORED).sum(), *torch.autograd.grad(loss, (h, w))


def assert_close(name, actual, expected, dtype):
    """Compare by the table's row for the dtype of the inputs: losses are fp32, of logits in that dtype."""
    limit = TOLERANCES[dtype]
    error = relative_error(actual, expected)
    assert error <= (limit.gradient if name[0] == "d" else limit.forward), f"{name}: {error:.1e}"


def assert_matches_fp64(run, case, dtype, device="cpu"):
    """Compare every result of ``run(h, w, labels, ignore_index, rows)`` with fp64 autograd."""
    h, w, labels = inputs_of(case, dtype, device)
    actual = run(h, w, labels, IGNORED, case.rows)
    expected = written_out(h, w, labels)
    dtypes = (torch.float32, torch.int64, dtype, torch.float32)
    for name, result, wanted, kind in zip(NAMES, actual, expected, dtypes, strict=True):
        assert (result.dtype, result.shape, result.is_contiguous()) == (kind, wanted.shape, True), name
        if bool(wanted.any()):
            assert_close(name, result, wanted, dtype)
        else:  # one class has no gradient but that of rounding
            assert float(result.double().norm()) <= 1e-6 * (case.T if case.V == 1 else 0), name
    assert int(actual[1]) == int(expected[1])
    assert not bool(actual[2][labels == IGNORED].any())


def kernels():
    from graphmoe.ops import linear_cross_entropy_kernels

    return linear_cross_entropy_kernels


def runs_of(backend):
    return reference if backend == "plain" else kernels().forward


@pytest.fixture
def small_blocks(monkeypatch):
    """Make blocks so small that the loops over a row and over tokens go round."""
    for name, size in {"BLOCK": 256, "TOTAL_BLOCK": 4}.items() if INTERPRETING else ():
        monkeypatch.setattr(kernels(), name, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_match_fp64(backend, name, dtype, small_blocks):
    assert_matches_fp64(runs_of(backend), CASES[name], dtype, device_of(backend))


SHARED = ("more than one block of logits", "one token", "a large vocabulary", "chunks of one token")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_with_parts_of_the_vocabulary_get_its_loss(backend, name, dtype, small_blocks, monkeypatch):
    case, size = CASES[name], 2
    h, w, labels = inputs_of(case, dtype, device_of(backend))
    scores_TV, found = (h @ w.T).float(), []
    scores_PTV = torch.stack(scores_TV.chunk(size, dim=1))
    own_PT = labels - torch.arange(size, device=h.device)[:, None] * (case.V // size)
    at_PT = scores_PTV.gather(2, own_PT.clamp(0, case.V // size - 1)[..., None]).squeeze(2)
    sums_P2T = torch.stack(
        [scores_PTV.logsumexp(2), at_PT.where(own_PT == own_PT.clamp(0, case.V // size - 1), 0)], 1
    )
    for rank, w_VD in enumerate(w.chunk(size)):
        starts = iter(range(0, case.T, case.rows))

        def gather(into, own, group, rank=rank, starts=starts):
            at = slice(start := next(starts), start + case.rows)
            others_P2C, kept_C = sums_P2T[:, :, at].clone(), labels[at] != IGNORED
            error = (own.view(2, -1) - others_P2C[rank])[:, kept_C].abs().max() if kept_C.any() else 0
            assert error < 1e-3
            others_P2C[rank] = own.view(2, -1)
            into.copy_(others_P2C.flatten())

        monkeypatch.setattr(collectives, "all_gather_into", gather)
        part = collectives.Part(rank * len(w_VD), case.V, Mock(size=lambda: size))
        found.append(runs_of(backend)(h, w_VD, labels, IGNORED, case.rows, True, part))
    (loss, count, dh, dw), (other, _, more, rest) = found
    joined = loss, count, dh.float() + more.float(), torch.cat([dw, rest])
    assert loss.equal(other) or relative_error(loss, other) < 1e-6
    for of, actual, wanted in zip(NAMES, joined, written_out(h, w, labels), strict=True):
        assert_close(of, actual, wanted, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_frozen_weight_has_no_gradient_and_changes_no_other_result(backend, small_blocks):
    case = next(iter(CASES.values()))
    h, w, labels = inputs_of(case, torch.float32, device_of(backend))
    whole, frozen = (runs_of(backend)(h, w, labels, IGNORED, case.rows, trains) for trains in (True, False))
    assert all(one.equal(other) for one, other in zip(whole[:3], frozen[:3], strict=True))
    assert whole[3].shape == w.shape and frozen[3].numel() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_class_of_probability_1e_12_has_its_gradient_to_a_bf16_rounding(backend):
    run, device, (T, V, D) = runs_of(backend), device_of(backend), (4, 300, 8)
    h, w = torch.zeros(T, D), torch.zeros(V, D)
    h[:, 0], w[:, 0], w[7, 0] = 1.0, -27.625, 0.0  # all logits are exact in bf16
    h, w = h.to(device, torch.bfloat16), w.to(device, torch.bfloat16)
    dw = run(h, w, torch.full((T,), 7, device=device), IGNORED, 128)[3]
    probability = torch.tensor(-27.625, dtype=torch.float64).exp()
    torch.testing.assert_close(dw[11, 0].double().cpu(), T * probability, rtol=8e-3, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_have_a_finite_loss_and_no_tokens_none(backend, small_blocks):
    run, device = runs_of(backend), device_of(backend)
    h, w = torch.full((2, 1), 200.0, device=device), torch.arange(-2.0, 3, device=device).unsqueeze(1)
    labels = torch.tensor([0, 4], device=device)
    total, *_, dh, dw = run(h, w, labels, IGNORED, 128)
    assert total.item() == 800.0 and bool(dh.isfinite().all()) and bool(dw.isfinite().all())
    total, count, dh, dw = run(h[:0], w, labels[:0], IGNORED, 128)
    assert (total.item(), count.item(), dh.shape) == (0.0, 0, (0, 1)) and not bool(dw.any())


@pytest.mark.parametrize("label", [-1, 50, 10**9])
@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_make_the_loss_of_an_impossible_label_or_a_nan_nan(backend, label, small_blocks):
    run, (h, w, labels) = runs_of(backend), inputs_of(Case(6, 50, ignored="none"), device=device_of(backend))
    labels[3] = label
    loss, count, dh, _ = run(h, w, labels, IGNORED, 128)
    assert math.isnan(loss) and count == 6 and bool(dh.isfinite().all())
    labels[3], h[2, 0] = 1, math.nan
    assert math.isnan(run(h, w, labels, IGNORED, 128)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_and_int32_labels_are_taken(backend, small_blocks):
    case, run = Case(9, 70, rows=4), runs_of(backend)
    h, w, labels = inputs_of(case, device=device_of(backend))
    expected = run(h, w, labels, IGNORED, case.rows)
    views = (h.t().contiguous().t(), w.t().contiguous().t(), labels.int().repeat_interleave(2)[::2])
    for actual, wanted in zip(run(*views, IGNORED, 4), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("backend", KERNELS)
def test_refused_fp32_products_are_named_once_but_no_lack_of_memory(backend, monkeypatch, caplog):
    has_products, case = kernels()._has_fp32_products, CASES["odd sizes, three chunks"]
    has_products.cache_clear()
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "mm", Mock(side_effect=torch.OutOfMemoryError("full")))
        has_products(device_of(backend), torch.bfloat16)
    assert has_products.cache_info().currsize == 0
    monkeypatch.setattr(torch, "addmm", Mock(side_effect=RuntimeError("no such kernel")))
    for _ in range(2):
        assert_matches_fp64(kernels().forward, case, torch.bfloat16, device_of(backend))
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "rounded to torch.bfloat16" in record.message
    has_products.cache_clear()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["odd sizes, three chunks", "everything ignored"])
def test_the_mean_loss_and_its_gradients_match_fp64_autograd(name, dtype, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr(module, "ROWS_MULTIPLE", 1)
    monkeypatch.setattr(module, "LOGITS_BYTES", 5 * case.V * dtype.itemsize)
    h, w, labels = (x.requires_grad_(x.is_floating_point()) for x in inputs_of(case, dtype))
    loss, count, _, _ = ops.linear_cross_entropy(h, w, labels, IGNORED)
    (loss / count.clamp_min(1)).backward()
    expected, _, dh, dw = written_out(h, w, labels)
    kind = torch.float32 if dtype == torch.float64 else dtype
    assert_close("loss", loss, expected, kind)
    for name, leaf, wanted in (("dh", h, dh), ("dw", w, dw)):
        assert leaf.grad.dtype == dtype
        assert_close(name, leaf.grad, wanted / count.clamp_min(1), kind)


def test_an_impossible_label_raises_on_the_cpu():
    h, w, labels = inputs_of(CASES["one chunk"])
    labels[2] = 64
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        ops.linear_cross_entropy(h, w, labels, IGNORED)


def test_the_gradients_are_scaled_in_fp32():
    case, factor = CASES["one chunk"], torch.tensor(1 / 12345)
    h, w, labels = inputs_of(case, torch.bfloat16)
    total, *_, dh, dw = ops.linear_cross_entropy(h.requires_grad_(), w.requires_grad_(), labels, IGNORED)
    total.backward(factor)
    assert torch.equal(h.grad, (dh.float() * factor).bfloat16())
    assert torch.equal(w.grad, (dw * factor).bfloat16())


@pytest.mark.parametrize("wanted", ["h", "w", "both"])
def test_the_backward_makes_the_gradients_that_are_wanted_and_nothing_else_as_large_as_the_weight(wanted):
    case = CASES["odd sizes, three chunks"]
    h, w, labels = inputs_of(case, torch.bfloat16)
    h.requires_grad_(wanted != "w"), w.requires_grad_(wanted != "h")
    total = ops.linear_cross_entropy(h, w, labels, IGNORED)[0]
    with SeenOps() as seen:
        torch.autograd.grad(total, [x for x in (h, w) if x.requires_grad])
    as_large = [dtype for shape, dtype in seen.made if shape == w.shape]
    assert seen.names == [] and as_large == [torch.bfloat16] * (wanted != "h")


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_accepts_the_ops(dtype):
    case = CASES["first chunk ignored"]
    h, w, labels = inputs_of(case, dtype)
    leaves = (h.requires_grad_(), w.requires_grad_(), labels)
    opcheck(ops.linear_cross_entropy.default, (*leaves, IGNORED))
    opcheck(ops.linear_cross_entropy.default, (h.detach(), w.detach(), labels, IGNORED))


def ahead_of_time_cases():
    """A vocabulary of 102400, and one of a single class."""
    for name, dtype, T, V in (
        ("bf16", torch.bfloat16, 16384, 102400),
        ("fp32", torch.float32, 16384, 102400),
        ("sizes of 1", torch.bfloat16, 1, 1),
    ):
        h, w = (torch.empty(rows, 64, dtype=dtype, device="meta") for rows in (T, V))
        labels = torch.empty(T, dtype=torch.int64, device="meta")
        yield from launches_of(name, functools.partial(kernels().forward, h, w, labels, IGNORED, T))
