"""Attention as one operation: causal, with documents, a window and sinks.

Attention of whole sequences without sinks runs the backend's kernel (``ops.attention``). Sinks alone change
the log-sum-exp around the library's kernel or the fastest of torch. Documents, and windows that a library
lacks, run Triton kernels (``ops.attention_kernels``), measured faster on an H200 than FlexAttention and
torch's flash kernel with cumulative lengths (docs/model.md). Shapes as in ``ops.attention``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphmoe.config.choices import RUN_WINDOWS
from graphmoe.config.schema import AttentionBackend
from graphmoe.ops import accumulator, has_kernel, register_gradient, require_half, row_major
from graphmoe.ops.attention import causal_attention, pad_heads
from graphmoe.ops.library_attention import LIBRARIES, Saved
from graphmoe.ops.ring_attention import attend_to_block, gradients_of_block


def attention(
    q_BSHE: Tensor, k_BSGE: Tensor, v_BSGV: Tensor, *, scale: float, backend: AttentionBackend,
    first_BS: Tensor | None = None, window: int = 0, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return causal attention [B, S, H, V] in the dtype of the inputs. No device sync.

    Query i sees keys max(first_BS[b, i], i - window + 1) to i. ``first_BS``, int32, does not decrease along
    S; a query whose first key is past itself sees none and returns 0. ``window`` counts the query itself; 0:
    no window. ``sinks_H`` is one more logit of each query of a head, whose probability is dropped.
    ``backend``, of `choose_backend`, runs sequences without documents, and without a window if it has none.
    Raises ConfigError if the backend's package is missing or has no kernel for the dtype.
    """
    is_whole = first_BS is None and sinks_H is None and not 0 < window < q_BSHE.shape[1]
    if is_whole and backend not in LIBRARIES:
        return causal_attention(q_BSHE, k_BSGE, v_BSGV, scale=scale, backend=backend)
    return attention_with_lse(
        *(q_BSHE, k_BSGE, v_BSGV), scale=scale, backend=backend, first_BS=first_BS, window=window,
        sinks_H=sinks_H,
    )[0]  # fmt: skip


