"""fp8_linear, fp8_experts and fp8_quantise: products in 8 bits, and what stores the operands as such.

The first two put operations that have gradients of their own, `fp8_linear` and `fp8_mlp`, in place of
products with a weight and of the experts. The last spells out what forward and backward of these consist of,
so that Inductor joins each rounding to 8 bits with whatever makes the operand (a norm, an activation, its
gradient), and two products of one operand share it.

Suffixes: R rows, N outputs, K inputs of the weight.
"""

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.fx import Node

from graphmoe.ops.fp8 import fp8_dtype, quantise
from graphmoe.ops.fp8_linear import ALIGNED, product, row_factors
from graphmoe.passes.base import Rewrites, rewrite
from graphmoe.passes.matching import (
    aten,
    calls,
    dtype,
    is_op,
    operand,
    operands,
    origin,
    put,
    put_graph,
    put_parts,
    shape,
    value,
)

ops = torch.ops.graphmoe
"""Operations; ``runtime.compile.code`` imports ``graphmoe.ops.fp8_mlp``, which registers some."""
DENSE = ("attn", "mlp", "shared_experts")


def fp8_linear(graph: fx.Graph, *, products: Sequence[str] = DENSE, wgrad: str = "fp8") -> Rewrites:
    """Put `fp8_linear` in place of the products of some segments or parts."""
    found = [(call, products, wgrad) for call in calls(graph, aten.mm)]
    return rewrite(_replace, found, f"{len(found)} products of two matrices, none in {', '.join(products)}")


def _replace(call: Node, products: Sequence[str], wgrad: str) -> str | None:
    where = call.meta.get("custom", {})
    if not {where.get("part"), where.get("segment")} & {*products}:
        return ""
    x, turned = operands(call)
    if not is_op(turned, aten.t) or operand(turned).op != "placeholder":
        return "its second factor is no weight"
    weight = operand(turned)
    uneven = [size for size in shape(weight) if size % ALIGNED]
    if uneven:
        return f"{uneven[0]} of its weight {list(shape(weight))} is no multiple of {ALIGNED}"
    call.replace_all_uses_with(put(call, ops.fp8_linear.default, x, weight, wgrad))
    return None


def fp8_experts(graph: fx.Graph) -> Rewrites:
    """Put `fp8_mlp` in place of `grouped_mlp`, whatever kernels that would have."""
    found = calls(graph, ops.grouped_mlp)
    return rewrite(_replace_experts, ((call,) for call in found), "no experts that fuse_experts has joined")


def _replace_experts(call: Node) -> str | None:
    *layer, _ = operands(call)
    uneven = [size for weight in layer[1:3] for size in shape(weight)[1:] if size % ALIGNED]
    if uneven:
        return f"{uneven[0]} of its weights {list(shape(layer[1]))} is no multiple of {ALIGNED}"
    y = next((piece for piece in call.users if piece.args[1] == 0), None)
    if y is None or len(call.users) > 1:
        return "more than the sum of its experts is read"
    y.replace_all_uses_with(put(call, ops.fp8_mlp.default, *layer, like=y))
    return None


