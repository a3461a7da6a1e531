"""Updates with torch's ``fully_shard``: each rank has 1/n of weights, gradients and moments.

Same update as `zero1`; addresses are not fixed.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.config.schema import OptimConfig, TrainConfig
from graphmoe.model.transformer import Transformer
from graphmoe.optim.base import StepOptimizer, StepResult, count_step, norm_of
from graphmoe.plan.buckets import decays
from graphmoe.plan.layout import Axis, layout_of
from graphmoe.runtime.compile.units import owner_of
from graphmoe.runtime.ranks import Mesh
from graphmoe.segments import Executor, Segment


class ShardedOptimizer(StepOptimizer):
    """StepOptimizer over fp32 DTensor master weights; its executor gathers each layer while it runs."""

    gradient_of = None
    weight_forms = None  # would be as large as the unsharded weights
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
        """``model`` is on the meta device; ``fill`` allocates and sets one block's parameters."""
        super().__init__(optim, train, mesh, device)
        self.model, self._dtype = model, next(model.parameters()).dtype
        self.rounds = self._dtype != torch.float32
        blocks = model.blocks()
        # each block is sharded before the next is filled: no rank ever holds the whole model
        self._sharded = ShardedWeights(blocks, mesh, device, fill)
        needed_once = not model.mtp and not model.config.tie_embeddings  # embedding and head
        self._sharded.gather_ahead(range(len(blocks)) if needed_once else range(1, 1 + len(model.layers)))
        model.loss = self._sharded.around(model.loss)  # type: ignore[method-assign]
        self.weights = dict(model.named_parameters())
        # this rank's rows of each fp32 weight
        self.main = {name: _local(weight) for name, weight in self.weights.items()}
        self.moments = {
            kind: {name: torch.zeros_like(main) for name, main in self.main.items()}
            for kind in self.rule.moments
        }

    def executor(self, execute: Executor) -> Executor:
        return functools.partial(self._sharded.execute, execute)

    @torch.no_grad()
    def step(self, loss: Tensor) -> StepResult:
        gradients = {name: self._gradient(name) for name in self.weights}
        norm = self._over_ranks(norm_of([*gradients.values()]))
        scalars = self._scalars(norm, loss.detach().float(), self.applied, self.void, self._numbers)
        for decayed in (True, False):
            names = [n for n, own in self.main.items() if decays(self.weights[n]) is decayed and own.numel()]
            if names:
                kinds = (self.main, gradients, *self.moments.values())
                main, gradient, *moments = ([kind[name] for name in names] for kind in kinds)
                self.rule.apply(main, gradient, moments, config=self.config, decays=decayed, scalars=scalars)
        done = scalars.ok.float()
        count_step(done, self.void, *self._counters().values())
        for weight in self.weights.values():
            weight.grad = None
        return StepResult(norm, scalars.lr, done)

    def model_state(self) -> dict[str, Tensor | FlatShard]:
        rounded = {name: main.to(self._dtype) for name, main in self.main.items()}
        state, shards = self.model.state_dict(keep_vars=True), self._shards(rounded)
        return {name: shards.get(name, tensor.detach()) for name, tensor in state.items()}

    def _entries(self, kind: str) -> dict[str, Any]:
        return self._shards(self.main if kind == "main" else self.moments[kind])

    def weights_to_fill(self) -> Mapping[str, FlatShard]:
        return self._shards(self.main)

    def _gradient(self, name: str) -> Tensor:
        gradient = self.weights[name].grad
        return torch.zeros_like(self.main[name]) if gradient is None else _local(gradient)

    def _shards(self, tensors: Mapping[str, Tensor]) -> dict[str, FlatShard]:
        layout, rank = self.mesh.layout, self.mesh.rank
        found = {}
        for name, own in tensors.items():
            weight = self.weights[name]
            parallel, shape = layout_of(weight), weight.shape
            rows = -(-shape[0] // layout.size(parallel.summed_over))  # as torch.chunk splits
            first = min(rows * layout.index(parallel.summed_over, rank), shape[0])
            start = first * math.prod(shape[1:])
            found[name] = FlatShard(own.view(-1), start, shape, parallel, layout, rank)
        return found


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


# module and attribute name of a parameter; still valid after the parameter is replaced
Holder = tuple[nn.Module, str]


class _Gathering(nn.Module):
    # `fully_shard` hooks its call: a function runs with gathered parameters

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, run: Callable[..., Any], *arguments: Any) -> Any:
        return run(*arguments)


