"""Units whose graphs run as they are, uncompiled."""

import pytest
from torch import Tensor, fx

from graphmoe.runtime.compile import graphs as unit_graphs
from graphmoe.runtime.compile import report
from graphmoe.runtime.torch_compat import joint_graph

_JOINTS: dict[str, fx.GraphModule] = {}


def _copied_joint(forward: fx.GraphModule, fakes: list[Tensor]) -> fx.GraphModule:
    """A copy of the joint graph, which is traced once for all that differ in what is computed again."""
    names = [node.meta.get("custom") for node in forward.graph.nodes]
    key = f"{[(fake.shape, fake.dtype, fake.requires_grad) for fake in fakes]} {names} {forward.graph}"
    if key not in _JOINTS:
        _JOINTS[key] = joint_graph(forward, fakes)
    graph, copies = fx.Graph(), {}
    graph.output(graph.graph_copy(_JOINTS[key].graph, copies))
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    return fx.GraphModule(_JOINTS[key], graph)


@pytest.fixture
def graphs_as_they_are(monkeypatch):
    """Units run their graphs operation by operation: each gives the bits that it gave the first time."""
    monkeypatch.setattr(report, "compile_graph", lambda graph: graph)
    monkeypatch.setattr(unit_graphs, "joint_graph", _copied_joint)
