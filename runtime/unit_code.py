"""UnitCode: a unit's compiled F, I and W, and the autograd node that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphmoe.torch_compat import FakeTensorMode, compile_inference
from runtime.accumulation import accumulate_outputs
from runtime.unit_graphs import UnitGraphs

Compiled = Callable[..., Sequence[Tensor]]


def compile_graph(graph: fx.GraphModule) -> Compiled:
    """Compile a graph without gradients for tensors with the shapes and strides that it was traced with."""
    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode: FakeTensorMode = values[0].fake_mode
    with mode:
        fakes = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
    return compile_inference(graph, fakes, mode)


class UnitCode:
    """The three compiled callables of a unit, shared by every unit that computes the same.

    A plain backward is ``backward_inputs`` then ``backward_weights``; a schedule may call them apart.
    """

    def __init__(self, graphs: UnitGraphs, *, accumulates: bool) -> None:
        self.graphs, self.accumulates = graphs, accumulates
        self.num_graphs = 0
        self._forward = self._compile(graphs.forward) if graphs.num_outputs else _no_results
        self._inputs: Compiled | None = None
        self._weights: Compiled | None = None
        if graphs.backward is not None:
            if graphs.input_gradients or graphs.backward.num_handed:
                self._inputs = self._compile(graphs.backward.inputs)
            if graphs.weight_gradients:
                weights = graphs.backward.weights
                self._weights = self._compile(accumulate_outputs(weights) if accumulates else weights)

    def __call__(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The unit's outputs from (parameters, buffers, inputs); differentiable if it was compiled so.

        Where the code accumulates, the backward adds each parameter's gradient to its fp32 tensor in
        ``buffers``, and autograd gets none.
        """
        if self.graphs.backward is None:
            results = tuple(self._forward(*tensors))
        else:
            results = _UnitFunction.apply(self, buffers, *tensors)
        return self.graphs.views(tensors, results) if self.graphs.views else results

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """F: what ``graphs.views`` makes the outputs of, and what the backward reads."""
        results = self._forward(*tensors)
        count = self.graphs.num_outputs
        return tuple(results[:count]), [*(tensors[i] for i in self.graphs.kept_inputs), *results[count:]]

    def backward_inputs(
        self, kept: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """I: gradients of the inputs in ``graphs.input_gradients``, and what W reads."""
        split = self.graphs.backward
        assert split is not None
        read = [*kept, *gradients]
        results: Sequence[Tensor] = ()
        if self._inputs is not None:
            results = self._inputs(*(read[i] for i in split.inputs_read))
        count = len(self.graphs.input_gradients)
        return list(results[:count]), [*results[count:], *(read[i] for i in split.weights_read)]

    def backward_weights(self, handed: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[Tensor | None]:
        """W, from what I handed over: gradients of the parameters in ``graphs.weight_gradients``.

        They are added to ``buffers`` instead, and None is returned, where the code accumulates.
        """
        if self._weights is None:
            return []
        if not self.accumulates:
            return list(self._weights(*handed))
        self._weights(*handed, *(buffers[i] for i in self.graphs.weight_gradients))
        return [None] * len(self.graphs.weight_gradients)

    def _compile(self, graph: fx.GraphModule) -> Compiled:
        self.num_graphs += 1
        return compile_graph(graph)


class _UnitFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, code: UnitCode, buffers: Sequence[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, kept = code.forward(tensors)
        ctx.code, ctx.buffers, ctx.num_inputs = code, buffers, len(tensors)
        ctx.save_for_backward(*kept)
        fixed = [o for o, wanted in zip(outputs, code.graphs.differentiable, strict=True) if not wanted]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("compiled segments have no gradients of gradients; use compile.enabled=false")
        code: UnitCode = ctx.code
        graphs = code.graphs
        wanted = [g for g, w in zip(gradients, graphs.differentiable, strict=True) if w]
        wanted = [_with_strides(g, s) for g, s in zip(wanted, graphs.gradient_strides, strict=True)]
        of_inputs, handed = code.backward_inputs(ctx.saved_tensors, wanted)
        of_weights = code.backward_weights(handed, ctx.buffers)
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
