"""Routers and checks for the router's operation, wherever it runs: as plain code, interpreted, or on a GPU.

Suffixes as in graphmoe/ops/fused_router.py. Expected values are computed in fp64, the choice from
plain lists.
"""

import math
from dataclasses import dataclass

import torch

from graphmoe.ops import fused_router as router_op  # noqa: F401  # registers the op
from tests.tolerances import assert_forward_close, assert_gradient_close


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

    def settings(self):
        """The operation's arguments behind logits, bias and chosen experts."""
        weighting = (self.renormalise, self.after, self.scale, self.count_scores)
        return (self.B, self.K, self.score, *self.groups, *weighting)

    def backward_settings(self):
        """The backward operation's arguments behind gradients, logits and experts."""
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
    "given twice": Case(1, 10, 6, 3, chosen="twice", renormalise=True),
    "given twice, softmax over them": Case(1, 10, 6, 3, chosen="twice", after=True),
}


def best(values, k):
    """Ids of the k largest values, best first, the lower id first among equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def coarse_choices(T, E, seed):
    """Choices on a grid of eighths, some negative: many ties, and sums are exact in fp32."""
    return torch.randint(-4, 12, (T, E), generator=torch.Generator().manual_seed(seed)) / 8


def inputs_of(case, seed=0, device="cpu"):
    """Logits, bias and given experts."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(case.B * case.S, case.E, generator=generator) * 2
    bias = torch.randn(case.E, generator=generator) / 8 if case.biased else None
    chosen = None
    if case.chosen:
        slot = torch.arange(len(logits) * case.K, dtype=torch.int32).view(-1, case.K)
        chosen = slot % case.E if case.chosen == "round robin" else slot // 2 % case.E
    return tuple(None if t is None else t.to(device) for t in (logits, bias, chosen))


