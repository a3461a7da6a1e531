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
) -> tuple[set[object], list[torch.Tensor]]:
    """Targets in the changed graph, and its buffers after one run from ones; the given graph stays."""
    given = make_fx(function)(*arguments)
    code = given.code
    graph = accumulate_outputs(given, add=add)
    buffers = [torch.ones(o.shape) for o in function(*arguments)]
    assert graph(*arguments, *buffers) == () and given.code == code
    return {node.target for node in graph.graph.nodes}, buffers


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda a: (a * 3, a - 1),
        lambda a: ((a * 3).bfloat16(), a.bfloat16() * 3),
        lambda a: (aten.permute(a * 2, [1, 0]), aten.permute(a[None] * 2, [1, 0, 2])),
    ],
    ids=["fp32", "bf16", "permuted"],
)
def test_each_output_is_added_to_its_buffer_in_fp32_or_takes_its_place(function, add):
    a = torch.randn(5, 7)
    targets, buffers = accumulated(function, a, add=add)
    assert all(buffer.equal(add + value.float()) for buffer, value in zip(buffers, function(a), strict=True))
    assert (aten.add.Tensor in targets) == add


def test_a_rounding_at_the_end_is_left_out_and_a_transposed_product_is_one_of_the_transposed():
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    targets, (buffer,) = accumulated(lambda a: (convert(a * 3, torch.bfloat16),), a)
    assert buffer.equal(1 + a * 3) and convert not in targets
    _, (buffer,) = accumulated(lambda a, b: (aten.permute(aten.mm(a, b), [1, 0]),), a, b)
    torch.testing.assert_close(buffer, 1 + (a @ b).T)
    graph = accumulate_outputs(make_fx(lambda a, b: (aten.permute(aten.mm(a, b), [1, 0]),))(a, b), add=True)
    (product,) = graph.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert product.meta["val"].shape == (3, 5)


def grads_of_experts(name: str, dtype: torch.dtype):
    """Operands of the gradients of the experts' weights."""
    p = make_problem(name, dtype)
    h, a = (torch.ones(len(p.plan[0]), w).to(dtype) for w in (p.w_gate_up.shape[1], p.w_down.shape[2]))
    return p.dy_TD, p.x_TD, h, a, *p.plan


@pytest.mark.parametrize("add", [False, True])
def test_the_experts_kernels_fill_their_buffers_themselves(add):
    given = grads_of_experts("skewed, dead rows", torch.bfloat16)

    def gradients(dy, *rest):
        of_gate_up, of_down = torch.ops.graphmoe.grouped_mlp_wgrad(dy, *rest, "torch")
        return of_down, dy * 2, of_gate_up

    targets, buffers = accumulated(gradients, *given, add=add)
    for buffer, value in zip(buffers, gradients(*given), strict=True):
        assert torch.equal(buffer, value.float() + add)
    assert torch.ops.graphmoe.grouped_mlp_wgrad_into.default in targets
    assert torch.ops.graphmoe.grouped_mlp_wgrad.default not in targets


def test_a_gradient_of_experts_that_is_read_elsewhere_is_copied():
    given = grads_of_experts("random", torch.float32)

    def gradients(*given):
        of_gate_up, of_down = torch.ops.graphmoe.grouped_mlp_wgrad(*given, "torch")
        return of_gate_up, of_down, of_down * 2

    _, buffers = accumulated(gradients, *given, add=False)
    assert all(torch.equal(b, value) for b, value in zip(buffers, gradients(*given), strict=True))
