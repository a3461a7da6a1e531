"""Constants in a graph, and the order of its nodes."""

import torch

from graphmoe.passes.matching import aten, calls, constant, restore_order
from tests.passes.blocks import random, traced


def test_constants_are_what_depends_on_no_input_and_no_chance():
    def run(x):
        rows = torch.arange(6).view(2, 3) * 2 + 1
        return rows, torch.ones_like(x).long(), x.new_zeros(2), x + 1, torch.rand(2), torch.empty_like(x) * 0

    nodes = traced(run, random(3)).graph.graph.output_node().args[0]
    values = [constant(node) for node in nodes]
    assert values[0].tolist() == [[1, 3, 5], [7, 9, 11]]
    assert values[1].tolist() == [1, 1, 1] and values[2].tolist() == [0, 0]
    assert values[3:] == [None, None, None] and constant(3) is None
    with nodes[0].meta["val"].fake_mode:
        assert constant(nodes[0]) is None


def test_order_is_restored_with_the_fewest_moves():
    plain = traced(lambda x, y: (x.exp() + 1, y.sin().cos()), random(3), random(3, seed=1))
    graph, (x, y) = plain.graph.graph, plain.inputs
    (cos,), (add,) = (calls(graph, packet) for packet in (aten.cos, aten.add))
    add.args = (cos, 1)  # reads what stands behind it
    restore_order(graph)
    graph.lint()
    assert [node.name for node in plain.nodes if node.op == "call_function"] == ["exp", "sin", "cos", "add"]
    plain.graph.recompile()
    assert torch.equal(plain.graph(x, y)[0], y.sin().cos() + 1)
