"""The words that the fusion passes are written in."""

import torch

from graphmoe.passes.matching import aten, calls, cast, constant, put, put_parts, restore_order, viewed
from tests.passes.blocks import Traced, random, traced


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


def test_new_nodes_carry_values_and_the_segment_of_what_they_stand_for():
    plain = traced(lambda x: x.view(3, 2).exp(), random(2, 3))
    graph = plain.graph.graph
    view, exp = calls(graph, aten.view)[0], calls(graph, aten.exp)[0]
    exp.meta["custom"] = {"segment": "mlp"}
    assert viewed(exp, view, 2, 3) is view.args[0] and cast(exp, view, torch.float32) is view
    flat = viewed(exp, view, 6)
    values, indices = put_parts(exp, aten.topk.default, flat, 2)
    lowered = put(exp, aten.mul.Tensor, cast(exp, values, torch.bfloat16), 2.0)
    assert indices.meta["val"].dtype == torch.int64 and lowered.meta["val"].shape == (2,)
    assert lowered.meta["val"].dtype == torch.bfloat16 and lowered.meta["custom"] == {"segment": "mlp"}
    assert lowered.meta["val"].fake_mode is view.meta["val"].fake_mode


def test_order_is_restored_with_the_fewest_moves():
    plain = traced(lambda x, y: (x.exp() + 1, y.sin().cos()), random(3), random(3, seed=1))
    graph = plain.graph.graph
    exp, cos = calls(graph, aten.exp)[0], calls(graph, aten.cos)[0]
    add = calls(graph, aten.add)[0]
    add.args = (cos, 1)  # reads what stands behind it
    restore_order(graph)
    graph.lint()
    names = [node.name for node in graph.nodes]
    assert names.index(exp.name) < names.index("sin") < names.index("cos") < names.index(add.name)
    plain.graph.recompile()
    x, y = plain.inputs
    assert torch.equal(Traced(plain.graph, [x, y]).graph(x, y)[0], y.sin().cos() + 1)
