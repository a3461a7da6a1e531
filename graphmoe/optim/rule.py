"""Rule of an update, independent of how weights, gradients and moments are sharded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.config.schema import ConfigError, OptimConfig


class StepScalars(NamedTuple):
    """Device scalars that a step reads."""

    lr: Tensor
    shrink: Tensor
    done: Tensor
    ok: Tensor
    """bool: False leaves weights and moments unchanged."""
    weight_decay: Tensor
    numbers: tuple[Tensor, ...]


@dataclass(frozen=True)
class UpdateRule:
    """A rule of `RULES`, or a plug-in; elementwise, since tensors are flat fp32 shards of parameters."""

    moments: tuple[str, ...]
    """Names of a parameter's moments, zero at first; checkpoints use them."""
    numbers: Callable[[OptimConfig], Sequence[float]]
    """Settings that the update reads as device scalars."""
    update: Callable[[Tensor, Tensor, Sequence[Tensor], StepScalars], Sequence[Tensor]]
    """Pure function of decayed weights, clipped gradient, moments and scalars to new weights and moments."""
    fused: Callable[..., None] | None = None
    """`apply` as one kernel, for uncompiled steps."""

    def __post_init__(self) -> None:
        if len({*self.moments, "main", "counters"}) < len(self.moments) + 2:
            raise ConfigError(f"moments={self.moments} need a name each, and none of main and counters")

    @property
    def bytes_moved(self) -> int:
        """Bytes that a compiled update moves for each parameter."""
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
        """Apply one step in place. No device sync. ``fused`` is False in compiled code."""
        if fused and self.fused:
            self.fused(mains, grads, moments, config=config, decays=decays, scalars=scalars)
            return
        for main, grad, *own in zip(mains, grads, *moments, strict=True):
            decayed = main * (1 - scalars.lr * scalars.weight_decay) if decays else main
            found = self.update(decayed, grad / scalars.shrink, own, scalars)
            for old, new in zip((main, *own), found, strict=True):
                old.copy_(torch.where(scalars.ok, new, old))
