"""Rule of an update: what it computes, apart from which rank has which weights, gradients and moments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.config.schema import ConfigError, OptimConfig


class StepScalars(NamedTuple):
    """Scalars on the device that a step reads: other values need no other code."""

    lr: Tensor
    shrink: Tensor
    """Divides the gradient."""
    done: Tensor
    """Steps before this one."""
    ok: Tensor
    """bool: False leaves weights and moments as they are."""
    weight_decay: Tensor
    numbers: tuple[Tensor, ...]
    """Numbers of the rule."""


@dataclass(frozen=True)
class UpdateRule:
    """Line of `RULES`, or a user's own. Everything is fp32.

    Shards of ranks are flat and begin and end anywhere in a parameter, so a rule treats each element alike.
    """

    moments: tuple[str, ...]
    """Names of the tensors that it keeps of each parameter, zeros at first; checkpoints have them by name."""
    numbers: Callable[[OptimConfig], Sequence[float]]
    """Settings that the update reads as scalars on the device."""
    update: Callable[[Tensor, Tensor, Sequence[Tensor], StepScalars], Sequence[Tensor]]
    """Function of weights that have decayed, their clipped gradient, the moments and the scalars to the new
    weights and moments. It changes nothing in place and waits for no number of the device."""
    fused: Callable[..., None] | None = None
    """`apply` by one kernel, decay, scaling and skipping included; for steps that are not compiled."""

    def __post_init__(self) -> None:
        if len({*self.moments, "main", "counters"}) < len(self.moments) + 2:
            raise ConfigError(f"moments={self.moments} need a name each, and none of main and counters")

    @property
    def bytes_moved(self) -> int:
        """Bytes that a compiled update moves for each parameter.

        Main weights and moments are read and written, gradients read twice, bf16 weights written.
        """
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
        """Apply one step in place to lists of tensors, with a list of each moment. No device sync.

        Where a compiler reads it, ``fused`` is False.
        """
        if fused and self.fused:
            self.fused(mains, grads, moments, config=config, decays=decays, scalars=scalars)
            return
        for main, grad, *own in zip(mains, grads, *moments, strict=True):
            decayed = main * (1 - scalars.lr * scalars.weight_decay) if decays else main
            found = self.update(decayed, grad / scalars.shrink, own, scalars)
            for old, new in zip((main, *own), found, strict=True):
                old.copy_(torch.where(scalars.ok, new, old))
