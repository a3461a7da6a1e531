"""fuse_loss: linear head and cross-entropy as one operation, which never stores all logits.

Suffixes: T tokens, V vocabulary, D hidden.

The forward computes the gradients of hidden states and head. Labels are not shifted here.
"""

import torch
from torch import fx
from torch.fx import Node

import graphmoe.ops.collectives
import graphmoe.ops.linear_cross_entropy  # noqa: F401  # registers the operation
from graphmoe.passes.base import Rewrites, rewrite
from graphmoe.passes.matching import (
    argument,
    aten,
    calls,
    cast,
    dtype,
    escape,
    is_op,
    name_of,
    operand,
    operands,
    origin,
    over_last,
    part,
    put,
    put_parts,
    shape,
)

ops = torch.ops.graphmoe
MEAN, SUM = 1, 2  # reductions of nll_loss; 0 is none


def fuse_loss(graph: fx.Graph) -> Rewrites:
    """Replace head, log-softmax and nll_loss by `linear_cross_entropy`."""
    absent = f"{len(calls(graph, aten._log_softmax))} log_softmax, and no nll_loss behind one"
    losses = [(nll,) for nll in calls(graph, aten.nll_loss_forward)]
    if not losses and calls(graph, ops.all_reduce):
        absent = "ranks share the vocabulary: each sums over its part of the logits, and they add their sums"
        return Rewrites(0, (), absent, expected=False)
    return rewrite(_replace, losses, absent)


def _loss(nll: Node) -> tuple[Node, Node, Node] | str:
    log_probs, labels, weight, reduction = operands(nll)[:4]
    if weight is not None or reduction not in (MEAN, SUM):
        return "classes are weighted" if weight is not None else "losses are not reduced"
    log_softmax = origin(log_probs)
    if not is_op(log_softmax, aten._log_softmax) or not over_last(log_softmax):
        return f"{name_of(log_softmax)} is not a log_softmax over the vocabulary"
    if dtype(log_softmax) != torch.float32:
        return f"the loss is computed in {dtype(log_softmax)}, not torch.float32"
    logits = origin(operand(log_softmax))
    if is_op(logits, aten.addmm):
        return f"the head has a bias ({name_of(logits)})"
    if not is_op(logits, aten.mm):
        return f"logits are computed by {name_of(logits)}, not by a head"
    reader = escape(logits, [nll])
    if reader is not None:
        return f"the logits are also read by {name_of(reader)}"
    transposed = operand(logits, 1)
    if not is_op(transposed, aten.t, aten.transpose, aten.permute):
        return f"the head {name_of(transposed)} is stored as [D, V]"
    if not shape(logits)[-1] == shape(log_softmax)[-1] == shape(log_probs)[-1]:
        return f"{list(shape(logits))} logits become {list(shape(log_softmax))}, {list(shape(log_probs))}"
    return operand(logits), operand(transposed), labels


def _replace(nll: Node) -> str | None:
    loss = _loss(nll)
    if isinstance(loss, str):
        return loss
    is_frozen = origin(loss[1]).meta.get("frozen", False)
    arguments = (*loss, argument(nll, 4, "ignore_index"), *[False] * is_frozen)
    total, count, _, _ = put_parts(nll, ops.linear_cross_entropy.default, *arguments, like=nll)
    for result in list(nll.users):
        if part(result, aten.nll_loss_forward) == 1:  # the number of kept labels, as a float
            result.replace_all_uses_with(cast(result, count, dtype(result)))
        elif operand(nll, 3) == SUM:
            result.replace_all_uses_with(total)
        else:
            result.replace_all_uses_with(put(result, aten.div.Tensor, total, count))
    return None
