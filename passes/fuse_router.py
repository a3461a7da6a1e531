"""fuse_router: scores, expert choice, weights, counts and the sums of the losses as one operation.

Suffixes: B sequences, T tokens, E experts, K slots of a token.

The loss arithmetic on [B, E] and scalars stays in the graph. Of experts with equal scores the operation
chooses the lower id.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import fx
from torch.fx import Node

import graphmoe.ops.router  # noqa: F401  # registers the operation
from graphmoe.passes.base import Rewrites
from graphmoe.passes.fuse_permutation import adds_ones
from graphmoe.passes.matching import (
    argument,
    aten,
    axes,
    calls,
    cast,
    constant,
    dtype,
    escape,
    first_of,
    is_cast,
    is_op,
    name_of,
    only_user,
    operand,
    operand_pairs,
    operands,
    origin,
    over_last,
    put,
    put_parts,
    restore_order,
    shape,
    viewed,
)
from graphmoe.passes.router_choice import SCORES, Choice, Weights, choices, scores_behind, weights_of

ops = torch.ops.graphmoe
LARGEST_FLOOR = 1e-8  # a share below this adds nothing to an fp32 entropy


def fuse_router(graph: fx.Graph) -> Rewrites:
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
    return [each for each in choosing if any(each.is_best_of(router) for router in routers)]


def _replace(graph: fx.Graph, choice: Choice, choosing: Sequence[Choice]) -> str | None:
    weights, scores = weights_of(graph, choice), choice.scores
    if weights is None:
        weighed = any(choice.is_expert(operand(node, 2)) for node in calls(graph, aten.gather))
        # "" for other scores: this is not a router
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
    chosen = choice.given if choice.ranking else choice.expert
    chosen = None if chosen is None else cast(first, chosen, torch.int32)
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
    for user in list(old.users):
        if is_cast(user) and dtype(user) == torch.int32:
            user.replace_all_uses_with(expert)
    old.replace_all_uses_with(cast(old, expert, dtype(old)))


# Sums over tokens that the losses and statistics are made of.


class Sum(NamedTuple):
    """A sum in the graph: ``node`` is ``factor`` times a result of the fused operation, reshaped."""

    node: Node
    result: Literal["counts", "share", "z", "entropy"]
    factor: float
    sequences: int | None  # B if the sum is per sequence


def sums_of(graph: fx.Graph, choice: Choice, counted: Choice) -> Iterator[Sum]:
    """Yield sums over tokens that losses and loads read; loads count the experts of ``counted``."""
    yield from counts_of(graph, counted)
    for node in calls(graph, aten.sum, aten.mean):
        found = _share(node, choice) or _squares(node, choice) or _entropy(node, choice)
        if found is not None:
            yield found


def counts_of(graph: fx.Graph, choice: Choice) -> Iterator[Sum]:
    """Yield the sums that count tokens per sequence and expert by this choice."""
    for node in calls(graph, aten.scatter_add):
        if (sequences := _counted_sequences(node, choice)) is not None:
            yield Sum(node, "counts", 1.0, sequences)


def _counted_sequences(node: Node, choice: Choice) -> int | None:
    if len(shape(node)) != 1 or not is_op(origin(operand(node, 2)), aten.add) or not adds_ones(node):
        return None
    num_experts = choice.num_experts
    sequences = shape(node)[0] // num_experts
    for ids, offsets in operand_pairs(origin(operand(node, 2))):
        first = constant(offsets)
        if first is None or not choice.is_expert(ids) or shape(ids) != (sequences, shape(ids)[-1]):
            continue
        if first.tolist() == [[num_experts * i] for i in range(sequences)]:
            return sequences
    return None


def _is_share(node: Any, choice: Choice) -> bool:
    node = origin(node)
    # scores divided by their sum over experts, which softmax scores are already
    if choice.score == "softmax" and node is choice.scores:
        return True
    if not is_op(node, aten.div) or shape(node)[-1] != choice.num_experts:
        return False
    scores, total = origin(operand(node)), origin(operand(node, 1))
    of_token = is_op(total, aten.sum) and over_last(total) and bool(argument(total, 2, "keepdim", False))
    return of_token and origin(operand(total)) is scores and scores_behind(scores) is choice.scores


def _share(node: Node, choice: Choice) -> Sum | None:
    sizes, over = shape(operand(node)), axes(node)
    per_sequence = len(sizes) == 3 and over == (1,)
    over_tokens = per_sequence or over == tuple(range(len(sizes) - 1))
    if not over_tokens or sizes[-1:] != (choice.num_experts,) or not _is_share(operand(node), choice):
        return None
    factor = math.prod(shape(node)) / math.prod(sizes) if is_op(node, aten.mean) else 1.0
    return Sum(node, "share", factor, sizes[0] if per_sequence else None)


def _squares(node: Node, choice: Choice) -> Sum | None:
    square = origin(operand(node))
    if shape(node) != () or math.prod(shape(operand(node))) != choice.num_tokens:
        return None
    if not is_op(square, aten.mul) and not (is_op(square, aten.pow) and operand(square, 1) == 2):
        return None
    for each in operands(square)[: 2 if is_op(square, aten.mul) else 1]:
        factor = origin(each)
        if not is_op(factor, aten.logsumexp) or not over_last(factor):
            return None
        if origin(operand(factor)) is not origin(choice.logits):
            return None
    return Sum(node, "z", _mean_factor(node, choice), None)


def _entropy(node: Node, choice: Choice) -> Sum | None:
    if shape(node) != () or math.prod(shape(operand(node))) != choice.num_tokens:
        return None
    total, sign = origin(operand(node)), -1.0
    if is_op(total, aten.neg):
        total, sign = origin(operand(total)), 1.0
    product: Any = origin(operand(total)) if is_op(total, aten.sum) and over_last(total) else None
    for share, log in operand_pairs(product) if is_op(product, aten.mul) else []:
        if _is_log_of(log, share) and _is_share(share, choice):
            factor, user = sign * _mean_factor(node, choice), only_user(node)
            negated = user is not None and is_op(user, aten.neg)
            return Sum(user if negated and user else node, "entropy", -factor if negated else factor, None)
    return None


def _is_log_of(node: Node, share: Node) -> bool:
    log = origin(node)
    if not is_op(log, aten.log):
        return False
    inner = origin(operand(log))
    if is_op(inner, aten.clamp_min, aten.clamp, aten.add):
        floor = argument(inner, 1, "min")
        if isinstance(floor, float) and 0 <= floor <= LARGEST_FLOOR:
            inner = origin(operand(inner))
    return inner is origin(share)


def _mean_factor(node: Node, choice: Choice) -> float:
    return 1 / choice.num_tokens if is_op(node, aten.mean) else 1.0
