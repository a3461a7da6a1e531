"""AdamW (arXiv 1711.05101, algorithm 2): as ATen operations to compile, and as torch's fused kernel."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from graphmoe.config.schema import OptimConfig
from graphmoe.optim.rule import StepScalars, UpdateRule


def _numbers(config: OptimConfig) -> tuple[float, ...]:
    log1, log2 = (math.log(b) if b > 0 else -math.inf for b in (config.beta1, config.beta2))
    return 1 - config.beta1, log1, config.beta2, 1 - config.beta2, log2, config.eps


def _update(
    decayed: Tensor, g: Tensor, moments: Sequence[Tensor], scalars: StepScalars
) -> tuple[Tensor, Tensor, Tensor]:
    exp_avg, exp_avg_sq = moments
    new_average, log_beta1, kept_square, new_square, log_beta2, eps = scalars.numbers
    m = exp_avg + (g - exp_avg) * new_average
    v = exp_avg_sq * kept_square + g * g * new_square
    bias1, bias2 = (-torch.expm1((scalars.done + 1) * log) for log in (log_beta1, log_beta2))
    return decayed - scalars.lr / bias1 * m / ((v / bias2).sqrt() + eps), m, v


def _fused(
    mains: list[Tensor],
    grads: list[Tensor],
    moments: Sequence[list[Tensor]],
    *,
    config: OptimConfig,
    decays: bool,
    scalars: StepScalars,
) -> None:
    exp_avgs, exp_avg_sqs = moments
    adamw(
        mains,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [*scalars.done.expand(len(mains)).clone().unbind()],  # torch increments each of them
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


ADAMW = UpdateRule(("exp_avg", "exp_avg_sq"), _numbers, _update, _fused)
