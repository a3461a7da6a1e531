"""The router on all backends against fp64 and plain lists. Suffixes as in graphmoe/ops/router.py."""

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from torch.library import opcheck

from graphmoe.config.schema import AuxLoss, ModelConfig, ScoreFunction
from graphmoe.ops import router as plain
from tests.ops.ahead_of_time import launches_of
from tests.ops.interpreted import BACKENDS, KERNELS, device_of
from tests.tolerances import assert_forward_close, assert_gradient_close

ops = torch.ops.graphmoe


@dataclass(frozen=True)
class Case:
    """Shapes and settings of one router."""

    B: int
    S: int
    E: int
    K: int
    score: str = "softmax"
    groups: tuple[int, int, int] = (1, 1, 1)  # groups, groups kept, experts summed for a group's score
    renormalise: bool = False
    after: bool = False
    scale: float = 1.0
    biased: bool = False
    chosen: str = ""
    count_scores: bool = False
    low: bool = False  # the first tokens have low logits only

    def settings(self):
        weighting = (self.renormalise, self.after, self.scale, self.count_scores)
        return (self.B, self.K, self.score, *self.groups, *weighting)

    def backward_settings(self):
        return (self.B, self.score, self.renormalise, self.after, self.scale)


SIGMOID = {"score": "sigmoid", "renormalise": True, "biased": True}
CASES = {
    "DeepSeek-V2-Lite": Case(2, 33, 64, 6),
    "DeepSeek-V2": Case(1, 9, 160, 6, groups=(8, 3, 1), scale=16.0),
    "DeepSeek-V3": Case(2, 5, 256, 8, groups=(8, 4, 2), scale=2.5, count_scores=True, **SIGMOID),
    "counted with its bias": Case(2, 5, 256, 8, groups=(8, 4, 2), scale=2.5, **SIGMOID),
    "Qwen": Case(1, 11, 128, 8, renormalise=True),
    "softmax over the chosen": Case(2, 19, 32, 4, after=True, scale=0.5),
    "softmax over the one chosen": Case(2, 7, 8, 1, after=True),
    "sigmoid as it is": Case(3, 13, 24, 3, score="sigmoid"),
    "smallest": Case(1, 7, 2, 1, renormalise=True),
    "largest": Case(1, 3, 512, 16, **SIGMOID),
    "all experts": Case(2, 6, 5, 5, renormalise=True),
    "groups of 10": Case(2, 9, 30, 6, groups=(3, 2, 3), count_scores=True, **SIGMOID),
    "3 groups of 16": Case(1, 8, 48, 4, groups=(3, 2, 2), biased=True),
    "groups of 1": Case(1, 8, 6, 2, groups=(6, 3, 2)),
    "all groups kept": Case(1, 8, 12, 4, groups=(4, 4, 2)),
    "one token in a sequence": Case(5, 1, 9, 2, count_scores=True, **SIGMOID),
    "given": Case(2, 10, 12, 4, chosen="round robin", **SIGMOID),
    "given in groups": Case(2, 10, 12, 4, groups=(4, 2, 2), chosen="round robin"),
    "given to some": Case(2, 10, 12, 4, groups=(4, 2, 2), chosen="some", count_scores=True, **SIGMOID),
    "given twice": Case(1, 10, 6, 3, chosen="twice", renormalise=True),
    "given twice, softmax over them": Case(1, 10, 6, 3, chosen="twice", after=True),
    "low": Case(2, 5, 12, 4, chosen="round robin", low=True, **SIGMOID),
    "low, and one expert": Case(2, 5, 12, 1, chosen="round robin", low=True, **SIGMOID),
    "low, softmax over them": Case(1, 9, 12, 4, "sigmoid", chosen="round robin", low=True, after=True),
    "low as they are": Case(1, 9, 12, 4, "sigmoid", chosen="round robin", low=True),
}


