"""Split a unit's backward into dgrad (I) and wgrad (W).

A schedule may delay W (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2). I hands shared
results to W, which recomputes views and pointwise values if that saves storing them.
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
"""Operations that alias their input."""
CASTS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}
RECOMPUTED = VIEWS | CASTS  # views and casts: W recomputes these from what I stores anyway
SUMS = {aten.sum.default, aten.sum.dim_IntList}


class SplitBackward(NamedTuple):
    """The two graphs of a split backward, I (dgrad) and W (wgrad); I passes ``num_handed`` tensors to W."""

    inputs: fx.GraphModule  # I: placeholders ``inputs_read`` -> (gradients of inputs..., handed...)
    inputs_read: tuple[int, ...]  # positions among the backward's placeholders
    weights: fx.GraphModule  # W: (handed..., placeholders ``weights_read``) -> gradients of weights
    weights_read: tuple[int, ...]
    num_handed: int
    nodes_moved: int  # operations that only W runs
    ms: float


def split_backward(backward: fx.GraphModule, weight_outputs: Collection[int]) -> SplitBackward:
    """Split a backward whose outputs at ``weight_outputs`` are weight gradients.

    Outputs keep their order within each half; the graph is unchanged.
    """
    started = time.perf_counter()
    graph = backward.graph
    outputs = [*next(iter(graph.find_nodes(op="output"))).args[0]]
    weights = [outputs[i] for i in sorted(weight_outputs)]
    others = [node for i, node in enumerate(outputs) if i not in set(weight_outputs)]
    in_inputs = _ancestors(others)
    in_inputs |= {user for node in in_inputs for user in node.users if user.target is operator.getitem}
    # I computes gradients that are sums over its results, as of norms: passing it to W would store a tensor
    # as large as the activations
    in_inputs |= _summed_by_inputs(weights, in_inputs)
    # What W runs or reads: back to placeholders and to what I computes and W does not recompute.
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


def drop_kept_axes(graph: fx.Graph) -> None:
    """Replace sums with ``keepdim`` that only views without the kept axes read by plain sums; in place."""
    # Inductor's fused reductions lose kept axes (pytorch #177782, in 2.10 and 2.11), and W checks the
    # shapes of what I hands it
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        x, axes, keeps = (*node.args, False)[:3]
        shape = x.meta["val"].sum(axes).shape
        users = [*node.users]
        if keeps and users and all(n.target in VIEWS and n.meta["val"].shape == shape for n in users):
            node.args, node.meta["val"] = (x, axes), users[0].meta["val"]
            for user in users:
                user.replace_all_uses_with(node)
                graph.erase_node(user)


def _ancestors(
    roots: Iterable[fx.Node | None], goes_on: Callable[[fx.Node], bool] = lambda node: True
) -> set[fx.Node]:
    # the search does not continue behind nodes that are not goes_on
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
        cheap = (
            n.target in RECOMPUTED | SUMS or torch.Tag.pointwise in getattr(n.target, "tags", ()) for n in own
        )
        is_sum = any(node.target in SUMS for node in own) and all(cheap)
        found |= path if would_hand and is_sum else set()
    return found


def _is_cheap(node: fx.Node) -> bool:
    # a piece of a tuple is recomputed only if the tuple is
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
