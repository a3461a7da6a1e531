"""Routings, and their plans from plain Python lists. Suffixes as in graphmoe/ops/permute.py."""

import random
from contextlib import contextmanager
from typing import NamedTuple

import torch

NAN = float("nan")


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


def values(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


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


def store_in_both(wgrad, totals):
    """Store gradients in fp32 ``totals``, and compare those that it stores in bf16."""
    rounded = tuple(torch.full_like(total, NAN, dtype=torch.bfloat16) for total in totals)
    wgrad(rounded)
    wgrad(totals)
    for each, total in zip(rounded, totals, strict=True):
        # the interpreter does not round to the nearest
        torch.testing.assert_close(each.float(), total, rtol=2**-7, atol=0, equal_nan=True)