def best(values, k):
    """Ids of the k largest values, best first, the lower id first among equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def coarse_choices(T, E, seed):
    """Choices on a grid of eighths, some negative: many ties, and sums are exact in fp32."""
    return torch.randint(-4, 12, (T, E), generator=torch.Generator().manual_seed(seed)) / 8


def inputs_of(case, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(case.B * case.S, case.E, generator=generator) * 2
    if case.low:
        logits[:6] += torch.tensor([-15.0, -25.0, -50.0, -80.0, -110.0, -200.0]).unsqueeze(1)
    bias = torch.randn(case.E, generator=generator) / 8 if case.biased else None
    chosen = None
    if case.chosen:
        slot = torch.arange(len(logits) * case.K, dtype=torch.int32).view(-1, case.K)
        chosen = slot // 2 % case.E if case.chosen == "twice" else slot % case.E
        chosen[::3] = -1 if case.chosen == "some" else chosen[::3]
    return tuple(None if t is None else t.to(device) for t in (logits, bias, chosen))


def choice_of(case, logits_TE, bias_E=None, groups=None):
    """The experts of each token by the definition of group-limited top-k, in plain lists."""
    exact, (groups, kept_groups, summed) = logits_TE.double().cpu(), groups or case.groups
    choice_TE = exact.sigmoid() if case.score == "sigmoid" else exact.softmax(1)
    if bias_E is not None:
        choice_TE = choice_TE + bias_E.double().cpu()
    size, rows = case.E // groups, []
    for choices in choice_TE.tolist():
        members = [choices[g * size : (g + 1) * size] for g in range(groups)]
        score_of_group = [sum(sorted(group, reverse=True)[:summed]) for group in members]
        kept = best(score_of_group, kept_groups) if groups > 1 else [0]
        rows.append(best([c if e // size in kept else -math.inf for e, c in enumerate(choices)], case.K))
    return torch.tensor(rows, dtype=torch.int32)


def written_out(case, exact_TE, expert_TK):
    """Weights, shares, z and entropy in fp64 by their definitions; differentiable in the logits."""
    scores_TE = exact_TE.sigmoid() if case.score == "sigmoid" else exact_TE.softmax(1)
    weight_TK = (exact_TE.exp() if case.after else scores_TE).gather(1, expert_TK.long())
    if case.after or case.renormalise:
        weight_TK = weight_TK / weight_TK.sum(1, keepdim=True)
    share_TE = scores_TE / scores_TE.sum(1, keepdim=True)
    share_sum_BE = torch.stack([share.sum(0) for share in share_TE.split(case.S)])
    z_sum = exact_TE.exp().sum(1).log().square().sum()
    return weight_TK * case.scale, share_sum_BE, z_sum, -(share_TE * share_TE.log()).sum()


def differentiable(outputs):
    """The results with a gradient: weights, shares, z and entropy."""
    return [outputs[0], *outputs[3:]]


def by_autograd(logits, bias, chosen, case):
    """Results of the operation, and a function from gradients to that of the logits."""
    logits = logits.clone().requires_grad_()
    return with_gradient(ops.router(logits, bias, chosen, *case.settings()), logits)


def with_gradient(outputs, logits):
    def gradient(incoming):
        pairs = [(o, g) for o, g in zip(differentiable(outputs), incoming, strict=True) if g is not None]
        results, gradients = zip(*pairs, strict=True)
        return torch.autograd.grad(results, logits, gradients, retain_graph=True)[0]

    return [o.detach() for o in outputs], gradient


def by_plain_form(logits, bias, chosen, case):
    """The same from the functions of which a router of the model is made."""
    _, expert_TK, counts_BE, *_ = ops.router(logits, bias, chosen, *case.settings())
    logits, function = logits.clone().requires_grad_(), ScoreFunction(case.score)
    scores, weighting = plain.scores_of(logits, function), (case.renormalise, case.after, case.scale)
    relative = plain.relative_scores(logits, scores, function)
    weight_TK = plain.weights_of(logits, scores, relative, expert_TK, *weighting)
    config = ModelConfig(num_experts=case.E, score_function=function, aux_loss=AuxLoss.sequence)
    mean_BE, _ = plain.balance_terms(config, relative, counts_BE, None)
    sums = (mean_BE * case.S, plain.z_loss(logits) * len(logits), plain.entropy(relative) * len(logits))
    return with_gradient([weight_TK, expert_TK, counts_BE, *sums], logits)


def by_kernels(logits, bias, chosen, case):
    from graphmoe.ops import router_kernels

    outputs = router_kernels.forward(logits, bias, chosen, *case.settings())

    def gradient(incoming):
        return router_kernels.backward(*incoming, logits, outputs[1], *case.backward_settings())

    return outputs, gradient


def assert_matches_fp64(run, case, device="cpu"):
    """Compare the choice, every result, and the gradient through each result and through all."""
    logits, bias, chosen = inputs_of(case, device=device)
    outputs, gradient = run(logits, bias, chosen, case)
    expert_TK, counts_BE = outputs[1:3]
    wanted_TK = choice_of(case, logits, bias)
    if chosen is not None:
        wanted_TK = torch.where(chosen.cpu() < 0, wanted_TK, chosen.cpu())
    assert (expert_TK.dtype, expert_TK.is_contiguous()) == (torch.int32, True)
    assert torch.equal(expert_TK.cpu(), wanted_TK)
    if case.count_scores:
        wanted_TK = choice_of(case, logits, groups=(1, 1, 1))
    for b, rows in enumerate(wanted_TK.view(case.B, -1).tolist()):
        assert counts_BE[b].tolist() == [rows.count(e) for e in range(case.E)]
    exact = logits.double().requires_grad_()
    expected = written_out(case, exact, expert_TK)
    actual = differentiable(outputs)
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(o.shape, generator=generator).to(device) for o in actual]
    for result, wanted in zip(actual, expected, strict=True):
        assert (result.dtype, result.shape, result.is_contiguous()) == (torch.float32, wanted.shape, True)
        assert_forward_close(result, wanted)
    for used in [{0}, {1}, {2}, {3}, {0, 1, 2, 3}]:
        given = [g if i in used else None for i, g in enumerate(incoming)]
        total = sum((expected[i] * incoming[i].double()).sum() for i in used)
        (wanted,) = torch.autograd.grad(total, exact, retain_graph=True)
        terms = float(incoming[0].norm()) * case.scale
        assert_gradient_close(gradient(given), wanted, terms=terms)


def runs_of(backend):
    """Ways to the results: by autograd, and for a GPU's tensors the kernels by themselves too."""
    both = [by_autograd, by_kernels]
    return {"plain": [by_autograd, by_plain_form], "interpreted": [by_kernels], "cuda": both}[backend]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_and_gradients_match_fp64(backend, name):
    for run in runs_of(backend):
        assert_matches_fp64(run, CASES[name], device_of(backend))