def attention_with_lse(
    q_BSHE: Tensor, k_BSGE: Tensor, v_BSGV: Tensor, *, scale: float, backend: AttentionBackend,
    first_BS: Tensor | None = None, window: int = 0, sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `attention`, and each query's log-sum-exp [B, H, S] with that of a sink, without gradient.

    A ``backend`` of torch is its fastest kernel here.
    """
    window, library = window if window < q_BSHE.shape[1] else 0, ""
    size, deterministic = v_BSGV.shape[-1], torch.are_deterministic_algorithms_enabled()
    if backend in LIBRARIES and first_BS is None and (backend in RUN_WINDOWS or not window):
        library = backend.value
        require_half("model.attention_backend", library, q_BSHE.dtype)
        # their kernels need heads of multiples of 8
        q_BSHE, k_BSGE, v_BSGV = (pad_heads(x, x.shape[-1]) for x in (q_BSHE, k_BSGE, v_BSGV))
    how = scale, window, library, deterministic
    out_BSHV, lse_BHS, _ = _forward(q_BSHE, k_BSGE, v_BSGV, first_BS, sinks_H, *how)
    return out_BSHV[..., :size], lse_BHS


def logit_bound(lse_BHS: Tensor, sinks_H: Tensor | None = None) -> Tensor:
    """Return an upper bound of each head's logits, fp32 [H]: the largest log-sum-exp, without a sink's share.

    It exceeds the largest logit by ln(keys) at most. A sink 15 above all logits hides them: -inf or noise
    about 15 below the sink. Without gradient.
    """
    largest_H = lse_BHS.detach().amax(dim=(0, 2)).float()
    if sinks_H is None:
        return largest_H
    # exp(largest) is the sum over keys and the sink, which rounding may leave below the sink's part
    return largest_H + torch.log1p(-torch.exp((sinks_H.detach().float() - largest_H).clamp_max(0.0)))


@torch.library.custom_op("graphmoe::attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, sinks: Tensor | None,
    scale: float, window: int, library: str, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return out, the log-sum-exp [B, H, S] with that of the sinks, in `accumulator`'s dtype, and seeds."""
    seeds = q.new_empty(0, dtype=torch.int64)
    if library:
        out, lse, *given = LIBRARIES[AttentionBackend(library)].forward(q, k, v, scale, window)
        seeds = given[0] if given else seeds
    elif first is None and not window:
        out, lse = attend_to_block(q, k, v, scale, True)
    elif has_kernel(q):
        from graphmoe.ops import attention_kernels as kernels

        q, k, v = row_major(q, k, v)
        return *kernels.forward(q, k, v, first, sinks, scale, window), seeds
    else:
        return *reference(q, k, v, first, sinks, scale, window), seeds
    lse = lse.to(accumulator(q))
    if sinks is None:
        return out.contiguous(), lse.contiguous(), seeds
    sink = sinks.to(accumulator(q))[:, None]
    kept = torch.sigmoid(lse - sink).transpose(1, 2).unsqueeze(-1)
    shifted = q.new_empty(out.shape)
    torch.mul(out, kept, out=shifted)  # rounds once, without a copy in fp32
    return shifted, torch.logaddexp(lse, sink.expand_as(lse)).contiguous(), seeds


@torch.library.custom_op("graphmoe::attention_backward", mutates_args=())
def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, sinks: Tensor | None,
    out: Tensor, lse: Tensor, seeds: Tensor, scale: float, window: int, library: str, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of q, k and v, and of the sinks (empty if there are none)."""
    d_out, q, k, v = row_major(d_out, q, k, v)
    is_block, gradients_of, delta = first is None and not window, _reference_gradients, lse.new_empty(0)
    if sinks is not None or not (is_block or library):
        if has_kernel(q):
            from graphmoe.ops import attention_kernels as kernels

            delta, gradients_of = kernels.deltas(d_out, out), kernels.backward
        else:
            delta = (d_out.to(lse.dtype) * out).sum(-1).transpose(1, 2)
    gradients: Sequence[Tensor]
    if library:
        saved = Saved(q, k, v, out, d_out, lse, seeds)
        gradients = LIBRARIES[AttentionBackend(library)].backward(saved, scale, window, deterministic)
    elif is_block:
        gradients = gradients_of_block(d_out, q, k, v, out, lse, scale, True)
    else:
        gradients = gradients_of(d_out, q, k, v, first, lse, delta, scale, window)
    dq, dk, dv = (x.to(q.dtype).contiguous() for x in gradients)
    if sinks is None:
        return dq, dk, dv, lse.new_empty(0)
    d_sinks = -((sinks.to(lse.dtype)[:, None] - lse).exp() * delta).sum((0, 2))
    return dq, dk, dv, d_sinks.to(sinks.dtype)


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, sinks: Tensor | None,
    scale: float, window: int, library: str, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, seq, heads, _ = q.shape
    num_seeds = LIBRARIES[AttentionBackend(library)].num_seeds if library else 0
    lse = q.new_empty(batch, heads, seq, dtype=accumulator(q))
    return q.new_empty(batch, seq, heads, v.shape[-1]), lse, q.new_empty(num_seeds, dtype=torch.int64)


@_backward.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, sinks: Tensor | None,
    out: Tensor, lse: Tensor, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_sinks = lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_sinks


def _gradient(d_out: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
    dq, dk, dv, d_sinks = _backward(d_out, *saved)
    return dq, dk, dv, None, d_sinks if saved[4] is not None else None


register_gradient(_forward, _gradient, lambda inputs, output: (*inputs[:5], *output, *inputs[5:]))


def reference(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, sinks: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """The operation with all logits [B, G, H / G, S, S] in memory, for CPUs and fp64."""
    logits, seen = _logits(q, k, first, scale, window)
    lse = logits.masked_fill(~seen, -torch.inf).logsumexp(-1).flatten(1, 2)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse)[:, None].expand_as(lse))
    p = _probabilities(logits, seen, lse)
    out = torch.einsum("bghst,btgv->bsghv", p, v.to(p.dtype)).flatten(2, 3)
    return out.to(q.dtype).contiguous(), lse.contiguous()


def _reference_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, lse: Tensor, delta: Tensor,
    scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    p = _probabilities(*_logits(q, k, first, scale, window), lse)
    groups = k.shape[2]
    q, k, v, d_out = (x.to(p.dtype) for x in (q, k, v, d_out))
    d_out, q = (x.unflatten(2, (groups, -1)) for x in (d_out, q))
    d_logits = p * (torch.einsum("bsghv,btgv->bghst", d_out, v) - delta.unflatten(1, (groups, -1))[..., None])
    dq = scale * torch.einsum("bghst,btge->bsghe", d_logits, k).flatten(2, 3)
    dk = scale * torch.einsum("bghst,bsghe->btge", d_logits, q)
    return dq, dk, torch.einsum("bghst,bsghv->btgv", p, d_out)


def _logits(q: Tensor, k: Tensor, first: Tensor | None, scale: float, window: int) -> tuple[Tensor, Tensor]:
    dtype, position_S = accumulator(q), torch.arange(q.shape[1], device=q.device)
    first_BS = (position_S - (window or len(position_S)) + 1)[None]
    if first is not None:
        first_BS = torch.maximum(first_BS, first)
    seen_BST = (position_S >= first_BS[..., None]) & (position_S <= position_S[:, None])
    grouped = q.to(dtype).unflatten(2, (k.shape[2], -1))
    return scale * torch.einsum("bsghe,btge->bghst", grouped, k.to(dtype)), seen_BST[:, None, None]


def _probabilities(logits: Tensor, seen: Tensor, lse: Tensor) -> Tensor:
    # the maximum of each query is subtracted by its log-sum-exp, which is -inf for one without keys
    of_query = lse.unflatten(1, logits.shape[1:3])[..., None]
    return (logits - of_query).exp().masked_fill(~seen, 0.0)
