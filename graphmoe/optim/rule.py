"""Optimizer update rules, independent of sharding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

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
            raise ConfigError(f"moments={self.moments} need a name each, and none of main and counters")

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