TIED = [Case(1, 21, 40, 12), Case(1, 21, 40, 12, "sigmoid"), Case(1, 21, 24, 6, groups=(6, 2, 1))]
TIED += [Case(1, 21, E, K, "sigmoid", of) for E, K, of in ((24, 6, (6, 3, 2)), (30, 8, (3, 2, 2)))]


@pytest.mark.parametrize("case", TIED, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_lower_id(backend, case):
    # Most rows of the first have equal logits, which have equal scores.
    for logits in (coarse_choices(21, case.E, 0) * 4, torch.zeros(21, case.E)):
        for run in runs_of(backend):
            outputs, _ = run(logits.to(device_of(backend)), None, None, case)
            assert torch.equal(outputs[1].cpu(), choice_of(case, logits))


GIVEN_BAD = [Case(1, 9, 13, 5), Case(1, 9, 64, 6, after=True)]
GIVEN_BAD += [Case(1, 9, E, K, "sigmoid", of, True) for E, K, of in ((16, 4, (4, 2, 2)), (30, 8, (3, 1, 2)))]


@pytest.mark.parametrize("case", GIVEN_BAD, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_logits_give_different_ids_in_range_and_leave_other_tokens_alone(backend, case):
    good, _, _ = inputs_of(case)
    bad = good.clone()
    bad[1], bad[2, 0], bad[3, ::2] = math.nan, math.nan, math.nan
    bad[4], bad[5, 1], bad[6], bad[7, 3] = -math.inf, math.inf, math.inf, -math.inf
    for run in runs_of(backend):
        outputs, wanted = (run(x.to(device_of(backend)), None, None, case)[0] for x in (bad, good))
        for row in outputs[1].tolist():
            assert len(set(row)) == case.K and min(row) >= 0 and max(row) < case.E, row
        assert int(outputs[2].sum()) == 9 * case.K
        for i in (0, 1):
            assert torch.equal(outputs[i][[0, 8]], wanted[i][[0, 8]])
        assert bool(outputs[0][1].isnan().all()) and bool(outputs[4].isnan())
        if case.score == "sigmoid":  # one NaN score among the others: it is the worst choice
            assert 0 not in outputs[1][2].tolist() and bool(outputs[0][2].isfinite().all())


@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_take_several_blocks_and_sum_more_than_one_block_of_rows(backend, monkeypatch):
    """Blocks of 4 tokens and few programs, so that the last round of each is cut or empty."""
    from graphmoe.ops import router_kernels

    for sizes in ({"MOST_PROGRAMS": 1}, {"MOST_PROGRAMS": 7}, {"SUMMED_ROWS": 4, "SUMMED_COLUMNS": 8}):
        with monkeypatch.context() as patch:
            for name, size in {"BLOCK": 64, **sizes}.items():
                patch.setattr(router_kernels, name, size)
            assert_matches_fp64(by_kernels, Case(2, 45, 15, 3, renormalise=True), device_of(backend))
            assert_matches_fp64(by_kernels, Case(2, 45, 12, 3, groups=(3, 2, 1)), device_of(backend))


def test_a_router_that_has_decided_has_finite_entropy_and_gradients():
    case = Case(1, 4, 6, 2)
    logits = torch.tensor([[200.0, 0, 0, 0, 0, -200]]).repeat(4, 1)
    outputs, gradient = by_autograd(logits, None, None, case)
    assert outputs[5].item() == 0.0
    assert bool(gradient([torch.ones_like(o) for o in differentiable(outputs)]).isfinite().all())


@pytest.mark.parametrize("name", ["DeepSeek-V3", "given", "softmax over the chosen"])
def test_torch_accepts_the_ops(name):
    case = CASES[name]
    logits, bias, chosen = inputs_of(case)
    outputs = ops.router(logits, bias, chosen, *case.settings())
    opcheck(ops.router.default, (logits.clone().requires_grad_(), bias, chosen, *case.settings()))
    incoming = [None, *(torch.ones_like(o) for o in differentiable(outputs)[1:])]
    opcheck(ops.router_backward.default, (*incoming, logits, outputs[1], *case.backward_settings()))


@pytest.mark.parametrize(("T", "K", "E"), [(8, 2, 8), (16, 6, 32), (512, 16, 512), (5, 8, 10), (64, 1, 2)])
def test_round_robin_gives_every_expert_the_same_number_of_slots(T, K, E):
    experts = plain.round_robin(T, K, E, torch.device("cpu"))
    assert experts.dtype == torch.int32
    assert torch.bincount(experts.flatten(), minlength=E).tolist() == [T * K // E] * E
    assert all(len(set(row)) == K for row in experts.tolist())


def ahead_of_time_cases():
    for name, case in {
        "64 experts": Case(16, 256, 64, 6),
        "256 experts in 8 groups": Case(16, 256, 256, 8, groups=(8, 4, 2), count_scores=True, **SIGMOID),
        "160 experts in 8 groups": Case(16, 256, 160, 6, groups=(8, 3, 1)),
        "512 experts": Case(16, 256, 512, 16, count_scores=True, **SIGMOID),
        "after top-k": Case(16, 256, 60, 4, after=True),
        "given": Case(16, 256, 64, 6, chosen="round robin"),
        "one token": Case(1, 1, 64, 6),  # Triton makes a constant of an argument that is 1
    }.items():
        found = launches_of(name, functools.partial(both_ways, case))
        yield from found if name == "64 experts" else (found[0], found[2])  # the second adds up partial sums


def both_ways(case):
    outputs, gradient = by_kernels(*inputs_of(case, device="meta"), case)
    gradient(differentiable(outputs))
