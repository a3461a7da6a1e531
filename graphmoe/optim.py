"""AdamW over fp32 main weights, with clipping, skipping and the schedule on the device.

Weights, gradients and moments lie in flat buffers at fixed addresses. Compiled, the update reads the
gradients for their norm and then walks all buffers once; otherwise torch's fused AdamW walks them.
Nothing here waits for the device: a step that is not finite leaves what was there, and counters live on
the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphmoe.adamw import AdamWNumbers, StepScalars, adamw_, fused_adamw_
from graphmoe.config import OptimConfig, TrainConfig
from graphmoe.gradients import Gradient
from graphmoe.schedule import LrNumbers, learning_rate

ALIGNMENT = 64
"""Elements; every parameter starts at a multiple, 128 bytes in bf16, and zeros fill the gaps."""

Function = Callable[..., Sequence[Tensor]]


class StepResult(NamedTuple):
    """What one optimizer step says about itself; fp32 scalars on the device."""

    grad_norm: Tensor
    lr: Tensor
    finite: Tensor
    """1.0 if the step was applied, 0.0 if it was skipped."""


class Optimizer:
    """Holds main weights, gradients, moments and counters of a model, and applies steps.

    The model's parameters become views of one buffer of their dtype: bf16, rounded from the fp32 main
    weights, or those main weights themselves.
    """

    def __init__(self, model: nn.Module, optim: OptimConfig, train: TrainConfig) -> None:
        self.config, self.train = optim, train
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = list(model.parameters())
        dtype, device = self.weights[0].dtype, self.weights[0].device
        assert all(w.dtype == dtype and w.requires_grad for w in self.weights)
        self._place_parameters()
        self._flat_weight = torch.zeros(self._size, dtype=dtype, device=device)
        self._adopt_weights()
        in_fp32 = dtype == torch.float32
        self._flat_main = self._flat_weight if in_fp32 else self._flat_weight.float()
        self.flat_grad, self._exp_avg, self._exp_avg_sq = (
            torch.zeros(self._size, device=device) for _ in range(3)
        )
        self.main = self._views(self._flat_main)
        self._gradients = {
            id(weight): Gradient(total)
            for weight, total in zip(self.weights, self._views(self.flat_grad), strict=True)
        }
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(self._collect)
        self.applied, self.skipped, self.skipped_in_row, self.longest_skip = (
            torch.zeros((), device=device) for _ in range(4)
        )
        numbers = [*LrNumbers.of(optim, train.steps), *AdamWNumbers.of(optim), train.clip_grad_norm]
        self._numbers = torch.tensor(numbers, device=device)
        """What the update reads of the configuration: other values need no other code."""
        self._update: Function = self._update_in_place

    def compile(self, compiler: Callable[[Function, Sequence[Tensor]], Function]) -> None:
        """Let ``compiler(function, arguments)`` compile the update, a function that changes its arguments."""
        update = functools.partial(self._update_in_place, rule=adamw_)
        self._update = compiler(update, self._arguments(self.applied))

    @torch.no_grad()
    def step(self, loss: Tensor, reduce: Callable[[Tensor], object] | None = None) -> StepResult:
        """Apply the gradients since the last step; a no-op where loss or norm is not finite.

        ``reduce`` may change the flat gradient before, to its sum over all ranks.
        """
        for gradient in self._gradients.values():
            gradient.finish()
        if reduce is not None:
            reduce(self.flat_grad)
        return StepResult(*self._update(*self._arguments(loss.detach().float())))

    def state_dict(self) -> dict[str, Any]:
        """Main weights and moments by parameter name, and the counters; tensors are not copied."""
        rounded = self._flat_main is not self._flat_weight
        return {
            "exp_avg": self._by_name(self._exp_avg),
            "exp_avg_sq": self._by_name(self._exp_avg_sq),
            "main": self._by_name(self._flat_main) if rounded else {},
            "counters": {
                "applied": self.applied,
                "skipped": self.skipped,
                "skipped_in_row": self.skipped_in_row,
                "longest_skip": self.longest_skip,
            },
        }

    def restored(self) -> None:
        """Take over what was loaded in place into the tensors of ``state_dict``."""
        self.longest_skip.zero_()  # a run that it stopped may go on, with other settings
        self.publish()

    def gradient_of(self, weight: Tensor) -> Gradient:
        """Where the gradients of a step's micro-batches are summed, in the weight's shape."""
        return self._gradients[id(weight)]

    def main_weights(self) -> dict[str, Tensor]:
        """The fp32 weights by parameter name; after a change of their values call ``publish``."""
        return self._by_name(self._flat_main)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the main weights into the model's weights."""
        if self._flat_main is not self._flat_weight:
            self._flat_weight.copy_(self._flat_main)

    def _place_parameters(self) -> None:
        """Give each parameter its place in the flat buffers: those that decay, then the others."""
        self._starts, end = [0] * len(self.weights), 0
        for decays in (True, False):
            for i, weight in enumerate(self.weights):
                if _decays(weight) is decays:
                    self._starts[i] = end
                    end += -(-weight.numel() // ALIGNMENT) * ALIGNMENT
            if decays:
                self._decayed = end
        self._size = end

    def _views(self, flat: Tensor) -> list[Tensor]:
        """A view of a flat buffer for each parameter."""
        places = zip(self._starts, self.weights, strict=True)
        return [flat[start : start + w.numel()].view(w.shape) for start, w in places]

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, self._views(flat), strict=True))

    @torch.no_grad()
    def _adopt_weights(self) -> None:
        """Move the parameters into their flat buffer."""
        for weight, view in zip(self.weights, self._views(self._flat_weight), strict=True):
            view.copy_(weight)
            weight.data = view

    def _collect(self, weight: Tensor) -> None:
        """Take a gradient from autograd as soon as it has made it."""
        if weight.grad is not None:  # None: whoever computed it has added it already
            self.gradient_of(weight).add(weight.grad)
            weight.grad = None

    def _arguments(self, loss: Tensor) -> list[Tensor]:
        """Loss, counters, numbers, and the regions of the flat buffers: those that decay, then the others."""
        flats = [self._flat_main, self.flat_grad, self._exp_avg, self._exp_avg_sq]
        if self._flat_weight is not self._flat_main:
            flats.append(self._flat_weight)
        regions = [flat[part] for part in self._parts() for flat in flats]
        counters = [self.applied, self.skipped, self.skipped_in_row, self.longest_skip]
        return [loss, *counters, self._numbers, *regions]

    def _parts(self) -> list[slice]:
        """Bounds of the regions that hold any parameter."""
        parts = (slice(0, self._decayed), slice(self._decayed, self._size))
        return [part for part in parts if part.stop > part.start]

    def _update_in_place(
        self,
        loss: Tensor,
        applied: Tensor,
        skipped: Tensor,
        skipped_in_row: Tensor,
        longest_skip: Tensor,
        numbers: Tensor,
        *flats: Tensor,
        rule: Callable[..., None] = fused_adamw_,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The update of ``_arguments`` in place -> the values of a StepResult."""
        width = len(flats) // len(self._parts())
        regions = [flats[i : i + width] for i in range(0, len(flats), width)]
        # On a CPU an eager norm adds one element after the other: fp32 would lose three digits.
        exact = torch.float64 if loss.device.type == "cpu" else None
        norms = [torch.linalg.vector_norm(grad, dtype=exact) for _, grad, *_ in regions]
        norm = torch.linalg.vector_norm(torch.stack(norms)).float()
        ok = torch.isfinite(norm) & torch.isfinite(loss)
        *each, clip = numbers.unbind()
        of_lr, of_adamw = LrNumbers(*each[: len(LrNumbers._fields)]), each[len(LrNumbers._fields) :]
        finite, lr = ok.float(), learning_rate(self.config.schedule, of_lr, applied)
        clips = self.train.clip_grad_norm > 0
        shrink = ((norm + 1e-6) / clip).clamp_min(1.0) if clips else torch.ones_like(norm)
        scalars = StepScalars(lr, shrink, applied, ok, AdamWNumbers(*of_adamw))
        for part, region in zip(self._parts(), regions, strict=True):
            rule(*region, config=self.config, decays=part.start < self._decayed, scalars=scalars)
        applied += finite
        skipped += 1.0 - finite
        skipped_in_row.add_(1.0).mul_(1.0 - finite)
        longest_skip.copy_(torch.maximum(longest_skip, skipped_in_row))
        return norm, lr, finite


def _decays(weight: Tensor) -> bool:
    """Matrices and experts decay, norms and biases do not."""
    return weight.dim() > 1


@torch.no_grad()
def update_selection_bias(bias_E: Tensor, counts_E: Tensor, rate: float, finite: Tensor) -> None:
    """Move the bias of under-loaded experts up and of over-loaded ones down, in place.

    Auxiliary-loss-free balancing (arXiv 2408.15664, algorithm 1); a no-op where ``finite`` is 0.0.
    """
    load_E = counts_E.float()
    bias_E.add_((load_E.mean() - load_E).sign() * rate * finite)
