"""Expert choice and routing weights, read from the graph.

Suffixes: T tokens, E experts, K slots of a token, G expert groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from graphmoe.ops.router import LOW_LOGIT
from graphmoe.passes.fuse_permutation import counts_of
from graphmoe.passes.matching import (
    argument,
    aten,
    calls,
    constant,
    depends_on,
    dtype,
    is_descending,
    is_float,
    is_op,
    name_of,
    operand,
    operand_pairs,
    operands,
    origin,
    over_last,
    part,
    shape,
    value,
)

SCORES = {aten._softmax: "softmax", aten.sigmoid: "sigmoid"}
LARGEST_EPS = 1e-12  # a term below this in a denominator is lost in fp32 rounding


@dataclass(frozen=True)
class Choice:
    """Nodes by which a router chooses experts."""

    expert: Node  # ids [T, K] of any integer type
    scores: Node  # softmax or sigmoid scores, before bias and groups, or the logits
    ranking: Node | None = None  # the sort or topk; None if the ids do not depend on the logits
    values: Node | None = None
    """The chosen scores [T, K], if the topk returns them and gradients flow into them."""
    bias: Node | None = None
    groups: tuple[int, int, int] = (1, 1, 1)  # num_groups, topk_groups, group_top
    given: Node | None = None
    """Ids that replace the choice by ``ranking`` unless -1; ``expert`` is `graphmoe.ops.router.replayed`."""

    @property
    def score(self) -> str | None:
        return next((name for packet, name in SCORES.items() if is_op(self.scores, packet)), None)

    @property
    def num_tokens(self) -> int:
        return shape(self.expert)[0]

    @property
    def num_experts(self) -> int:
        return value(self.scores).numel() // self.num_tokens

    @property
    def logits(self) -> Node:
        return self.scores if self.score is None else operand(self.scores)

    def is_best_of(self, other: Choice) -> bool:
        """Return whether this chooses as many experts as ``other`` by the same scores and nothing else."""
        own = self.ranking is not None and self.given is None
        plain = own and self.bias is None and self.groups == (1, 1, 1)
        return plain and self.scores is other.scores and shape(self.expert) == shape(other.expert)

    def is_expert(self, index: Any) -> bool:
        return origin(index) is origin(self.expert)


@dataclass(frozen=True)
class Weights:
    """Node of the routing weights, and the arithmetic that makes them from the chosen experts' scores."""

    node: Node
    renormalise: bool = False
    softmax_after_topk: bool = False
    scale: float = 1.0


def choices(graph: fx.Graph) -> Iterator[Choice | str]:
    """Yield each choice of experts, by top-k of [T, E] or given ids; for an unsupported one, the reason."""
    for node in graph.nodes:
        top = top_of(node)
        choice = _choice_by(node, top[0]) if top is not None and len(shape(node)) == 2 else None
        if isinstance(choice, Choice) and (among := _replayed(choice.expert)):
            choice = replace(choice, expert=among[0], given=among[1], values=None)
        if choice is not None:
            yield choice
    scores, seen = _scores(graph), set()
    for node in calls(graph, aten.gather):
        ids, source = operand(node, 2), scores_behind(operand(node))
        of_tokens = (
            len(shape(node)) == 2 and operand(node, 1) == 1 and shape(node)[0] == shape(operand(node))[0]
        )
        if of_tokens and _routes(ids) and not depends_on(ids, source):
            of_source = [each for each in scores if source in (each, origin(operand(each)))]
            found = of_source[0] if of_source else source
            if (found, origin(ids)) not in seen and (of_source or not is_op(source, *SCORES)):
                seen.add((found, origin(ids)))
                yield Choice(_as_given(ids), found)


def _replayed(own: Node) -> tuple[Node, Node] | None:
    users = [reader for user in own.users for reader in (user, *user.users)]  # behind a cast
    for node in users:
        if not is_op(node, aten.where) or origin(operand(node, 1)) is not origin(own):
            continue
        unknown, _, given = operands(node)
        is_whole = shape(given) == shape(own) and not is_float(given)
        if is_whole and is_op(unknown, aten.lt) and operand(unknown, 1) == 0 and operand(unknown) is given:
            return node, given
    return None


