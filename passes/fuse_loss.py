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
    """Replace head, log-softmax and nll_loss, or `blocks.cross_entropy_sum`, by `linear_cross_entropy`."""
    absent = f"{len(calls(graph, aten._log_softmax))} log_softmax, and no nll_loss behind one"
    of_ranks = [(total,) for total in calls(graph, aten.sum) if _logarithm(total) is not None]
    if of_ranks:
        return rewrite(_replace_of_ranks, of_ranks, absent)
    return rewrite(_replace, [(nll,) for nll in calls(graph, aten.nll_loss_forward)], absent)


def _logarithm(total: Node) -> Node | None:
    """Return log(sums of exponentials over ranks), if a sum of log(...) - ... of labels is taken."""
    if not is_op(masked := operand(total), aten.masked_fill) or not is_op(operand(masked, 1), aten.eq):
        return None
    log = operand(difference) if is_op(difference := operand(masked), aten.sub) else None
    if not is_op(log, aten.log) or not is_op(operand(log), aten.select):
        return None
    return log if is_op(operand(operand(log)), ops.all_reduce) else None


def _replace_of_ranks(total: Node) -> str | None:
    labels, ignored = operands(operand(operand(total), 1))
    of_ranks, subtracted = operand(operand(_logarithm(total))), operand(operand(operand(total)), 1)
    sums, axis, _ = operands(of_ranks)
    first, second = operand(sums) if is_op(sums, aten.stack) and len(operand(sums)) == 2 else (None, None)
    exponentials = operand(first) if is_op(first, aten.sum) else None
    if not is_op(exponentials, aten.exp) or not is_op(shifted := operand(exponentials), aten.sub):
        return f"{name_of(sums)} is not a sum of exponentials beside the label's logit"
    at_label = origin(operand(second)) if is_op(second, aten.masked_fill) else None
    of_label = is_op(at_label, aten.gather) and operand(at_label) is shifted
    if not of_label or not is_op(subtracted, aten.select) or operand(subtracted) is not of_ranks:
        return f"{name_of(sums)} is not reduced for the loss of the label's logit"
    head = _head(operand(shifted), total, dtype(shifted))
    if isinstance(head, str):
        return head
    arguments = *head, labels, ignored, not _is_frozen(head[1]), axis
    total.replace_all_uses_with(put_parts(total, ops.linear_cross_entropy.default, *arguments, like=total)[0])
    return None


def _is_frozen(weight: Node) -> bool:
    return bool(origin(weight).meta.get("frozen", False))


def _loss(nll: Node) -> tuple[Node, Node, Node] | str:
    log_probs, labels, weight, reduction = operands(nll)[:4]
    if weight is not None or reduction not in (MEAN, SUM):
        return "classes are weighted" if weight is not None else "losses are not reduced"
    log_softmax = origin(log_probs)
    if not is_op(log_softmax, aten._log_softmax) or not over_last(log_softmax):
        return f"{name_of(log_softmax)} is not a log_softmax over the vocabulary"
    head = _head(operand(log_softmax), nll, dtype(log_softmax))
    if isinstance(head, str):
        return head
    logits, last, probabilities = map(shape, (origin(operand(log_softmax)), log_softmax, log_probs))
    if not logits[-1] == last[-1] == probabilities[-1]:
        return f"{list(logits)} logits become {list(last)}, {list(probabilities)}"
    return *head, labels


def _head(scores: Node, loss: Node, kind: torch.dtype | None) -> tuple[Node, Node] | str:
    """Return hidden states and weight of the head that made the scores of a loss."""
    if kind != torch.float32:
        return f"the loss is computed in {kind}, not torch.float32"
    logits = origin(scores)
    if is_op(logits, aten.addmm):
        return f"the head has a bias ({name_of(logits)})"
    if not is_op(logits, aten.mm):
        return f"logits are computed by {name_of(logits)}, not by a head"
    reader = escape(logits, [loss])
    if reader is not None:
        return f"the logits are also read by {name_of(reader)}"
    transposed = operand(logits, 1)
    if not is_op(transposed, aten.t, aten.transpose, aten.permute):
        return f"the head {name_of(transposed)} is stored as [D, V]"
    return operand(logits), operand(transposed)


def _replace(nll: Node) -> str | None:
    loss = _loss(nll)
    if isinstance(loss, str):
        return loss
    arguments = (*loss, argument(nll, 4, "ignore_index"), *[False] * _is_frozen(loss[1]))
    total, count, _, _ = put_parts(nll, ops.linear_cross_entropy.default, *arguments, like=nll)
    for result in list(nll.users):
        if part(result, aten.nll_loss_forward) == 1:  # the number of kept labels, as a float
            result.replace_all_uses_with(cast(result, count, dtype(result)))
        elif operand(nll, 3) == SUM:
            result.replace_all_uses_with(total)
        else:
            result.replace_all_uses_with(put(result, aten.div.Tensor, total, count))
    return None
