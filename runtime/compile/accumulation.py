"""Weight gradients that W itself sums in the optimizer's fp32 tensors: autograd gets none."""

from __future__ import annotations

import torch
from torch import fx

from graphmoe.ops import grouped_mlp  # noqa: F401  # registers the ops

aten, prims, ops = torch.ops.aten, torch.ops.prims, torch.ops.graphmoe


def accumulate_outputs(module: fx.GraphModule, *, add: bool) -> fx.GraphModule:
    """The same graph with a further fp32 input for each output, which it stores there or adds to it.

    The experts' kernels do so from their own sums where they can. Elsewhere the sum is taken in fp32 before
    any rounding to the weights' dtype that ends the graph, and a transposed product becomes the product of
    the transposed, so that both sides of the sum lie alike.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, copies)
    assert isinstance(result, tuple)
    last_input = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    pairs: list[tuple[fx.Node, fx.Node]] = []
    for index, value in enumerate(result):
        shape = value.meta["val"]
        with graph.inserting_after(last_input[0]) if last_input else graph.inserting_before(None):
            buffer = graph.placeholder(f"buffer_{index}")
        last_input = [buffer]
        buffer.meta["val"] = shape.new_empty(shape.shape, dtype=torch.float32)
        pairs.append((value, buffer))
    for value, buffer in _without_experts(graph, pairs, add):
        value = _transposed_product(graph, _before_rounding(value))
        if add:
            value = graph.call_function(aten.add.Tensor, (buffer, value))
            value.meta["val"] = buffer.meta["val"]
        copy = graph.call_function(aten.copy_.default, (buffer, value))
        copy.meta["val"] = buffer.meta["val"]
    graph.output(())
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(module, graph)


def _without_experts(
    graph: fx.Graph, pairs: list[tuple[fx.Node, fx.Node]], add: bool
) -> list[tuple[fx.Node, fx.Node]]:
    """Let the experts' kernels fill their buffers themselves; returns the other (value, buffer)."""
    experts = [node for node in graph.nodes if node.target is ops.grouped_mlp_wgrad.default]
    for node in experts:
        of_node = [(value, buffer) for value, buffer in pairs if value in node.users]
        of_node.sort(key=lambda pair: pair[0].args[1])  # type: ignore[arg-type, return-value]
        if [value.args[1] for value, _ in of_node] == [0, 1] and not any(v.users for v, _ in of_node):
            *given, backend = node.args
            totals = [buffer for _, buffer in of_node]
            into = graph.call_function(ops.grouped_mlp_wgrad_into.default, (*given, *totals, backend, add))
            into.meta["val"] = None
            pairs = [pair for pair in pairs if pair not in of_node]
    return pairs


def _before_rounding(node: fx.Node) -> fx.Node:
    if node.target is prims.convert_element_type.default:
        source = node.args[0]
        if isinstance(source, fx.Node) and source.meta["val"].dtype == torch.float32:
            return source
    return node


def _transposed_product(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """(a b)^T as b^T a^T: its rows are contiguous."""
    product = node.args[0] if node.target is aten.permute.default and list(node.args[1]) == [1, 0] else None  # type: ignore[arg-type]
    if not (isinstance(product, fx.Node) and product.target is aten.mm.default and len(product.users) == 1):
        return node
    turned = []
    for factor in reversed(product.args):
        assert isinstance(factor, fx.Node)
        view = graph.call_function(aten.permute.default, (factor, [1, 0]))
        view.meta["val"] = factor.meta["val"].permute(1, 0)
        turned.append(view)
    result = graph.call_function(aten.mm.default, tuple(turned))
    result.meta = {**node.meta, "val": node.meta["val"].new_empty(node.meta["val"].shape)}
    return result
