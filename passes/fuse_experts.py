"""fuse_experts: gather, grouped GEMM, SwiGLU, grouped GEMM and weighted sum as one operation.

Suffixes: T tokens, K slots of a token, R rows (T * K), D hidden.

The pass reads what fuse_permutation and fuse_activation made. Routing weights may be in the activation or in
the sum, as the GEMM between is linear. Replica weights (`ops.replicas`) may follow those of experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

import graphmoe.ops.grouped_mlp  # noqa: F401  # registers the operation
from graphmoe.passes.base import Rewrites, rewrite
from graphmoe.passes.matching import (
    argument,
    aten,
    calls,
    cast,
    is_op,
    name_of,
    only_user,
    operand,
    operands,
    origin,
    put,
    put_parts,
    shape,
    value,
    viewed,
)

ops = torch.ops.graphmoe


def fuse_experts(graph: fx.Graph, *, backend: str = "torch", keep: bool = False) -> Rewrites:
    """Replace the chain from `permute` to `unpermute` by `grouped_mlp`.

    ``keep``: replica weights are saved for the backward, which otherwise fetches them again.
    """
    absent = f"{len(calls(graph, ops.grouped_mm))} grouped products, and no unpermute behind one"
    return rewrite(_replace, ((call, backend, keep) for call in calls(graph, ops.unpermute)), absent)


def _replace(unpermute: Node, backend: str, keep: bool) -> str | None:
    found = _experts(unpermute)
    if isinstance(found, str):
        return found
    x, w_gate_up, w_down, weight, *plan, bias, limit = found
    weight = viewed(unpermute, weight, *shape(plan[1]))
    weight = cast(unpermute, weight, torch.promote_types(value(x).dtype, torch.float32))
    (w_gate_up, w_down), replicas = _own_and_replicas(_straight(w_gate_up), _straight(w_down))
    # The operation reduces their gradients to the owner.
    more = [put(unpermute, aten.detach.default, each) for each in replicas[1:]] if keep else []
    replicas = [*replicas[:1], *more]
    rest: list[Any] = [*replicas]
    if bias is not None or limit:
        rest += [*[None] * (3 - len(rest)), bias, limit]
    weights, call = (w_gate_up, w_down, weight), ops.grouped_mlp.default
    y, _ = put_parts(unpermute, call, x, *weights, *plan, backend, *rest, like=unpermute)
    unpermute.replace_all_uses_with(y)
    return None


def hidden_only(graph: fx.Graph) -> None:
    """Replace each `grouped_mlp` whose sum has no readers by `grouped_mlp_hidden`; likewise in fp8."""
    # a recomputing backward needs the first GEMM only
    for call in calls(graph, ops.grouped_mlp, ops.fp8_mlp_forward):
        if any(piece.args[1] == 0 and piece.users for piece in call.users):
            continue
        given, in_fp8 = operands(call), is_op(call, ops.fp8_mlp_forward)
        target = ops.fp8_mlp_hidden.default if in_fp8 else ops.grouped_mlp_hidden.default
        read = (*given[:4], *given[7:12], *given[14:]) if in_fp8 else (*given[:2], *given[4:10])
        hidden = put(call, target, *read)
        hidden.meta = {**call.meta, **hidden.meta}
        for piece in [piece for piece in call.users if piece.args[1]]:
            if in_fp8:
                piece.args = hidden, operand(piece, 1) - 1
            else:
                piece.replace_all_uses_with(hidden)


def _experts(unpermute: Node) -> tuple[Node, ...] | str:
    y, slot, row, ends, weight = operands(unpermute)
    chain = []
    for target in (ops.grouped_mm, ops.swiglu, ops.grouped_mm, ops.permute):
        if not is_op(y, target):
            return f"{name_of(y)} is in place of {target}"
        if only_user(y) is None:
            return f"{name_of(y)} has {len(y.users)} users"
        chain.append(y)
        y = operand(y)
    down, swiglu, up, permute = chain
    if any(operand(node, 2) is not ends for node in (down, swiglu, up)):
        return "the rows of its products end elsewhere"
    if operands(permute)[1:] != (slot, row, ends):
        return f"{name_of(permute)} follows another plan"
    of_rows = operand(swiglu, 1)
    if (weight is None) == (of_rows is None):
        return "the rows have no weights" if weight is None else "the rows are weighted twice"
    if of_rows is not None:
        gather = origin(of_rows)
        found = is_op(gather, ops.permute) and shape(operand(gather, 2))[1] == 1
        if not found or [origin(each) for each in operands(gather)[1:]] != [slot, row, ends]:
            return f"{name_of(of_rows)} is not a gather of the weights by the plan"
        weight = operand(gather)
    clamp = argument(swiglu, 3, "bias_EH"), argument(swiglu, 4, "limit", 0.0)
    return operand(permute), operand(up, 1), operand(down, 1), weight, slot, row, ends, *clamp


def _straight(weight: Node) -> Node:
    inner = operand(weight) if is_op(weight, aten.transpose) else None
    if is_op(inner, aten.transpose) and _swapped(inner) == _swapped(weight):
        return operand(inner)
    return weight


def _own_and_replicas(*weights: Node) -> tuple[Sequence[Node], Sequence[Node]]:
    own, slots, more = list[Node](), list[Node](), list[Node]()
    for weight in weights:
        parts: Sequence[Node] = ()
        if is_op(weight, aten.cat) and argument(weight, 1, "dim", 0) == 0:
            parts = operand(weight)
        if len(parts) == 2 and is_op(parts[1], ops.replica_weights) and operand(parts[1]) is parts[0]:
            own.append(parts[0])
            slots.append(operand(parts[1], 1))
            more.append(parts[1])
    # own weights, the experts in the slots of all ranks, and replica weights
    alike = len(own) == len(weights) and all(each is slots[0] for each in slots)
    return (own, [*slots[:1], *more]) if alike else (weights, ())


def _swapped(transpose: Any) -> set[int]:
    return {axis % 3 for axis in operands(transpose)[1:]}