def brute_force_choice(choice_TE, k, groups, kept_groups, summed):
    """The experts of each token by the definition of group-limited top-k, in plain lists."""
    size, rows = choice_TE.shape[1] // groups, []
    for choices in choice_TE.tolist():
        members = [choices[g * size : (g + 1) * size] for g in range(groups)]
        score_of_group = [sum(sorted(group, reverse=True)[:summed]) for group in members]
        kept = best(score_of_group, kept_groups) if groups > 1 else [0]
        rows.append(best([c if e // size in kept else -math.inf for e, c in enumerate(choices)], k))
    return torch.tensor(rows, dtype=torch.int32)


def choice_of(case, logits_TE, bias_E=None, groups=None):
    """The experts of each token from fp64 scores."""
    exact = logits_TE.double().cpu()
    choice_TE = exact.sigmoid() if case.score == "sigmoid" else exact.softmax(1)
    if bias_E is not None:
        choice_TE = choice_TE + bias_E.double().cpu()
    return brute_force_choice(choice_TE, case.K, *(groups or case.groups))


def written_out(case, exact_TE, expert_TK):
    """Weights, shares, z and entropy in fp64 by their definitions; differentiable in the logits."""
    expert_TK = expert_TK.long()
    if case.after:
        power_TK = exact_TE.gather(1, expert_TK).exp()
        weight_TK = power_TK / power_TK.sum(1, keepdim=True)
    else:
        power_TE = exact_TE.exp()
        scores_TE = 1 / (1 + 1 / power_TE) if case.score == "sigmoid" else power_TE / power_TE.sum(1, True)
        weight_TK = scores_TE.gather(1, expert_TK)
        if case.renormalise:
            weight_TK = weight_TK / weight_TK.sum(1, keepdim=True)
    scores_TE = exact_TE.sigmoid() if case.score == "sigmoid" else exact_TE.softmax(1)
    share_TE = scores_TE / scores_TE.sum(1, keepdim=True)
    share_sum_BE = torch.stack([share.sum(0) for share in share_TE.split(case.S)])
    z_sum = exact_TE.exp().sum(1).log().square().sum()
    return weight_TK * case.scale, share_sum_BE, z_sum, -(share_TE * share_TE.log()).sum()


def by_autograd(logits, bias, chosen, case, wanted):
    """Results of the operation, and a function from gradients to that of the logits."""
    logits = logits.clone().requires_grad_()
    outputs = torch.ops.graphmoe.router(logits, bias, chosen, *case.settings())

    def gradient(incoming):
        pairs = [(o, g) for o, g in zip(wanted(outputs), incoming, strict=True) if g is not None]
        return torch.autograd.grad([o for o, _ in pairs], logits, [g for _, g in pairs], retain_graph=True)[0]

    return [o.detach() for o in outputs], gradient


def by_kernels(logits, bias, chosen, case, wanted):
    """The same from the kernels themselves."""
    from graphmoe.ops import router_kernels

    outputs = router_kernels.forward(logits, bias, chosen, *case.settings())

    def gradient(incoming):
        return router_kernels.backward(*incoming, logits, outputs[1], *case.backward_settings())

    return outputs, gradient


def differentiable(outputs):
    """The results with a gradient: weights, shares, z and entropy."""
    return [outputs[0], *outputs[3:]]


def assert_matches_fp64(run, case, device="cpu"):
    """Compare the choice, every result, and the gradient through each result and through all."""
    logits, bias, chosen = inputs_of(case, device=device)
    outputs, gradient = run(logits, bias, chosen, case, differentiable)
    expert_TK, counts_BE = outputs[1:3]
    wanted_TK = choice_of(case, logits, bias) if chosen is None else chosen.cpu()
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


def assert_ties_go_to_the_lower_id(run, device="cpu"):
    for E, K, groups, score in (
        (40, 12, (1, 1, 1), "softmax"),
        (40, 12, (1, 1, 1), "sigmoid"),
        (24, 6, (6, 2, 1), "softmax"),
        (24, 6, (6, 3, 2), "sigmoid"),
        (30, 8, (3, 2, 2), "sigmoid"),
    ):
        case = Case(1, 21, E, K, score, groups)
        logits = coarse_choices(21, E, 0) * 4  # most rows have equal ones, which have equal scores
        outputs, _ = run(logits.to(device), None, None, case, differentiable)
        assert torch.equal(outputs[1].cpu(), choice_of(case, logits)), (E, groups)
        outputs, _ = run(torch.zeros(21, E, device=device), None, None, case, differentiable)
        assert outputs[1].tolist() == [list(range(K))] * 21


def assert_bad_logits_give_ids_in_range(run, device="cpu"):
    """NaN and infinite logits: K different experts for each token, and the other tokens as without them."""
    for case in (
        Case(1, 9, 13, 5),
        Case(1, 9, 16, 4, "sigmoid", (4, 2, 2), True),
        Case(1, 9, 30, 8, "sigmoid", (3, 1, 2), True),
        Case(1, 9, 64, 6, after=True),
    ):
        good, _, _ = inputs_of(case)
        bad = good.clone()
        bad[1], bad[2, 0], bad[3, ::2] = math.nan, math.nan, math.nan
        bad[4], bad[5, 1], bad[6], bad[7, 3] = -math.inf, math.inf, math.inf, -math.inf
        outputs, _ = run(bad.to(device), None, None, case, differentiable)
        wanted, _ = run(good.to(device), None, None, case, differentiable)
        for row in outputs[1].tolist():
            assert len(set(row)) == case.K and min(row) >= 0 and max(row) < case.E, row
        assert int(outputs[2].sum()) == 9 * case.K
        for i in (0, 1):
            assert torch.equal(outputs[i][[0, 8]], wanted[i][[0, 8]])
        assert bool(outputs[0][1].isnan().all()) and bool(outputs[4].isnan())
        if case.score == "sigmoid":  # one NaN score among the others: it is the worst choice
            assert 0 not in outputs[1][2].tolist() and bool(outputs[0][2].isfinite().all())
