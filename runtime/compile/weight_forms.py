"""Weights in 8 bits, made once a step for all micro-batches: taken out of units' graphs, and their owner.

They are functions of parameters alone, and computing them takes a fifth of the time of the experts' products.
Row forms are read by forwards and column forms by backwards, which find them among a unit's inputs. So do
the delayed scales of what the products of a weight read, which stay from step to step.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx

from graphmoe.ops import fp8_linear, fp8_mlp  # noqa: F401  # registers the operations
from graphmoe.ops.fp8 import GRADIENT, INPUT, given
from graphmoe.passes.matching import calls, is_op, operand, operands, put_graph
from graphmoe.runtime.compile.delayed_scales import DelayedScales
from graphmoe.segments import profiler_range

OPERATIONS = {
    name: getattr(torch.ops.graphmoe, name)
    for pair in (
        ("fp8_rows", "fp8_columns"), ("fp8_whole_rows", "fp8_whole_columns"),
        ("fp8_squares", "fp8_squares_turned"), ("mx_rows", "mx_columns"), (INPUT, GRADIENT),
    )
    for name in pair
}  # fmt: skip
LARGEST = {
    torch.ops.graphmoe.fp8_given: (2, 1),
    torch.ops.graphmoe.fp8_mlp_forward: (12, 3),
    torch.ops.graphmoe.fp8_mlp_dgrad: (15, 6),
}
"""Places of the largest number so far among the arguments of an operation, and of the next in its results."""
ALIGNED = 16
"""Bytes of which the addresses of numbers are multiples, as descriptors of tensors want them."""
NUM_TENSORS = 2
"""Tensors of a form: stored numbers, and their scales."""


class WeightForm(NamedTuple):
    """A parameter in 8 bits, with scales along its rows or along its columns; or scales that it has."""

    operation: str
    """Name among ``OPERATIONS``."""
    parameter: int
    """Position among the unit's inputs."""
    alone: bool = False
    """True where the unit reads the parameter as forms only."""


def take_out_forms(module: fx.GraphModule, num_inputs: int, num_weights: int) -> tuple[WeightForm, ...]:
    """Make inputs of what a graph stores of its parameters in 8 bits. In place.

    They come behind the first ``num_inputs`` inputs, of which the first ``num_weights`` are parameters:
    numbers and scales of each form returned.
    """
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
    """Let inputs take up the largest numbers of what a graph stores by delayed scales. In place.

    The storing of tensors is spelt out, so that Inductor joins it with what makes them.
    """
    graph = module.graph
    for call in calls(graph, *LARGEST):
        place, result = next(where for operation, where in LARGEST.items() if is_op(call, operation))
        if len(call.args) <= place or call.args[place] is None:
            continue
        if is_op(call, torch.ops.graphmoe.fp8_given):
            *tensors, wide = operands(call)
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
    weight: Tensor
    """Held too: its identity is the key."""
    tensors: tuple[Tensor, ...]
    made_at: int | None
    """Number of changes at which they were made; None for those that stay, whatever becomes of the weight."""
    within: bool
    """True where the numbers lie in the weight's own memory."""


class WeightForms:
    """Owner of all forms of a model's weights, each once, whatever units read it, at addresses that stay.

    Whoever begins to read changed weights calls ``changed`` first: at the start of a step, so that a captured
    step has in its graph that forms are made, and before a validation. Then the first forward that needs a
    form makes it, behind whatever the current stream waits for: weights that other ranks have updated.

    No later reader needs to wait, a second micro-batch in turns with the first neither: forwards and
    backwards of a step are queued on one stream, with the forward that makes a form before all others that
    read it. Transfers, which have a stream of their own, read no weights. No device sync.

    Two forms have as many bytes as the weight in bf16. Where a unit reads nothing else of it, and its values
    can be had again, they take its place, until the update writes it anew, or ``changed``: who reads weights
    calls that before.
    """

    def __init__(self, mains: Mapping[int, Tensor] | None = None) -> None:
        """``mains`` has the fp32 values, by id, of weights of two bytes whose memory forms may take."""
        self.scales: DelayedScales | None = None
        """Delayed scales of what products read; None where there are none."""
        self._mains = mains or {}
        self._held: dict[tuple[int, str], _Held] = {}
        self._number = 0
        """Times that weights have changed."""
        self._within: dict[int, Tensor] = {}
        """Weights in whose memory forms are now, by id."""

    @torch.no_grad()
    def changed(self) -> None:
        """Give weights their values back; let each form be made anew before it is read next."""
        for key, weight in self._within.items():
            weight.data.copy_(self._mains[key])
        self.written()

    def written(self) -> None:
        """As ``changed``, where all weights are written in any case, whatever is in their memory."""
        self._within.clear()
        self._number += 1

    def keep(self, scales: DelayedScales) -> None:
        """Give units these scales, of tensors that products of the weights read."""
        self.scales = scales
        for (weight, side), tensors in scales.tensors():
            self._held[id(weight), side] = _Held(weight, tensors, None, within=False)

    def of(self, forms: Sequence[WeightForm], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return numbers and scales of each form, as the parameters among a unit's ``tensors`` are now."""
        held = [self._held.get((id(tensors[form.parameter]), form.operation)) for form in forms]
        if any(each is None or each.made_at not in (None, self._number) for each in held):
            held = self._make(forms, tensors)
        # Units change what stays, so autograd, which keeps it, gets it without the count of changes.
        return [
            tensor.data if each.made_at is None else tensor
            for each in held
            if each is not None
            for tensor in each.tensors
        ]

    @torch.no_grad()
    def _make(self, forms: Sequence[WeightForm], tensors: Sequence[Tensor]) -> list[_Held | None]:
        """Make the forms of a unit that are old: all of them before the first is put into a weight."""
        made: dict[tuple[int, str], tuple[Tensor, ...]] = {}
        for form in forms:
            weight = tensors[form.parameter]
            key, held = (id(weight), form.operation), self._held.get((id(weight), form.operation))
            if held is not None and held.made_at in (None, self._number):
                continue
            assert form.operation not in (INPUT, GRADIENT), "delayed scales are kept, not made"
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
        half = [*OPERATIONS].index(form.operation) % 2  # along its rows, or turned
        memory = weight.data.view(-1).view(torch.uint8).chunk(NUM_TENSORS)[half]
        return _Held(
            weight, (memory.view(numbers.dtype).view(numbers.shape), scale), self._number, within=True
        )
