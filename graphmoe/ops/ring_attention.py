"""Causal attention over sequences that ranks share: keys and values go round (arXiv 2310.01889).

A sequence of the n ranks of an axis is 2n equal chunks, and rank i has chunks i and 2n - 1 - i, one behind
the other ("zigzag"), so that each rank has as many keys to attend to at each step. At step s a rank has the
keys of the rank s places before it:

- its own, s = 0: causal, for its two chunks stand in order;
- of a rank with a lower number: all its queries see that rank's first chunk, and none the second;
- of a rank with a higher number: its second chunk sees both, and its first none.

Outputs of blocks are joined by the log-sum-exp of their scores. In the backward the gradient of a block of
keys and values travels behind it, each rank adds its part, and it ends where the block began. Shapes as in
``graphmoe.ops.attention``; S positions of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.ops.block_attention import accumulated, attend_to_block, gradients_of_block
from graphmoe.ops.collectives import group_of
from graphmoe.plan.layout import Axis


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, axis: Axis, size: int) -> Tensor:
    """softmax(scale * q k^T, causal) v of this rank's queries over whole sequences -> [B, S, H, V].

    q [B, S, H, E], k [B, S, G, E], v [B, S, G, V] are of this rank's two chunks, so S is even. Sums are kept
    in fp32. A collective; with NCCL the host waits for nothing.
    """
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[1] % 2 == 0, (q.shape, k.shape, v.shape)
    out, _ = torch.ops.graphmoe.ring_attention(q, k, v, scale, axis, size)
    return out


class _Shift:
    """A tensor on its way to the next rank of a ring, and that of the rank before on its way here.

    One collective of all ranks instead of a send and a receive: so there is no order that could block, on
    any backend. What is for others than the next rank is empty.
    """

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        size, index = group.size(), dist.get_rank(group)
        self._sent, self._received = sent, torch.empty_like(sent)  # kept until both have arrived
        to, of = ([0] * size for _ in range(2))
        to[(index + 1) % size], of[(index - 1) % size] = sent.numel(), sent.numel()
        self._work = dist.all_to_all_single(self._received, sent, of, to, group=group, async_op=True)

    def wait(self) -> Tensor:
        """What came from the rank before; on a GPU its stream waits, and not the host."""
        self._work.wait()
        return self._received


class _Part(NamedTuple):
    """The queries and keys of a step that meet."""

    queries: slice
    keys: slice
    causal: bool


def _part(step: int, index: int, seq: int) -> _Part:
    """What rank ``index`` computes at a step, with ``seq`` positions on each rank."""
    everything = slice(0, seq)
    if step == 0:
        return _Part(everything, everything, True)
    if step <= index:  # the keys are of rank index - step
        return _Part(everything, slice(0, seq // 2), False)
    return _Part(slice(seq // 2, seq), everything, False)


@torch.library.custom_op("graphmoe::ring_attention", mutates_args=())
def _ring_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, axis: str, size: int
) -> tuple[Tensor, Tensor]:
    group = group_of(axis, size)  # type: ignore[arg-type]
    (batch, seq, heads, _), kept = q.shape, accumulated(q.dtype)
    out = q.new_empty(batch, seq, heads, v.shape[-1], dtype=kept)
    lse = q.new_empty(batch, heads, seq, dtype=kept)
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
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    axis: str,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    group, (_, seq, _, _), kept = group_of(axis, size), q.shape, accumulated(q.dtype)  # type: ignore[arg-type]
    dq = torch.zeros(q.shape, dtype=kept, device=q.device)
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
        d_block = torch.zeros_like(block, dtype=kept) if adding is None else adding.wait()
        dk, dv = _unpacked(d_block, k.shape, v.shape)
        dk[:, columns] += dk_block
        dv[:, columns] += dv_block
        adding = _Shift(d_block, group)
        if passing:
            block = passing.wait()
    assert adding is not None
    dk, dv = _unpacked(adding.wait(), k.shape, v.shape)
    # copies, since no result of an operation may share memory with another
    return tuple(x.to(q.dtype, copy=True) for x in (dq, dk, dv))  # type: ignore[return-value]


@_ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, axis: str, size: int) -> tuple[Tensor, Tensor]:
    (batch, seq, heads, _), kept = q.shape, accumulated(q.dtype)
    return q.new_empty(batch, seq, heads, v.shape[-1]), q.new_empty(batch, heads, seq, dtype=kept)


@_ring_attention_backward.register_fake
def _(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    axis: str,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, axis, size = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)
    ctx.arguments = scale, axis, size


def _of_ring_attention(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.graphmoe.ring_attention_backward(d_out, *ctx.saved_tensors, *ctx.arguments)
    return *gradients, None, None, None


_ring_attention.register_autograd(_of_ring_attention, setup_context=_keep_for_backward)


def _join(out: Tensor, lse: Tensor, of_block: Tensor, lse_of_block: Tensor) -> None:
    """Add attention to another block to that of the blocks before, in place."""
    joint = torch.logaddexp(lse, lse_of_block)
    before, added = (
        (part - joint).exp().transpose(1, 2).unsqueeze(-1) for part in (lse, lse_of_block.to(lse.dtype))
    )
    out.mul_(before).add_(of_block * added)
    lse.copy_(joint)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """Both as one flat tensor, so that they travel together."""
    return torch.cat([k.flatten(), v.flatten()])


def _unpacked(block: Tensor, of_keys: torch.Size, of_values: torch.Size) -> tuple[Tensor, Tensor]:
    """Views of a packed block."""
    k, v = block.split([of_keys.numel(), of_values.numel()])
    return k.view(of_keys), v.view(of_values)
