"""Optimizer update rules, independent of sharding: AdamW as ATen operations and as torch's fused kernel."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from graphmoe.config.schema import ConfigError, OptimConfig


class StepScalars(NamedTuple):
    """Device scalars that an update reads."""

    lr: Tensor
    shrink: Tensor
    done: Tensor
    ok: Tensor
    """bool: False leaves weights and moments unchanged."""
    weight_decay: Tensor
    numbers: tuple[Tensor, ...]


@dataclass(frozen=True)
class UpdateRule:
    """Elementwise update rule, of `RULES` or a plug-in: tensors are flat fp32 shards."""

    moments: tuple[str, ...]
    """Names of a parameter's moments, initially zero; used in checkpoints."""
    numbers: Callable[[OptimConfig], Sequence[float]]
    """Settings read as device scalars."""
    update: Callable[[Tensor, Tensor, Sequence[Tensor], StepScalars], Sequence[Tensor]]
    """Pure: decayed weights, clipped gradient, moments, scalars -> new weights and moments."""
    fused: Callable[..., None] | None = None
    """Fused kernel of `apply` for uncompiled steps."""

    def __post_init__(self) -> None:
        if len({*self.moments, "main", "counters"}) < len(self.moments) + 2:
            raise ConfigError(f"moments={self.moments} must be distinct names other than main and counters")

    @property
    def bytes_moved(self) -> int:
        """Bytes of memory that a compiled update reads and writes per parameter."""
        # master weights and moments are read and written, gradients read twice, bf16 weights written
        return 4 * (2 * (1 + len(self.moments)) + 2) + 2

    def apply(
        self,
        mains: list[Tensor],
        grads: list[Tensor],
        moments: Sequence[list[Tensor]],
        *,
        config: OptimConfig,
        decays: bool,
        scalars: StepScalars,
        fused: bool = True,
    ) -> None:
        """Update in place. No device sync. ``fused`` is False in compiled code."""
        if fused and self.fused:
            self.fused(mains, grads, moments, config=config, decays=decays, scalars=scalars)
            return
        for main, grad, *own in zip(mains, grads, *moments, strict=True):
            decayed = main * (1 - scalars.lr * scalars.weight_decay) if decays else main
            found = self.update(decayed, grad / scalars.shrink, own, scalars)
            for old, new in zip((main, *own), found, strict=True):
                old.copy_(torch.where(scalars.ok, new, old))


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


# arXiv 1711.05101, algorithm 2
ADAMW = UpdateRule(("exp_avg", "exp_avg_sq"), _numbers, _update, _fused)