def fp8_quantise(graph: fx.Graph) -> Rewrites:
    """Spell out each `fp8_linear` and `fp8_mlp`, and gradients; what several need is computed once."""
    quantised: dict[tuple[Node, bool], tuple[Node, ...]] = {}
    kind = fp8_dtype()

    def numbers(node: Node, before: Node, *, turned: bool = False) -> tuple[Node, ...]:
        source = origin(node)
        key = (source if shape(source) == shape(node) else node, turned)
        if key not in quantised:

            def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                q, scale = quantise(x.t() if turned else x, kind)
                return q.contiguous(), scale

            quantised[key] = put_graph(before, run, node)
        return quantised[key]

    def forward(call: Node) -> Node:
        x, w, _ = operands(call)
        (q, scale), (of_w, scale_of_w) = numbers(x, call), numbers(w, call)
        return _product(call, q, of_w, scale, scale_of_w)

    def dgrad(call: Node) -> Node:
        dy, w = operands(call)
        (q, scale), (of_w, scale_of_w) = numbers(dy, call), numbers(w, call, turned=True)
        return _product(call, q, of_w, scale, scale_of_w)

    def wgrad(call: Node) -> Node:
        dy, x, how = operands(call)
        of_x, scale_of_x = numbers(x, call)
        if how != "fp8":
            (back,) = put_graph(call, lambda q, s: ((q.float() * s).to(value(dy).dtype),), of_x, scale_of_x)
            return put_graph(call, lambda dy, x: (dy.t() @ x,), dy, back)[0]
        q, scale = numbers(dy, call)
        factors, largest = put_graph(call, row_factors, scale, scale_of_x)
        left = put(call, ops.fp8_transposed.default, q, factors)
        right = _transposed(call, of_x)

        def sums(left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
            one = torch.ones_like(scale)
            return (torch._scaled_mm(left, right.t(), scale, one, out_dtype=torch.float32),)

        return _rounded(call, put_graph(call, sums, left, right, largest)[0], dy)

    turned: dict[Node, Node] = {}

    def _transposed(call: Node, q: Node) -> Node:
        if q not in turned:
            turned[q] = put(call, ops.fp8_transposed.default, q, None)
        return turned[q]

    def _product(call: Node, *sides: Node) -> Node:
        def run(q: torch.Tensor, w: torch.Tensor, *scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (product(q, w, scales[0], scales[1], value(call).dtype),)

        return put_graph(call, run, *sides)[0]

    layers: dict[tuple[Node, ...], tuple[Node, ...]] = {}

    def experts(call: Node) -> Node:
        layer: tuple[Node, ...] = operands(call)
        layers[layer] = _experts(call, numbers(layer[0], call), *layer)
        return layers[layer][0]

    def experts_grad(call: Node) -> tuple[Node, ...]:
        dy, *layer = operands(call)
        _, *h = layers[tuple(layer)]
        return _experts_grad(call, numbers(dy, call), numbers(layer[0], call), h, layer)

    spelt: dict[object, Callable[[Node], Node | tuple[Node, ...]]] = {
        ops.fp8_linear: forward,
        ops.fp8_linear_dgrad: dgrad,
        ops.fp8_linear_wgrad: wgrad,
        ops.fp8_mlp: experts,
        ops.fp8_mlp_grad: experts_grad,
    }
    found = calls(graph, *spelt)
    for call in found:
        results = spelt[call.target.overloadpacket](call)  # type: ignore[union-attr]
        if isinstance(results, Node):
            call.replace_all_uses_with(results)
            continue
        for piece in list(call.users):
            piece.replace_all_uses_with(results[operand(piece, 1)])
    return Rewrites(len(found), absent="no product in 8 bits")


def _experts(call: Node, x: tuple[Node, ...], *layer: Node) -> tuple[Node, ...]:
    """y, hq and hs."""
    of_x, gate_up, down, *rest = layer
    weights = [part for weight in (gate_up, down) for part in put_parts(call, ops.fp8_rows.default, weight)]
    return put_parts(call, ops.fp8_mlp_forward.default, *x, *weights, *rest, dtype(of_x))


def _experts_grad(
    call: Node, dy: tuple[Node, ...], x: tuple[Node, ...], h: Sequence[Node], layer: Sequence[Node]
) -> tuple[Node, ...]:
    """Gradients of x, of both weights and of the weights of slots."""
    of_x, gate_up, down, *rest = layer
    weights = [
        part for weight in (gate_up, down) for part in put_parts(call, ops.fp8_columns.default, weight)
    ]
    call_dgrad = ops.fp8_mlp_dgrad.default
    dx, dweight, *made = put_parts(call, call_dgrad, *dy, *h, *weights, *rest, dtype(of_x))
    gradients = put_parts(call, ops.fp8_mlp_wgrad.default, *dy, *x, *made, *rest[1:])
    return dx, *(_rounded(call, gradient, of_x) for gradient in gradients), dweight


def _rounded(call: Node, total: Node, like: Node) -> Node:
    """A sum in the dtype of another node; who adds it to others takes it as it was before."""
    if dtype(total) == dtype(like):
        return total
    return put(call, torch.ops.prims.convert_element_type.default, total, dtype(like))
