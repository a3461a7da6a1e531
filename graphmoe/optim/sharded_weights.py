"""Weights that ranks share out, gathered for as long as a layer runs: torch's ``fully_shard`` over segments.

``fully_shard`` hangs on calls of modules, while segments are functions over several. So a block of the model,
a layer for one, gets a module whose call is that of the executor: a gathering. Where ranks of different
groups have the same parameters of a block (experts: those with copies of them; all else: all ranks), it has
a gathering for each group, one inside the other. Compiled code sees no hook and finds the same parameters in
every step, though not at the same addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from graphmoe.plan.layout import Axis, layout_of
from graphmoe.runtime.compile.units import owner_of
from graphmoe.runtime.ranks import Mesh
from graphmoe.segments import Executor, Segment

Place = tuple[nn.Module, str]
"""The module that holds a parameter, and its name there. The object changes, its place does not."""


class _Gathering(nn.Module):
    """What parameters are gathered for: the call of a function. ``fully_shard`` hooks it."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, run: Callable[..., Any], *arguments: Any) -> Any:
        return run(*arguments)


class ShardedWeights:
    """The parameters of a model, each cut by rows and shared out to the ranks that have the same.

    They become DTensors of fp32 over their axis. While a block runs they are plain tensors of the dtype that
    they had, whole, and the same objects each time. Gradients are summed over the ranks in fp32, without
    division, when the backward has left a block, and added to those of earlier micro-batches: no rank keeps
    whole gradients.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[nn.Module]],
        mesh: Mesh,
        device: torch.device,
        fill: Callable[[Sequence[nn.Module]], None],
    ) -> None:
        """``blocks`` in the order in which a forward needs them; each parameter is in one. A collective.

        ``fill`` makes the parameters of a block real, on ``device``.
        """
        self._dtype = next(blocks[0][0].parameters()).dtype
        self._device, self._mesh, self._fill = device, mesh, fill
        self._meshes: dict[dist.ProcessGroup | None, DeviceMesh] = {}
        self._places: dict[FSDPModule, frozenset[Place]] = {}
        """What each gathering holds."""
        self._blocks = [[*self._gatherings(block)] for block in blocks]
        """The gatherings of each, the outermost first."""
        self._root = _Gathering([gathering for block in self._blocks for gathering in block])  # type: ignore[misc]
        fully_shard(self._root, mesh=self._mesh_over("world"))
        self._needs: dict[nn.Module, tuple[FSDPModule, ...]] = {}
        """The gatherings of what a module holds."""

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, a forward that calls the executor: it begins with the weights of the last update."""
        return functools.partial(self._root, run)

    def executor(self, execute: Executor) -> Executor:
        """Calls ``execute`` with the weights gathered that the segments' modules hold, and no others."""
        return functools.partial(self._execute, execute)

    def gather_ahead(self, order: Sequence[int]) -> None:
        """Gather each of these blocks while the one before it runs, in the backward the one after it."""
        for number, following in zip(order, order[1:], strict=False):
            self._blocks[number][-1].set_modules_to_forward_prefetch(self._blocks[following])
        for place, number in enumerate(order):
            inside_out = self._blocks[number][::-1]  # as a backward enters them
            before = self._blocks[order[place - 1]][::-1] if place else []
            for i, gathering in enumerate(inside_out):
                gathering.set_modules_to_backward_prefetch(inside_out[i + 1 :] or before)

    def _gatherings(self, block: Sequence[nn.Module]) -> Iterator[FSDPModule]:
        """One for each group of ranks that have the same of some parameters."""
        self._fill(block)
        held = {place: getattr(*place) for module in block for place in _places(module)}
        groups: dict[dist.ProcessGroup | None, Axis] = {}
        for parameter in held.values():
            axis = layout_of(parameter).summed_over
            groups.setdefault(self._mesh.group(axis), axis)
        marks = {place: layout_of(parameter) for place, parameter in held.items()}
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
                getattr(*place).parallel = marks[place]  # it is another object now
            self._places[gathering] = frozenset(own)
            yield gathering

    def _mesh_over(self, axis: Axis) -> DeviceMesh:
        group = self._mesh.group(axis)
        if group not in self._meshes:
            of_one = group or dist.new_group([self._mesh.rank], use_local_synchronization=True)
            self._meshes[group] = DeviceMesh.from_group(of_one, self._device.type)
        return self._meshes[group]

    def _execute(
        self,
        execute: Executor,
        segments: Sequence[Segment],
        tensors: dict[str, Tensor],
        keep: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        names = [*tensors]

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            return execute(segments, dict(zip(names, values, strict=True)), keep)

        needed: dict[FSDPModule, None] = {}
        for segment in segments:
            owner = owner_of(segment.run)
            if owner is not None:
                needed.update(dict.fromkeys(self._needed_by(owner)))
        for gathering in reversed(needed):
            run = functools.partial(cast(_Gathering, gathering), run)
        return run(*tensors.values())

    def _needed_by(self, owner: nn.Module) -> tuple[FSDPModule, ...]:
        if owner not in self._needs:
            held = {*_places(owner)}
            self._needs[owner] = tuple(gathering for gathering, own in self._places.items() if own & held)
        return self._needs[owner]


def _places(module: nn.Module) -> Iterator[Place]:
    for holder in module.modules():
        for name, _ in holder.named_parameters(recurse=False):
            yield holder, name
