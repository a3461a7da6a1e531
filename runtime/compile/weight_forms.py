"""Weights in 8 bits, made once a step for all micro-batches: taken out of units' graphs, and their owner.

They are functions of parameters alone, and computing them takes a fifth of the time of the experts' products.
Row forms are read by forwards and column forms by backwards, which find them among a unit's inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx

from graphmoe.ops import fp8_linear, fp8_mlp  # noqa: F401  # registers the operations
from graphmoe.passes.matching import calls, is_op, operand
from graphmoe.segments import profiler_range

OPERATIONS = {
    name: getattr(torch.ops.graphmoe, name)
    for name in ("fp8_rows", "fp8_columns", "fp8_squares", "fp8_squares_turned", "mx_rows", "mx_columns")
}
NUM_TENSORS = 2
"""Tensors of a form: stored numbers, and their scales."""


class WeightForm(NamedTuple):
    """A parameter in 8 bits, with scales along its rows or along its columns."""

    operation: str
    """Name among ``OPERATIONS``."""
    parameter: int
    """Position among the unit's inputs."""


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
    return tuple(inputs)


@dataclass
class _Held:
    weight: Tensor
    """Held too: its identity is the key."""
    tensors: tuple[Tensor, ...]
    made_at: int


class WeightForms:
    """Owner of all forms of a model's weights, each once, whatever units read it, at addresses that stay.

    Whoever begins to read changed weights calls ``changed`` first: at the start of a step, so that a captured
    step has in its graph that forms are made, and before a validation. Then the first forward that needs a
    form makes it, behind whatever the current stream waits for: weights that other ranks have updated.

    No later reader needs to wait, a second micro-batch in turns with the first neither: forwards and
    backwards of a step are queued on one stream, with the forward that makes a form before all others that
    read it. Transfers, which have a stream of their own, read no weights. No device sync.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], _Held] = {}
        self._number = 0
        """Times that weights have changed."""

    def changed(self) -> None:
        """Let each form be made anew before it is read next."""
        self._number += 1

    def of(self, forms: Sequence[WeightForm], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return numbers and scales of each form, as the parameters among a unit's ``tensors`` are now."""
        return [each for form in forms for each in self._made(form.operation, tensors[form.parameter])]

    def _made(self, operation: str, weight: Tensor) -> tuple[Tensor, ...]:
        held = self._held.get((id(weight), operation))
        if held is not None and held.made_at == self._number:
            return held.tensors
        with torch.no_grad(), profiler_range("weights", "8 bits"):
            made = OPERATIONS[operation](weight)
            if held is None:
                held = self._held[id(weight), operation] = _Held(weight, tuple(made), self._number)
            else:
                for tensor, new in zip(held.tensors, made, strict=True):
                    tensor.copy_(new)
        held.made_at = self._number
        return held.tensors
