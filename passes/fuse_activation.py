"""fuse_activation: silu(gate) * up, times the row's routing weight, as one operation.

Suffixes: R rows, F expert width, H = 2 * F (gate, then up).

The pass matches only between two grouped GEMMs, whose offsets tell which rows are valid; Inductor fuses the
dense MLP and the shared experts. The product is computed in fp32 and rounded once.
"""

import torch
from torch import fx
from torch.fx import Node

import graphmoe.ops.grouped_mm
import graphmoe.ops.swiglu  # noqa: F401  # registers the operation
from graphmoe.passes.base import Rewrites, rewrite
from graphmoe.passes.matching import (
    SAME_ELEMENTS,
    aten,
    calls,
    cast,
    dtype,
    half,
    is_cast,
    is_float,
    is_op,
    name_of,
    only_user,
    operand,
    operand_pairs,
    origin,
    put,
    shape,
    value,
)

ops = torch.ops.graphmoe


def fuse_activation(graph: fx.Graph) -> Rewrites:
    """Replace silu(gate) * up [* weight] between grouped GEMMs by `swiglu`."""
    silus, own = calls(graph, aten.silu), calls(graph, ops.swiglu)
    absent = f"{len(silus)} silu, none of a half of a grouped product"
    found = rewrite(_replace, ((s,) for s in silus), "the model calls swiglu" if own else absent)
    return found._replace(expected=not own)


def _replace(silu: Node) -> str | None:
    gate = half(origin(operand(silu)))
    if gate is None or not is_op(origin(gate[0]), ops.grouped_mm):
        return ""
    h, which = origin(gate[0]), gate[1]
    product, factors = _product(silu, shape(silu))
    halves = {f: found[1] for f in factors if (found := half(origin(f))) and origin(found[0]) is h}
    others = [f for f in factors if f not in halves]
    if list(halves.values()) != [1 - which]:
        if only_user(product) is None:
            return f"{name_of(product)} has {len(product.users)} users, up not yet among its factors"
        return f"it is not multiplied with the other half of {name_of(h)}"
    if which == 1:
        return "the halves are swapped: the first must be the gate"
    if len(others) > 1 or any(shape(f) != (shape(h)[0], 1) or not is_float(f) for f in others):
        return f"beside up, the product has {', '.join(map(name_of, others))}, not one weight for each row"
    reader = only_user(product)
    if reader is None:
        return f"{name_of(product)} has {len(product.users)} users"
    if not is_op(reader, ops.grouped_mm):
        return f"{name_of(reader)} reads the product, not a grouped product"
    if dtype(product) != dtype(h) or shape(product) != shape(silu):
        given, wanted = dtype(product), dtype(h)
        return f"the product is {given} {list(shape(product))}, not {wanted} {list(shape(silu))}"
    weight = None
    if others:
        weight = cast(reader, others[0], torch.promote_types(value(h).dtype, torch.float32))
    new = put(reader, ops.swiglu.default, h, weight, operand(reader, 2), like=product)
    product.replace_all_uses_with(new)
    return None


def _product(silu: Node, sizes: tuple[int, ...]) -> tuple[Node, list[Node]]:
    node, factors = silu, list[Node]()
    while (user := only_user(node)) is not None:
        if is_op(user, aten.mul):
            pairs = [other for one, other in operand_pairs(user) if one is node]
            if not pairs:
                break
            factors += _factors(pairs[0], sizes)
        elif not is_op(user, *SAME_ELEMENTS) and not is_cast(user):
            break
        node = user
    return node, factors


def _factors(node: Node, sizes: tuple[int, ...]) -> list[Node]:
    product = origin(node, casts=True)
    if is_op(product, aten.mul) and shape(product) == sizes and only_user(product) is not None:
        return [each for one, _ in operand_pairs(product) for each in _factors(one, sizes)] or [node]
    return [node]
