"""fuse_permutation: routing plan, gather to expert order, and weighted sum per token, as three operations.

Suffixes: T tokens, K slots of a token, E experts, R rows (T * K), D hidden.

Patterns, matched by meaning:
- the plan: sorted and counted expert ids, cumulative counts, inverse order -> `routing_plan`;
- the gather: rows x[slot // K], of tokens or of routing weights (K is 1) -> `permute`;
- the sum: rows by the inverse order summed over k, or an index_add by token -> `unpermute`.
Another compile unit may make the plan. An unstable sort becomes a stable one. Sums are fp32, rounded once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

import graphmoe.ops.permute  # noqa: F401  # registers the operations
from graphmoe.passes.base import MadeBy, Rewrites, rewrite
from graphmoe.passes.matching import (
    SAME_ELEMENTS,
    argument,
    aten,
    axes,
    calls,
    cast,
    constant,
    depends_on,
    dtype,
    escape,
    first_of,
    is_cast,
    is_descending,
    is_float,
    is_op,
    name_of,
    only_user,
    operand,
    operand_pairs,
    operands,
    origin,
    part,
    put,
    put_parts,
    shape,
    value,
    viewed,
)

ops = torch.ops.graphmoe
COUNTS = (aten.scatter_add, aten.histc, aten.bincount)
GATHERS = (aten.index, aten.index_select, aten.gather)
ADDITIONS = (aten.index_add, aten.scatter_add)


def fuse_permutation(graph: fx.Graph) -> Rewrites:
    """Replace plans, gathers and sums by `routing_plan`, `permute` and `unpermute`."""
    sorts, given = calls(graph, aten.sort), calls(graph, ops.permute, ops.unpermute)
    planned = rewrite(_plan, ((sort,) for sort in sorts))
    plans = [plan_of(call) for call in calls(graph, ops.routing_plan)] + plans_from_outside(graph)

    def rewrite_by_plans(replace: Callable[..., str | None], *packets: Any) -> Rewrites:
        return rewrite(replace, [(node, plan) for node in calls(graph, *packets) for plan in plans])

    found = planned, rewrite_by_plans(_gather, *GATHERS), rewrite_by_plans(_return, *GATHERS, *ADDITIONS)
    matches, left = sum(each.matches for each in found), [reason for each in found for reason in each.left]
    for sort in sorts:
        reader = escape(sort, [])
        if reader is not None and matches and part(reader, aten.sort) == 0 and not is_float(operand(sort)):
            left.append(f"{name_of(sort)}: is kept beside the plan, since its sorted ids are read")
    absent = f"{len(sorts)} sorts, none of a flat list of expert ids"
    # a model that calls the operations itself, as for dispatched rows, is not expected to match
    if given:
        absent = f"the model calls permute or unpermute itself, {len(given)} times"
    return Rewrites(matches, tuple(left), absent, expected=not given)


def _plan(sort: Node) -> str | None:
    ids = operand(sort)
    inverse = part(origin(ids), aten.sort) == 1 or not any(result.users for result in sort.users)
    if is_float(ids) or len(shape(ids)) != 1 or inverse:
        return ""
    counts = counts_of(ids)
    if is_descending(sort) or not counts:
        return "the ids are in descending order" if counts else "nothing counts the ids: how many experts?"
    ends = [node for node in calls(sort.graph, aten.cumsum) if origin(operand(node)) in counts]
    slots = [user for user in sort.users if part(user, aten.sort) == 1]
    rows = [node for node in sort.graph.nodes if inverse_of(node) in slots]
    first, size = first_of([sort, *counts]), shape(ids)[0]
    k = slots_of_token(ids, slots)
    expert = cast(first, viewed(first, origin(ids), size // k, k), torch.int32)
    binned = is_op(counts[0], aten.bincount)
    num_experts = argument(counts[0], 2, "minlength", 0) if binned else shape(counts[0])[0]
    plan = put_parts(first, ops.routing_plan.default, expert, num_experts, like=sort)
    for old, new in zip((counts, ends, rows, slots), plan, strict=True):
        for node in old:
            flat = viewed(node, new, size) if old is rows else new
            node.replace_all_uses_with(cast(node, flat, dtype(node)))
    return None


def _gather(node: Node, plan: Plan) -> str | None:
    rows = rows_by(node)
    if rows is None or not is_float(node) or not depends_on(rows[1], plan.slot, integers=True):
        return ""
    x, k, size = rows[0], divisor(rows[1], [plan.slot]), plan.rows
    if k is None:
        return "the index is not slot // k"
    if shape(x)[0] * k != size or shape(node) != (size, *shape(x)[1:]) or len(shape(x)) > 2:
        return f"{list(shape(x))} to {list(shape(node))} is not [R / {k}, D] to [R, D]"
    flat = viewed(node, x, size // k, 1) if len(shape(x)) == 1 else x
    new = put(node, ops.permute.default, flat, plan.slot, plan.row_of(node, k), plan.ends)
    node.replace_all_uses_with(viewed(node, new, *shape(node)))
    return None


Returned = tuple[Node, Node, int, Node | None]  # a node, and the rows, k and weights of its `unpermute`


def _return(node: Node, plan: Plan) -> str | None:
    found = _summed_by_token(node, plan) if is_op(node, *ADDITIONS) else _summed_over_k(node, plan)
    if found is None or isinstance(found, str):
        return found or ""
    before, rows, k, weight = found
    if weight is not None:
        # fp32 as the operation wants it; fp64 weights stay fp64
        precise = torch.promote_types(value(rows).dtype, torch.float32)
        weight = cast(before, viewed(before, weight, plan.rows // k, k), precise)
    row = plan.row_of(before, k)
    new = put(before, ops.unpermute.default, rows, plan.slot, row, plan.ends, weight)
    before.replace_all_uses_with(viewed(before, new, *shape(before)))
    return None


def _summed_over_k(gather: Node, plan: Plan) -> Returned | str | None:
    by = rows_by(gather)
    if by is None or origin(by[1]) is not plan.row or not is_float(gather):
        return None
    node, weight = gather, None
    while (user := only_user(node)) is not None and not is_op(user, aten.sum):
        if is_op(user, aten.mul) and weight is None:
            pairs = [other for one, other in operand_pairs(user) if one is node]
            weight = narrow(pairs[0]) if pairs else None
            if weight is None or shape(weight) != (*shape(node)[:-1], 1):
                return f"{name_of(user)} is not a product with one weight for each row"
        elif not is_op(user, *SAME_ELEMENTS) and not is_cast(user):
            return f"the rows are not summed over k but read by {name_of(user)}"
        node = user
    if user is None:
        return f"{name_of(node)} has {len(node.users)} users"
    sizes, size = shape(node), plan.rows
    if len(sizes) != 3 or sizes[0] * sizes[1] != size or axes(user) != (1,):
        return f"{name_of(user)} is not a sum over the second axis of [R / k, k, D], R = {size}"
    return _weighted(user, by[0], sizes[1], weight, plan)


def _summed_by_token(node: Node, plan: Plan) -> Returned | str | None:
    along_rows = len(shape(node)) == 2 and operand(node, 1) == 0 and node.kwargs.get("alpha", 1) == 1
    k = divisor(narrow(operand(node, 2)), [plan.slot]) if along_rows and is_float(node) else None
    if k is None:
        return None
    base = constant(operand(node))
    if base is None or bool(base.any()):
        return "the rows are added to something that is not zero"
    if shape(node)[0] * k != plan.rows:
        return f"{list(shape(node))} is not [R / {k}, D], R = {plan.rows}"
    return _weighted(node, operand(node, 3), k, None, plan)


def _weighted(total: Node, rows: Node, k: int, weight: Node | None, plan: Plan) -> Returned | str:
    options = [(rows, weight)]
    product = origin(rows, casts=True)
    if is_op(product, aten.mul) and weight is None and escape(product, [total]) is None:
        for one, other in operand_pairs(product):
            gathered = _weight_of_rows(other, plan)
            if gathered is not None and shape(one) == shape(product):
                options.insert(0, (one, gathered))
    for option, its_weight in options:
        for each in (origin(option), option):
            if shape(each) != shape(rows):
                continue
            after = only_user(total)
            if dtype(each) == dtype(total):
                return total, each, k, its_weight
            if after is not None and is_cast(after) and dtype(each) == dtype(after):
                return after, each, k, its_weight
    return f"the sum of {dtype(rows)} rows stays {dtype(total)}"


def _weight_of_rows(node: Node, plan: Plan) -> Node | None:
    node = origin(narrow(node))
    if not is_op(node, ops.permute) or [origin(each) for each in operands(node)[1:]] != plan.parts:
        return None
    return operand(node) if shape(operand(node, 2))[1] == shape(node)[1] == 1 else None


@dataclass(frozen=True)
class Plan:
    """Nodes of a `routing_plan`'s results: expert ends, row of each slot, slot of each row."""

    ends: Node
    row: Node
    slot: Node

    @property
    def parts(self) -> list[Node]:
        return [self.slot, self.row, self.ends]  # the operations' argument order

    @property
    def rows(self) -> int:
        return shape(self.slot)[0]

    def row_of(self, before: Node, k: int) -> Node:
        return viewed(before, self.row, self.rows // k, k)


def plan_of(call: Node) -> Plan:
    # unread results are added to the graph
    read = {part(user, ops.routing_plan): user for user in call.users}
    ends, row, slot = (read.get(i) or put(call.next, operator.getitem, call, i, like=call) for i in (1, 2, 3))
    return Plan(ends, row, slot)


def plans_from_outside(graph: fx.Graph) -> list[Plan]:
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
    # the width of the last [T, K] that the flat ids are a view of, else the divisor of slots
    node = ids
    while is_op(node, *SAME_ELEMENTS) or is_cast(node):
        node = operand(node)
        if len(shape(node)) > 1:
            return shape(node)[-1]
    return max([divisor(user, slots) or 1 for slot in slots for user in slot.users], default=1)


def inverse_of(node: Node) -> Node | None:
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
    # x and index of x[index] along the first axis
    if is_op(node, aten.index):
        return (operand(node), operand(node, 1)[0]) if len(operand(node, 1)) == 1 else None
    if is_op(node, aten.index_select, aten.gather) and operand(node, 1) == 0:
        return operand(node), narrow(operand(node, 2))
    return None


def narrow(node: Any) -> Node:
    return operand(node) if is_op(node, aten.expand) else node


def divisor(index: Node, slots: list[Node]) -> int | None:
    # k of an index slot // k, also if written as token_of_slot[slot]
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
