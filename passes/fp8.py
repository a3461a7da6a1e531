"""fp8_linear, fp8_experts and fp8_quantise: fp8 GEMMs, and the quantization of their operands.

The first two passes replace GEMMs by the differentiable `fp8_linear` and `fp8_mlp`. The last decomposes
these, so that Inductor fuses each quantization with the operand's producer, unless that is a cat, and an
operand of two GEMMs is quantized once.

Suffixes: R rows, N outputs, K inputs of the weight.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from graphmoe.config.formats import FORMATS
from graphmoe.config.schema import ConfigError
from graphmoe.ops.formats import KERNELS, linear, linear_dgrad, linear_wgrad
from graphmoe.ops.fp8_mlp import mlp, mlp_gradients
from graphmoe.ops.symm import combine_grad_stored, dispatch_stored
from graphmoe.passes.base import Rewrites, rewrite
from graphmoe.passes.matching import (
    SAME_ELEMENTS,
    argument,
    aten,
    calls,
    dtype,
    is_op,
    name_of,
    operand,
    operands,
    origin,
    put,
    put_graph,
    shape,
    value,
)

ops = torch.ops.graphmoe
"""Operations; ``runtime.compile.code`` imports ``graphmoe.ops.fp8_mlp``, which registers some."""
SPELT: dict[Any, Any] = {
    ops.fp8_linear: linear,
    ops.fp8_linear_dgrad: linear_dgrad,
    ops.fp8_linear_wgrad: linear_wgrad,
}
SENT: dict[Any, Any] = {ops.symm_dispatch: dispatch_stored, ops.symm_combine_grad: combine_grad_stored}
"""Functions that send tokens, or the gradients of combine, in fp8, by the operation that they replace."""
MOVED = (*SAME_ELEMENTS, aten.permute, aten.transpose, aten.t, aten._to_copy)
"""Operations that may lie between a cat and an operand, besides elementwise ones."""
X_AT = {mlp: 0, mlp_gradients: 3}
"""Position of x among each function's tensors; the layer's others follow, row_TK as the fifth."""
DENSE = ("attn", "mlp", "shared_experts")


def fp8_linear(
    graph: fx.Graph,
    *,
    products: Sequence[str] = DENSE,
    recipe: str = "rowwise",
    wgrad: str = "fp8",
    plain: Sequence[Sequence[int]] = (),
) -> Rewrites:
    """Replace the GEMMs of some segments or parts by `fp8_linear`, except for weights of ``plain`` shapes."""
    found = [(call, products, recipe, wgrad, plain) for call in calls(graph, aten.mm)]
    return rewrite(_replace, found, f"{len(found)} matrix products, none in {', '.join(products)}")


def _replace(
    call: Node, products: Sequence[str], recipe: str, wgrad: str, plain: Sequence[Sequence[int]]
) -> str | None:
    where = call.meta.get("custom", {})
    if not {where.get("part"), where.get("segment")} & {*products}:
        return ""
    x, turned = operands(call)
    if not is_op(turned, aten.t) or operand(turned).op != "placeholder":
        return "its second factor is not a weight"
    weight = operand(turned)
    aligned = FORMATS[recipe].aligned
    uneven = [size for size in shape(weight) if size % aligned]
    if uneven:
        return f"{uneven[0]} of its weight {list(shape(weight))} is not a multiple of {aligned}"
    if [*shape(weight)] in [[*each] for each in plain]:
        return f"its weight {list(shape(weight))} is no faster in fp8 (precision.fp8_measure)"
    call.replace_all_uses_with(put(call, ops.fp8_linear.default, x, weight, wgrad, recipe))
    return None


def fp8_experts(graph: fx.Graph, *, recipe: str = "rowwise", vendor: str | None = None) -> Rewrites:
    """Replace each `grouped_mlp` by `fp8_mlp`, or with a ``vendor`` make it run the vendor's fp8 GEMMs."""
    found = [(call, recipe, vendor) for call in calls(graph, ops.grouped_mlp)]
    return rewrite(_replace_experts, found, "no experts that fuse_experts has fused")


def _replace_experts(call: Node, recipe: str, vendor: str | None) -> str | None:
    (*layer, _), rest, aligned = operands(call)[:8], operands(call)[8:], FORMATS[recipe].aligned
    uneven = [size for weight in layer[1:3] for size in shape(weight)[1:] if size % aligned]
    if uneven:
        return f"{uneven[0]} of its weights {list(shape(layer[1]))} is not a multiple of {aligned}"
    if vendor is not None:
        call.args = (*layer, f"{vendor}.{recipe}", *rest)
        return None
    y = next((piece for piece in call.users if piece.args[1] == 0), None)
    if y is None or len(call.users) > 1:
        return "more than the sum of its experts is read"
    y.replace_all_uses_with(put(call, ops.fp8_mlp.default, *layer, recipe, *rest[:1], *rest[3:], like=y))
    return None


