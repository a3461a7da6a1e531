"""UnitCode: a unit's compiled F, I and W, and the autograd node that runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from graphmoe.ops.gradients import Gradient, have_begun, report_added
from graphmoe.profiler_ranges import ranged
from graphmoe.runtime.compile.accumulation import accumulate_outputs
from graphmoe.runtime.compile.graphs import UnitGraphs
from graphmoe.runtime.torch_compat import FakeTensorMode, compile_inference

Compiled = Callable[..., Sequence[Tensor]]
Later = list[Callable[[], object]]
"""What a backward has left to be done."""


def compile_graph(graph: fx.GraphModule) -> Compiled:
    """Compile a graph without gradients for tensors with the shapes and strides that it was traced with."""
    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode: FakeTensorMode = values[0].fake_mode
    with mode:
        fakes = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
    return compile_inference(graph, fakes, mode)


class UnitCode:
    """The compiled F, I and W of a unit, shared by every unit that computes the same.

    A plain backward is ``backward_inputs`` then ``backward_weights``; a schedule may call them apart.
    """

    def __init__(
        self, graphs: UnitGraphs, compiler: Callable[[fx.GraphModule], Compiled], *, accumulates: bool
    ) -> None:
        """``accumulates``: W sums weight gradients itself; else autograd gets them."""
        self.graphs, self.accumulates, self._compiler = graphs, accumulates, compiler
        self._forward = compiler(graphs.forward) if graphs.num_outputs else _no_results
        self._inputs: Compiled | None = None
        self._weights: dict[bool, Compiled] = {}
        """W that stores, and W that adds to gradients that are there already, compiled at first use."""
        self.weights_run: set[bool] = set()
        """Which of the two have run where W accumulates."""
        if graphs.backward is not None:
            if graphs.input_gradients or graphs.backward.num_handed:
                self._inputs = compiler(graphs.backward.inputs)
            if graphs.weight_gradients:
                self._weights_code(add=False)

    @property
    def has_inputs(self) -> bool:
        """Whether I computes anything."""
        return self._inputs is not None

    def compile_rest(self) -> None:
        """Compile what else waits for its first use: W that adds."""
        if self.graphs.weight_gradients:
            self._weights_code(add=True)

    def __call__(
        self, tensors: Sequence[Tensor], gradients: Sequence[Gradient], later: Later | None = None
    ) -> tuple[Tensor, ...]:
        """The unit's outputs from (parameters, buffers, inputs); differentiable if it was compiled so.

        Where the code accumulates, the backward adds to each parameter's gradient in ``gradients``, and
        autograd gets none. It leaves that to a call that it puts into ``later``, if it is given.
        """
        if self.graphs.backward is None:
            results = tuple(self.run_forward(tensors))
        else:
            code = self if later is None else Postponing(self, later, len(gradients))
            results = differentiable(code, tensors, gradients)
        return self.graphs.views(tensors, results) if self.graphs.views else results

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """F: what ``graphs.views`` makes the outputs of, and what the backward reads."""
        return self.outputs_and_kept(tensors, self.run_forward(tensors))

    def run_forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The outputs, then the intermediate results that the backward keeps."""
        with ranged(self.graphs.name, "F"):
            return self._forward(*tensors)

    def outputs_and_kept(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """What ``forward`` returns, from what it was given and what ``run_forward`` returned."""
        count = self.graphs.num_outputs
        return tuple(results[:count]), [*(tensors[i] for i in self.graphs.kept_inputs), *results[count:]]

    def backward(
        self, kept: Sequence[Tensor], of_outputs: Sequence[Tensor], gradients: Sequence[Gradient]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """I, then W: gradients of ``graphs.input_gradients`` and of ``graphs.weight_gradients``."""
        of_inputs, handed = self.backward_inputs(kept, of_outputs)
        return of_inputs, self.backward_weights(handed, gradients)

    def backward_inputs(
        self, kept: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """I: gradients of the inputs in ``graphs.input_gradients``, and what W reads."""
        split = self.graphs.backward
        assert split is not None
        read = [*kept, *gradients]
        results: Sequence[Tensor] = ()
        if self._inputs is not None:
            with ranged(self.graphs.name, "I"):
                results = self._inputs(*(read[i] for i in split.inputs_read))
        count = len(self.graphs.input_gradients)
        return list(results[:count]), [*results[count:], *(read[i] for i in split.weights_read)]

    def backward_weights(
        self, handed: Sequence[Tensor], gradients: Sequence[Gradient]
    ) -> list[Tensor | None]:
        """W, from what I handed over: gradients of the parameters in ``graphs.weight_gradients``.

        They go to ``gradients`` instead, and None is returned, where the code accumulates.
        """
        wanted = self.graphs.weight_gradients
        if not wanted:
            return []
        if not self.accumulates:
            code = self._weights_code(add=False)
            with ranged(self.graphs.name, "W"):
                return list(code(*handed))
        sums = [gradients[i] for i in wanted]
        self.run_weights(handed, sums, add=have_begun(sums))
        report_added(sums)
        return [None] * len(wanted)

    def run_weights(self, handed: Sequence[Tensor], sums: Sequence[Gradient], *, add: bool) -> None:
        """W, where it accumulates: store in ``sums`` or add to them."""
        if sums:
            code = self._weights_code(add=add)
            with ranged(self.graphs.name, "W"):
                code(*handed, *(gradient.total for gradient in sums))
            self.weights_run.add(add)

    def _weights_code(self, *, add: bool) -> Compiled:
        if add not in self._weights:
            assert self.graphs.backward is not None
            graph = self.graphs.backward.weights
            self._weights[add] = self._compiler(
                accumulate_outputs(graph, add=add) if self.accumulates else graph
            )
        return self._weights[add]


class Postponing:
    """A unit whose backward is I, and leaves W for later."""

    def __init__(self, code: UnitCode, later: Later, num_weights: int) -> None:
        assert code.accumulates, "autograd wants weight gradients at once"
        of_inputs = code.graphs.input_gradients
        assert all(i >= num_weights for i in of_inputs), "the backward is not cut into I and W"
        self.graphs, self.forward, self._code, self._later = code.graphs, code.forward, code, later

    def backward(
        self, kept: Sequence[Tensor], of_outputs: Sequence[Tensor], gradients: Sequence[Gradient]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        of_inputs, handed = self._code.backward_inputs(kept, of_outputs)
        if self.graphs.weight_gradients:
            # What made an input leads to other units' calls in the list: a cycle, which nobody collects.
            handed = [tensor.detach() for tensor in handed]
            self._later.append(functools.partial(self._code.backward_weights, handed, gradients))
        return of_inputs, [None] * len(self.graphs.weight_gradients)


class Differentiable(Protocol):
    """A training unit's F, and its I and W together."""

    graphs: UnitGraphs

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]: ...

    def backward(
        self, kept: Sequence[Tensor], of_outputs: Sequence[Tensor], gradients: Sequence[Gradient]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]: ...


def differentiable(
    code: Differentiable, tensors: Sequence[Tensor], gradients: Sequence[Gradient]
) -> tuple[Tensor, ...]:
    """What the unit's outputs are made of, with their place in autograd's graph."""
    return _UnitFunction.apply(code, gradients, *tensors)


class _UnitFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, code: Differentiable, gradients: Sequence[Gradient], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outputs, kept = code.forward(tensors)
        ctx.code, ctx.gradients, ctx.num_inputs = code, gradients, len(tensors)
        ctx.save_for_backward(*kept)
        fixed = [o for o, wanted in zip(outputs, code.graphs.differentiable, strict=True) if not wanted]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("compiled segments have no gradients of gradients; use compile.enabled=false")
        code: Differentiable = ctx.code
        graphs = code.graphs
        wanted = [g for g, w in zip(gradients, graphs.differentiable, strict=True) if w]
        wanted = [_with_strides(g, s) for g, s in zip(wanted, graphs.gradient_strides, strict=True)]
        of_inputs, of_weights = code.backward(ctx.saved_tensors, wanted, ctx.gradients)
        result: list[Tensor | None] = [None] * ctx.num_inputs
        for i, gradient in zip(graphs.input_gradients, of_inputs, strict=True):
            result[i] = gradient
        for i, gradient in zip(graphs.weight_gradients, of_weights, strict=True):
            result[i] = gradient
        return None, None, *result


def _no_results(*tensors: Tensor) -> tuple[Tensor, ...]:
    return ()


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
