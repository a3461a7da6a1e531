"""Cut a unit's joint graph so that the backward computes again what the configuration names.

torch's partition does the work; it is told by marks on nodes. A region is a run of neighbouring segments:
all of it is marked, and what it hands on passes a border, a node that is kept if the backward of what
follows needs it, and that is taken off again. A part is a piece of a segment: it has no border, so what
follows reads its results from the second computation.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from graphmoe.passes.fuse_experts import hidden_only
from graphmoe.passes.split_backward import RECOMPUTED, VIEWS
from graphmoe.runtime.compile.output_views import is_view
from graphmoe.runtime.compile.recompute import UnitRecompute, refuse_random_numbers
from graphmoe.runtime.torch_compat import is_recomputed, mark_kept, mark_recomputed, partition, remove_marks

aten = torch.ops.aten

MOVES = RECOMPUTED | {aten.clone.default, aten.constant_pad_nd.default, operator.getitem}
"""What only lays a value out, pads or casts it: behind a part it is computed again too."""
BORDER = "border"
"""The key of a border's metadata."""


class Cut(NamedTuple):
    """The two halves of a joint graph."""

    forward: fx.GraphModule
    """May have borders in it, which `take_off_borders` takes off."""
    backward: fx.GraphModule
    recomputed: int = 0
    """Operations of the forward that are in the backward because they are marked, views not counted."""


def cut_joint(
    joint: fx.GraphModule, num_outputs: int, static_inputs: Sequence[int], wanted: UnitRecompute
) -> Cut:
    """Cut a joint graph. Raises ConfigError for random numbers in what is wanted."""
    if not wanted:
        return Cut(*partition(joint, num_outputs, static_inputs))
    _mark(joint.graph, wanted)
    forward, backward = partition(joint, num_outputs, static_inputs)
    _read_what_is_kept(forward, backward)
    hidden_only(backward.graph)
    backward.graph.eliminate_dead_code()
    backward.recompile()
    again = [node for node in backward.graph.nodes if node.op == "call_function" and is_recomputed(node)]
    for half in (forward, backward):
        remove_marks(half.graph)
    return Cut(forward, backward, sum(node.target not in {*VIEWS, operator.getitem} for node in again))


def take_off_borders(forward: fx.GraphModule) -> None:
    """Replace each border by what it stands for. In place."""
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
        mark_recomputed(node)
    for number in range(len(wanted.regions)):
        inside = {node for node in graph.nodes if region(node) == number}
        for node in forward:
            if node in inside and not is_view(node) and isinstance(node.meta["val"], Tensor):
                _close(graph, node, inside)


def said_of(node: fx.Node, key: str) -> str:
    """What ``torch.fx.traceback.annotate`` said about a node, or about the one whose gradient it makes."""
    return node.meta.get("custom", {}).get(key, "")


def _forward_of(graph: fx.Graph) -> list[fx.Node]:
    """The operations that no gradient of an output goes into."""
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        gradient = node.op == "placeholder" and node.name.startswith("tangents")
        if gradient or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    return [node for node in graph.nodes if node.op == "call_function" and node not in behind]


def _close(graph: fx.Graph, node: fx.Node, inside: set[fx.Node]) -> None:
    """Let what stands outside read a node, and views of it, through a border."""
    if not _leaves(node, inside):
        return
    with graph.inserting_after(node):
        border = graph.call_function(aten.clone.default, (node,))
    border.meta = {**node.meta, BORDER: True}
    mark_kept(border)
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
    """Take a value from its border where that is kept, instead of computing it again."""
    by_name = {node.name: node for node in backward.graph.nodes}
    for border in forward.graph.nodes:
        if BORDER in border.meta and border.name in by_name:
            again = by_name.get(border.args[0].name)
            if again is not None:
                again.replace_all_uses_with(by_name[border.name])
