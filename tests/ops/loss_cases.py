"""Heads, labels and checks for linear cross-entropy, wherever it runs: plain, interpreted, or on a GPU.

Suffixes as in graphmoe/ops/linear_cross_entropy.py. What is expected is fp64 autograd of the formula.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tests.tolerances import TOLERANCES, relative_error

IGNORED = -100
NAMES = ("total", "cross_entropy", "z_sum", "count", "dh", "dw")


@dataclass(frozen=True)
class Case:
    """Sizes and settings of one loss; ``rows`` is the size of a chunk."""

    T: int
    V: int
    D: int = 24
    rows: int = 128
    seq_len: int = 0  # 0: all tokens are one sequence
    shift: int = 0
    z: float = 0.0
    ignored: str = "some"
    seed: int = 0

    def settings(self):
        """The operation's arguments between labels and ``needs_grad``."""
        return (IGNORED, self.z, self.seq_len or self.T, self.shift)


CASES = {
    "one chunk": Case(16, 64),
    "odd sizes, three chunks": Case(13, 301, 19, rows=5),
    "more than one block of logits": Case(6, 1100, rows=4),
    "whole blocks of logits": Case(4, 1024),
    "z-loss": Case(9, 777, rows=4, z=0.01),
    "labels shifted by one": Case(12, 50, rows=5, seq_len=4, shift=1, z=0.01),
    "labels shifted by two": Case(15, 50, rows=4, seq_len=5, shift=2),
    "labels shifted beyond the sequence": Case(6, 50, seq_len=2, shift=3, z=0.1),
    "nothing ignored": Case(11, 67, rows=3, ignored="none"),
    "first chunk ignored": Case(12, 67, rows=4, ignored="first", z=0.01),
    "all but one ignored": Case(9, 33, rows=4, ignored="all but one"),
    "everything ignored": Case(9, 33, rows=4, ignored="all", z=0.1),
    "one token": Case(1, 40, ignored="none"),
    "one class": Case(5, 1, z=0.1),
    "chunks of one token": Case(3, 10, rows=1),
}


def inputs_of(case, dtype=torch.float32, device="cpu"):
    """h, w and labels; logits of about unit size."""
    generator = torch.Generator().manual_seed(case.seed)
    h = torch.randn(case.T, case.D, generator=generator)
    w = torch.randn(case.V, case.D, generator=generator) / case.D**0.5
    labels = torch.randint(0, case.V, (case.T,), generator=generator)
    if case.ignored == "all":
        labels[:] = IGNORED
    elif case.ignored == "all but one":
        labels[torch.arange(case.T) != case.T // 2] = IGNORED
    elif case.ignored == "first":
        labels[: case.rows] = IGNORED
    elif case.ignored == "some":
        labels[torch.rand(case.T, generator=generator) < 0.3] = IGNORED
    return h.to(device, dtype), w.to(device, dtype), labels.to(device)


def targets_of(case, labels_T):
    """The label that each token predicts, written out."""
    seq_len, targets = case.seq_len or case.T, []
    for t in range(case.T):
        known = t % seq_len + case.shift < seq_len
        targets.append(int(labels_T[t + case.shift]) if known else IGNORED)
    return torch.tensor(targets, device=labels_T.device)


def written_out(case, h_TD, w_VD, labels_T):
    """total, cross_entropy, z_sum, count, dh and dw by fp64 autograd of the formula."""
    h, w = (x.detach().double().requires_grad_() for x in (h_TD, w_VD))
    target_T = targets_of(case, labels_T)
    kept_T = target_T != IGNORED
    logits_TV = h @ w.T
    cross_entropy = F.cross_entropy(logits_TV, target_T, ignore_index=IGNORED, reduction="sum")
    z_sum = (logits_TV.logsumexp(1).square() * kept_T).sum()
    total = cross_entropy + case.z * z_sum
    return total, cross_entropy, z_sum, kept_T.sum(), *torch.autograd.grad(total, (h, w))


def assert_close(name, actual, expected, dtype):
    """Compare by the table's row for the dtype of the inputs: losses are fp32, of logits in that dtype."""
    limit = TOLERANCES[dtype]
    error = relative_error(actual, expected)
    assert error <= (limit.gradient if name[0] == "d" else limit.forward), f"{name}: {error:.1e}"


def assert_matches_fp64(run, case, dtype, device="cpu"):
    """Compare every result of ``run(h, w, labels, *settings, needs_grad, rows)`` with fp64 autograd."""
    h, w, labels = inputs_of(case, dtype, device)
    actual = run(h, w, labels, *case.settings(), True, case.rows)
    expected = written_out(case, h, w, labels)
    dtypes = (*[torch.float32] * 3, torch.int64, dtype, torch.float32)
    for name, result, wanted, kind in zip(NAMES, actual, expected, dtypes, strict=True):
        assert (result.dtype, result.shape, result.is_contiguous()) == (kind, wanted.shape, True), name
        if bool(wanted.any()):
            assert_close(name, result, wanted, dtype)
        else:  # one class has no gradient but that of rounding
            assert float(result.double().norm()) <= 1e-6 * (case.T if case.V == 1 else 0), name
    assert int(actual[3]) == int(expected[3])
    assert not bool(actual[4][targets_of(case, labels) == IGNORED].any())
    only_loss = run(h, w, labels, *case.settings(), False, case.rows)
    assert all(torch.equal(a, b) for a, b in zip(only_loss[:4], actual[:4], strict=True))
    assert only_loss[4].numel() == only_loss[5].numel() == 0


def assert_small_probabilities_count(run, device="cpu"):
    """A class of probability 1e-12 has the gradient that it should have, to a bf16 rounding."""
    T, V, D = 4, 300, 8
    h, w = torch.zeros(T, D), torch.zeros(V, D)
    h[:, 0], w[:, 0], w[7, 0] = 1.0, -27.625, 0.0  # all logits are exact in bf16
    h, w = h.to(device, torch.bfloat16), w.to(device, torch.bfloat16)
    labels = torch.full((T,), 7, device=device)
    dw = run(h, w, labels, IGNORED, 0.0, T, 0, True, 128)[5]
    probability = torch.tensor(-27.625, dtype=torch.float64).exp()
    torch.testing.assert_close(dw[11, 0].double().cpu(), T * probability, rtol=8e-3, atol=0)
