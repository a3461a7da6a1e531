"""The recurrence of `delta_net` position by position, and its gradients: for CPUs and fp64."""

import torch
from torch import Tensor

from graphmoe.ops import accumulator


def forward(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSVW: Tensor, g_BSV: Tensor, beta_BSV: Tensor, first_BS: Tensor | None
) -> Tensor:
    out = v_BSVW.new_empty(v_BSVW.shape)
    q, k, v, g, beta = _by_position(q_BSHK, k_BSHK, v_BSVW, g_BSV, beta_BSV)
    for position, state_BVKW in enumerate(_states(k, v, g, beta, first_BS)[0]):
        out[:, position] = torch.einsum("bvkw,bvk->bvw", state_BVKW, q[position])
    return out


def backward(
    d_out: Tensor, q_BSHK: Tensor, k_BSHK: Tensor, v_BSVW: Tensor, g_BSV: Tensor, beta_BSV: Tensor,
    first_BS: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of q, k, v, g and beta."""
    q, k, v, g, beta = _by_position(q_BSHK, k_BSHK, v_BSVW, g_BSV, beta_BSV)
    states, errors, decays = _states(k, v, g, beta, first_BS)
    dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g, beta))
    d_state = torch.zeros_like(states[0])
    for i in reversed(range(len(q))):
        d_out_BVW, error, decay = d_out[:, i].to(q.dtype), errors[i], decays[i][..., None, None]
        before = states[i - 1] if i else torch.zeros_like(d_state)
        d_state = d_state + _outer(q[i], d_out_BVW)
        dq[i] = torch.einsum("bvkw,bvw->bvk", states[i], d_out_BVW)
        d_step = torch.einsum("bvkw,bvk->bvw", d_state, k[i])
        dbeta[i] = (d_step * error).sum(-1)
        dv[i] = beta[i][..., None] * d_step
        dk[i] = torch.einsum("bvkw,bvw->bvk", d_state, beta[i][..., None] * error)
        dk[i] -= torch.einsum("bvkw,bvw->bvk", decay * before, dv[i])
        d_state = d_state - _outer(k[i], dv[i])
        dg[i] = (d_state * before).sum((-2, -1)) * decays[i]
        d_state = decay * d_state
    dq *= q_BSHK.shape[-1] ** -0.5
    dq, dk = (x.unflatten(2, (q_BSHK.shape[2], -1)).sum(3) for x in (dq, dk))
    given = zip((dq, dk, dv, dg, dbeta), (q_BSHK, k_BSHK, v_BSVW, g_BSV, beta_BSV), strict=True)
    dq, dk, dv, dg, dbeta = (x.transpose(0, 1).contiguous().to(like.dtype) for x, like in given)
    return dq, dk, dv, dg, dbeta


def _states(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first_BS: Tensor | None
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    # of each position: the state behind it, how far the value is from what the state has for the key, decay
    states, errors, decays = [], [], []
    state = k.new_zeros(*k.shape[1:], v.shape[-1])
    for i in range(len(k)):
        decay_BV = g[i].exp() if i else torch.zeros_like(g[i])
        if first_BS is not None:
            decay_BV = decay_BV.where(first_BS[:, i, None] < i, 0.0)
        kept = decay_BV[..., None, None] * state
        errors.append(v[i] - torch.einsum("bvkw,bvk->bvw", kept, k[i]))
        state = kept + _outer(k[i], beta[i][..., None] * errors[-1])
        states.append(state)
        decays.append(decay_BV)
    return states, errors, decays


def _by_position(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    # [S, B, V, ...] in the accumulator's dtype: q scaled, a key head for each value head
    dtype, copies = accumulator(v), v.shape[2] // k.shape[2]
    q, k = (x.to(dtype).repeat_interleave(copies, dim=2) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    q, k, v, g, beta = (x.to(dtype).transpose(0, 1) for x in (q, k, v, g, beta))
    return q, k, v, g, beta


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x[..., :, None] * y[..., None, :]
