"""Routings, row buffers and checks for the row kernels, wherever these run: in the interpreter or on a GPU.

Suffixes as in graphmoe/ops/permute.py. What is expected is computed from plain Python lists and in fp64.
"""

import os
import random
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tests.tolerances import assert_forward_close

NAN = float("nan")
ROUTINGS = {  # name: (pattern, T, K, E)
    "random": ("random", 37, 6, 64),
    "skewed": ("skewed", 61, 3, 9),
    "empty experts": ("half of the experts", 29, 4, 24),
    "all tokens on one expert": ("one expert", 23, 5, 12),
    "one expert is all there are": ("one expert", 7, 2, 1),
    "some slots are not routed here": ("unrouted", 41, 6, 16),
    "no slot is routed here": ("nothing", 5, 3, 4),
    "one token": ("random", 1, 2, 2),
    "one slot": ("random", 53, 1, 2),
    "16 slots of 512 experts": ("random", 35, 16, 512),
    "every expert": ("random", 31, 8, 8),
    "slots of two rounds": ("unrouted", 11, 20, 33),
}


def experts_of(name):
    """Expert ids int32 [T, K], and the number of experts."""
    pattern, T, K, E = ROUTINGS[name]
    return pattern_of_experts(pattern, T, K, E), E


def pattern_of_experts(pattern, T, K, E):
    """int32 [T, K]; ids below 0 where a slot is not routed here."""
    if pattern == "one expert":
        return torch.full((T, K), E // 2, dtype=torch.int32)
    if pattern == "nothing":
        return torch.full((T, K), -1, dtype=torch.int32)
    if pattern == "unrouted":
        expert_TK = choose("skewed", T, K, E)
        hole_TK = torch.rand(T, K, generator=torch.Generator().manual_seed(T)) < 0.4
        return expert_TK.masked_fill(hole_TK, -3)
    if pattern.endswith(" live slots"):
        order_TK = torch.randperm(T * K, generator=torch.Generator().manual_seed(T)).view(T, K)
        return choose("random", T, K, E).masked_fill(order_TK >= int(pattern.split()[0]), -1)
    return choose(pattern, T, K, E)


def choose(pattern, T, K, E, seed=0):
    """K distinct experts of each token -> int32 [T, K]."""
    draw = random.Random(f"{pattern} {T} {K} {E} {seed}")
    pool = range(max(K, E // 2)) if pattern == "half of the experts" else range(E)
    rows = []
    for _ in range(T):
        if pattern == "same experts":
            rows.append(list(range(E - K, E)))
        elif pattern == "skewed":
            rows.append(sorted(pool, key=lambda e: draw.random() * (e + 1))[:K])
        else:
            rows.append(draw.sample(pool, K))
    return torch.tensor(rows, dtype=torch.int32).view(T, K)


def sizes():
    """(T, K, E): each K up to 16 and some more, experts up to 512, token counts that divide nothing."""
    draw = random.Random(0)
    for K in range(1, 17):
        yield draw.choice([1, 7, 37, 61]), K, draw.randint(max(K, 2), 512)
    yield from [(67, 16, 512), (31, 8, 8), (1, 2, 2), (53, 1, 2), (5, 3, 512), (5, 64, 100)]


class Plan(NamedTuple):
    """A routing plan, and room for rows that are dead."""

    counts_E: torch.Tensor
    ends_E: torch.Tensor
    row_TK: torch.Tensor
    slot_R: torch.Tensor
    live: int


def brute_force_plan(expert_TK, num_experts, dead_rows=0, device="cpu"):
    """The plan from sorted Python tuples; garbage stands in the last ``dead_rows`` of slot_R."""
    K = expert_TK.shape[1]
    triples = sorted((e, t, k) for t, row in enumerate(expert_TK.tolist()) for k, e in enumerate(row))
    live = [triple for triple in triples if triple[0] >= 0]
    counts = [sum(e == expert for e, _, _ in live) for expert in range(num_experts)]
    row_TK = torch.full_like(expert_TK, -1)
    for row, (_, t, k) in enumerate(live):
        row_TK[t, k] = row
    unrouted = sorted((t, k) for e, t, k in triples if e < 0)
    slots = [t * K + k for _, t, k in live] + [t * K + k for t, k in unrouted]
    garbage = random.Random(0).choices([-1, 2**30, 0], k=dead_rows)
    tensors = (counts, torch.tensor(counts).cumsum(0), row_TK, slots + garbage)
    counts_E, ends_E, row_TK, slot_R = (torch.as_tensor(t).int().to(device) for t in tensors)
    return Plan(counts_E, ends_E, row_TK, slot_R, len(live))


EXPERT_RS = torch.tensor([[3, 0, -1]], dtype=torch.int32)
"""Experts that a rank has replicas of."""


def plan_with_replicas(expert_TK, num_experts, dead_rows=0):
    """slot_R, row_TK and ends_E where every second row of an expert of `EXPERT_RS` is its replica's."""
    place_TK = expert_TK.clone()
    for slot, expert in enumerate(EXPERT_RS[0].tolist()):
        if expert >= 0:
            rows = (expert_TK == expert).view(-1).nonzero()[::2, 0]
            place_TK.view(-1)[rows] = num_experts + slot
    plan = brute_force_plan(place_TK, num_experts + EXPERT_RS.shape[1], dead_rows)
    return plan.slot_R, plan.row_TK, plan.ends_E


def assert_plan_matches_brute_force(run, expert_TK, num_experts, device="cpu"):
    """``run`` is the op or its kernel: (expert_TK, num_experts) -> counts, ends, rows, slots."""
    expected = brute_force_plan(expert_TK, num_experts)
    for name, actual, wanted in zip(
        Plan._fields, run(expert_TK.to(device), num_experts), expected[:4], strict=False
    ):
        assert actual.dtype == torch.int32 and actual.is_contiguous(), name
        assert actual.shape == wanted.shape, (name, actual.shape, wanted.shape)
        assert torch.equal(actual.cpu(), wanted), f"{name}: {actual.cpu()} is not {wanted}"


def spread(x_TD, plan, weight_TK):
    return torch.ops.graphmoe.permute(x_TD, plan.slot_R, plan.row_TK, plan.ends_E, weight_TK)


def summed(y_RD, plan, weight_TK):
    return torch.ops.graphmoe.unpermute(y_RD, plan.slot_R, plan.row_TK, plan.ends_E, weight_TK)


def dotted(dx_TD, y_RD, plan):
    return torch.ops.graphmoe.unpermute_weight_grad(dx_TD, y_RD, plan.row_TK)


def values(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def rows_with_nan(plan, columns, dtype, device, seed=1):
    """[R, columns]: numbers in live rows, NaN in dead ones."""
    y_RD = values(len(plan.slot_R), columns, dtype=dtype, device=device, seed=seed)
    y_RD[plan.live :] = NAN
    return y_RD


@contextmanager
def fresh_memory_is_nan():
    """New memory holds NaN inside the context, so that what a kernel leaves unwritten can be told."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def assert_rounded_alike(actual, expected):
    """Bitwise equality; only closeness where Triton's interpreter cuts fp32 to bf16, which devices round."""
    if actual.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1":
        assert_forward_close(actual, expected)
    else:
        assert torch.equal(actual, expected), (actual.double() - expected.double()).abs().max()


def assert_dead_rows_are_untouched(y_RD, plan):
    dead = y_RD[plan.live :]
    assert bool(dead.isnan().all()), f"{int((~dead.isnan()).any(-1).sum())} of {len(dead)} dead rows written"


def assert_rows_are_spread(run, plan, columns, dtype, device="cpu", weighted=False):
    """``run(x, plan, weight)`` -> y[row[t, k]] = weight[t, k] * x[t]; bitwise without weights."""
    (T, K), live = plan.row_TK.shape, plan.live
    x_TD, weight_TK = values(T, columns, dtype=dtype, device=device), values(T, K, device=device, seed=2)
    with fresh_memory_is_nan():
        y_RD = run(x_TD, plan, weight_TK if weighted else None)
    slot_R = plan.slot_R[:live].long()
    assert y_RD.dtype == dtype and y_RD.shape == (len(plan.slot_R), columns) and y_RD.is_contiguous()
    expected = x_TD[slot_R // K]
    if weighted:  # one product in fp32, rounded once
        expected = (expected.float() * weight_TK.view(-1, 1)[slot_R]).to(dtype)
        assert_rounded_alike(y_RD[:live], expected)
    else:
        assert torch.equal(y_RD[:live], expected)
    assert_dead_rows_are_untouched(y_RD, plan)


def assert_rows_are_summed(run, plan, columns, dtype, device="cpu", weighted=False):
    """``run(y, plan, weight)`` -> sum over k; without weights, bitwise that of fp32 additions in order."""
    y_RD = rows_with_nan(plan, columns, dtype, device)
    weight_TK = values(*plan.row_TK.shape, device=device, seed=2)
    x_TD = run(y_RD, plan, weight_TK if weighted else None)
    assert x_TD.dtype == dtype and x_TD.shape == (len(plan.row_TK), columns) and x_TD.is_contiguous()
    accumulate = torch.float64 if weighted else torch.float32
    expected = torch.zeros(x_TD.shape, dtype=accumulate, device=device)
    for k, row_T in enumerate(plan.row_TK.unbind(1)):
        term = y_RD[row_T.clamp(min=0)].to(accumulate)
        if weighted:
            term = term * weight_TK[:, k : k + 1].double()
        expected += torch.where(row_T[:, None] < 0, 0, term)
    if weighted:
        assert_forward_close(x_TD, expected)
    else:
        assert_rounded_alike(x_TD, expected.to(dtype))


def assert_rows_are_multiplied(run, plan, columns, dtype, device="cpu"):
    """``run(dx, y, plan)`` -> <dx[t], y[row[t, k]]> in fp32, and 0 where a slot has no row."""
    y_RD = rows_with_nan(plan, columns, dtype, device)
    dx_TD = values(len(plan.row_TK), columns, dtype=dtype, device=device)
    dot_TK = run(dx_TD, y_RD, plan)
    assert dot_TK.dtype == torch.float32 and dot_TK.shape == plan.row_TK.shape and dot_TK.is_contiguous()
    gathered = torch.where(plan.row_TK[..., None] < 0, 0, y_RD[plan.row_TK.clamp(min=0)].double())
    assert_forward_close(dot_TK, (gathered * dx_TD.double()[:, None]).sum(-1))
