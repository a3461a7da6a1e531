"""Expert loads that a benchmark forces on routers (``moe.expert_load``).

A load is the share of tokens that choose each expert of a MoE layer: ``top_k`` in total, at most 1 each.
Suffixes: S steps, L MoE layers, E experts.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from graphmoe.config.untrusted import FileError, read_json

NO_LOAD = "none"
LOADS = ("balanced", "hot_experts", "hot_rank", "one_expert", "rotating", "burst", "idle_rank")
# consecutive hot experts, at most an eighth of all, and their share of tokens
HOT_EXPERTS, HOT_SHARE = 4, 0.4
BURST_STEPS = 10
UNIT = 1 << 24  # the share 1 in a router's fixed point; 32-bit kernels hold up to 127 of them
LARGEST_BYTES = 1 << 28

Counts = list[list[list[float]]]  # recorded loads [S, L, E], on any scale


def load(name: str, step: int, layer: int, num_experts: int, top_k: int, ranks: int) -> list[float]:
    """Return the load [E] that a name of `LOADS` gives in ``step`` (from 1); ``ranks`` share the experts."""
    few = max(min(HOT_EXPERTS, num_experts // 8), 1)
    # each layer has its own hot experts; the hot or idle rank is the first
    first, of_rank = layer * few, num_experts // ranks
    share = top_k / num_experts
    if name == "one_expert":
        first, few, share = layer, 1, 1.0
    elif name in ("hot_experts", "rotating"):
        first += few * step if name == "rotating" else 0
        share = HOT_SHARE * top_k / few
    elif name in ("hot_rank", "idle_rank", "burst"):
        first, few = 0, of_rank
        times = {"hot_rank": 2, "idle_rank": 0}.get(name, 1 if step % BURST_STEPS else 3)
        share *= min(times, ranks) if ranks > 1 else 1
    rest = (top_k - few * share) / max(num_experts - few, 1)
    chosen = {(first + i) % num_experts for i in range(few)}
    return fitted([share if expert in chosen else max(rest, 0.0) for expert in range(num_experts)], top_k)


def recorded(counts_SLE: Counts, step: int, layer: int, top_k: int) -> list[float]:
    """Return the load [E] of recorded counts, which repeat beyond the recorded steps and layers."""
    layers = counts_SLE[(step - 1) % len(counts_SLE)]
    return fitted(layers[layer % len(layers)], top_k)


def fitted(weights: Sequence[float], top_k: int) -> list[float]:
    """Scale weights to a load [E]; shares are clipped at 1, and the rest is split by weight."""
    share, rest = [0.0] * len(weights), float(top_k)
    open_to = [expert for expert, weight in enumerate(weights) if weight > 0]
    while open_to and rest > 0:
        total = math.fsum(weights[expert] for expert in open_to)
        full = {expert for expert in open_to if weights[expert] * rest >= total}
        for expert in full or open_to:
            share[expert] = 1.0 if full else weights[expert] * rest / total
        rest -= len(full) if full else rest
        open_to = [expert for expert in open_to if expert not in full]
    # fewer than top_k positive weights: the idle experts share the rest
    if rest > 0:
        idle = share.count(0.0)
        return [each or rest / idle for each in share]
    return share


def ends(share: Sequence[float]) -> list[int]:
    """Return the cumulative load [E] as integers, in which `UNIT` is a share of 1."""
    top_k = round(math.fsum(share))
    found = [min(round(total * UNIT), top_k * UNIT) for total in itertools.accumulate(share)]
    found[-1] = top_k * UNIT
    for expert in range(len(found) - 2, -1, -1):
        found[expert] = max(found[expert], found[expert + 1] - UNIT)
    return found


def read_counts(path: str, num_experts: int) -> Counts:
    """Read recorded counts [S, L, E] from a JSON file. *Raises* FileError."""
    counts_SLE = read_json(Path(path), Counts, LARGEST_BYTES)
    layers = [layer for step in counts_SLE for layer in step]
    if not layers or not all(counts_SLE):
        raise FileError(f"{path} has a step without layers, or no step; it must be steps x layers x experts")
    for layer in layers:
        if len(layer) != num_experts:
            raise FileError(f"{path} counts {len(layer)} experts, and model.num_experts={num_experts}")
        if not all(0 <= count < math.inf for count in layer) or not 0 < sum(layer) < math.inf:
            raise FileError(f"{path} has counts that are negative, infinite or all 0; use numbers from 0 on")
    return counts_SLE
