"""fuse_router: scores, choice of experts, weights, counts and the sums behind the losses as one operation.

Suffixes: B sequences, T tokens, E experts, K slots of a token.

The arithmetic on [B, E] and scalars that makes losses of the sums stays in the graph. Experts with equal
scores may be chosen in another order than before: the operation takes the lower id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.fx import Node

import graphmoe.ops.fused_router  # noqa: F401  # registers the operation
from graphmoe.passes.base import Rewrites
from graphmoe.passes.matching import aten, calls, dtype, escape, is_cast, name_of, operand, shape
from graphmoe.passes.replacing import cast, first_of, put, put_parts, restore_order, viewed
from graphmoe.passes.router_choice import SCORES, Choice, Weights, choices, weights_of
from graphmoe.passes.router_sums import Sum, counts_of, sums_of

ops = torch.ops.graphmoe


def fuse_router(graph: fx.Graph) -> Rewrites:
    """Put `router` in place of what it does."""
    matches, left = 0, []
    found = list(choices(graph))
    choosing = [each for each in found if isinstance(each, Choice)]
    routers = [each for each in choosing if weights_of(graph, each) is not None]
    for choice in found:
        if choice not in routers and choice in _counted_by(routers, choosing):
            continue  # a part of that router
        reason = choice if isinstance(choice, str) else _replace(graph, choice, choosing)
        matches += reason is None
        if reason:
            left.append(reason)
    if matches:
        restore_order(graph)
    absent = f"{len(calls(graph, *SCORES))} softmax or sigmoid, none that experts are chosen and weighted by"
    return Rewrites(matches, tuple(left), absent)


def _counted_by(routers: Sequence[Choice], choosing: Sequence[Choice]) -> list[Choice]:
    """Choices by the scores alone, which the balance loss of a router with a bias counts."""
    return [each for each in choosing if any(each.is_best_of(router) for router in routers)]


def _replace(graph: fx.Graph, choice: Choice, choosing: Sequence[Choice]) -> str | None:
    """Replace one router; "" where it is none after all, a reason where it cannot be replaced."""
    weights, scores = weights_of(graph, choice), choice.scores
    if weights is None:
        weighed = any(choice.is_expert(operand(node, 2)) for node in calls(graph, aten.gather))
        if choice.score is None:
            return (
                f"{name_of(scores)}: experts are chosen by what is neither softmax nor sigmoid"
                if weighed
                else ""
            )
        return f"{name_of(choice.expert)}: no weights are gathered by these ids"
    for node in (scores if choice.score else weights.node, weights.node):
        if dtype(node) != torch.float32:
            return f"{name_of(node)} is {dtype(node)}, not torch.float32"
    counted = next((each for each in _counted_by([choice], choosing) if any(counts_of(graph, each))), choice)
    sums = list(sums_of(graph, choice, counted))
    num_sequences = max([s.sequences for s in sums if s.sequences is not None], default=1)
    sums = [s for s in sums if s.sequences in (None, num_sequences)]
    roots = [weights.node, *(s.node for s in sums), *([choice.expert] if choice.ranking else [])]
    reader = _other_reader(choice, roots)
    if reader is not None:
        return f"{name_of(scores)}: scores are also read by {name_of(reader)}"
    _emit(choice, weights, sums, num_sequences, roots, count_scores=counted is not choice)
    return None


def _other_reader(choice: Choice, roots: Sequence[Node]) -> Node | None:
    """Name the nodes that still read a result between logits and ``roots`` when those are replaced."""
    if choice.score is not None:
        return escape(choice.scores, roots)
    results = list(choice.ranking.users) if choice.ranking else []
    return next((reader for each in results if each not in roots and (reader := escape(each, roots))), None)


def _emit(
    choice: Choice,
    weights: Weights,
    sums: Sequence[Sum],
    num_sequences: int,
    roots: Sequence[Node],
    *,
    count_scores: bool,
) -> None:
    first, like = first_of(roots), weights.node
    f32 = torch.float32
    logits = cast(first, viewed(first, choice.logits, choice.num_tokens, choice.num_experts), f32)
    bias = choice.bias
    if bias is not None:
        bias = cast(first, viewed(first, bias, choice.num_experts), f32)
    chosen = None if choice.ranking else cast(first, choice.expert, torch.int32)
    options = (
        *(num_sequences, shape(choice.expert)[1], choice.score or "softmax", *choice.groups),
        *(weights.renormalise, weights.softmax_after_topk, weights.scale, count_scores),
    )
    results = put_parts(first, ops.router.default, logits, bias, chosen, *options, like=like)
    weight, expert, *totals = results
    weights.node.replace_all_uses_with(viewed(like, weight, *shape(like)))
    if choice.ranking:
        _replace_ids(choice.expert, expert)
    by_name = dict(zip(("counts", "share", "z", "entropy"), totals, strict=True))
    for each in sums:
        result = by_name[each.result]
        if each.result == "share" and each.sequences is None:
            result = put(each.node, aten.sum.dim_IntList, result, [0])
        if each.factor != 1.0:
            result = put(each.node, aten.mul.Tensor, result, each.factor)
        new = cast(each.node, viewed(each.node, result, *shape(each.node)), dtype(each.node))
        each.node.replace_all_uses_with(new)


def _replace_ids(old: Node, expert: Node) -> None:
    """Readers of the ids as int32 get them as they are."""
    for user in list(old.users):
        if is_cast(user) and dtype(user) == torch.int32:
            user.replace_all_uses_with(expert)
    old.replace_all_uses_with(cast(old, expert, dtype(old)))
