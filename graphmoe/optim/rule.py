"""Update rules, independent of sharding, and learning-rate schedules.

AdamW as ATen operations and as torch's fused kernel; schedules as functions of a device step counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from graphmoe.config.choices import look_up
from graphmoe.config.schema import ConfigError, OptimConfig
from graphmoe.ops.gradients import PIECE_ELEMENTS


class StepScalars(NamedTuple):
    """Device scalars that an update reads."""

    lr: Tensor
    shrink: Tensor
    done: Tensor
    ok: Tensor
    """bool: False leaves weights and moments unchanged."""
    weight_decay: Tensor
    numbers: tuple[Tensor, ...]
    of_matrices: tuple[Tensor, ...] = ()
    """Numbers of the rule of whole matrices."""


@dataclass(frozen=True)
class UpdateRule:
    """Update rule, of `RULES` or a plug-in: elementwise, tensors are fp32 shards, flat or [N, 64]."""

    moments: tuple[str, ...]
    """Names of a parameter's moments, initially zero; used in checkpoints."""
    numbers: Callable[[OptimConfig], Sequence[float]]
    """Returns the settings that updates read as device scalars."""
    update: Callable[[Tensor, Tensor, Sequence[Tensor], StepScalars], Sequence[Tensor]]
    """Pure: decayed weights, clipped gradient, moments, scalars -> new weights and moments."""
    fused: Callable[..., None] | None = None
    """Fused kernel of `apply` for uncompiled steps."""
    matrices: UpdateRule | None = None
    """Rule of whole matrices, fp32 [N, rows, columns], each on one rank; None: all is updated by element."""
    flops: Callable[[int, int], int] | None = None
    """FLOPs of the update of a matrix of rows and columns, for projections."""
    squares: tuple[str, ...] = ()
    """Moments that are never negative and divide others: int8 keeps more of their range."""

    def __post_init__(self) -> None:
        if len({*self.all_moments, "main", "counters"}) < len(self.all_moments) + 2:
            raise ConfigError(
                f"moments={self.all_moments} must be distinct names other than main and counters"
            )

    @property
    def all_moments(self) -> tuple[str, ...]:
        return (*self.moments, *(self.matrices.moments if self.matrices else ()))

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
            given: Iterable[Any] = [(mains, grads, moments)]
            if grads[0].dtype != torch.float32:
                given = _pieces(mains, grads, moments)
            for piece in given:
                self.fused(*piece, config=config, decays=decays, scalars=scalars)
            return
        for main, grad, *own in zip(mains, grads, *moments, strict=True):
            decayed = main * (1 - scalars.lr * scalars.weight_decay) if decays else main
            found = self.update(decayed, grad.float() / scalars.shrink, own, scalars)
            for old, new in zip((main, *own), found, strict=True):
                old.copy_(torch.where(scalars.ok, new, old))


def _pieces(
    mains: Sequence[Tensor], grads: Sequence[Tensor], moments: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[list[Tensor], list[Tensor], list[list[Tensor]]]]:
    # fp32 copies of bf16 gradients, which bounds their memory
    for tensors in zip(mains, grads, *moments, strict=True):
        for main, grad, *own in zip(*(tensor.split(PIECE_ELEMENTS) for tensor in tensors), strict=True):
            yield [main], [grad.float()], [[moment] for moment in own]


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
ADAMW = UpdateRule(("exp_avg", "exp_avg_sq"), _numbers, _update, _fused, squares=("exp_avg_sq",))


# map decay progress, 0 to 1, to a position between floor (0) and peak (1)
DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "cosine": lambda progress: 0.5 * (1 + torch.cos(math.pi * progress)),
    "wsd": lambda progress: 1 - progress.sqrt(),
}


class LrNumbers(NamedTuple):
    """Numbers of a schedule, as floats or fp32 device scalars."""

    peak: Any
    floor: Any
    """Final over peak learning rate."""
    warmup: Any
    start: Any
    span: Any

    @classmethod
    def of(cls, config: OptimConfig, total_steps: int) -> LrNumbers:
        decay = config.decay_steps(total_steps)
        return cls(
            config.lr, config.min_lr_ratio, float(config.warmup_steps), float(decay.start), float(len(decay))
        )


def learning_rate(schedule: str, numbers: LrNumbers, done: Tensor) -> Tensor:
    """Return the learning rate after ``done`` applied steps; fp32 scalar, no device sync.

    Linear warm-up, then constant; cosine (arXiv 1608.03983); wsd: constant, then 1 - sqrt decay over the last
    steps (arXiv 2405.18392, section 4); or a plug-in. Decays end at floor * peak.
    """
    step = done.float() + 1
    factor = torch.ones_like(step)
    if schedule != "constant":
        decay = look_up(DECAYS, schedule, "optim.schedule")
        progress = ((step - numbers.start) / numbers.span).clamp(0, 1)
        factor = numbers.floor + (1 - numbers.floor) * decay(progress)
    rising = step / numbers.warmup.clamp_min(1.0)
    return numbers.peak * torch.where(step < numbers.warmup, rising, factor)
