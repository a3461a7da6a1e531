"""Passes: functions of a traced graph that return the number of places that they have changed."""

import torch

aten = torch.ops.aten


def square_as_product(graph):
    """Write x ** 2, as in each RMSNorm, as x * x."""
    found = [node for node in graph.nodes if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2]
    for node in found:
        node.target, node.args = aten.mul.Tensor, (node.args[0], node.args[0])
    return len(found)
