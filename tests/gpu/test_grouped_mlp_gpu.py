"""The grouped MLP on a GPU: values at real sizes, determinism, addressing, capture, choice."""

import pytest
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.ops.grouped_mlp import choice
from graphmoe.runtime.cache.store import CompileCache
from tests.gpu.sleeping import assert_repeats, assert_replays
from tests.ops.mlp_cases import assert_directions_match, assert_results_match, leaves_of, make_problem, ops_of
from tests.ops.row_cases import fresh_memory_is_nan
from tests.tolerances import assert_gradient_close

ops, CUDA = torch.ops.graphmoe, torch.device("cuda", 0)
LARGE = {  # name: (pattern, T, D, F, E, K, dead rows)
    "tails in all axes": ("skewed", 1500, 1000, 328, 12, 4, 100),
    "odd, which descriptors cannot describe": ("random", 700, 517, 131, 10, 3, 9),
    "deepseek v2 lite": ("random", 1024, 2048, 1408, 16, 6, 0),
    "wide": ("random", 600, 7168, 512, 8, 2, 0),
    "few rows of many experts": ("random", 64, 512, 256, 256, 8, 0),
    "all tokens on one expert": ("one expert", 900, 512, 384, 8, 2, 0),
}
ROUTED = ("skewed", 2048, 512, 256, 16, 4, 0)


def step(p, leaves, backend="triton"):
    y_TD, _ = ops.grouped_mlp(*leaves, *p.plan, backend)
    return [y_TD, *torch.autograd.grad(y_TD, leaves, p.dy_TD)]


@pytest.mark.parametrize("backend", ["triton", "torch", "torch,triton,torch"])
@pytest.mark.parametrize("case", LARGE)
def test_large_cases_match_fp64_in_bf16(case, backend):
    assert_directions_match(ops_of(backend), scaled(make_problem(LARGE[case], torch.bfloat16, CUDA)))


def scaled(p):
    D, F = p.w_down.shape[1:]
    return p._replace(w_gate_up=p.w_gate_up * D**-0.5, w_down=p.w_down * F**-0.5)


def test_a_large_case_matches_fp64_in_fp32():
    assert_directions_match(
        ops_of("triton"), scaled(make_problem(LARGE["tails in all axes"], torch.float32, CUDA))
    )


@pytest.mark.parametrize("backend", ["triton", "torch", "te", "turbo"])
@pytest.mark.parametrize("live", [0, 1, 127, 128, 129, 1000, 2047, 2048])
def test_any_number_of_rows_may_be_live(live, backend):
    """Use a buffer of 2148 rows; tiles have up to 128. A single row's bf16 sums are no mean of many: fp32."""
    dtype = torch.float32 if live == 1 and backend in ("triton", "torch") else torch.bfloat16
    p = scaled(make_problem((f"{live} live slots", 512, 256, 128, 8, 4, 100), dtype, CUDA))
    try:
        with fresh_memory_is_nan():
            y_TD, *gradients = step(p, leaves_of(p), backend)
    except ConfigError as error:
        if backend in ("triton", "torch"):
            raise
        pytest.skip(str(error))  # the package is not there, or has no such products here
    assert_results_match(p, y_TD, gradients)
    assert_directions_match(ops_of(backend), p)


def test_runs_are_bitwise_equal():
    p = scaled(make_problem(LARGE["deepseek v2 lite"], torch.bfloat16, CUDA))
    leaves = leaves_of(p)
    assert_repeats(lambda: step(p, leaves))


def test_rows_beyond_two_to_the_31_elements_are_addressed():
    T, D, F, E, K = 132_000, 2112, 16, 4, 8
    assert T * K * D > 2**31
    x_TD = torch.randn(T, D, device=CUDA).bfloat16()
    weights = [
        torch.randn(E, 2 * F, D, device=CUDA).bfloat16() * D**-0.5,
        torch.randn(E, D, F, device=CUDA).bfloat16(),
        torch.rand(T, K, device=CUDA),
    ]
    expert_TK = torch.randint(E, (T, K), device=CUDA, dtype=torch.int32)
    _, ends_E, row_TK, slot_R = ops.routing_plan(expert_TK, E)
    plan = (slot_R, row_TK, ends_E)
    mine, torchs = ops_of("triton"), ops_of("torch")
    y_TD, h_RH = mine.forward(x_TD, *weights, *plan)
    expected, _ = torchs.forward(x_TD, *weights, *plan)
    assert_gradient_close(y_TD, expected)  # two roundings apart
    actual = mine.dgrad(x_TD, h_RH, *weights, *plan)
    wanted = torchs.dgrad(x_TD, h_RH, *weights, *plan)
    for a, b in zip(actual, wanted, strict=True):
        assert_gradient_close(a.bfloat16(), b)
    for a, b in zip(
        mine.wgrad(x_TD, x_TD, *actual[2:], *plan), torchs.wgrad(x_TD, x_TD, *actual[2:], *plan), strict=True
    ):
        assert_gradient_close(a, b)


@pytest.mark.parametrize("backend", ["triton", "triton,triton,torch"])
def test_a_captured_step_replays_on_another_routing(backend):
    p = scaled(make_problem(ROUTED, torch.bfloat16, CUDA))
    leaves, E = leaves_of(p), len(p.w_down)

    def whole():
        _, ends_E, row_TK, slot_R = ops.routing_plan(p.expert_TK, E)
        return step(p._replace(plan=(slot_R, row_TK, ends_E)), leaves, backend)

    def changes():
        for pattern in ("one expert", "half of the experts", "random"):
            other = make_problem((pattern, *ROUTED[1:]), torch.bfloat16, CUDA)
            p.expert_TK.copy_(other.expert_TK)
            with torch.no_grad():
                leaves[0].mul_(0.75)
            yield pattern

    def match(results):
        assert_results_match(p._replace(x_TD=leaves[0].detach()), results[0], results[1:])

    assert_replays(whole, changes(), match)


def test_auto_measures_and_remembers_on_this_gpu(tmp_path, monkeypatch):
    shape = choice.MlpShape(2048, 512, 256, 16, 4, torch.bfloat16)
    memory = CompileCache(tmp_path)
    found = choice.choose_backends("auto", shape, CUDA, memory)
    assert len(found.split(",")) == 3

    def never(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(choice, "milliseconds", never)
    assert choice.choose_backends("auto", shape, CUDA, CompileCache(tmp_path)) == found
