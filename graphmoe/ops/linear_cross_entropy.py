"""Head and cross-entropy in one operation that never holds the logits of all tokens.

Suffixes: T tokens, C tokens of a chunk, V vocabulary, D hidden.

The gradients are made in the forward, chunk by chunk, while the logits are there; the backward multiplies
them by the gradient of the loss. bf16 and fp32 on a GPU run the kernels, everything else `plain`.
"""

from typing import Any

import torch
from torch import Tensor

LOGITS_BYTES = 1_160_000_000
"""Largest buffer of logits: 5504 tokens of a vocabulary of 102400 in bf16."""
ROWS_MULTIPLE = 128


@torch.library.custom_op("graphmoe::linear_cross_entropy", mutates_args=())
def _forward(
    h_TD: Tensor, w_VD: Tensor, labels_T: Tensor,
    ignore_index: int, z_loss_coef: float, seq_len: int, label_shift: int, needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> total f32 [], cross_entropy f32 [], z_sum f32 [], count i64 [], dh_TD, dw_VD f32. No device sync.

    ``cross_entropy`` is the sum over the kept labels of -log softmax(h @ w.T)[label], ``z_sum`` that of the
    squared logsumexp (ST-MoE, arXiv 2202.08906, section 4), ``count`` the number of kept labels, and
    ``total`` = cross_entropy + z_loss_coef * z_sum. Only ``total`` is differentiable; ``dh_TD`` and ``dw_VD``
    are its gradients, of no elements where ``needs_grad`` is false.

    Position i of each sequence of ``seq_len`` tokens predicts labels[i + label_shift]; its last
    ``label_shift`` positions predict nothing (0: the labels are shifted already). A label that is
    neither a class nor ``ignore_index`` makes the loss NaN on a GPU and raises on a CPU.

    Logits are in the dtype of h, from fp32 sums; softmax and losses are fp32, so are the sums of dw.
    """
    assert h_TD.dtype == w_VD.dtype, (h_TD.dtype, w_VD.dtype)
    assert label_shift == 0 or labels_T.shape[0] % seq_len == 0, (labels_T.shape, seq_len)
    rows = rows_per_chunk(h_TD.shape[0], w_VD.shape[0], h_TD.element_size())
    run = plain
    if h_TD.is_cuda:
        from graphmoe.ops import linear_cross_entropy_kernels as kernels

        if h_TD.dtype in kernels.DTYPES:
            run = kernels.forward
    return run(h_TD, w_VD, labels_T, ignore_index, z_loss_coef, seq_len, label_shift, needs_grad, rows)


@_forward.register_fake
def _(h_TD: Tensor, w_VD: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    needs_grad = rest[-1]
    total, cross_entropy, z_sum = (h_TD.new_empty((), dtype=torch.float32) for _ in range(3))
    count = h_TD.new_empty((), dtype=torch.int64)
    dh_TD = h_TD.new_empty(h_TD.shape if needs_grad else 0)
    dw_VD = w_VD.new_empty(w_VD.shape if needs_grad else 0, dtype=torch.float32)
    return total, cross_entropy, z_sum, count, dh_TD, dw_VD


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    dh_TD, dw_VD = output[4:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # the gradients of dh and dw would be zeros as large as they are
    ctx.save_for_backward(dh_TD, dw_VD)
    ctx.w_dtype, ctx.needs_grad = inputs[1].dtype, inputs[7]


def _backward(ctx: Any, dtotal: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    assert ctx.needs_grad, "linear_cross_entropy made no gradients: needs_grad was false"
    dh_TD, dw_VD = ctx.saved_tensors
    dh = dw = None
    if dtotal is None:
        return (None,) * 8
    # Plain arithmetic: a compiler makes one pass of product and cast, and of what follows.
    if ctx.needs_input_grad[0]:
        dh = (dh_TD.float() * dtotal).to(dh_TD.dtype)
    if ctx.needs_input_grad[1]:  # rounded on the way out: the product in fp32 would be as large as dw
        dw = torch.mul(dw_VD, dtotal, out=dw_VD.new_empty(dw_VD.shape, dtype=ctx.w_dtype))
    return dh, dw, *[None] * 6


_forward.register_autograd(_backward, setup_context=_save)


def rows_per_chunk(num_tokens: int, vocab_size: int, element_size: int) -> int:
    """Tokens of a chunk: as few chunks as ``LOGITS_BYTES`` allows, and those of about one size."""
    most = max(LOGITS_BYTES // (vocab_size * element_size) // ROWS_MULTIPLE, 1) * ROWS_MULTIPLE
    num_chunks = max(-(-num_tokens // most), 1)
    rows = max(-(-num_tokens // num_chunks), 1)
    return -(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE


def shifted(labels_T: Tensor, ignore_index: int, seq_len: int, label_shift: int) -> Tensor:
    """labels[i + s] at position i of each sequence, ``ignore_index`` at its last s positions."""
    if label_shift == 0:
        return labels_T
    labels_BS = labels_T.view(-1, seq_len)
    ignored = labels_BS.new_full((len(labels_BS), min(label_shift, seq_len)), ignore_index)
    return torch.cat([labels_BS[:, label_shift:], ignored], dim=1).flatten()


def plain(
    h_TD: Tensor,
    w_VD: Tensor,
    labels_T: Tensor,
    ignore_index: int,
    z_loss_coef: float,
    seq_len: int,
    label_shift: int,
    needs_grad: bool,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operation in plain PyTorch, ``rows`` tokens at a time; fp64 inputs are summed in fp64."""
    exact, f32 = (torch.float64 if h_TD.dtype == torch.float64 else torch.float32), torch.float32
    target_T = shifted(labels_T, ignore_index, seq_len, label_shift)
    cross_entropy, z_sum = (torch.zeros((), dtype=exact, device=h_TD.device) for _ in range(2))
    dh_TD = h_TD.new_empty(h_TD.shape if needs_grad else 0)
    dw_VD = w_VD.new_zeros(w_VD.shape if needs_grad else 0, dtype=exact)
    for start in range(0, len(h_TD), rows):
        h_CD, target_C = h_TD[start : start + rows], target_T[start : start + rows]
        kept_C = target_C != ignore_index
        target_C1 = target_C.masked_fill(~kept_C, 0).long().unsqueeze(1)
        logits_CV = (h_CD @ w_VD.T).to(exact)
        lse_C = logits_CV.logsumexp(dim=-1)
        loss_C = lse_C - logits_CV.gather(1, target_C1).squeeze(1)
        cross_entropy += loss_C.masked_fill(~kept_C, 0).sum()
        z_sum += lse_C.masked_fill(~kept_C, 0).square().sum()
        if needs_grad:
            d_CV = (logits_CV - lse_C.unsqueeze(1)).exp() * (1 + 2 * z_loss_coef * lse_C).unsqueeze(1)
            d_CV.scatter_add_(1, target_C1, torch.full_like(target_C1, -1, dtype=exact))
            d_CV = d_CV.masked_fill(~kept_C.unsqueeze(1), 0).to(h_TD.dtype)
            dh_TD[start : start + rows] = d_CV @ w_VD
            dw_VD.addmm_(d_CV.to(exact).T, h_CD.to(exact))
    total, count = cross_entropy + z_loss_coef * z_sum, (target_T != ignore_index).sum()
    return total.to(f32), cross_entropy.to(f32), z_sum.to(f32), count, dh_TD, dw_VD.to(f32)