def _routes(ids: Node) -> bool:
    plans = calls(ids.graph, torch.ops.graphmoe.routing_plan)
    planned = any(origin(operand(plan)) is origin(ids) for plan in plans)
    drawn = is_op(origin(ids), aten.searchsorted)  # of moe.expert_load
    return planned or drawn or constant(ids) is not None or bool(counts_of(origin(ids)))


def _scores(graph: fx.Graph) -> list[Node]:
    return [
        node
        for node in calls(graph, *SCORES)
        if len(shape(node)) == 2 and (is_op(node, aten.sigmoid) or over_last(node))
    ]


def top_of(node: Any) -> tuple[Node, int] | None:
    """Return the topk or sort whose top indices along the last axis a node holds, and k; else None."""
    if part(node, aten.topk) == 1:
        call = operand(node)
        largest, axis = argument(call, 3, "largest", True), argument(call, 2, "dim", -1)
        return (call, argument(call, 1, "k")) if largest and _is_last(call, axis) else None
    return _first_of_sort(node, 1)


def _first_of_sort(node: Any, which: int) -> tuple[Node, int] | None:
    if not is_op(node, aten.slice) or part(operand(node), aten.sort) != which:
        return None
    call = operand(operand(node))
    along = is_descending(call) and _is_last(call, argument(call, 1, "dim", -1))
    along = along and _is_last(call, argument(node, 1, "dim", 0)) and argument(node, 2, "start") in (0, None)
    return (call, shape(node)[-1]) if along and argument(node, 4, "step", 1) == 1 else None


def _is_last(call: Node, axis: int) -> bool:
    return axis in (-1, len(shape(operand(call))) - 1)


def _as_given(index: Node) -> Node:
    # before the cast for a gather
    node = index
    while is_op(node, aten._to_copy) and not dtype(operand(node)).is_floating_point:  # type: ignore[union-attr]
        node = operand(node)
    return node


def _choice_by(expert: Node, ranking: Node) -> Choice | str | None:
    node, direct = operand(ranking), origin(operand(ranking))
    bias, groups = None, (1, 1, 1)
    filled = origin(node, detached=True)
    limited = is_op(filled, aten.masked_fill)
    if limited:
        node, direct = operand(filled), origin(operand(filled)) if direct is filled else None
        found = _group_limit(filled)
        if found is None:
            return f"{name_of(filled)}: it does not mask all but the best groups"
        groups = found
    added = origin(node, detached=True)
    for scores, other in operand_pairs(added) if is_op(added, aten.add) else []:
        if shape(other) in (shape(added)[-1:], (1, *shape(added)[-1:])) and bias is None:
            node, bias, direct = scores, other, None
    scores = origin(node, detached=True)
    if is_op(scores, *SCORES) and scores not in _scores(scores.graph):
        return None
    lowest = operand(filled, 2) if limited else -math.inf
    # Softmax and sigmoid are above 0, so without a bias 0 is as good as -inf.
    if lowest != -math.inf and (lowest != 0 or bias is not None or not is_op(scores, *SCORES)):
        return f"{name_of(filled)}: scores outside the best groups become {lowest}, not -inf"
    if not is_op(scores, *SCORES) and (bias is not None or limited):
        return f"{name_of(scores)}: bias or groups act on what is neither softmax nor sigmoid"
    values = next((user for user in ranking.users if part(user, aten.topk) == 0), None)
    return Choice(expert, scores, ranking, values if direct is scores else None, bias, groups)


