"""Cut a compile unit's joint graph into forward and backward, and remove views from its outputs.

torch's partitioner cuts, guided by recompute marks on nodes. A region is a run of segments that is recomputed
as a whole: a value read outside it passes through a border node, which is saved if a later backward reads it.
A recomputed part of a segment has no borders: later operations read its recomputed results.

Segments that are not compiled recompute by `RecomputedSegments`.
"""

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from graphmoe.config.schema import ConfigError
from graphmoe.passes.fuse_experts import hidden_only
from graphmoe.passes.matching import operand
from graphmoe.passes.split_backward import RECOMPUTED, VIEWS
from graphmoe.plan.recompute import Recompute, UnitRecompute
from graphmoe.runtime.compile.units import Unit, joined
from graphmoe.runtime.torch_compat import draws_random_numbers, is_recomputed, mark, partition, remove_marks
from graphmoe.segments import Executor, Segment, run_segments

aten = torch.ops.aten

MOVES = RECOMPUTED | {aten.clone.default, aten.constant_pad_nd.default, operator.getitem}
"""Layout changes, padding and casts: recomputed too if they follow a recomputed part."""
BORDER = "border"


class Halves(NamedTuple):
    forward: fx.GraphModule
    backward: fx.GraphModule
    recomputed: int = 0  # forward operations that the backward recomputes, views not counted


def cut_joint(
    joint: fx.GraphModule, num_outputs: int, static_inputs: Sequence[int], wanted: UnitRecompute
) -> Halves:
    """Cut a joint graph into forward and backward. Raises ConfigError if a recomputed operation is random."""
    if not wanted:
        return Halves(*partition(joint, num_outputs, static_inputs))
    _mark(joint.graph, wanted)
    forward, backward = partition(joint, num_outputs, static_inputs)
    _read_what_is_kept(forward, backward)
    hidden_only(backward.graph)
    backward.graph.eliminate_dead_code()
    backward.recompile()
    again = [node for node in backward.graph.nodes if node.op == "call_function" and is_recomputed(node)]
    for half in (forward, backward):
        remove_marks(half.graph)
    return Halves(forward, backward, sum(node.target not in {*VIEWS, operator.getitem} for node in again))


def take_off_borders(forward: fx.GraphModule) -> None:
    """Replace each border node, a copy of a recomputed region's result, by its input. In place."""
    for node in list(forward.graph.nodes):
        if BORDER in node.meta:
            node.replace_all_uses_with(node.args[0])
            forward.graph.erase_node(node)
    forward.recompile()


def _mark(graph: fx.Graph, wanted: UnitRecompute) -> None:
    regions = {name: number for number, names in enumerate(wanted.regions) for name in names}

    def region(node: fx.Node) -> int | None:
        return regions.get(said_of(node, "segment"))

    of_parts: set[fx.Node] = set()
    forward = _forward_of(graph)
    for node in forward:
        if region(node) is None:
            moved = node.target in MOVES and {*node.all_input_nodes} <= of_parts
            if said_of(node, "part") not in wanted.parts and not (moved and node.all_input_nodes):
                continue
            of_parts.add(node)
        refuse_random_numbers(f"segment {said_of(node, 'segment')}", node.target, node.args, node.kwargs)
        mark(node, recomputed=True)
    for number in range(len(wanted.regions)):
        inside = {node for node in graph.nodes if region(node) == number}
        for node in forward:
            if node in inside and not is_view(node) and isinstance(node.meta["val"], Tensor):
                _close(graph, node, inside)


def said_of(node: fx.Node, key: str) -> str:
    return node.meta.get("custom", {}).get(key, "")


def _forward_of(graph: fx.Graph) -> list[fx.Node]:
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        # nodes that depend on tangents belong to the backward
        gradient = node.op == "placeholder" and node.name.startswith("tangents")
        if gradient or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    return [node for node in graph.nodes if node.op == "call_function" and node not in behind]


def _close(graph: fx.Graph, node: fx.Node, inside: set[fx.Node]) -> None:
    if not _leaves(node, inside):
        return
    with graph.inserting_after(node):
        border = graph.call_function(aten.clone.default, (node,))
    border.meta = {**node.meta, BORDER: True}
    mark(border, recomputed=False)
    # views inside are copied onto the border, so that outside users read the saved value
    todo = [(node, border)]
    while todo:
        source, kept = todo.pop()
        for user in list(source.users):
            if user is border or user.op == "output":
                continue
            if user not in inside:
                user.replace_input_with(source, kept)
            elif is_view(user):
                with graph.inserting_after(user):
                    todo.append((user, graph.node_copy(user, {source: kept}.__getitem__)))


