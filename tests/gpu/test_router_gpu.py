"""The router's kernels at real sizes on a GPU: values, gradients, capture, determinism.

Suffixes as in graphmoe/ops/router.py.
"""

import pytest
import torch

from graphmoe.ops.router import draw_experts
from graphmoe.plan.forced_loads import ends, load
from tests.gpu.sleeping import assert_repeats, assert_replays
from tests.ops.test_router import SIGMOID, Case, by_autograd, differentiable, written_out
from tests.tolerances import assert_forward_close, assert_gradient_close

REAL = {
    "DeepSeek-V2-Lite": Case(4, 4096, 64, 6),
    "DeepSeek-V3": Case(2, 4096, 256, 8, groups=(8, 4, 2), scale=2.5, count_scores=True, **SIGMOID),
    "DeepSeek-V2": Case(3, 3001, 160, 6, groups=(8, 3, 1), scale=16.0),
    "Qwen": Case(4, 4096, 128, 8, renormalise=True),
    "largest": Case(1, 16384, 512, 16, **SIGMOID),
    "many sequences": Case(2048, 5, 64, 6, after=True),
}


def real_inputs(case, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(case.B * case.S, case.E, generator=generator, device="cuda") * 2
    bias = torch.randn(case.E, generator=generator, device="cuda") / 8 if case.biased else None
    return logits, bias


def results_and_gradient(case, logits, bias, incoming):
    outputs, gradient = by_autograd(logits, bias, None, case)
    return *outputs, gradient(incoming)


def incoming_of(case, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = ((case.B * case.S, case.K), (case.B, case.E), (), ())
    return [torch.randn(size, generator=generator, device="cuda") for size in sizes]


def assert_choice_is_best_up_to_rounding(case, logits, bias, expert_TK):
    """Scores in fp64 of the experts chosen, in order, against the largest ones; few rows may be near-ties."""
    exact = logits.double()
    choice_TE = exact.sigmoid() if case.score == "sigmoid" else exact.softmax(1)
    if bias is not None:
        choice_TE = choice_TE + bias.double()
    if case.groups[0] > 1:
        choice_TGE = choice_TE.unflatten(1, (case.groups[0], -1))
        score_TG = choice_TGE.topk(case.groups[2], dim=-1).values.sum(-1)
        kept_TG = torch.zeros_like(score_TG).scatter(1, score_TG.topk(case.groups[1]).indices, 1.0)
        choice_TE = choice_TGE.masked_fill(kept_TG.unsqueeze(-1) == 0, float("-inf")).flatten(1)
    best_TK = choice_TE.topk(case.K).values
    wrong_T = ((choice_TE.gather(1, expert_TK.long()) - best_TK).abs() > 1e-6 * best_TK.abs()).any(1)
    # A near-tie of two groups changes a whole row.
    assert int(wrong_T.sum()) <= (4 if case.groups[0] > 1 else 0)
    ordered_TK = expert_TK.sort(1).values
    assert bool((ordered_TK[:, 1:] > ordered_TK[:, :-1]).all()), "an expert is chosen twice"


@pytest.mark.parametrize("name", REAL)
def test_real_sizes_match_fp64(name):
    case = REAL[name]
    (logits, bias), incoming = real_inputs(case), incoming_of(case)
    *outputs, gradient = results_and_gradient(case, logits, bias, incoming)
    assert_choice_is_best_up_to_rounding(case, logits, bias, outputs[1])
    owner_T = torch.arange(case.B, device="cuda").repeat_interleave(case.S)
    counted_TK = logits.double().sigmoid().topk(case.K).indices if case.count_scores else outputs[1]
    bins = (counted_TK + owner_T[:, None] * case.E).flatten()
    counts = torch.bincount(bins, minlength=case.B * case.E).view(case.B, case.E)
    # Two scores that are one in fp32 may change places.
    assert (outputs[2] - counts).abs().sum() <= (8 if case.count_scores else 0)
    exact = logits.double().requires_grad_()
    expected = written_out(case, exact, outputs[1])
    for actual, wanted in zip(differentiable(outputs), expected, strict=True):
        assert_forward_close(actual, wanted)
    total = sum((e * g.double()).sum() for e, g in zip(expected, incoming, strict=True))
    assert_gradient_close(gradient, torch.autograd.grad(total, exact)[0])


@pytest.mark.parametrize("name", REAL)
def test_runs_are_bitwise_equal(name):
    case = REAL[name]
    inputs = (case, *real_inputs(case), incoming_of(case))
    assert_repeats(lambda: results_and_gradient(*inputs))


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "DeepSeek-V3"])
def test_a_captured_router_replays_on_new_logits(name):
    case = REAL[name]
    (logits, bias), incoming = real_inputs(case), incoming_of(case)

    def changes():
        for seed in (5, 6):
            logits.copy_(real_inputs(case, seed)[0])
            for target, source in zip(incoming, incoming_of(case, seed + 10), strict=True):
                target.copy_(source)
            yield seed

    assert_replays(lambda: results_and_gradient(case, logits, bias, incoming), changes())


def test_a_compiled_draw_of_a_forced_load_is_the_plain_one():
    end_E = torch.tensor(ends(load("hot_experts", 1, 0, 64, 6, 2)), device="cuda")
    compiled = torch.compile(draw_experts, fullgraph=True, dynamic=False)
    assert compiled(16384, 6, end_E).equal(draw_experts(16384, 6, end_E))
