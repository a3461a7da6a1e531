"""Weight gradients that W itself sums in the optimizer's fp32 tensors: autograd gets none."""

from __future__ import annotations

import torch
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims


def deliver_outputs(module: fx.GraphModule, *, add: bool) -> fx.GraphModule:
    """The same graph with a further fp32 input for each output, which it stores there or adds to it.

    The sum is taken in fp32 before any rounding to the weights' dtype that ends the graph, and a
    transposed product becomes the product of the transposed, so that both sides of the sum lie alike.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, copies)
    assert isinstance(result, tuple)
    last_input = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for index, value in enumerate(result):
        value = _transposed_product(graph, _before_rounding(value))
        shape = value.meta["val"]
        with graph.inserting_after(last_input[0]) if last_input else graph.inserting_before(None):
            buffer = graph.placeholder(f"buffer_{index}")
        last_input = [buffer]
        fake = shape.new_empty(shape.shape, dtype=torch.float32)
        buffer.meta["val"] = fake
        if add:
            value = graph.call_function(aten.add.Tensor, (buffer, value))
            value.meta["val"] = fake
        graph.call_function(aten.copy_.default, (buffer, value)).meta["val"] = fake
    graph.output(())
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(module, graph)


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