class ShardedWeights:
    """fp32 DTensor parameters, sharded along dim 0 over ranks that would hold equal copies.

    While a block runs, its parameters are unsharded tensors of the compute dtype, always the same objects.
    Their gradients are reduce-scattered in fp32, as sums, and accumulated.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[nn.Module]],
        mesh: Mesh,
        device: torch.device,
        fill: Callable[[Sequence[nn.Module]], None],
    ) -> None:
        """``blocks``: modules gathered together, in forward order. A collective."""
        self._dtype = next(blocks[0][0].parameters()).dtype
        self._device, self._mesh, self._fill = device, mesh, fill
        self._meshes: dict[dist.ProcessGroup | None, DeviceMesh] = {}
        self._places: dict[FSDPModule, frozenset[Holder]] = {}
        # `_Gathering` modules of each block, outermost first
        self._blocks = [[*self._gatherings(block)] for block in blocks]
        self._root = _Gathering([gathering for block in self._blocks for gathering in block])  # type: ignore[misc]
        fully_shard(self._root, mesh=self._mesh_over("world"))
        self._needs: dict[nn.Module, tuple[FSDPModule, ...]] = {}

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a forward so that it reads the last update's weights."""
        return functools.partial(self._root, run)

    def gather_ahead(self, order: Sequence[int]) -> None:
        """Gather each block's weights while the previous block runs; in the backward, in reverse."""
        for number, following in zip(order, order[1:], strict=False):
            self._blocks[number][-1].set_modules_to_forward_prefetch(self._blocks[following])
        for place, number in enumerate(order):
            inside_out = self._blocks[number][::-1]  # the order in which a backward enters them
            before = self._blocks[order[place - 1]][::-1] if place else []
            for i, gathering in enumerate(inside_out):
                gathering.set_modules_to_backward_prefetch(inside_out[i + 1 :] or before)

    def _gatherings(self, block: Sequence[nn.Module]) -> Iterator[FSDPModule]:
        self._fill(block)
        held = {place: getattr(*place) for module in block for place in _places(module)}
        marks = {place: layout_of(parameter) for place, parameter in held.items()}
        groups: dict[dist.ProcessGroup | None, Axis] = {}
        for mark in marks.values():
            groups.setdefault(self._mesh.group(mark.summed_over), mark.summed_over)
        for group, axis in groups.items():
            own = {p for p in held if self._mesh.group(marks[p].summed_over) is group}
            for place in own:
                parameter = getattr(*place)
                parameter.data = parameter.data.float()
            gathering = _Gathering(block)
            fully_shard(
                gathering,
                mesh=self._mesh_over(axis),
                reshard_after_forward=True,
                mp_policy=MixedPrecisionPolicy(self._dtype, torch.float32, cast_forward_inputs=False),
                ignored_params={getattr(*place) for place in held if place not in own},
            )
            assert isinstance(gathering, FSDPModule)
            gathering.set_gradient_divide_factor(1.0)
            gathering.set_force_sum_reduction_for_comms(True)
            gathering.set_unshard_in_backward(not all(isinstance(module, nn.Embedding) for module in block))
            for place in own:
                getattr(*place).parallel = marks[place]  # the attribute holds another object now
            self._places[gathering] = frozenset(own)
            yield gathering

    def _mesh_over(self, axis: Axis) -> DeviceMesh:
        group = self._mesh.group(axis)
        if group not in self._meshes:
            of_one = group or dist.new_group([self._mesh.rank], use_local_synchronization=True)
            self._meshes[group] = DeviceMesh.from_group(of_one, self._device.type)
        return self._meshes[group]

    def execute(
        self,
        execute: Executor,
        segments: Sequence[Segment],
        tensors: dict[str, Tensor],
        keep: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        """Run segments; only their modules' weights are gathered meanwhile."""
        names = [*tensors]

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            return execute(segments, dict(zip(names, values, strict=True)), keep)

        needed: dict[FSDPModule, None] = {}
        for segment in segments:
            owner = owner_of(segment.run)
            if owner is not None:
                if owner not in self._needs:
                    held = {*_places(owner)}
                    self._needs[owner] = tuple(each for each, own in self._places.items() if own & held)
                needed |= dict.fromkeys(self._needs[owner])
        for gathering in reversed(needed):
            run = functools.partial(cast(_Gathering, gathering), run)
        return run(*tensors.values())


def _places(module: nn.Module) -> Iterator[Holder]:
    for holder in module.modules():
        for name, _ in holder.named_parameters(recurse=False):
            yield holder, name
