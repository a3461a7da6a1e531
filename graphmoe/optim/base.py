"""Interface of optimizers, and their common part: counters, schedule, norm and clipping.

Optimizers differ in where weights, gradients and moments lie: ``graphmoe.optim.zero1`` keeps them in flat
buffers, ``graphmoe.optim.fsdp`` leaves them to torch's ``fully_shard``. What an update computes is its
`UpdateRule`, the same for both.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.config.schema import OptimConfig, TrainConfig
from graphmoe.ops.collectives import all_gather_into
from graphmoe.ops.gradients import Gradient
from graphmoe.optim import rule_of
from graphmoe.optim.lr_schedule import LrNumbers, learning_rate
from graphmoe.optim.rule import StepScalars
from graphmoe.runtime.capture.capture import TensorSlot
from graphmoe.runtime.compile.delayed_scales import DelayedScales
from graphmoe.runtime.compile.weight_forms import WeightForms
from graphmoe.runtime.ranks import Mesh
from graphmoe.segments import Executor

Function = Callable[..., Sequence[Tensor]]
COUNTERS = ("applied", "skipped", "skipped_in_row", "longest_skip")
"""Numbers of steps, fp32 scalars."""


class StepResult(NamedTuple):
    """Results of one optimizer step; fp32 scalars on the device."""

    grad_norm: Tensor
    lr: Tensor
    finite: Tensor
    """1.0 if the step was applied, 0.0 if it was skipped."""


class StepOptimizer(ABC):
    """Holder of main weights, gradients, moments and counters of a model, which applies steps.

    All ranks of the mesh call its methods alike.
    """

    weight_forms: WeightForms | None
    """Weights in 8 bits, for compiled units; None where weights have no addresses of their own."""
    gradient_of: Callable[[Tensor], Gradient] | None
    """Return the sum of a parameter's gradients, in its shape; None where autograd gets them."""
    model_is_whole: bool
    """True where each rank can read, after ``gather``, all that it has of the model."""
    rounds: bool
    """True where the model computes with weights that are rounded from the main ones."""

    def __init__(self, optim: OptimConfig, train: TrainConfig, mesh: Mesh, device: torch.device) -> None:
        self.config, self.train, self.mesh, self.rule = optim, train, mesh, rule_of(optim.name)
        self.applied, self.skipped, self.skipped_in_row, self.longest_skip = (
            torch.zeros((), device=device) for _ in COUNTERS
        )
        self.void = torch.zeros((), device=device)
        """0.0, or 1.0 while ``step`` must leave everything as it is; others set it, and take it back."""
        of_lr, of_rule = LrNumbers.of(optim, train.steps), self.rule.numbers(optim)
        numbers = [*of_lr, *of_rule, optim.weight_decay, train.clip_grad_norm]
        self._numbers = torch.tensor(numbers, device=device)
        """Settings that the update reads: other values need no other code."""

    def compile(self, compiler: Callable[[Function, Sequence[Tensor]], Function]) -> None:  # noqa: B027
        """Let ``compiler(function, arguments)`` compile the update, a function that changes its arguments.

        An optimizer that does not override it stays uncompiled.
        """

    @abstractmethod
    def executor(self, execute: Executor) -> Executor:
        """Return an executor that runs segments by ``execute`` once their weights are there."""

    @property
    def scales(self) -> DelayedScales | None:
        """Delayed scales of what products read; None where there are none."""
        return self.weight_forms.scales if self.weight_forms else None

    def start_gather(self) -> None:  # noqa: B027
        """Begin a step: start to gather weights of other ranks, where they are gathered ahead of use."""

    def gather(self) -> None:  # noqa: B027
        """Make the model's weights those of the last step. A collective."""

    def restore_weights(self) -> None:  # noqa: B027
        """Give the model its weights back where a forward without an update has used their memory."""

    @abstractmethod
    def step(self, loss: Tensor) -> StepResult:
        """Apply the gradients since the last step; where loss or norm is not finite, count a skip only.

        A square of the clipped norm that is not finite in fp32 counts as not finite, too. A collective. The
        loss must be that of all ranks. While ``void`` is 1.0 nothing is applied or counted.
        """

    @abstractmethod
    def model_state(self) -> dict[str, Tensor | FlatShard]:
        """Return the model's state by name as a checkpoint keeps it. A collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return main weights and moments by parameter name, the counters, and delayed scales by theirs.

        On several ranks, the parts that this rank owns. Tensors are not copied.
        """
        found = {moment: self._entries(moment) for moment in self.rule.moments}
        found["main"] = self._entries("main") if self.rounds else {}
        return {**found, "counters": self._counters(), "scales": self.scales.values() if self.scales else {}}

    @abstractmethod
    def _entries(self, kind: str) -> dict[str, Any]:
        """Return a moment, or the main weights, as a checkpoint keeps them by parameter name."""

    def restored(self, state: Mapping[str, Any]) -> None:
        """Take over ``state_dict``, of which what was loaded lies in its tensors, and ``model_state``."""
        self.longest_skip.zero_()  # a run that it stopped may go on, with other settings
        if self.scales:
            self.scales.load(state.get("scales", {}))

    def fixed_tensors(self) -> dict[str, TensorSlot]:
        """Return by name all tensors that a captured step uses without being given them."""
        raise AssertionError("a captured step needs fixed addresses")

    @abstractmethod
    def weights_to_fill(self) -> Mapping[str, Tensor | FlatShard]:
        """Return the fp32 weights by parameter name, for new values from a folder; then call ``adopt``."""

    def adopt(self, weights: Mapping[str, Any]) -> None:  # noqa: B027
        """Take the values of what ``weights_to_fill`` gave for the main weights."""

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
        # Above 1.8e19 the square, which a second moment takes up, is infinite in fp32, and would stay so.
        ok = torch.isfinite((norm / shrink).square()) & torch.isfinite(shrink)
        ok = ok & torch.isfinite(loss) & (void == 0.0)
        return StepScalars(lr, shrink, applied, ok, weight_decay, tuple(of_rule))

    def _over_ranks(self, own: Tensor) -> Tensor:
        """Combine the norms of all ranks; each element of a gradient is counted by one rank."""
        norms = own.new_empty(self.mesh.layout.size("world"))
        all_gather_into(norms, own.reshape(1), group=self.mesh.group("world"))
        return torch.linalg.vector_norm(norms).float()


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together; fp64 on a CPU."""
    # On a CPU an eager norm adds one element after the other: fp32 would lose three digits.
    exact = torch.float64 if gradients[0].device.type == "cpu" else None
    norms = [torch.linalg.vector_norm(gradient, dtype=exact) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def count_step(
    done: Tensor, void: Tensor, applied: Tensor, skipped: Tensor, skipped_in_row: Tensor, longest_skip: Tensor
) -> None:
    """Count a step in place that was applied (``done`` 1.0) or skipped (0.0); a void one (1.0) is neither."""
    counts = 1.0 - void
    applied += done
    skipped += counts - done
    skipped_in_row.add_(counts).mul_(1.0 - done)
    longest_skip.copy_(torch.maximum(longest_skip, skipped_in_row * counts))
