"""Weight copies quantized once a step for all micro-batches, and delayed scales; both are inputs of units.

Quantizing takes a fifth of the time of the experts' GEMMs. Forwards read row-scaled copies, backwards
column-scaled ones.

Suffixes: P scales, two per weight; S steps; W fp32 values per scale, for alignment: the first is used.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx

from graphmoe.ops import fp8_mlp  # noqa: F401  # registers the operations
from graphmoe.ops.formats import KERNELS
from graphmoe.ops.fp8 import FIRST_SCALE, GRADIENT, INPUT, fp8_dtype, given, scales_of, wide_dtype
from graphmoe.passes.matching import calls, is_op, operand, operands, put_graph
from graphmoe.segments import profiler_range

OPERATIONS = {
    name: getattr(torch.ops.graphmoe, name)
    for pair in (*((each.weight.name, each.transposed.name) for each in KERNELS.values()), (INPUT, GRADIENT))
    for name in pair
}
LARGEST = {
    torch.ops.graphmoe.fp8_given: (2, 1),
    torch.ops.graphmoe.fp8_mlp_forward: (13, 3),
    torch.ops.graphmoe.fp8_mlp_dgrad: (16, 6),
}
"""Indices of the amax so far among an operation's arguments, and of the new amax among its results."""
ALIGNED = 16  # bytes, for tensor descriptors
NUM_TENSORS = 2  # values and scales
STEPS = 16
WORDS = 4  # fp32 words per scale: graph inputs must be 16-byte aligned, else each call copies them
ROOM = 2.0  # headroom over amax; larger values saturate
SIDES = (INPUT, GRADIENT)


class WeightForm(NamedTuple):
    """A quantized copy of a parameter, scaled along rows or columns; or a delayed scale of its GEMM."""

    operation: str
    parameter: int  # position among the unit's inputs
    alone: bool = False  # True if the unit reads the parameter only as forms


def take_out_forms(module: fx.GraphModule, num_inputs: int, num_weights: int) -> tuple[WeightForm, ...]:
    """Replace each quantization of a parameter by two new last inputs, its values and scales. In place."""
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    positions = {node: i for i, node in enumerate(placeholders[:num_weights])}
    inputs: dict[WeightForm, list[fx.Node]] = {}
    last = placeholders[num_inputs - 1]
    for call in calls(graph, *OPERATIONS.values()):
        if operand(call) not in positions:
            continue
        name = next(name for name, operation in OPERATIONS.items() if is_op(call, operation))
        form = WeightForm(name, positions[operand(call)])
        if form not in inputs:
            inputs[form] = []
            for part, value in zip((name, "scale"), call.meta["val"], strict=True):
                with graph.inserting_after(last):
                    last = graph.placeholder(f"{part}_of_{form.parameter}")
                last.target, last.meta = last.name, {"val": value}
                inputs[form].append(last)
        for piece in list(call.users):
            piece.replace_all_uses_with(inputs[form][operand(piece, 1)])
    if inputs:
        graph.eliminate_dead_code()
        graph.lint()
        module.recompile()
    return tuple(form._replace(alone=not placeholders[form.parameter].users) for form in inputs)


def take_up_largest(module: fx.GraphModule) -> None:
    """Make the graph write each new amax of delayed scaling to its input tensor. In place."""
    graph = module.graph
    for call in calls(graph, *LARGEST):
        place, result = next(where for operation, where in LARGEST.items() if is_op(call, operation))
        if len(call.args) <= place or call.args[place] is None:
            continue
        if is_op(call, torch.ops.graphmoe.fp8_given):
            *tensors, wide = operands(call)
            # spelt out in ATen operations, so that Inductor fuses it with the producer
            q, largest = put_graph(call, functools.partial(given, wide=wide), *tensors)
            for piece in list(call.users):
                piece.replace_all_uses_with(q)
        else:
            with graph.inserting_after(call):
                largest = graph.call_function(operator.getitem, (call, result))
            largest.meta["val"] = call.meta["val"][result]
        with graph.inserting_after(largest):
            taken = graph.call_function(torch.ops.aten.copy_.default, (call.args[place], largest))
        taken.meta["val"] = largest.meta["val"]
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()


