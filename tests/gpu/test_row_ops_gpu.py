"""The routing plan, row movement and SwiGLU at real sizes on a GPU: values, capture, large buffers.

Suffixes as in graphmoe/ops/permute.py and graphmoe/ops/swiglu.py.
"""

import pytest
import torch

from graphmoe.ops import permute as _registers_the_ops  # noqa: F401
from graphmoe.ops import swiglu as _registers_swiglu  # noqa: F401
from tests.gpu.sleeping import assert_repeats, assert_replays
from tests.tolerances import assert_forward_close, assert_gradient_close

ops = torch.ops.graphmoe
DTYPES = (torch.float32, torch.bfloat16)


def random_experts(T, K, E, seed=0, unrouted=0.0):
    """Distinct experts of each token, on the GPU; a share of the slots is not routed here."""
    generator = torch.Generator("cuda").manual_seed(seed)
    expert_TK = torch.rand(T, E, generator=generator, device="cuda").topk(K, dim=1).indices.int()
    hole_TK = torch.rand(T, K, generator=generator, device="cuda") < unrouted
    return expert_TK.masked_fill(hole_TK, -1)


def assert_plan_is_that_of_the_cpu(expert_TK, num_experts):
    expected = ops.routing_plan(expert_TK.cpu(), num_experts)
    names = ("counts_E", "ends_E", "row_TK", "slot_R")
    for name, actual, wanted in zip(names, ops.routing_plan(expert_TK, num_experts), expected, strict=True):
        wrong = int((actual.cpu() != wanted).sum())
        assert wrong == 0, f"{name}: {wrong} of {wanted.numel()} differ"


@pytest.mark.parametrize("unrouted", [0.0, 0.3])
@pytest.mark.parametrize(
    ("T", "K", "E"), [(16384, 6, 64), (65536, 16, 512), (9999, 8, 256), (4099, 1, 2), (2731, 3, 127)]
)
def test_plans_of_real_sizes_are_those_of_the_cpu(T, K, E, unrouted):
    assert_plan_is_that_of_the_cpu(random_experts(T, K, E, unrouted=unrouted), E)


def test_a_plan_with_all_tokens_on_one_expert_is_that_of_the_cpu():
    assert_plan_is_that_of_the_cpu(torch.full((16384, 6), 63, dtype=torch.int32, device="cuda"), 64)


def expert_block(expert_TK, x_TD, weight_TK, num_experts):
    """Plan, rows to experts, SwiGLU with weights, rows back with weights: [T, D] -> [T, D / 2]."""
    _, ends_E, row_TK, slot_R = ops.routing_plan(expert_TK, num_experts)
    where = (slot_R, row_TK, ends_E)
    h_RH = ops.permute(x_TD, *where)
    weight_R1 = ops.permute(weight_TK.reshape(-1, 1), slot_R, row_TK.reshape(-1, 1), ends_E)
    return ops.unpermute(ops.swiglu(h_RH, weight_R1, ends_E), *where, weight_TK)


def values_and_gradients(expert_TK, x_TD, weight_TK, num_experts):
    y_TF = expert_block(expert_TK, x_TD, weight_TK, num_experts)
    dy_TF = torch.arange(y_TF.numel(), device=y_TF.device).remainder(17).sub(8).view_as(y_TF).to(y_TF.dtype)
    return y_TF, *torch.autograd.grad(y_TF, (x_TD, weight_TK), dy_TF)


def block_inputs(T=1000, K=6, E=64, D=256, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    x_TD = torch.randn(T, D, generator=generator, device="cuda").to(dtype).requires_grad_()
    weight_TK = torch.rand(T, K, generator=generator, device="cuda").requires_grad_()
    return random_experts(T, K, E, unrouted=0.2), x_TD, weight_TK, E


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_a_whole_block_matches_fp64_on_the_cpu(dtype):
    expert_TK, x_TD, weight_TK, E = block_inputs(dtype=dtype)
    exact = (t.detach().cpu().double().requires_grad_() for t in (x_TD, weight_TK))
    expected = values_and_gradients(expert_TK.cpu(), *exact, E)
    y_TF, *gradients = values_and_gradients(expert_TK, x_TD, weight_TK, E)
    if dtype == torch.float64:
        weight = gradients.pop()  # fp32 like its input
        assert_gradient_close(weight, expected[2].to(weight.device))
    assert_forward_close(y_TF.cpu(), expected[0])
    for actual, wanted in zip(gradients, expected[1:], strict=False):
        # that of the fp32 weights sums products of rows in the dtype of x
        assert_gradient_close(actual.cpu().to(dtype), wanted)


def test_runs_are_bitwise_equal():
    inputs = block_inputs(T=5000)
    assert_repeats(lambda: values_and_gradients(*inputs))


def test_a_captured_block_replays_on_new_routing():
    expert_TK, x_TD, weight_TK, E = block_inputs()
    T, K = expert_TK.shape
    routings = {
        "few are routed here": random_experts(T, K, E, seed=1, unrouted=0.9),
        "all are routed here": random_experts(T, K, E, seed=2),
        "none is routed here": torch.full_like(expert_TK, -1),
        "one expert": torch.full_like(expert_TK, 5),
    }

    def changes():
        for name, routing in routings.items():
            with torch.no_grad():
                expert_TK.copy_(routing)
                x_TD.mul_(1.25)
            yield name

    assert_replays(lambda: values_and_gradients(expert_TK, x_TD, weight_TK, E), changes())


def test_addresses_beyond_2_to_the_31_are_reached():
    T, K, E, D = 2**18 + 5, 4, 8, 2064  # 2.16e9 elements of rows
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free memory")
    expert_TK = (torch.arange(T, device="cuda")[:, None] + torch.arange(K, device="cuda")).int() % E
    _, ends_E, row_TK, slot_R = ops.routing_plan(expert_TK, E)
    where = (slot_R, row_TK, ends_E)
    x_TD = torch.randint(-8, 9, (T, D), device="cuda").bfloat16()  # small integers: sums are exact
    y_RD = ops.permute(x_TD, *where)
    assert y_RD.numel() > 2**31
    tail = slice(T * K - 1000, T * K)
    assert torch.equal(y_RD[tail], x_TD[slot_R[tail].long() // K])
    assert torch.equal(ops.unpermute(y_RD, *where, None), 4 * x_TD)
    ones_TD = torch.ones_like(x_TD)
    assert torch.equal(
        ops.unpermute_weight_grad(ones_TD, y_RD, row_TK)[:, 0], x_TD.sum(1, dtype=torch.float32)
    )
    a_RF = ops.swiglu(y_RD, None, ends_E)
    gate, up = y_RD[tail].float().chunk(2, dim=-1)
    assert_forward_close(a_RF[tail], torch.nn.functional.silu(gate) * up)
    dh_RH, _ = ops.swiglu_backward(torch.ones_like(a_RF), y_RD, None, ends_E)
    assert_gradient_close(dh_RH[tail, D // 2 :], torch.nn.functional.silu(gate))
