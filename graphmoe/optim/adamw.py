"""AdamW over flat tensors: in ATen operations, which compile to one kernel, and by torch's fused kernel.

(Decoupled Weight Decay Regularization, arXiv 1711.05101, algorithm 2.)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from graphmoe.config.schema import OptimConfig


class AdamWNumbers(NamedTuple):
    """Settings of AdamW as floats, or as fp32 scalars on the device: other values need no other code."""

    new_average: Any
    """1 - beta1."""
    log_beta1: Any
    kept_square: Any
    """beta2."""
    new_square: Any
    """1 - beta2."""
    log_beta2: Any
    eps: Any
    weight_decay: Any

    @classmethod
    def of(cls, config: OptimConfig) -> AdamWNumbers:
        """Return the numbers of a configuration, as floats."""
        log1, log2 = (math.log(b) if b > 0 else -math.inf for b in (config.beta1, config.beta2))
        square = config.beta2, 1 - config.beta2
        return cls(1 - config.beta1, log1, *square, log2, config.eps, config.weight_decay)


class StepScalars(NamedTuple):
    """Scalars on the device that a step reads."""

    lr: Tensor
    shrink: Tensor
    """Divides the gradient."""
    done: Tensor
    """Steps before this one."""
    ok: Tensor
    """bool: False leaves weights and moments as they are."""
    numbers: AdamWNumbers


def adamw_(
    main: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor | None = None,
    *,
    decays: bool,
    scalars: StepScalars,
) -> None:
    """Apply one step of AdamW in place to fp32 tensors of one shape; round ``main`` into ``weight`` if given.

    Every number comes from ``scalars``.
    """
    lr, shrink, done, ok, numbers = scalars
    g = grad / shrink
    m = exp_avg + (g - exp_avg) * numbers.new_average
    v = exp_avg_sq * numbers.kept_square + g * g * numbers.new_square
    bias1, bias2 = (_bias_correction(log, done + 1) for log in (numbers.log_beta1, numbers.log_beta2))
    decayed = main * (1 - lr * numbers.weight_decay) if decays else main
    moved = decayed - lr / bias1 * m / ((v / bias2).sqrt() + numbers.eps)
    for old, new in ((main, moved), (exp_avg, m), (exp_avg_sq, v)):
        old.copy_(torch.where(ok, new, old))
    if weight is not None:
        weight.copy_(main)


def fused_adamw_(
    mains: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    config: OptimConfig,
    decays: bool,
    scalars: StepScalars,
) -> None:
    """Apply the same step to lists of tensors by torch's fused kernel, which scales the gradients."""
    adamw(
        mains,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [*scalars.done.expand(len(mains)).clone().unbind()],  # torch counts each of them up
        fused=True,
        grad_scale=scalars.shrink,
        found_inf=(~scalars.ok).float(),
        amsgrad=False,
        beta1=config.beta1,
        beta2=config.beta2,
        lr=scalars.lr,
        weight_decay=config.weight_decay if decays else 0.0,
        eps=config.eps,
        maximize=False,
    )


def _bias_correction(log_beta: Tensor, step: Tensor) -> Tensor:
    """Return 1 - beta^step, without cancellation."""
    return -torch.expm1(step * log_beta)
