"""Causal attention over sequences split among ranks, which circulate keys and values (arXiv 2310.01889).

A sequence of n ranks is 2n equal chunks; rank i has chunks i and 2n - 1 - i ("zigzag"), which balances the
work of each step. At step s a rank has the keys of the rank s before it. Blocks are merged by log-sum-exp.
Shapes as in ``graphmoe.ops.attention``; S positions of this rank, T keys of a block.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from graphmoe.ops import HALF_DTYPES, accumulator, register_gradient
from graphmoe.ops.attention import FLASH_MAX_HEAD_DIM, pad_heads
from graphmoe.ops.collectives import group_of
from graphmoe.ops.waits import waiting
from graphmoe.plan.layout import Axis

aten = torch.ops.aten
Kernel = Literal["cpu", "flash", "cudnn", "efficient"]
# kernels of scaled_dot_product_attention: called by name, they return the log-sum-exp of each query
FORWARD: dict[Kernel, Any] = {
    "cpu": aten._scaled_dot_product_flash_attention_for_cpu,
    "flash": aten._scaled_dot_product_flash_attention,
    "cudnn": aten._scaled_dot_product_cudnn_attention,
    "efficient": aten._scaled_dot_product_efficient_attention,
}
CUDNN_MAX_HEAD_DIM = 192  # beyond it cuDNN's backward depends on its version and the GPU
# the memory-efficient kernel pads log-sum-exps of a head to a multiple of this many queries
_LSE_ALIGNMENT = 32


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, axis: Axis, size: int
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * q k^T, causal) v of this rank's queries over whole sequences -> [B, S, H, V].

    And their log-sum-exp [B, H, S], without gradient. q [B, S, H, E], k [B, S, G, E], v [B, S, G, V]: this
    rank's two chunks, S even. Sums are fp32.
    """
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[1] % 2 == 0, (q.shape, k.shape, v.shape)
    return torch.ops.graphmoe.ring_attention(q, k, v, scale, axis, size)


