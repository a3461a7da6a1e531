"""Functions that recognise nodes of a functional ATen graph, and insert new nodes.

Shapes are static: sizes are read from ``meta["val"]``, each node's fake value.
"""

import contextlib
import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate, map_arg

aten = torch.ops.aten

SAME_ELEMENTS = (
    *(aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.flatten),
    *(aten.clone, aten.alias),
)
"""Operations whose result has the operand's elements in the same (row-major) order."""
FILLED = {aten.zeros_like: 0, aten.ones_like: 1, aten.new_zeros: 0, aten.new_ones: 1}
"""Operations that fill the shape of their operand with a constant, and that constant."""
SIDE_META = ("custom", "stack_trace", "nn_module_stack")
"""Keys of metadata that a new node copies from the node it replaces, such as the segment."""
CONSTANT_LIMIT = 1 << 26  # elements of the largest constant that is evaluated


def is_op(node: Any, *packets: Any) -> bool:
    """Return whether this is a call of an operation, in any overload: ``is_op(n, aten.mul)``."""
    target = getattr(node, "target", None)
    return (
        isinstance(node, Node)
        and node.op == "call_function"
        and getattr(target, "overloadpacket", target) in packets
    )


def calls(graph: fx.Graph, *packets: Any) -> list[Node]:
    return [node for node in graph.nodes if is_op(node, *packets)]


def operand(node: Any, position: int = 0) -> Any:
    return node.args[position]


def operands(node: Any) -> tuple[Any, ...]:
    return node.args


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def value(node: Any) -> Tensor:
    return node.meta["val"]


def shape(node: Any) -> tuple[int, ...]:
    # () unless it is a single tensor
    val = node.meta.get("val")
    return tuple(val.shape) if isinstance(val, Tensor) else ()


def dtype(node: Any) -> torch.dtype | None:
    val = node.meta.get("val")
    return val.dtype if isinstance(val, Tensor) else None


def is_float(node: Any) -> bool:
    kind = dtype(node)
    return kind is not None and kind.is_floating_point


def name_of(node: Node) -> str:
    return f"{node.name} ({node.target})" if node.op == "call_function" else node.name


def part(node: Any, of: Any) -> int | None:
    """Return the node's position among the results of a call of ``of``; None for other nodes."""
    if is_op(node, operator.getitem) and is_op(node.args[0], *(of if isinstance(of, tuple) else (of,))):
        return int(node.args[1])
    return None


# Looking through operations that do not change values.


def is_cast(node: Any, *, lossless: bool = False) -> bool:
    """Return whether a node only changes the dtype; with ``lossless``, only if no float is rounded."""
    before = node.args[0].meta.get("val") if is_op(node, aten._to_copy) else None
    if not isinstance(before, Tensor) or before.device != value(node).device:
        return False
    kind = value(node).dtype
    return not lossless or not before.is_floating_point() or torch.promote_types(before.dtype, kind) == kind


def origin(node: Any, *, detached: bool = False, casts: bool = False) -> Any:
    """Follow views, copies and lossless casts back to the node with the same values in the same order.

    ``detached`` also skips detach, ``casts`` any cast.
    """
    while (
        is_op(node, *SAME_ELEMENTS)
        or is_cast(node, lossless=not casts)
        or (detached and is_op(node, aten.detach))
    ):
        node = node.args[0]
    return node


def only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def escape(node: Node, roots: Iterable[Node]) -> Node | None:
    """Return a user that still needs the node after all ``roots`` are replaced, or None."""
    replaced, alive = set(roots), set[Node]()
    todo = [each for each in node.graph.nodes if each.op == "output"]
    while todo:
        current = todo.pop()
        if current not in alive and current not in replaced:
            alive.add(current)
            todo.extend(current.all_input_nodes)
    return next((user for user in node.users if user in alive), None)


def depends_on(node: Node, ancestor: Node, *, integers: bool = False) -> bool:
    """Return whether ``node`` is computed from ``ancestor``; ``integers``: on a path without floats."""
    seen, todo = set[Node](), [node]
    while todo:
        current = todo.pop()
        if current is ancestor:
            return True
        if integers and is_float(current):
            continue
        new = [each for each in current.all_input_nodes if each not in seen]
        seen.update(new)
        todo.extend(new)
    return False


def axes(node: Node) -> tuple[int, ...]:
    """Return the axes of a sum, mean or softmax, counted from the front; all if none is given."""
    rank = len(shape(operand(node)))
    given = argument(node, 1, "dim")
    if given is None or given == []:
        return tuple(range(rank))
    return tuple(sorted(axis % rank for axis in (given if isinstance(given, (list, tuple)) else [given])))


def over_last(node: Node) -> bool:
    """Return whether a sum, mean or softmax is over the last axis alone."""
    return axes(node) == (len(shape(operand(node))) - 1,)


def is_descending(sort: Node) -> bool:
    return bool(argument(sort, 2, "descending", False))