@dataclass
class _Held:
    weight: Tensor  # held because its id is the key
    tensors: tuple[Tensor, ...]
    # count of weight changes when quantized; None for delayed scales, which do not get stale
    made_at: int | None
    within: bool  # the values are in the weight's own memory


class WeightForms:
    """Holds quantized weight copies (forms) at fixed addresses, made once per weight change. No device sync.

    Call ``changed`` before changed weights are read: at the start of a step, so that a captured step
    quantizes, and before a validation. The first forward that needs a form quantizes it. The two forms of a
    weight together have the size of the bf16 weight, and overwrite it if nothing else reads it and its master
    weight is known; ``changed`` restores it.
    """

    def __init__(self, mains: Mapping[int, Tensor] | None = None) -> None:
        """``mains``: fp32 master weights by id of their 2-byte weights, in whose memory fp8 copies may be."""
        self.scales: DelayedScales | None = None
        self._mains = mains or {}
        self._held: dict[tuple[int, str], _Held] = {}
        self._number = 0  # times that weights have changed
        self._within: dict[int, Tensor] = {}  # weights overwritten by forms, by id

    @torch.no_grad()
    def changed(self) -> None:
        """Restore weights that quantized copies overwrote, and mark all copies stale."""
        for key, weight in self._within.items():
            weight.data.copy_(self._mains[key])
        self.written()

    def written(self) -> None:
        """Mark all quantized copies stale without restoring the weights, which the caller overwrites next."""
        self._within.clear()
        self._number += 1

    def keep(self, scales: DelayedScales) -> None:
        self.scales = scales
        for (weight, side), tensors in scales.tensors():
            self._held[id(weight), side] = _Held(weight, tensors, None, within=False)

    def of(self, forms: Sequence[WeightForm], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return values and scales of each form, quantized again if stale."""
        held = [self._held.get((id(tensors[form.parameter]), form.operation)) for form in forms]
        if any(each is None or each.made_at not in (None, self._number) for each in held):
            held = self._make(forms, tensors)
        # Units update delayed scales in place; .data hides that from autograd's check of saved tensors.
        return [
            tensor.data if each.made_at is None else tensor
            for each in held
            if each is not None
            for tensor in each.tensors
        ]

    @torch.no_grad()
    def _make(self, forms: Sequence[WeightForm], tensors: Sequence[Tensor]) -> list[_Held | None]:
        # All forms are made before the first one overwrites its weight, after whatever the current stream
        # waits for: weights that other ranks update. Later readers need no event: forwards and backwards run
        # on one stream, interleaved micro-batches too, and transfers read no weights.
        made: dict[tuple[int, str], tuple[Tensor, ...]] = {}
        for form in forms:
            weight = tensors[form.parameter]
            key, held = (id(weight), form.operation), self._held.get((id(weight), form.operation))
            if held is not None and held.made_at in (None, self._number):
                continue
            assert form.operation not in (INPUT, GRADIENT), "delayed scales are never stale"
            assert id(weight) not in self._within, f"{form} is read behind other forms of its weight"
            with profiler_range("weights", "8 bits"):
                made[key] = tuple(OPERATIONS[form.operation](weight))
            if held is None:
                held = self._held[key] = self._place(form, weight, made[key])
            assert form.alone or not held.within, f"the weight of {form} is read as it is, too"
        for key, new in made.items():
            held = self._held[key]
            for tensor, value in zip(held.tensors, new, strict=True):
                if tensor is not value:
                    tensor.copy_(value)
            held.made_at = self._number
            if held.within:
                self._within[key[0]] = held.weight
        return [self._held[id(tensors[form.parameter]), form.operation] for form in forms]

    def _place(self, form: WeightForm, weight: Tensor, made: tuple[Tensor, ...]) -> _Held:
        numbers, scale = made
        main = self._mains.get(id(weight)) if form.alone else None
        start = weight.storage_offset() * weight.itemsize
        fits = weight.itemsize == 2 and not (numbers.numel() % ALIGNED or start % ALIGNED)
        if main is None or not fits or not weight.is_contiguous():
            return _Held(weight, made, self._number, within=False)
        half = [*OPERATIONS].index(form.operation) % 2  # row forms first, then column forms
        memory = weight.data.view(-1).view(torch.uint8).chunk(NUM_TENSORS)[half]
        return _Held(
            weight, (memory.view(numbers.dtype).view(numbers.shape), scale), self._number, within=True
        )


class DelayedScales:
    """Per-tensor fp8 scales from the amax history of earlier steps; equal on all ranks that share a layer.

    Each weight has two: of its GEMM's input (e4m3) and its output's gradient (e5m2). A current scale would
    need a second read of the tensor (arXiv 2209.05433; history as in Transformer Engine). Fixed addresses.
    """

    def __init__(self, weights: Mapping[str, Tensor], tokens: int, group: dist.ProcessGroup | None) -> None:
        """``tokens`` per step, over which the loss is a mean; ``group``: ranks that share the layers."""
        self._group = group
        self._sides = {f"{name}.{side}": (weight, side) for name, weight in weights.items() for side in SIDES}
        device, count = next(iter(weights.values())).device, len(weights) * len(SIDES)
        self._scale_PW, self._largest_PW = torch.zeros(2, count, WORDS, device=device)
        self.scale_P, self.largest_P = self._scale_PW[:, 0], self._largest_PW[:, 0]
        # the loss is a mean over tokens, so output gradients start smaller by about that factor
        first = FIRST_SCALE, FIRST_SCALE / 2 ** (tokens - 1).bit_length()
        self.scale_P.copy_(torch.tensor(first).repeat(len(weights)))
        self.history_SP = torch.zeros(STEPS, count, device=device)  # newest first; 0 if unknown

    def tensors(self) -> Iterator[tuple[tuple[Tensor, str], tuple[Tensor, Tensor]]]:
        """Yield each (weight, side) with its scale [1] and its amax [1] of this step."""
        for i, key in enumerate(self._sides.values()):
            yield key, (self._scale_PW[i, :1], self._largest_PW[i, :1])

    @torch.no_grad()
    def begin(self) -> None:
        # drops the amax of forwards that no update followed
        self._largest_PW.zero_()

    @torch.no_grad()
    def update(self, done: Tensor) -> None:
        """Set the next scales if ``done`` is 1.0, so the step was applied. Collective."""
        if self._group is not None:
            dist.all_reduce(self._largest_PW, op=dist.ReduceOp.MAX, group=self._group)
        newest_P = self.largest_P.where(self.largest_P.isfinite(), 0.0)
        moved_SP = torch.cat([newest_P[None], self.history_SP[:-1]])
        # an overflowed or skipped step, or a tensor without amax, keeps its history
        self.history_SP.copy_(moved_SP.where((done > 0) & (newest_P > 0), self.history_SP))
        amax_P = self.history_SP.amax(0)
        held_P = (ROOM * amax_P).clamp(max=torch.finfo(torch.float32).max)  # the scale of inf is NaN
        sides = zip(held_P.view(-1, 2).unbind(-1), (fp8_dtype(), wide_dtype()), strict=True)
        scale_P = torch.stack([scales_of(*side)[0] for side in sides], -1).view(-1)
        self.scale_P.copy_(scale_P.where(amax_P > 0, self.scale_P))

    def values(self) -> dict[str, list[float]]:
        """Return scale and history by weight and side. Syncs with the device."""
        columns = torch.cat([self.scale_P[None], self.history_SP]).t().tolist()
        return dict(zip(self._sides, columns, strict=True))

    @torch.no_grad()
    def load(self, values: Mapping[str, list[float]]) -> None:
        """Restore scales returned by `values`; others keep theirs. *Raises* ValueError for other values."""
        for i, name in enumerate(self._sides):
            if name in values:
                found = values[name]
                is_list = isinstance(found, list) and all(isinstance(each, float) for each in found)
                if not is_list or len(found) != 1 + STEPS or not 0 <= min(found) <= max(found) < math.inf:
                    raise ValueError(f"{name} has no scale and {STEPS} magnitudes, finite and not negative")
                scale, *history = found
                self.scale_P[i] = scale
                self.history_SP[:, i] = torch.tensor(history)