class _Shift:
    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        # a send to the next rank and a receive from the previous one, as one all-to-all: cannot deadlock
        size, index = group.size(), dist.get_rank(group)
        self._sent, self._received = sent, torch.empty_like(sent)  # kept until both have arrived
        to, of = ([0] * size for _ in range(2))
        to[(index + 1) % size], of[(index - 1) % size] = sent.numel(), sent.numel()
        self._work = dist.all_to_all_single(self._received, sent, of, to, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return the received tensor. On a GPU the host does not wait."""
        with waiting():
            self._work.wait()
        return self._received


def _part(step: int, index: int, seq: int) -> tuple[slice, slice, bool]:
    everything = slice(0, seq)
    if step == 0:
        return everything, everything, True
    if step <= index:  # keys of a lower rank: all queries attend to its first chunk
        return everything, slice(0, seq // 2), False
    return slice(seq // 2, seq), everything, False  # of a higher rank: the second chunk attends to both


@torch.library.custom_op("graphmoe::ring_attention", mutates_args=())
def _ring_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, axis: str, size: int
) -> tuple[Tensor, Tensor]:
    group = group_of(axis, size)  # type: ignore[arg-type]
    (batch, seq, heads, _), summed = q.shape, accumulator(q)
    out = q.new_empty(batch, seq, heads, v.shape[-1], dtype=summed)
    lse = q.new_empty(batch, heads, seq, dtype=summed)
    block = _packed(k, v)
    for step in range(size):
        passing = _Shift(block, group) if step < size - 1 else None
        k, v = _unpacked(block, k.shape, v.shape)
        rows, columns, causal = _part(step, dist.get_rank(group), seq)
        of_block = attend_to_block(q[:, rows], k[:, columns], v[:, columns], scale, causal)
        if step == 0:
            out.copy_(of_block[0])
            lse.copy_(of_block[1])
        else:
            _join(out[:, rows], lse[:, :, rows], *of_block)
        if passing:
            block = passing.wait()
    return out.to(q.dtype), lse


@torch.library.custom_op("graphmoe::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, axis: str, size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    group, (_, seq, _, _), summed = group_of(axis, size), q.shape, accumulator(q)  # type: ignore[arg-type]
    dq = torch.zeros(q.shape, dtype=summed, device=q.device)
    block, adding = _packed(k, v), None
    for step in range(size):
        passing = _Shift(block, group) if step < size - 1 else None
        k, v = _unpacked(block, k.shape, v.shape)
        rows, columns, causal = _part(step, dist.get_rank(group), seq)
        dq_block, dk_block, dv_block = gradients_of_block(
            *(d_out[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, :, rows]),
            *(scale, causal),
        )
        dq[:, rows] += dq_block
        d_block = torch.zeros_like(block, dtype=summed) if adding is None else adding.wait()
        dk, dv = _unpacked(d_block, k.shape, v.shape)
        dk[:, columns] += dk_block
        dv[:, columns] += dv_block
        # the gradient of a block follows it around the ring
        adding = _Shift(d_block, group)
        if passing:
            block = passing.wait()
    assert adding is not None
    dk, dv = _unpacked(adding.wait(), k.shape, v.shape)
    # copies: results of an operation may not share memory
    return tuple(x.to(q.dtype, copy=True) for x in (dq, dk, dv))  # type: ignore[return-value]


@_ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, axis: str, size: int) -> tuple[Tensor, Tensor]:
    (batch, seq, heads, _), summed = q.shape, accumulator(q)
    return q.new_empty(batch, seq, heads, v.shape[-1]), q.new_empty(batch, heads, seq, dtype=summed)


_ring_attention_backward.register_fake(
    lambda d_out, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
)


register_gradient(
    _ring_attention, _ring_attention_backward, lambda inputs, output: (*inputs[:3], *output, *inputs[3:])
)


def _join(out: Tensor, lse: Tensor, of_block: Tensor, lse_of_block: Tensor) -> None:
    joint = torch.logaddexp(lse, lse_of_block)
    before, added = (
        (part - joint).exp().transpose(1, 2).unsqueeze(-1) for part in (lse, lse_of_block.to(lse.dtype))
    )
    out.mul_(before).add_(of_block * added)
    lse.copy_(joint)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.flatten(), v.flatten()])


def _unpacked(block: Tensor, of_keys: torch.Size, of_values: torch.Size) -> tuple[Tensor, Tensor]:
    k, v = block.split([of_keys.numel(), of_values.numel()])
    return k.view(of_keys), v.view(of_values)


def attend_to_block(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return output [B, S, H, V], and natural log-sum-exp [B, H, S] in `accumulator`'s dtype. No gradient.

    q [B, S, H, E], k [B, T, G, E], v [B, T, G, V]; ``causal`` needs S = T.
    """
    kernel, V = choose_kernel(q, k, v, causal), v.shape[-1]
    q, k, v = _prepared(kernel, q, k, v)
    mask_and_lse = (None, True) if kernel in ("cudnn", "efficient") else ()
    out, lse, *_ = FORWARD[kernel](q, k, v, *mask_and_lse, 0.0, causal, scale=scale)
    batch, heads, seq = q.shape[:3]
    # cuDNN's log-sum-exp has one more dimension, the efficient kernel's has padded queries
    lse = lse[:, :, :seq].reshape(batch, heads, seq)
    return out.transpose(1, 2)[..., :V], lse


def gradients_of_block(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v from this block; ``out`` and ``lse`` [B, H, S] are of all blocks."""
    # torch's backward kernels accept the log-sum-exp over all keys in place of their own block's
    kernel, (E, V), groups = choose_kernel(q, k, v, causal), (q.shape[-1], v.shape[-1]), k.shape[2]
    seq, keys = q.shape[1], k.shape[1]
    q, k, v = _prepared(kernel, q, k, v)
    out, d_out = (pad_heads(x.transpose(1, 2), v.shape[-1]) for x in (out, d_out))
    lse = lse.contiguous()
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # seeds of a dropout that is 0
    if kernel == "cpu":
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    elif kernel == "flash":
        gradients = aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, lse, None, None, seq, keys, 0.0, causal, unused, unused, scale=scale
        )
    elif kernel == "cudnn":
        gradients = aten._scaled_dot_product_cudnn_attention_backward(
            *(d_out, q, k, v, out, lse.unsqueeze(-1), unused, unused),
            *(None, None, None, seq, keys, 0.0, causal),
            scale=scale,
        )
    else:
        lse = F.pad(lse, (0, -seq % _LSE_ALIGNMENT), value=torch.inf)
        wanted = [True, True, True, False]
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            d_out, q, k, v, None, out, lse, unused, unused, 0.0, wanted, causal, scale=scale
        )[:3]
    dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
    return dq[..., :E], _of_groups(dk[..., :E], groups), _of_groups(dv[..., :V], groups)


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Kernel:
    """Return the fastest kernel for these inputs, in the order of `ops.attention.kernel_order`."""
    if q.device.type == "cpu":
        return "cpu"
    largest = max(q.shape[-1], v.shape[-1])
    if q.dtype not in HALF_DTYPES or largest > FLASH_MAX_HEAD_DIM:
        return "efficient"
    if largest > CUDNN_MAX_HEAD_DIM or torch.are_deterministic_algorithms_enabled():
        return "flash"
    cuda = torch.backends.cuda
    grouped = q.shape[2] != k.shape[2]
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    parameters = cuda.SDPAParams(*heads_first, None, 0.0, causal, grouped)  # type: ignore[arg-type,call-arg]
    return "cudnn" if cuda.can_use_cudnn_attention(parameters) else "flash"


def _prepared(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # zero padding changes neither scores nor the columns that are used
    if kernel in ("cpu", "efficient") and q.shape[2] != k.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if kernel == "cudnn":
        return q, k, v
    sizes = (q.shape[-1], v.shape[-1])
    of_heads, of_values = sizes if kernel == "efficient" else (max(sizes), max(sizes))
    return pad_heads(q, of_heads), pad_heads(k, of_heads), pad_heads(v, of_values)


def _of_groups(d_BTHE: Tensor, groups: int) -> Tensor:
    if d_BTHE.shape[2] == groups:
        return d_BTHE
    return d_BTHE.unflatten(2, (groups, -1)).to(accumulator(d_BTHE)).sum(dim=3)
