"""Sums over tokens that a router's losses and statistics are made of, read from the graph.

Suffixes: B sequences, T tokens, E experts, K slots of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from torch import fx
from torch.fx import Node

from graphmoe.passes.matching import (
    Op,
    Var,
    argument,
    aten,
    axes,
    calls,
    constant,
    is_op,
    match,
    only_user,
    operand,
    operand_pairs,
    origin,
    over_last,
    shape,
)
from graphmoe.passes.router_choice import Choice
from graphmoe.passes.routing import adds_ones

LARGEST_FLOOR = 1e-8
"""A share below this adds nothing to an fp32 entropy, whatever its logarithm is taken to be."""


def _keeps_axis(node: Node) -> bool:
    return over_last(node) and bool(argument(node, 2, "keepdim", False))


def _is_floor(node: Node) -> bool:
    floor = argument(node, 1, "min")
    return isinstance(floor, float) and 0 <= floor <= LARGEST_FLOOR


SHARE = Op(aten.div, (Var("scores"), Op(aten.sum, (Var("scores"),), where=_keeps_axis)))
LOGSUMEXP = Op(aten.logsumexp, (Var("logits"),), where=over_last)
SQUARES = (Op(aten.pow, (LOGSUMEXP, 2)), Op(aten.mul, (LOGSUMEXP, LOGSUMEXP)))
FLOORED = Op((aten.clamp_min, aten.clamp, aten.add), (Var("share"),), where=_is_floor)
ENTROPIES = tuple(
    Op(aten.sum, (Op(aten.mul, (Var("share"), Op(aten.log, (share,)))),), where=over_last)
    for share in (FLOORED, Var("share"))
)


class Sum(NamedTuple):
    """One sum in the graph: ``node`` is ``factor`` times the router operation's result, in its shape."""

    node: Node
    result: Literal["counts", "share", "z", "entropy"]
    factor: float
    sequences: int | None
    """B where the sum is one for each sequence."""


def sums_of(graph: fx.Graph, choice: Choice, counted: Choice) -> Iterator[Sum]:
    """The sums over this router's tokens; slots are those of the experts that are ``counted``."""
    yield from counts_of(graph, counted)
    for node in calls(graph, aten.sum, aten.mean):
        found = _share(node, choice) or _squares(node, choice) or _entropy(node, choice)
        if found is not None:
            yield found


def counts_of(graph: fx.Graph, choice: Choice) -> Iterator[Sum]:
    """The slots of these experts in each sequence."""
    for node in calls(graph, aten.scatter_add):
        if (sequences := _counted_sequences(node, choice)) is not None:
            yield Sum(node, "counts", 1.0, sequences)


def _counted_sequences(node: Node, choice: Choice) -> int | None:
    """B where this counts the slots of B sequences, one flat axis of B * E bins."""
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
    """Return whether a node holds the scores of each token divided by their sum; softmax scores are that."""
    found = match(SHARE, node)
    if found is not None:
        return found["scores"] is choice.scores and shape(origin(node))[-1] == choice.num_experts
    return choice.score == "softmax" and origin(node) is choice.scores


def _share(node: Node, choice: Choice) -> Sum | None:
    sizes, over = shape(operand(node)), axes(node)
    per_sequence = len(sizes) == 3 and over == (1,)
    over_tokens = per_sequence or over == tuple(range(len(sizes) - 1))
    if not over_tokens or sizes[-1:] != (choice.num_experts,) or not _is_share(operand(node), choice):
        return None
    factor = math.prod(shape(node)) / math.prod(sizes) if is_op(node, aten.mean) else 1.0
    return Sum(node, "share", factor, sizes[0] if per_sequence else None)


def _squares(node: Node, choice: Choice) -> Sum | None:
    if shape(node) != () or math.prod(shape(operand(node))) != choice.num_tokens:
        return None
    for pattern in SQUARES:
        found = match(pattern, operand(node))
        if found is not None and found["logits"] is origin(choice.logits):
            return Sum(node, "z", _mean_factor(node, choice), None)
    return None


def _entropy(node: Node, choice: Choice) -> Sum | None:
    if shape(node) != () or math.prod(shape(operand(node))) != choice.num_tokens:
        return None
    total, sign = origin(operand(node)), -1.0
    if is_op(total, aten.neg):
        total, sign = origin(operand(total)), 1.0
    for pattern in ENTROPIES:
        found = match(pattern, total)
        if found is not None and _is_share(found["share"], choice):
            factor, user = sign * _mean_factor(node, choice), only_user(node)
            negated = user is not None and is_op(user, aten.neg)
            return Sum(user if negated and user else node, "entropy", -factor if negated else factor, None)
    return None


def _mean_factor(node: Node, choice: Choice) -> float:
    return 1 / choice.num_tokens if is_op(node, aten.mean) else 1.0
