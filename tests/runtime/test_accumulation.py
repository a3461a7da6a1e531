"""accumulate_outputs: gradients go to fp32 buffers in place, before they are rounded."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphmoe.runtime.compile.code import accumulate_outputs
from tests.ops.mlp_cases import make_problem

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


def accumulated(
    function, *arguments: torch.Tensor, add: bool = True
) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """The changed graph, and its buffers after one run from ones."""
    graph = accumulate_outputs(make_fx(function)(*arguments), add=add)
    buffers = [torch.ones(o.shape) for o in function(*arguments)]
    assert graph(*arguments, *buffers) == ()
    return graph, buffers


def test_each_output_is_added_to_its_buffer_in_place():
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    _, (first, second) = accumulated(lambda a, b: (a * b, a - b), a, b)
    assert first.equal(1 + a * b) and second.equal(1 + (a - b))


def test_a_first_output_takes_the_place_of_what_was_there():
    a, b = torch.randn(3, 4), torch.randn(3, 4).bfloat16()
    graph, (first, second) = accumulated(lambda a, b: (a * 2, b * 3), a, b, add=False)
    assert first.equal(a * 2) and second.equal((b * 3).float())
    assert not graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)


def test_a_rounding_at_the_end_is_left_out():
    a = torch.randn(50)
    graph, (buffer,) = accumulated(lambda a: (convert(a * 3, torch.bfloat16),), a)
    assert buffer.equal(1 + a * 3) and not graph.graph.find_nodes(op="call_function", target=convert)


def test_a_bf16_gradient_is_added_in_fp32():
    a = torch.randn(50).bfloat16()
    _, (buffer,) = accumulated(lambda a: (a * 3,), a)
    assert buffer.equal(1 + (a * 3).float())


def test_a_transposed_product_becomes_the_product_of_the_transposed():
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    graph, (buffer,) = accumulated(lambda a, b: (aten.permute(aten.mm(a, b), [1, 0]),), a, b)
    torch.testing.assert_close(buffer, 1 + (a @ b).T)
    (product,) = graph.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert product.meta["val"].shape == (3, 5)


@pytest.mark.parametrize("dims", [[0, 1, 2], [1, 0, 2]])
def test_other_permutations_are_left_as_they_are(dims):
    a = torch.randn(2, 3, 4)
    _, (buffer,) = accumulated(lambda a: (aten.permute(a * 2, dims),), a)
    assert buffer.equal(1 + (a * 2).permute(dims))


def test_the_graph_that_is_given_stays_as_it_is():
    graph = make_fx(lambda a: (a * 2,))(torch.ones(2))
    code = graph.code
    accumulate_outputs(graph, add=True)
    assert graph.code == code


@pytest.mark.parametrize("add", [False, True])
def test_the_experts_kernels_fill_their_buffers_themselves(add):
    p = make_problem("skewed, dead rows", torch.bfloat16)
    h = torch.ones(len(p.plan[0]), p.w_gate_up.shape[1]).bfloat16()
    a = torch.ones(len(p.plan[0]), p.w_down.shape[2]).bfloat16()
    given = (p.dy_TD, p.x_TD, h, a, *p.plan)

    def gradients(dy, x, *rest):
        of_gate_up, of_down = torch.ops.graphmoe.grouped_mlp_wgrad(dy, x, *rest, "torch")
        return of_down, dy * 2, of_gate_up

    graph, buffers = accumulated(gradients, *given, add=add)
    for buffer, value in zip(buffers, gradients(*given), strict=True):
        assert torch.equal(buffer, value.float() + add)
    targets = [node.target for node in graph.graph.nodes]
    assert torch.ops.graphmoe.grouped_mlp_wgrad_into.default in targets
    assert torch.ops.graphmoe.grouped_mlp_wgrad.default not in targets


def test_a_gradient_of_experts_that_is_read_elsewhere_is_copied():
    p = make_problem("random", torch.float32)
    h = torch.ones(len(p.plan[0]), p.w_gate_up.shape[1])
    a = torch.ones(len(p.plan[0]), p.w_down.shape[2])

    def gradients(*given):
        of_gate_up, of_down = torch.ops.graphmoe.grouped_mlp_wgrad(*given, "torch")
        return of_gate_up, of_down, of_down * 2

    given = (p.dy_TD, p.x_TD, h, a, *p.plan)
    _, buffers = accumulated(gradients, *given, add=False)
    assert all(torch.equal(b, value) for b, value in zip(buffers, gradients(*given), strict=True))
