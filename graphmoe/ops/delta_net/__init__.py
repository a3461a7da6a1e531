"""The gated delta rule: attention whose state is a matrix that decays and is corrected at each position.

Suffixes: B batch, S sequence, H key heads, V value heads, a multiple of H, K size of a key head, W of a value
head. Value heads V / H * h and following read key head h.

The forward saves only its inputs. The backward recomputes the state between each two chunks and the
corrections of the state: saved, they would be three times the bytes of v in each layer, and less traffic only
in the backward, as the forward never writes them.
"""

import torch
from torch import Tensor

from graphmoe.ops import has_kernel, register_gradient
from graphmoe.ops.delta_net import reference
from graphmoe.plan.attention import LINEAR_HEADS


@torch.library.custom_op("graphmoe::delta_net", mutates_args=())
def delta_net(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSVW: Tensor, g_BSV: Tensor, beta_BSV: Tensor, first_BS: Tensor | None
) -> Tensor:
    """Return K^-0.5 S^T q of each position, [B, S, V, W] in the dtype of v. No device sync.

    At each position S <- e^g S, then S <- S + k (beta (v - S^T k))^T; S is zero, fp32, before the first of a
    document. ``first_BS``, int32: the first position of each position's document; None: 0. q and k have unit
    norm (`graphmoe.ops.short_conv.unit_norm`), or S may grow; g is not positive. Gated Delta Networks, arXiv
    2412.06464, equation 10.
    """
    H, V = k_BSHK.shape[2], v_BSVW.shape[2]
    assert q_BSHK.shape == k_BSHK.shape and V % H == 0, (q_BSHK.shape, k_BSHK.shape, v_BSVW.shape)
    assert q_BSHK.dtype == k_BSHK.dtype == v_BSVW.dtype, (q_BSHK.dtype, k_BSHK.dtype, v_BSVW.dtype)
    given = q_BSHK, k_BSHK, v_BSVW, g_BSV, beta_BSV, first_BS
    if not has_kernel(v_BSVW):
        return reference.forward(*given)
    from graphmoe.ops.delta_net import launches

    assert {k_BSHK.shape[3], v_BSVW.shape[3]} <= {*LINEAR_HEADS}, (k_BSHK.shape, v_BSVW.shape)
    return launches.forward(*given)


@torch.library.custom_op("graphmoe::delta_net_backward", mutates_args=())
def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if not has_kernel(v):
        return reference.backward(d_out, q, k, v, g, beta, first)
    from graphmoe.ops.delta_net import launches

    return launches.backward(d_out, q, k, v, g, beta, first)


delta_net.register_fake(lambda q, k, v, g, beta, first: v.new_empty(v.shape))
_backward.register_fake(lambda d_out, *given: tuple(x.new_empty(x.shape) for x in given[:5]))
register_gradient(delta_net, _backward)
