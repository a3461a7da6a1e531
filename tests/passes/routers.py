"""Checks that the tests of fuse_router share."""

from torch import fx

from graphmoe.passes.fuse_router import fuse_router
from tests.passes.blocks import Traced, operations, rewritten

INSIDE = {
    "_softmax",
    "sigmoid",
    "sort",
    "topk",
    "slice",
    "gather",
    "scatter_add",
    "logsumexp",
    "log",
    "scatter",
}
"""Operations of a router that the fused one replaces; every router of the model has some of them."""


def assert_fused(plain: Traced) -> Traced:
    """The graph with its one router replaced by one operation, of which nothing is left."""
    fused, (result,) = rewritten(plain, fuse_router)
    before, after = operations(plain), operations(fused)
    assert result[:2] == (1, ()) and after["router"] == 1
    assert INSIDE & set(before) and not INSIDE & set(after), after
    assert after.total() - after["getitem"] - after["_to_copy"] < before.total() - before["getitem"]
    return fused


def router_call(fused: Traced) -> fx.Node:
    """The one call of the operation."""
    (call,) = [node for node in fused.graph.graph.nodes if "graphmoe.router" in str(node.target)]
    return call
