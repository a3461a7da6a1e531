"""Head and cross-entropy in one operation that never holds the logits of all tokens.

Suffixes: T tokens, C tokens of a chunk, V vocabulary, D hidden. The forward computes gradients by chunk.
"""

from typing import Any

import torch
from torch import Tensor

from graphmoe.ops.collectives import Part, over_ranks, part_of

LOGITS_BYTES = 1_160_000_000  # largest buffer of logits: 5504 tokens of a vocabulary of 102400 in bf16
ROWS_MULTIPLE = 128


Results = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("graphmoe::linear_cross_entropy", mutates_args=())
def _forward(
    h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, ignore_index: int, trains_w: bool = True, axis: str = ""
) -> Results:
    """Return loss f32 [], count i64 [], and the gradients dh_TD, dw_VD f32. No device sync.

    Loss: sum of -log softmax(h @ w.T)[label] over labels other than ``ignore_index``; count: their number. An
    invalid label gives NaN on a GPU and raises on a CPU. Logits have the dtype of h. Without ``trains_w``
    dw is empty. The ranks of an ``axis`` have equal parts of V in their order: each gets the whole loss, and
    its part of the sum dh.
    """
    assert h_TD.dtype == w_VD.dtype, (h_TD.dtype, w_VD.dtype)
    rows = rows_per_chunk(h_TD.shape[0], w_VD.shape[0], h_TD.element_size())
    run = reference
    if h_TD.is_cuda:
        from graphmoe.ops import linear_cross_entropy_kernels as kernels

        if h_TD.dtype in kernels.DTYPES:
            run = kernels.forward
    return run(h_TD, w_VD, labels_T, ignore_index, rows, trains_w, part_of(axis, len(w_VD)))


@_forward.register_fake
def _(
    h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, ignore_index: int, trains_w: bool = True, axis: str = ""
) -> Results:
    loss, count = h_TD.new_empty((), dtype=torch.float32), h_TD.new_empty((), dtype=torch.int64)
    shape = w_VD.shape if trains_w else (0,)
    return loss, count, h_TD.new_empty(h_TD.shape), w_VD.new_empty(shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # the gradients of dh and dw would be zeros as large as they are
    ctx.save_for_backward(*output[2:])
    ctx.w_dtype = inputs[1].dtype


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    dh_TD, dw_VD = ctx.saved_tensors
    dh = dw = None
    # plain arithmetic: a compiler fuses product, cast and what follows
    if dloss is not None and ctx.needs_input_grad[0]:
        dh = (dh_TD.float() * dloss).to(dh_TD.dtype)
    if dloss is not None and ctx.needs_input_grad[1]:
        # rounded by the GEMM: the product in fp32 would be as large as dw
        assert dw_VD.dim() == 2, "the weight was frozen in the forward"
        dw = torch.mul(dw_VD, dloss, out=dw_VD.new_empty(dw_VD.shape, dtype=ctx.w_dtype))
    return dh, dw, None, None, None, None


_forward.register_autograd(_backward, setup_context=_save)


def rows_per_chunk(num_tokens: int, vocab_size: int, element_size: int) -> int:
    """Return the number of tokens per chunk; chunks are equal, and each one's logits fit ``LOGITS_BYTES``."""
    most = max(LOGITS_BYTES // (vocab_size * element_size) // ROWS_MULTIPLE, 1) * ROWS_MULTIPLE
    num_chunks = max(-(-num_tokens // most), 1)
    rows = max(-(-num_tokens // num_chunks), 1)
    return -(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE


def reference(
    h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, ignore_index: int, rows: int, trains_w: bool = True,
    part: Part | None = None,
) -> Results:  # fmt: skip
    """Return loss, count and gradients, made ``rows`` tokens at a time; fp64 inputs are summed in fp64."""
    part = part or part_of("", len(w_VD))
    exact, f32 = (torch.float64 if h_TD.dtype == torch.float64 else torch.float32), torch.float32
    loss = torch.zeros((), dtype=exact, device=h_TD.device)
    dh_TD = h_TD.new_empty(h_TD.shape)
    dw_VD = w_VD.new_zeros(w_VD.shape if trains_w else (0,), dtype=exact)
    for start in range(0, len(h_TD), rows):
        h_CD, label_C = h_TD[start : start + rows], labels_T[start : start + rows]
        kept_C = label_C != ignore_index
        label_C = label_C.long().masked_fill(~kept_C, 0)
        if part.group and not ((label_C >= 0) & (label_C < part.whole)).all():
            raise IndexError(f"a label is not in 0 to {part.whole - 1}, nor {ignore_index}")
        own_C = label_C - part.first
        here_C1 = ((own_C >= 0) & (own_C < len(w_VD)) if part.group else kept_C).unsqueeze(1)
        label_C1 = own_C.unsqueeze(1).where(here_C1, 0)
        logits_CV = (h_CD @ w_VD.T).to(exact)
        at_label_C = logits_CV.gather(1, label_C1).where(here_C1, 0).squeeze(1)
        lse_C, at_label_C = over_ranks(part, logits_CV.logsumexp(dim=-1), at_label_C)
        loss += (lse_C - at_label_C).masked_fill(~kept_C, 0).sum()
        d_CV = (logits_CV - lse_C.unsqueeze(1)).exp()
        d_CV.scatter_add_(1, label_C1, -here_C1.to(exact))
        d_CV = d_CV.masked_fill(~kept_C.unsqueeze(1), 0).to(h_TD.dtype)
        dh_TD[start : start + rows] = d_CV @ w_VD
        if trains_w:
            dw_VD.addmm_(d_CV.to(exact).T, h_CD.to(exact))
    return loss.to(f32), (labels_T != ignore_index).sum(), dh_TD, dw_VD.to(f32)
