"""One step of AdamW over flat tensors: in ATen operations, which compile to one kernel, and by torch's own.

(Decoupled Weight Decay Regularization, arXiv 1711.05101, algorithm 2.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from graphmoe.config import OptimConfig


def adamw_(
    main: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor | None = None,
    *,
    config: OptimConfig,
    weight_decay: float,
    lr: Tensor,
    shrink: Tensor,
    done: Tensor,
    ok: Tensor,
) -> None:
    """One step of AdamW in place; clears ``grad``, and rounds ``main`` into ``weight`` where given.

    fp32 tensors of one shape; ``lr``, ``shrink`` (divides the gradient), ``done`` (steps before this
    one) and ``ok`` (bool: False leaves weights and moments as they are) are scalars on the device.
    """
    g = grad / shrink
    m = exp_avg + (g - exp_avg) * (1 - config.beta1)
    v = exp_avg_sq * config.beta2 + g * g * (1 - config.beta2)
    bias1, bias2 = (_bias_correction(beta, done + 1) for beta in (config.beta1, config.beta2))
    decayed = main * (1 - lr * weight_decay)
    moved = decayed - lr / bias1 * m / ((v / bias2).sqrt() + config.eps)
    for old, new in ((main, moved), (exp_avg, m), (exp_avg_sq, v)):
        old.copy_(torch.where(ok, new, old))
    grad.zero_()
    if weight is not None:
        weight.copy_(main)


def fused_adamw_(
    main: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor | None = None,
    *,
    config: OptimConfig,
    weight_decay: float,
    lr: Tensor,
    shrink: Tensor,
    done: Tensor,
    ok: Tensor,
) -> None:
    """The same by torch's fused kernel: without a compiler it moves the fewest bytes."""
    adamw(
        [main],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [done.clone()],
        fused=True,
        grad_scale=shrink,
        found_inf=(~ok).float(),
        amsgrad=False,
        beta1=config.beta1,
        beta2=config.beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=config.eps,
        maximize=False,
    )
    grad.zero_()
    if weight is not None:
        weight.copy_(main)


def _bias_correction(beta: float, step: Tensor) -> Tensor:
    """1 - beta^step, without cancellation."""
    return -torch.expm1(step * (math.log(beta) if beta > 0 else -math.inf))