def _group_limit(filled: Node) -> tuple[int, int, int] | None:
    outside = origin(operand(filled, 1), casts=True)
    if not is_op(outside, aten.bitwise_not, aten.logical_not):
        return None
    copied = origin(operand(outside), casts=True)
    spread = is_op(copied, aten.expand)  # to all experts of a group; otherwise masked_fill broadcasts
    narrow, wide = (operand(copied), shape(copied)) if spread else (operand(filled, 1), shape(filled))
    mask = origin(narrow, casts=True) if spread else copied
    if not is_op(mask, aten.scatter) or argument(mask, 1, "dim") not in (1, -1) or operand(mask, 3) != 1:
        return None
    top, base = top_of(origin(operand(mask, 2))), constant(operand(mask))
    if top is None or base is None or bool(base.any()):
        return None
    grouped, group_top = _group_score(operand(top[0]))
    if grouped is None or shape(grouped) != wide or shape(narrow) != (*shape(mask), 1):
        return None
    same = origin(grouped, detached=True) is origin(operand(filled), detached=True)
    return (shape(grouped)[1], top[1], group_top) if same else None


def _group_score(node: Node) -> tuple[Node | None, int]:
    # scores [T, G, E / G], and how many of a group's best are summed to its score
    node = origin(node)
    if part(node, aten.max) == 0:
        call = operand(node)
        return (operand(call), 1) if over_last(call) else (None, 1)
    if is_op(node, aten.amax) and over_last(node):
        return operand(node), 1
    if not is_op(node, aten.sum) or not over_last(node):
        return None, 1
    best = operand(node)
    if part(best, aten.topk) == 0:
        return operand(operand(best)), operand(operand(best), 1)
    first = _first_of_sort(best, 0)
    return (operand(first[0]), first[1]) if first is not None else (None, 1)


def weights_of(graph: fx.Graph, choice: Choice) -> Weights | None:
    """Return how the graph computes the chosen experts' routing weights; None if no form matches."""
    node: Node
    for node in graph.nodes:
        if choice.score is not None and node is choice.values:
            return _scaled(_renormalised(Weights(node)))
        if is_op(node, aten._softmax) and shape(node) == shape(choice.expert) and over_last(node):
            of = origin(operand(node))
            if (choice.score is None and of is choice.values) or _gathers(of, choice, origin(choice.logits)):
                return _scaled(Weights(node, softmax_after_topk=True))
        if choice.score is not None and _gathers(node, choice, choice.scores):
            weights = _renormalised(Weights(node))
            if weights.renormalise or origin(operand(node)) is choice.scores:
                return _scaled(weights)
    return None


def _gathers(node: Any, choice: Choice, source: Node) -> bool:
    along = is_op(node, aten.gather) and operand(node, 1) in (1, -1)
    return along and scores_behind(operand(node)) is source and choice.is_expert(operand(node, 2))


def scores_behind(node: Any) -> Any:
    """Return the sigmoid scores behind `ops.router.relative_scores`, else the node's origin."""
    node = origin(node)
    if not is_op(node, aten.where):
        return node
    low, softmax, scores = (origin(each) for each in operands(node))
    highest: Any = origin(operand(low)) if is_op(low, aten.lt) and operand(low, 1) == LOW_LOGIT else None
    over_experts = is_op(highest, aten.amax) and over_last(highest) and over_last(softmax)
    if not over_experts or not is_op(softmax, aten._softmax) or not is_op(scores, aten.sigmoid):
        return node
    logits = {origin(operand(each)) for each in (highest, softmax, scores)}
    return scores if len(logits) == 1 else node


def _renormalised(weights: Weights) -> Weights:
    for user in weights.node.users:
        if is_op(user, aten.div) and not user.kwargs and _is_sum(operand(user, 1), weights.node):
            return replace(weights, node=user, renormalise=True)
    return weights


def _is_sum(node: Any, of: Node) -> bool:
    if is_op(node, aten.add, aten.clamp_min, aten.clamp) and len(node.args) > 1:
        eps = operand(node, 1)
        return isinstance(eps, float) and 0 <= eps <= LARGEST_EPS and _is_sum(operand(node), of)
    return is_op(node, aten.sum) and operand(node) is of and over_last(node) and shape(node)[-1] == 1


def _scaled(weights: Weights) -> Weights:
    while len(weights.node.users) == 1:
        user = next(iter(weights.node.users))
        factor = operand(user, 1) if is_op(user, aten.mul) else None
        if not isinstance(factor, (int, float)) or dtype(user) != torch.float32:
            break
        weights = replace(weights, node=user, scale=weights.scale * factor)
    return weights