def half(node: Any) -> tuple[Node, int] | None:
    """Return (whole, 0 or 1) if a node is the first or second half of ``whole`` along the last axis."""
    if (index := part(node, (aten.split, aten.split_with_sizes))) is not None:
        call = operand(node)
        whole, sizes, axis = operand(call), operand(call, 1), argument(call, 2, "dim", 0)
        start = sum(sizes[:index]) if isinstance(sizes, (list, tuple)) else index * sizes
    elif is_op(node, aten.slice) and argument(node, 4, "step", 1) == 1:
        whole, axis = operand(node), argument(node, 1, "dim", 0)
        start = argument(node, 2, "start") or 0
    else:
        return None
    width, last = shape(node)[-1], len(shape(whole)) - 1
    if axis % (last + 1) != last or 2 * width != shape(whole)[-1] or start % (2 * width) not in (0, width):
        return None
    return whole, start % (2 * width) // width


def constant(node: Any) -> Tensor | None:
    """Return the value, on the CPU, of a node that depends on no graph input (e.g. an arange); else None."""
    known: dict[Node, Tensor | None] = {}

    def evaluate(node: Node) -> Tensor | None:
        if node not in known:
            known[node] = _evaluate(node, evaluate)
        return known[node]

    found = evaluate(node) if isinstance(node, Node) else None
    return None if hasattr(found, "fake_mode") else found  # called under a fake mode, nothing has a value


def _evaluate(node: Node, value_of: Callable[[Node], Tensor | None]) -> Tensor | None:
    target: Any = node.target
    if not hasattr(target, "overloadpacket") or dtype(node) is None:
        return None
    if is_op(node, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided):
        return None
    if target.overloadpacket in FILLED:
        return torch.full(shape(node), FILLED[target.overloadpacket], dtype=dtype(node))
    values = {each: value_of(each) for each in node.all_input_nodes}
    by_chance = torch.Tag.nondeterministic_seeded in target.tags
    if by_chance or any(each is None for each in values.values()) or value(node).numel() > CONSTANT_LIMIT:
        return None
    arguments, named = map_arg((node.args, node.kwargs), values.__getitem__)
    return target(*arguments, **(named | {"device": "cpu"} if "device" in named else named))


def operand_pairs(node: Node) -> list[tuple[Node, Node]]:
    """Return both operands of a product or plain sum of two nodes, in both orders; else []."""
    if node.kwargs or len(node.args) < 2 or not all(isinstance(each, Node) for each in node.args[:2]):
        return []
    return [(node.args[0], node.args[1]), (node.args[1], node.args[0])]  # type: ignore[list-item]


# New nodes, with the metadata of traced ones.


def put(before: Node, target: Any, *arguments: Any, like: Node | None = None, **named: Any) -> Node:
    """Insert a call before a node, with its fake value and the metadata of ``like``, or of that node."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, arguments, named)
    meta = (like or before).meta
    node.meta = {key: meta[key] for key in SIDE_META if key in meta}
    fakes: list[Any] = []
    values, named_values = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    map_aggregate((values, named_values), lambda leaf: fakes.append(getattr(leaf, "fake_mode", None)))
    modes = [mode for mode in fakes if mode is not None]
    with torch.no_grad(), modes[0] if modes else contextlib.nullcontext():
        node.meta["val"] = target(*values, **named_values)
    return node


def put_parts(before: Node, target: Any, *arguments: Any, like: Node | None = None) -> tuple[Node, ...]:
    """Insert a call with several results, and return a node for each."""
    call = put(before, target, *arguments, like=like)
    return tuple(put(before, operator.getitem, call, i, like=like) for i in range(len(call.meta["val"])))


def put_graph(before: Node, run: Callable[..., tuple[Tensor, ...]], *inputs: Node) -> tuple[Node, ...]:
    """Insert the operations of a function of tensors, and return the nodes of its results."""
    fakes = [value(node) for node in inputs]
    with torch.no_grad(), fakes[0].fake_mode:  # type: ignore[attr-defined]
        traced = make_fx(run, decomposition_table={})(*fakes)  # keeps detach, as `torch_compat.make_fx`
    side = {key: before.meta[key] for key in SIDE_META if key in before.meta}
    for node in traced.graph.nodes:
        node.meta = side | ({"val": node.meta["val"]} if "val" in node.meta else {})
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with before.graph.inserting_before(before):
        results = before.graph.graph_copy(traced.graph, copies)
    assert isinstance(results, tuple)
    return results


def viewed(before: Node, node: Node, *sizes: int) -> Node:
    """Return a node with this content in another shape: the node, one that it is a view of, or a new view."""
    known: Any = node
    while shape(known) != sizes and is_op(known, *SAME_ELEMENTS):
        known = operand(known)
    if shape(known) == sizes:
        return known
    as_view = value(node).is_contiguous()
    return put(before, aten.view.default if as_view else aten.reshape.default, node, list(sizes))


def cast(before: Node, node: Node, kind: torch.dtype | None) -> Node:
    """Return the node cast to a dtype; itself if it has that dtype."""
    return node if dtype(node) == kind else put(before, aten._to_copy.default, node, dtype=kind)


def first_of(nodes: Collection[Node]) -> Node:
    return next(node for node in next(iter(nodes)).graph.nodes if node in nodes)


def restore_order(graph: fx.Graph) -> None:
    """Move each node that follows one of its users in front of that user."""
    placed = set[Node]()

    def place(node: Node) -> None:
        for needed in node.all_input_nodes:
            if needed not in placed:
                node.prepend(needed)
                place(needed)
        placed.add(node)

    for node in list(graph.nodes):
        if node not in placed:
            place(node)
