"""AdamW over fp32 main weights, with clipping, skipping and the schedule on the device.

Gradients are accumulated in fp32 into one flat buffer at a fixed address. Nothing here waits for the
device: a non-finite step is skipped by AdamW's own predicate, and counters live on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphmoe.config import OptimConfig, TrainConfig
from graphmoe.schedule import learning_rate


class StepResult(NamedTuple):
    """What one optimizer step says about itself; fp32 scalars on the device."""

    grad_norm: Tensor
    lr: Tensor
    finite: Tensor
    """1.0 if the step was applied, 0.0 if it was skipped."""


class Optimizer:
    """Holds main weights, gradients, moments and counters of a model, and applies steps."""

    def __init__(self, model: nn.Module, optim: OptimConfig, train: TrainConfig) -> None:
        self.config, self.train = optim, train
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = list(model.parameters())
        device = self.weights[0].device
        self.main = [w if w.dtype == torch.float32 else w.detach().float() for w in self.weights]
        self.flat_grad = torch.zeros(sum(w.numel() for w in self.weights), device=device)
        self.grads = self._views()
        for main, grad in zip(self.main, self.grads, strict=True):
            main.grad = grad
        self._grad_by_weight = {id(w): grad for w, grad in zip(self.weights, self.grads, strict=True)}
        self._collect_low_precision_gradients()
        self.adamw = self._adamw(optim, device)
        self.applied = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.skipped_in_row = torch.zeros((), device=device)
        self.longest_skip = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self, loss: Tensor) -> StepResult:
        """Apply the accumulated gradients and clear them; a no-op where loss or norm is not finite."""
        norm = torch.linalg.vector_norm(self.flat_grad)
        finite = (torch.isfinite(norm) & torch.isfinite(loss)).float()
        lr = learning_rate(self.config, self.train.steps, self.applied)
        for group in self.adamw.param_groups:
            group["lr"].copy_(lr)
        # AdamW's kernel divides gradients by grad_scale and does nothing where found_inf is 1.0.
        clip = self.train.clip_grad_norm
        scale = ((norm + 1e-6) / clip).clamp_min(1.0) if clip > 0 else torch.ones_like(norm)
        self.adamw.grad_scale = scale  # type: ignore[attr-defined]
        self.adamw.found_inf = 1.0 - finite  # type: ignore[attr-defined]
        self.adamw.step()
        self.publish()
        self._count(finite)
        self.flat_grad.zero_()
        return StepResult(norm, lr, finite)

    def state_dict(self) -> dict[str, Any]:
        """Main weights and moments by parameter name, and the counters; tensors are not copied."""
        moments = [self.adamw.state[main] for main in self.main]
        state: dict[str, Any] = {
            "exp_avg": {name: m["exp_avg"] for name, m in zip(self.names, moments, strict=True)},
            "exp_avg_sq": {name: m["exp_avg_sq"] for name, m in zip(self.names, moments, strict=True)},
            "main": {
                name: main.detach()
                for name, main, weight in zip(self.names, self.main, self.weights, strict=True)
                if main is not weight
            },
            "counters": {
                "applied": self.applied,
                "skipped": self.skipped,
                "skipped_in_row": self.skipped_in_row,
                "longest_skip": self.longest_skip,
            },
        }
        return state

    def restored(self) -> None:
        """Take over what was loaded in place into the tensors of ``state_dict``."""
        for main in self.main:
            self.adamw.state[main]["step"].copy_(self.applied)
        self.longest_skip.zero_()  # a run that it stopped may go on, with other settings
        self.publish()

    def gradient_of(self, weight: Tensor) -> Tensor:
        """The fp32 tensor, of the weight's shape, that the step's gradients are added to."""
        return self._grad_by_weight[id(weight)]

    def main_weights(self) -> dict[str, Tensor]:
        """The fp32 weights by parameter name; after a change of their values call ``publish``."""
        return {name: main.detach() for name, main in zip(self.names, self.main, strict=True)}

    @torch.no_grad()
    def publish(self) -> None:
        """Round the main weights into the model's weights."""
        pairs = [(w, m) for w, m in zip(self.weights, self.main, strict=True) if w is not m]
        if pairs:
            weights, mains = zip(*pairs, strict=True)
            torch._foreach_copy_(list(weights), list(mains))

    def _views(self) -> list[Tensor]:
        """A view of the flat buffer for each parameter."""
        parts = self.flat_grad.split([w.numel() for w in self.weights])
        return [part.view_as(weight) for part, weight in zip(parts, self.weights, strict=True)]

    def _collect_low_precision_gradients(self) -> None:
        """Add each bf16 gradient to its fp32 buffer as soon as autograd has made it."""
        for weight, main, grad in zip(self.weights, self.main, self.grads, strict=True):
            if main is not weight:
                weight.register_post_accumulate_grad_hook(_add_into(grad))

    def _adamw(self, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
        decayed = [main for main in self.main if main.dim() > 1]
        plain = [main for main in self.main if main.dim() <= 1]
        groups = [
            {"params": params, "weight_decay": decay, "lr": torch.tensor(config.lr, device=device)}
            for params, decay in ((decayed, config.weight_decay), (plain, 0.0))
            if params
        ]
        adamw = torch.optim.AdamW(
            groups,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
            capturable=True,
        )
        for main in self.main:
            adamw.state[main] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(main, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(main, requires_grad=False),
            }
        return adamw

    def _count(self, finite: Tensor) -> None:
        skipped = 1.0 - finite
        self.applied += finite
        self.skipped += skipped
        self.skipped_in_row.add_(1.0).mul_(skipped)
        torch.maximum(self.longest_skip, self.skipped_in_row, out=self.longest_skip)


def _add_into(grad: Tensor) -> Any:
    def hook(weight: Tensor) -> None:
        if weight.grad is not None:  # None: whoever computed it has added it already
            grad.add_(weight.grad)
            weight.grad = None

    return hook


@torch.no_grad()
def update_selection_bias(bias_E: Tensor, counts_E: Tensor, rate: float, finite: Tensor) -> None:
    """Move the bias of under-loaded experts up and of over-loaded ones down, in place.

    Auxiliary-loss-free balancing (arXiv 2408.15664, algorithm 1); a no-op where ``finite`` is 0.0.
    """
    load_E = counts_E.float()
    bias_E.add_((load_E.mean() - load_E).sign() * rate * finite)
