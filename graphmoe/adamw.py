"""One step of AdamW over flat tensors: in ATen operations, which compile to one kernel, and by torch's own.

(Decoupled Weight Decay Regularization, arXiv 1711.05101, algorithm 2.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from graphmoe.config import OptimConfig


class StepScalars(NamedTuple):
    """What a step reads on the device."""

    lr: Tensor
    shrink: Tensor
    """Divides the gradient."""
    done: Tensor
    """Steps before this one."""
    ok: Tensor
    """bool: False leaves weights and moments as they are."""


def adamw_(
    main: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor | None = None,
    *,
    config: OptimConfig,
    weight_decay: float,
    scalars: StepScalars,
) -> None:
    """One step of AdamW in place over fp32 tensors of one shape; rounds ``main`` into ``weight`` if given."""
    lr, shrink, done, ok = scalars
    g = grad / shrink
    m = exp_avg + (g - exp_avg) * (1 - config.beta1)
    v = exp_avg_sq * config.beta2 + g * g * (1 - config.beta2)
    bias1, bias2 = (_bias_correction(beta, done + 1) for beta in (config.beta1, config.beta2))
    decayed = main * (1 - lr * weight_decay)
    moved = decayed - lr / bias1 * m / ((v / bias2).sqrt() + config.eps)
    for old, new in ((main, moved), (exp_avg, m), (exp_avg_sq, v)):
        old.copy_(torch.where(ok, new, old))
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
    scalars: StepScalars,
) -> None:
    """The same by torch's fused kernel, which without a compiler moves the fewest bytes; scales ``grad``."""
    adamw(
        [main],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [scalars.done.clone()],
        fused=True,
        grad_scale=scalars.shrink,
        found_inf=(~scalars.ok).float(),
        amsgrad=False,
        beta1=config.beta1,
        beta2=config.beta2,
        lr=scalars.lr,
        weight_decay=weight_decay,
        eps=config.eps,
        maximize=False,
    )
    if weight is not None:
        weight.copy_(main)


def _bias_correction(beta: float, step: Tensor) -> Tensor:
    """1 - beta^step, without cancellation."""
    return -torch.expm1(step * (math.log(beta) if beta > 0 else -math.inf))
