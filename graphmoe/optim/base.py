"""Optimizer interface; counters, schedule, norm and clipping shared by updates of any kind."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.checkpoint import CheckpointError
from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.config.schema import OptimConfig, TrainConfig
from graphmoe.ops.collectives import all_gather_into
from graphmoe.ops.gradients import Gradient
from graphmoe.ops.waits import waiting
from graphmoe.optim import rule_of
from graphmoe.optim.rule import LrNumbers, StepScalars, learning_rate
from graphmoe.runtime.capture import TensorSlot
from graphmoe.runtime.compile.weight_forms import DelayedScales, WeightForms
from graphmoe.runtime.ranks import Mesh
from graphmoe.segments import Executor

Function = Callable[..., Sequence[Tensor]]
COUNTERS = ("applied", "skipped", "skipped_in_row", "longest_skip")


class StepResult(NamedTuple):
    """Result of an optimizer step: fp32 scalars on the device."""

    grad_norm: Tensor
    lr: Tensor
    finite: Tensor
    """1.0 if the step was applied, 0.0 if skipped."""
    max_logit: Tensor | None = None
    """With ``optim.qk_clip``: bound of all attention logits of the step, before it was clipped."""


class StepOptimizer(ABC):
    """Owns master weights, gradients, moments and counters. All ranks call it in the same order."""

    weight_forms: WeightForms | None
    """Quantized weight copies; None if weights have no fixed addresses."""
    gradient_of: Callable[[Tensor], Gradient] | None
    """Maps a parameter to its gradient sum; None if autograd accumulates gradients."""
    model_is_whole: bool
    """True if this rank's part of the model is unsharded after ``gather``."""
    rounds: bool
    """True if model weights are rounded master weights."""

    def __init__(self, optim: OptimConfig, train: TrainConfig, mesh: Mesh, device: torch.device) -> None:
        self.config, self.train, self.mesh, self.rule = optim, train, mesh, rule_of(optim.name)
        self.applied, self.skipped, self.skipped_in_row, self.longest_skip = (
            torch.zeros((), device=device) for _ in COUNTERS
        )
        self.void = torch.zeros((), device=device)  # 1.0 makes ``step`` a no-op, else 0.0; set by the caller
        of_lr, of_rule = LrNumbers.of(optim, train.steps), self.rule.numbers(optim)
        of_matrices = self.rule.matrices.numbers(optim) if self.rule.matrices else ()
        self._num_own = len(of_rule)  # the numbers of matrices follow
        numbers = [*of_lr, *of_rule, *of_matrices, optim.weight_decay, train.clip_grad_norm]
        self._numbers = torch.tensor(numbers, device=device)  # a tensor: new values don't recompile

    def compile(self, compiler: Callable[[Function, Sequence[Tensor]], Function]) -> None:  # noqa: B027
        """Compile the in-place update by ``compiler(function, arguments)``; no-op by default."""

    @abstractmethod
    def executor(self, execute: Executor) -> Executor:
        """Return an executor that first waits for the segments' weights."""

    @property
    def scales(self) -> DelayedScales | None:
        return self.weight_forms.scales if self.weight_forms else None

    def start_gather(self) -> None:  # noqa: B027
        """Start to all-gather the weights that other ranks updated."""

    def gather(self) -> None:  # noqa: B027
        """All-gather the weights of the last update, and wait. A collective."""

    def restore_weights(self) -> None:  # noqa: B027
        """Restore weights whose memory a forward without update has overwritten."""

    def own_gradients(self) -> list[Tensor]:
        """Return this rank's gradients before sums over ranks, until the next step; empty if not kept."""
        return []

    @abstractmethod
    def step(self, loss: Tensor) -> StepResult:
        """Update the weights; skip if the norm, or ``loss`` on any rank, is not finite. A collective."""

    @abstractmethod
    def model_state(self) -> dict[str, Tensor | FlatShard]:
        """Return the model's state for a checkpoint. A collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's master weights and moments by parameter name, counters and scales.

        Tensors share the state's memory; moments in other formats than fp32 are encoded FlatShards.
        """
        found = {moment: self._entries(moment) for moment in self.rule.all_moments}
        found["main"] = self.main_state()
        return {**found, "counters": self._counters(), "scales": self.scales.values() if self.scales else {}}

    def main_state(self) -> dict[str, Any]:
        """Return this rank's master weights by parameter name, none if the model's weights are fp32."""
        return self._entries("main") if self.rounds else {}

    @abstractmethod
    def _entries(self, kind: str) -> dict[str, Any]:
        """Return a moment, or the master weights ("main"), by parameter name."""

    def restored(self, state: Mapping[str, Any]) -> None:
        """Update derived state after a load that filled ``state_dict`` and ``model_state`` in place.

        *Raises* CheckpointError for fp8 scales of another form.
        """
        self.longest_skip.zero_()  # a run stopped by skips may resume with other settings
        if self.scales:
            try:
                self.scales.load(state.get("scales", {}))
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the checkpoint's optimizer.scales are not those of fp8: {error}"
                ) from error

    def fixed_tensors(self) -> dict[str, TensorSlot]:
        """Return all tensors that a captured step reads or writes, except its arguments."""
        raise AssertionError("a captured step needs fixed addresses, which this optimizer lacks")

    @abstractmethod
    def weights_to_fill(self) -> Mapping[str, Tensor | FlatShard]:
        """Return fp32 weights by parameter name, to fill and pass to ``adopt``."""

    def adopt(self, weights: Mapping[str, Any]) -> None:  # noqa: B027
        """Copy filled weights to the master weights."""

    def _counters(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in COUNTERS}

    def _scalars(
        self, norm: Tensor, loss: Tensor, applied: Tensor, void: Tensor, numbers: Tensor
    ) -> StepScalars:
        *each, weight_decay, clip = numbers.unbind()
        of_lr, of_rule = LrNumbers(*each[: len(LrNumbers._fields)]), each[len(LrNumbers._fields) :]
        lr = learning_rate(self.config.schedule, of_lr, applied)
        clips = self.train.clip_grad_norm > 0
        shrink = ((norm + 1e-6) / clip).clamp_min(1.0) if clips else torch.ones_like(norm)
        # Above 1.8e19 the square overflows fp32, and the second moment would stay infinite.
        ok = torch.isfinite((norm / shrink).square()) & torch.isfinite(shrink)
        ok = ok & torch.isfinite(loss) & (void == 0.0)
        own, of_matrices = tuple(of_rule[: self._num_own]), tuple(of_rule[self._num_own :])
        return StepScalars(lr, shrink, applied, ok, weight_decay, own, of_matrices)

    def _over_ranks(self, own: Tensor) -> Tensor:
        # one rank counts each gradient element
        norms = own.new_empty(self.mesh.layout.size("world"))
        with waiting():
            all_gather_into(norms, own.reshape(1), group=self.mesh.group("world"))
        return torch.linalg.vector_norm(norms).float()


def norm_of(gradients: Sequence[Tensor], counted_by: Sequence[int] = ()) -> Tensor:
    """Return the joint norm of gradients, each counted by one or that number of ranks; fp64 on a CPU."""
    # An eager CPU norm sums elements one by one: fp32 would lose three digits.
    dtype = torch.float64 if gradients[0].device.type == "cpu" else torch.float32
    norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients]
    for i, count in enumerate(counted_by):
        norms[i] = norms[i] if count == 1 else norms[i] * count**-0.5
    return torch.linalg.vector_norm(torch.stack(norms))


def count_step(
    done: Tensor, void: Tensor, applied: Tensor, skipped: Tensor, skipped_in_row: Tensor, longest_skip: Tensor
) -> None:
    """Count a step in place: applied (``done`` 1.0), skipped (0.0), or to be rerun (``void`` 1.0)."""
    counts = 1.0 - void
    applied += done
    skipped += counts - done
    skipped_in_row.add_(counts).mul_(1.0 - done)
    longest_skip.copy_(torch.maximum(longest_skip, skipped_in_row * counts))