def _leaves(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(
        user.op != "output" and (user not in inside or (is_view(user) and _leaves(user, inside)))
        for user in node.users
    )


def _read_what_is_kept(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    by_name = {node.name: node for node in backward.graph.nodes}
    for border in forward.graph.nodes:
        if BORDER in border.meta and border.name in by_name:
            # the backward has the value twice, saved and recomputed: it reads the saved one
            again = by_name.get(border.args[0].name)
            if again is not None:
                again.replace_all_uses_with(by_name[border.name])


class OutputViews(NamedTuple):
    """Views that make a unit's outputs from graph results; compiled graphs return no views and no inputs."""

    inputs: tuple[int, ...]
    graph: fx.GraphModule  # (inputs at positions ``inputs``, results of the unit's graph) -> outputs

    def __call__(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self.graph(*(inputs[i] for i in self.inputs), *results)


def take_off_views(forward: fx.GraphModule) -> OutputViews | None:
    """Reduce results to one per allocated storage, in place; return the views, None if nothing changes."""
    end = forward.graph.output_node()
    outputs = [*operand(end)]
    roots = dict.fromkeys(root_of(node) for node in outputs)
    results = [root for root in roots if root.op != "placeholder"]
    if results == outputs:
        return None
    # there are views: a router passes on its reshaped input, or a dispatch returns an input
    placeholders = forward.graph.find_nodes(op="placeholder")
    read = [node for node in placeholders if node in roots]
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in (*read, *results)}
    graph.output(tuple(_copy(node, graph, copies) for node in outputs))
    end.args = (tuple(results),)
    forward.graph.eliminate_dead_code()
    forward.recompile()
    return OutputViews(tuple(placeholders.index(node) for node in read), fx.GraphModule(forward, graph))


def root_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view shares; the node itself if it is not a view."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_view(node: fx.Node) -> bool:
    # an item of a split is a view, an item of an operation with several results is not
    target = node.all_input_nodes[0].target if node.target is operator.getitem else node.target
    return target in VIEWS or getattr(target, "is_view", False)


def _copy(node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    if node not in copies:
        _copy(node.all_input_nodes[0], graph, copies)
        copies[node] = graph.node_copy(node, lambda earlier: copies[earlier])
    return copies[node]


class RecomputedSegments:
    """Executor that saves only inputs of recomputed segments. Bitwise like ``run_segments``, capturable."""

    def __init__(self, recompute: Recompute) -> None:
        assert not recompute.parts, "parts are chosen in graphs"
        self._recompute = recompute
        # layer and name of units known to draw no random numbers
        self._checked: set[tuple[int | None, str]] = set()

    def __call__(
        self, segments: Sequence[Segment], tensors: dict[str, Tensor], keep: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        """Return the ``keep`` tensors. Raises ConfigError if a recomputed segment draws random numbers."""
        if not torch.is_grad_enabled():
            return run_segments(segments, tensors, keep)
        values = dict(tensors)
        runs = self._recompute.runs(segments)
        for (covered, _), unit in zip(runs, joined([run for _, run in runs], keep), strict=True):
            run = self._run_again if covered else _run
            results = run(unit, *(values[name] for name in unit.reads))
            values.update(zip(unit.writes, results, strict=True))
        return tuple(values[name] for name in keep)

    def _run_again(self, unit: Unit, *read: Tensor) -> tuple[Tensor, ...]:
        key = (unit.segments[0].layer, unit.name)
        if key in self._checked:
            return _checkpointed(unit, *read)
        with _WithoutRandomNumbers(unit.name):
            results = _checkpointed(unit, *read)
        self._checked.add(key)
        return results


def executor_outside_graphs(recompute: Recompute) -> Executor:
    """Return the executor of uncompiled segments: it recomputes whole segments, never parts of them."""
    whole = replace(recompute, parts=frozenset())
    if recompute.parts and not recompute.segments:
        return run_segments  # then layers select parts, not whole layers
    return RecomputedSegments(whole) if whole else run_segments


def refuse_random_numbers(where: str, target: Any, arguments: Sequence[Any], named: dict[str, Any]) -> None:
    """Raise ConfigError for an operation whose results would differ when recomputed."""
    if draws_random_numbers(target, arguments, named):
        raise ConfigError(
            f"recompute covers {where}, which draws random numbers ({target}) and would draw others when it "
            f"is computed again; leave it out of recompute.segments, or use recompute=none"
        )


def _run(unit: Unit, *read: Tensor) -> tuple[Tensor, ...]:
    return run_segments(unit.segments, dict(zip(unit.reads, read, strict=True)), unit.writes)


def _checkpointed(unit: Unit, *read: Tensor) -> tuple[Tensor, ...]:
    # Saving the generator's state would sync with the device, and nothing here draws from it.
    return checkpoint(_run, unit, *read, use_reentrant=False, preserve_rng_state=False)


class _WithoutRandomNumbers(TorchDispatchMode):
    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refuse_random_numbers(self._where, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
