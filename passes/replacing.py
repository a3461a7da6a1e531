"""New nodes in place of a pattern, with the metadata of a traced one."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from graphmoe.passes.matching import SAME_ELEMENTS, aten, dtype, is_op, operand, shape, value

SIDE_META = ("custom", "stack_trace", "nn_module_stack")
"""Metadata that a new node takes over from the node it stands for: the segment above all."""


def put(before: Node, target: Any, *arguments: Any, like: Node | None = None, **named: Any) -> Node:
    """A new call in front of a node, with its fake value and the metadata of ``like``, or of that node."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, arguments, named)
    meta = (like or before).meta
    node.meta = {key: meta[key] for key in SIDE_META if key in meta}
    fakes: list[Any] = []
    values, named_values = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    map_aggregate((values, named_values), lambda leaf: fakes.append(getattr(leaf, "fake_mode", None)))
    modes = [mode for mode in fakes if mode is not None]
    with torch.no_grad(), modes[0] if modes else contextlib.nullcontext():
        node.meta["val"] = target(*values, **named_values)
    return node


def put_parts(before: Node, target: Any, *arguments: Any, like: Node | None = None) -> tuple[Node, ...]:
    """The results, each a node, of a new call that has several."""
    call = put(before, target, *arguments, like=like)
    return tuple(put(before, operator.getitem, call, i, like=like) for i in range(len(call.meta["val"])))


def viewed(before: Node, node: Node, *sizes: int) -> Node:
    """The node in another shape: itself, or what it is a view of, where that has the shape."""
    known: Any = node
    while shape(known) != sizes and is_op(known, *SAME_ELEMENTS):
        known = operand(known)
    if shape(known) == sizes:
        return known
    as_view = value(node).is_contiguous()
    return put(before, aten.view.default if as_view else aten.reshape.default, node, list(sizes))


def cast(before: Node, node: Node, kind: torch.dtype | None) -> Node:
    """The node in another dtype; itself where it has that dtype."""
    return node if dtype(node) == kind else put(before, aten._to_copy.default, node, dtype=kind)


def first_of(nodes: Collection[Node]) -> Node:
    """The node that stands first in the graph."""
    return next(node for node in next(iter(nodes)).graph.nodes if node in nodes)


def restore_order(graph: fx.Graph) -> None:
    """Move each node that stands behind one of its users in front of it; the others stay."""
    placed = set[Node]()

    def place(node: Node) -> None:
        for needed in node.all_input_nodes:
            if needed not in placed:
                node.prepend(needed)
                place(needed)
        placed.add(node)

    for node in list(graph.nodes):
        if node not in placed:
            place(node)
