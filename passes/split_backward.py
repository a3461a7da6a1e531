"""Cut a unit's backward in two: I, the gradients of its inputs, and W, those of its weights.

A schedule may then run W whenever it likes: only I is on the path to the layer before (Zero Bubble
Pipeline Parallelism, arXiv 2401.10241, section 2). W holds just what I does not compute; what both
need goes from I to W. Views and pointwise values are computed again in W where that saves keeping them.
Gradients that are sums over what I computes, as those of norms, are made by I: it has read all of it, and W
would have to get it, a tensor as large as the activations, instead of a row.
"""

import operator
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch
from torch import fx

aten = torch.ops.aten

VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.alias.default,
    aten.detach.default,
}
"""Operations that show the memory of their input."""
CASTS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}
RECOMPUTED = VIEWS | CASTS
"""Views and casts: W computes these again from what I keeps anyway."""
SUMS = {aten.sum.default, aten.sum.dim_IntList}


class SplitBackward(NamedTuple):
    """Two graphs in place of one. W takes ``handed`` first, then the inputs named ``weights_read``."""

    inputs: fx.GraphModule
    """I: placeholders ``inputs_read`` -> (gradients of inputs..., handed...)."""
    inputs_read: tuple[int, ...]
    """Positions among the backward's placeholders."""
    weights: fx.GraphModule
    """W: (handed..., placeholders ``weights_read``) -> gradients of weights."""
    weights_read: tuple[int, ...]
    num_handed: int
    nodes_moved: int
    """Operations that only W runs."""
    ms: float
    """Time that the split took."""


def split_backward(backward: fx.GraphModule, weight_outputs: Collection[int]) -> SplitBackward:
    """Split a backward graph whose outputs at ``weight_outputs`` are gradients of weights.

    Outputs keep their order within each half; the graph itself is left as it is.
    """
    started = time.perf_counter()
    graph = backward.graph
    outputs = [*next(iter(graph.find_nodes(op="output"))).args[0]]
    weights = [outputs[i] for i in sorted(weight_outputs)]
    others = [node for i, node in enumerate(outputs) if i not in set(weight_outputs)]
    in_inputs = _ancestors(others)
    in_inputs |= {user for node in in_inputs for user in node.users if user.target is operator.getitem}
    in_inputs |= _summed_by_inputs(weights, in_inputs)
    # What W runs or reads: back to placeholders and to what I computes and W does not compute again.
    in_weights = _ancestors(weights, lambda node: node not in in_inputs or _is_cheap(node))
    of_both = in_weights & in_inputs
    calls = (node for node in graph.nodes if node.op == "call_function" and node in of_both)
    handed = [node for node in calls if not _is_cheap(node)]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs_read = [p for p in placeholders if p in in_inputs]
    weights_read = [p for p in placeholders if p in in_weights and p not in handed]
    return SplitBackward(
        _subgraph(backward, inputs_read, in_inputs, [*others, *handed]),
        tuple(placeholders.index(p) for p in inputs_read),
        _subgraph(backward, [*handed, *weights_read], in_weights, weights),
        tuple(placeholders.index(p) for p in weights_read),
        len(handed),
        sum(node.op == "call_function" and node not in in_inputs for node in in_weights),
        (time.perf_counter() - started) * 1e3,
    )


def _ancestors(
    roots: Iterable[fx.Node | None], goes_on: Callable[[fx.Node], bool] = lambda node: True
) -> set[fx.Node]:
    """The nodes that the roots are made from, themselves included; none behind one that ends the search."""
    found: set[fx.Node] = set()
    todo = [root for root in roots if root is not None]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes if goes_on(node) else ())
    return found


def _summed_by_inputs(weights: Iterable[fx.Node | None], in_inputs: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for root in weights:
        path = _ancestors([root], lambda node: node not in in_inputs or _is_cheap(node))
        own = [node for node in path - in_inputs if node.op == "call_function"]
        would_hand = any(node.op == "call_function" and not _is_cheap(node) for node in path & in_inputs)
        is_sum = any(node.target in SUMS for node in own) and all(map(_is_elementwise_or_sum, own))
        found |= path if would_hand and is_sum else set()
    return found


def _is_elementwise_or_sum(node: fx.Node) -> bool:
    return node.target in RECOMPUTED | SUMS or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_cheap(node: fx.Node) -> bool:
    """Computed again rather than kept; a piece of a tuple only where the tuple is."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.target in RECOMPUTED
    if _narrows(node):
        source = node.all_input_nodes[0]
        return _is_materialised(source) or _is_cheap_pointwise(source)
    return node.target in RECOMPUTED or _is_cheap_pointwise(node)


def _narrows(node: fx.Node) -> bool:
    if node.target not in CASTS:
        return False
    source, value = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    return value.dtype.itemsize < source.dtype.itemsize


def _is_cheap_pointwise(node: fx.Node) -> bool:
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return pointwise and all(_is_materialised(source) for source in node.all_input_nodes)


def _is_materialised(node: fx.Node) -> bool:
    while node.target in RECOMPUTED and node.all_input_nodes:
        node = node.all_input_nodes[0]
    if node.op == "placeholder":
        return True
    own_kernel = getattr(node.target, "namespace", "aten") not in ("aten", "prims")
    return own_kernel or node.target in (aten.mm.default, aten.bmm.default)


def _subgraph(
    backward: fx.GraphModule, inputs: list[fx.Node], nodes: set[fx.Node], outputs: list[fx.Node | None]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in backward.graph.nodes:
        if node.op in ("call_function", "get_attr") and node in nodes and node not in copies:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(None if node is None else copies[node] for node in outputs))
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(backward, graph)
