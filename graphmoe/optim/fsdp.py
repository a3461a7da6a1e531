"""AdamW over what torch's ``fully_shard`` leaves on a rank: an n-th of weights, gradients and moments.

For models whose dense part does not fit beside its gradients. The rule of the update, its norm, clipping and
skipping are those of ``graphmoe.optim.zero1``; only what lies where differs, and no address is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.config.schema import OptimConfig, TrainConfig
from graphmoe.model.transformer import Transformer
from graphmoe.optim.adamw import fused_adamw_of_many_
from graphmoe.optim.base import Function, StepOptimizer, StepResult, count_step, norm_of
from graphmoe.optim.sharded_weights import ShardedWeights
from graphmoe.plan.layout import layout_of
from graphmoe.runtime.capture.capture import Place
from graphmoe.runtime.ranks import Mesh
from graphmoe.segments import Executor


class ShardedOptimizer(StepOptimizer):
    """A StepOptimizer over the local tensors of DTensors.

    The model's parameters become DTensors of fp32, which are the main weights; ``model.loss`` gathers each
    layer in the compute dtype while it runs, if the executor is this optimizer's.
    """

    gradient_of = None
    model_is_whole = False

    def __init__(
        self,
        model: Transformer,
        optim: OptimConfig,
        train: TrainConfig,
        mesh: Mesh,
        device: torch.device,
        fill: Callable[[Sequence[nn.Module]], None],
    ) -> None:
        """``model`` is what this rank of the mesh has of it, on the meta device.

        ``fill`` gives a block of it memory on ``device`` and values; each is shared out before the next is
        made, so that no rank ever has all of the model.
        """
        super().__init__(optim, train, mesh, device)
        self.model, self._dtype = model, next(model.parameters()).dtype
        blocks = model.blocks()
        self._sharded = ShardedWeights(blocks, mesh, device, fill)
        needed_once = not model.mtp and not model.config.tie_embeddings  # embedding and head
        self._sharded.gather_ahead(range(len(blocks)) if needed_once else range(1, 1 + len(model.layers)))
        model.loss = self._sharded.around(model.loss)  # type: ignore[method-assign]
        self.weights = dict(model.named_parameters())
        """DTensors by parameter name."""
        self.main = {name: _local(weight) for name, weight in self.weights.items()}
        """What this rank has of the fp32 weights, rows of each."""
        self.exp_avg = {name: torch.zeros_like(main) for name, main in self.main.items()}
        self.exp_avg_sq = {name: torch.zeros_like(main) for name, main in self.main.items()}

    def compile(self, compiler: Callable[[Function, Sequence[Tensor]], Function]) -> None:
        """Nothing: gradients have other addresses in each step, and torch's fused kernel takes lists."""

    def executor(self, execute: Executor) -> Executor:
        """Gathers the weights of what it runs, and gives their memory back."""
        return self._sharded.executor(execute)

    def start_gather(self) -> None:
        """Nothing: each layer is gathered when it runs."""

    def gather(self) -> None:
        """Nothing: each layer is gathered when it runs."""

    @torch.no_grad()
    def step(self, loss: Tensor) -> StepResult:
        """As ``StepOptimizer.step``."""
        gradients = {name: self._gradient(name) for name in self.weights}
        norm = self._over_ranks(norm_of([*gradients.values()]))
        scalars = self._scalars(norm, loss.detach().float(), self.applied, self.void, self._numbers)
        for decays in (True, False):
            names = [n for n, own in self.main.items() if (own.dim() > 1) is decays and own.numel()]
            if names:
                kinds = (self.main, gradients, self.exp_avg, self.exp_avg_sq)
                lists = ([kind[name] for name in names] for kind in kinds)
                fused_adamw_of_many_(*lists, config=self.config, decays=decays, scalars=scalars)
        done = scalars.ok.float()
        count_step(done, self.void, *self._counters().values())
        for weight in self.weights.values():
            weight.grad = None
        return StepResult(norm, scalars.lr, done)

    def model_state(self) -> dict[str, Tensor | FlatShard]:
        """The model's state as a checkpoint keeps it: weights rounded to the compute dtype, in copies."""
        rounded = {name: main.to(self._dtype) for name, main in self.main.items()}
        state, shards = self.model.state_dict(keep_vars=True), self._shards(rounded)
        return {name: shards.get(name, tensor.detach()) for name, tensor in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """What this rank owns of main weights and moments, by parameter name, and the counters."""
        return {
            "exp_avg": self._shards(self.exp_avg),
            "exp_avg_sq": self._shards(self.exp_avg_sq),
            "main": self._shards(self.main) if self._dtype != torch.float32 else {},
            "counters": self._counters(),
        }

    def restored(self) -> None:
        """The next run may go on after a run of skipped steps, with other settings."""
        self.longest_skip.zero_()

    def places(self) -> dict[str, Place]:
        """*Raises* always: nothing stays where it is."""
        raise AssertionError("a captured step needs fixed addresses")

    def weights_to_fill(self) -> Mapping[str, FlatShard]:
        """What this rank owns of the main weights, in place."""
        return self._shards(self.main)

    def adopt(self, weights: Mapping[str, Any]) -> None:
        """Nothing: they were filled in place."""

    def _gradient(self, name: str) -> Tensor:
        """The sum over ranks and micro-batches; zeros where no micro-batch gave anything."""
        gradient = self.weights[name].grad
        return torch.zeros_like(self.main[name]) if gradient is None else _local(gradient)

    def _shards(self, tensors: Mapping[str, Tensor]) -> dict[str, FlatShard]:
        """As entries of a checkpoint; a rank's rows of a parameter are neighbours."""
        layout, rank = self.mesh.layout, self.mesh.rank
        found = {}
        for name, own in tensors.items():
            weight = self.weights[name]
            parallel, shape = layout_of(weight), weight.shape
            rows = -(-shape[0] // layout.size(parallel.summed_over))  # as torch.chunk cuts
            first = min(rows * layout.index(parallel.summed_over, rank), shape[0])
            start = first * math.prod(shape[1:])
            found[name] = FlatShard(own.view(-1), start, shape, parallel, layout, rank)
        return found


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of a DTensor, sharing its memory."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()
