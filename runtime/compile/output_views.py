"""Outputs of a unit that are inputs, or views of inputs or results: a compiled graph has none.

They are made outside it. A router that hands its normalised input on in another shape is such a unit, or
a dispatch that hands on what it was given.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, fx

from graphmoe.passes.split_backward import VIEWS


class OutputViews(NamedTuple):
    """How a unit's outputs follow from its inputs and from what its graph returns, by views alone."""

    inputs: tuple[int, ...]
    """Positions of the inputs that outputs are views of."""
    graph: fx.GraphModule
    """(those inputs, results of the unit's graph) -> outputs."""

    def __call__(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs; autograd sees the views."""
        return self.graph(*(inputs[i] for i in self.inputs), *results)


def take_off_views(forward: fx.GraphModule) -> OutputViews | None:
    """Leave one result for each memory that ``forward`` makes; None where it was so already. In place."""
    end = next(node for node in reversed(forward.graph.nodes) if node.op == "output")
    outputs = [*end.args[0]]
    roots = dict.fromkeys(root_of(node) for node in outputs)
    results = [root for root in roots if root.op != "placeholder"]
    if results == outputs:
        return None
    placeholders = [node for node in forward.graph.nodes if node.op == "placeholder"]
    read = [node for node in placeholders if node in roots]
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in (*read, *results)}
    graph.output(tuple(_copy(node, graph, copies) for node in outputs))
    end.args = (tuple(results),)
    forward.graph.eliminate_dead_code()
    forward.recompile()
    return OutputViews(tuple(placeholders.index(node) for node in read), fx.GraphModule(forward, graph))


def root_of(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows; the node itself if it is none."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a node shows the memory of another one."""
    # a piece of a split is one, a piece of what an operation with several results made is not
    target = node.all_input_nodes[0].target if node.target is operator.getitem else node.target
    return target in VIEWS or getattr(target, "is_view", False)


def _copy(node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """The chain of views that ends in ``node``, down to what has a copy."""
    if node not in copies:
        _copy(node.all_input_nodes[0], graph, copies)
        copies[node] = graph.node_copy(node, lambda earlier: copies[earlier])
    return copies[node]
