"""Meanings of a routing's integers: counts of expert ids, their order, its inverse, rows and tokens.

Suffixes: T tokens, K slots of a token, E experts, R rows (T * K).
"""

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

import graphmoe.ops.permute  # noqa: F401  # registers the operations
from graphmoe.passes.base import MadeBy
from graphmoe.passes.matching import (
    SAME_ELEMENTS,
    argument,
    aten,
    calls,
    constant,
    is_cast,
    is_descending,
    is_op,
    operand,
    origin,
    part,
    put,
    shape,
    viewed,
)

ops = torch.ops.graphmoe
COUNTS = (aten.scatter_add, aten.histc, aten.bincount)


@dataclass(frozen=True)
class Plan:
    """Results of a `routing_plan`."""

    ends: Node
    row: Node
    slot: Node

    @property
    def parts(self) -> list[Node]:
        """The plan in the operations' argument order."""
        return [self.slot, self.row, self.ends]

    @property
    def rows(self) -> int:
        """R."""
        return shape(self.slot)[0]

    def row_of(self, before: Node, k: int) -> Node:
        """The row of each slot -> [R / k, k]."""
        return viewed(before, self.row, self.rows // k, k)


def plan_of(call: Node) -> Plan:
    """The results of a `routing_plan`; unread ones are added to the graph."""
    read = {part(user, ops.routing_plan): user for user in call.users}
    ends, row, slot = (read.get(i) or put(call.next, operator.getitem, call, i, like=call) for i in (1, 2, 3))
    return Plan(ends, row, slot)


def plans_from_outside(graph: fx.Graph) -> list[Plan]:
    """The plans of other units, if this one reads all their parts."""
    parts: dict[str, list[tuple[int, Node]]] = {}
    for node in graph.find_nodes(op="placeholder"):
        made: MadeBy | None = node.meta.get("made_by")
        if made is not None and made.target == "graphmoe::routing_plan" and made.part in (1, 2, 3):
            parts.setdefault(made.call, []).append((made.part, node))
    read = [sorted(of, key=operator.itemgetter(0)) for of in parts.values()]
    plans = [Plan(*(node for _, node in of)) for of in read if [part for part, _ in of] == [1, 2, 3]]
    return [plan for plan in plans if math.prod(shape(plan.row)) == plan.rows]


def counts_of(ids: Node) -> list[Node]:
    return [node for node in calls(ids.graph, *COUNTS) if _counted(node) is origin(ids)]


def num_bins(counts: Node) -> int:
    """E: how many experts a histogram counts."""
    return argument(counts, 2, "minlength", 0) if is_op(counts, aten.bincount) else shape(counts)[0]


def _counted(node: Node) -> Node | None:
    if is_op(node, aten.histc):
        bins = argument(node, 1, "bins")
        limits = argument(node, 2, "min"), argument(node, 3, "max")
        return _unsorted(operand(node)) if limits == (0, bins - 1) else None
    if is_op(node, aten.bincount):
        plain = argument(node, 1, "weights") is None and argument(node, 2, "minlength", 0) > 0
        return _unsorted(operand(node)) if plain else None
    if len(shape(node)) != 1 or not adds_ones(node):
        return None
    return _unsorted(operand(node, 2))


def adds_ones(node: Node) -> bool:
    """Return whether a scatter_add adds ones to zeros."""
    zeros, ones = constant(operand(node)), constant(operand(node, 3))
    return zeros is not None and ones is not None and not zeros.any() and bool((ones == 1).all())


def _unsorted(node: Node) -> Node:
    node = origin(node)
    if part(node, aten.sort) == 0:
        return origin(operand(operand(node)))
    rows = rows_by(node)
    if rows is not None and part(origin(rows[1]), aten.sort) == 1:
        return origin(rows[0])
    return node


def slots_of_token(ids: Node, slots: list[Node]) -> int:
    """K: the width of the last [T, K] that the flat ids are a view of, else the divisor of slots."""
    node = ids
    while is_op(node, *SAME_ELEMENTS) or is_cast(node):
        node = operand(node)
        if len(shape(node)) > 1:
            return shape(node)[-1]
    return max([divisor(user, slots) or 1 for slot in slots for user in slot.users], default=1)


def inverse_of(node: Node) -> Node | None:
    """The order that this is the inverse of."""
    if part(node, aten.sort) == 1:
        call = operand(node)
        return None if is_descending(call) else origin(operand(call))
    if is_op(node, aten.scatter) and len(node.args) > 3:
        target, source = origin(operand(node, 2)), operand(node, 3)
    elif is_op(node, aten.index_put) and len(operand(node, 1)) == 1 and not argument(node, 3, "accumulate"):
        target, source = origin(operand(node, 1)[0]), operand(node, 2)
    else:
        return None
    values = constant(source)
    counting = values is not None and torch.equal(values.long(), torch.arange(len(values)))
    return target if counting and shape(node) == shape(target) else None


def rows_by(node: Any) -> tuple[Node, Node] | None:
    """x and index of x[index] along the first axis."""
    if is_op(node, aten.index):
        return (operand(node), operand(node, 1)[0]) if len(operand(node, 1)) == 1 else None
    if is_op(node, aten.index_select, aten.gather) and operand(node, 1) == 0:
        return operand(node), narrow(operand(node, 2))
    return None


def narrow(node: Any) -> Node:
    return operand(node) if is_op(node, aten.expand) else node


def divisor(index: Node, slots: list[Node]) -> int | None:
    """k of an index slot // k, also if written as token_of_slot[slot]."""
    node = origin(index)
    if node in slots:
        return 1
    floors = is_op(node, aten.floor_divide) or node.kwargs.get("rounding_mode") in ("floor", "trunc")
    if floors and origin(operand(node)) in slots and isinstance(operand(node, 1), int):
        return operand(node, 1)
    rows = rows_by(node)
    tokens = constant(rows[0]) if rows is not None and origin(rows[1]) in slots else None
    if tokens is None or tokens.dim() != 1:
        return None
    k = max(len(tokens) // (int(tokens[-1]) + 1), 1)
    return k if torch.equal(tokens.long(), torch.arange(len(tokens)) // k) else None