def fp8_quantise(graph: fx.Graph, *, dispatched: bool = False, has_room: bool = False) -> Rewrites:
    """Decompose each `fp8_linear` and `fp8_mlp`, and their gradients, into quantizations and scaled GEMMs.

    ``dispatched``: dispatch and combine's gradient send quantized rows. ``has_room``: the experts' input has
    more rows than were received; the last ones are uninitialized.
    """
    # duplicate quantizations stay until the joint graph is partitioned, which merges equal operations
    # (torch/_functorch/partitioners.py: config.cse)
    found, stored = calls(graph, *SPELT, ops.fp8_mlp, ops.fp8_mlp_grad), dict[tuple[Node, ...], Any]()
    sent = calls(graph, *SENT) if dispatched else []
    if dispatched:
        _check_readers(graph, found)
    for call in sent:
        _put_results(call, _spelt(call, SENT))
    for call in found:
        given = [each for each in operands(call) if isinstance(each, Node)]
        recipe = next(each for each in operands(call) if each in FORMATS)
        words = {"recipe": recipe, "carries": dispatched}
        if is_op(call, ops.fp8_mlp, ops.fp8_mlp_grad):
            at = 9 + is_op(call, ops.fp8_mlp_grad)
            words |= {
                "biased": argument(call, at, "b_gate_up") is not None,
                "limit": argument(call, at + 1, "limit", 0.0),
            }
        zeros = has_room and FORMATS[recipe].is_delayed
        if is_op(call, ops.fp8_mlp):
            y, *h = put_graph(call, functools.partial(_experts, mlp, zeros, words), *given)
            stored[tuple(given)] = tuple(h)
            call.replace_all_uses_with(y)
        elif is_op(call, ops.fp8_mlp_grad):
            dy, *layer = given
            gradients = functools.partial(_experts, mlp_gradients, zeros, words)
            _put_results(call, put_graph(call, gradients, dy, *stored[tuple(layer)], *layer))
        else:
            _put_results(call, _spelt(call, SPELT))
    forms = [each.weight for each in KERNELS.values()]
    for operation, plain in [(getattr(ops, form.name), form.plain) for form in forms if form.plain]:
        for call in calls(graph, operation):
            x = operand(call)
            if x.op != "placeholder" and not _is_over_cat(x):
                _put_results(call, put_graph(call, plain, x))
    _share_scales(graph)
    return Rewrites(len(found) + len(sent), absent="no fp8 GEMM")


def _experts(
    run: Callable[..., tuple[Tensor, ...]], zeros: bool, words: Mapping[str, Any], *tensors: Tensor
) -> tuple[Tensor, ...]:
    # padding rows contribute to no GEMM, but would to the largest number of a tensor
    if zeros:
        is_token = (tensors[X_AT[run] + 5] >= 0).any(1, keepdim=True)
        tensors = tuple(x.where(is_token, 0) if i in (0, X_AT[run]) else x for i, x in enumerate(tensors))
    return run(*tensors, **words)


def _is_over_cat(x: Node) -> bool:
    """Return whether ``x`` is a cat behind views, permutations and elementwise operations."""
    # Inductor computes such an operand inside the row-maximum loop, all parts masked at each element: 435 us
    # for 16,384 rows of 3072 on an H200, far more than to write and read them.
    todo, seen, size = [x], {x}, math.prod(shape(x))
    while todo:
        node = todo.pop()
        if is_op(node, aten.cat):
            return True
        if is_op(node, *MOVED) or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            todo += [n for n in node.all_input_nodes if n not in seen and math.prod(shape(n)) == size]
            seen.update(todo)
    return False


def _share_scales(graph: fx.Graph) -> None:
    # GEMMs of one input share one delayed scale, so that it is quantized once
    first = dict[Node, Node]()
    for call in calls(graph, ops.fp8_given):
        x, scale, *_ = operands(call)
        own = operand(scale)
        shared = first.setdefault(x, own)
        if own is not shared:
            pieces = {operand(piece, 1): piece for piece in shared.users}
            for piece in list(own.users):
                piece.replace_all_uses_with(pieces[operand(piece, 1)])


def _spelt(call: Node, table: Mapping[Any, Any]) -> tuple[Node, ...]:
    run = table[call.target.overloadpacket]  # type: ignore[union-attr]
    words = [each for each in operands(call) if not isinstance(each, Node)]

    def results(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = run(*tensors, *words)
        return found if isinstance(found, tuple) else (found,)

    return put_graph(call, results, *(each for each in operands(call) if isinstance(each, Node)))


def _put_results(call: Node, results: Sequence[Node]) -> None:
    if isinstance(value(call), Tensor):
        call.replace_all_uses_with(results[0])
        return
    for piece in list(call.users):
        piece.replace_all_uses_with(results[operand(piece, 1)])


def _check_readers(graph: fx.Graph, found: Sequence[Node]) -> None:
    experts = [call for call in found if is_op(call, ops.fp8_mlp, ops.fp8_mlp_grad)]
    has_experts = any(n.meta.get("custom", {}).get("segment") == "moe_experts" for n in graph.nodes)
    if has_experts and not experts:
        raise ConfigError(
            "moe.dispatch_dtype=fp8 sends fp8 rows, but the pass fp8_experts left the experts as they "
            "are; use moe.dispatch_dtype=bf16"
        )
    for call in experts:
        came = origin(operand(call))
        is_carrier = came.op == "placeholder" and dtype(came) == dtype(operand(call))
        assert is_carrier, f"{name_of(came)} is not a dispatched tensor"
