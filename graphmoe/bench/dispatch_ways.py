"""Ways by which tokens travel between ranks: the dispatchers, with each of their four exchanges by itself.

Suffixes: T tokens, K slots, P ranks, W places of a token in the send plan, N rows received, D hidden.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.bench.cases import route
from graphmoe.bench.rank_group import RankGroup
from graphmoe.ops.dispatch import Dispatcher, SendPlan, send_plan
from graphmoe.ops.grouped_mlp.choice import MlpShape
from graphmoe.ops.router import round_robin

ALL_FOUR = "all four"
ROOM = 1.5
"""Rows of the received tensors over those that arrive on average, as `moe.receive_budget` has it."""
LINK_BYTES_PER_S = 325e9
"""Rate of a GPU to all others of its node by NVLink, in one direction, as measured on H200s."""
EXCHANGES = ("dispatch", "combine", "combine_grad", "dispatch_grad")
"""In the order of a training step. The first and last carry slot weights, the first expert numbers too."""


class Tokens(NamedTuple):
    """Tokens that one rank sends."""

    h_TD: Tensor
    weight_TK: Tensor
    expert_TK: Tensor
    plan: SendPlan


class Way(NamedTuple):
    """A way with all that its exchanges need in place."""

    calls: Mapping[str, Callable[[], object]]
    """By name of the exchange. Collectives of all ranks, on the stream that the way was made on."""
    results: Mapping[str, Tensor]
    """Results that every way must give, bit for bit."""
    captures: bool
    """True if the exchanges can be part of a graph."""


def way_of(dispatcher: Dispatcher, tokens: Tokens) -> Way:
    """A dispatcher's exchanges of these tokens, each called once for its results."""
    h_TD, weight_TK, expert_TK, plan = tokens
    leaves = h_TD.clone().requires_grad_(), weight_TK.clone().requires_grad_()
    received_ND, weight_NK, number_NK, *rest = dispatcher.dispatch(*leaves, expert_TK, *plan)
    handle, sum_ND = rest[-len(dispatcher.handle) :], received_ND.detach().requires_grad_()
    y_TD = dispatcher.combine(sum_ND, *plan, *handle)
    # A way may send the weights of slots of experts elsewhere, or not
    of_rows = received_ND.detach(), weight_NK.detach().masked_fill(number_NK < 0, 0)
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: dispatcher.dispatch(h_TD, weight_TK, expert_TK, *plan),
        "combine": lambda: dispatcher.combine(of_rows[0], *plan, *handle),
        "combine_grad": lambda: torch.autograd.grad(y_TD, sum_ND, h_TD, retain_graph=True)[0],
        "dispatch_grad": lambda: torch.autograd.grad(
            (received_ND, weight_NK), leaves, of_rows, retain_graph=True
        ),
    }
    again_TD = dispatcher.combine(calls["combine_grad"](), *plan, *handle)
    dh_TD, dweight_TK = calls["dispatch_grad"]()
    results = {"y": calls["combine"](), "dh": dh_TD, "dweight": dweight_TK, "again": again_TD}
    return Way(calls, results, captures=h_TD.is_cuda and dispatcher.capacity is not None)


def differing(actual: Way, expected: Way) -> list[str]:
    """Names of the results that are not the same in every bit. Waits for the device."""
    return [name for name, wanted in expected.results.items() if not actual.results[name].equal(wanted)]


def tokens_of(shape: MlpShape, routing: str, ranks: RankGroup) -> Tokens:
    """This rank's tokens in bf16, routed at random or to all experts alike."""
    T, D, E, K = shape.T, shape.D, shape.E, shape.K
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    h_TD = torch.randn(T, D, generator=generator, device=ranks.device).to(shape.dtype)
    drawn_TK, _, weight_TK = route(T, E, K, generator, ranks.device)
    balanced = routing == "balanced"
    expert_TK = round_robin(T, K, E, ranks.device) if balanced else drawn_TK
    return Tokens(h_TD, weight_TK, expert_TK, send_plan(expert_TK, E, ranks.size, 1))


def rows_of(sent_PP: Sequence[Sequence[int]], mean: float, block: int) -> int:
    """Rows of the received tensors: `ROOM` over the mean, and no fewer than arrive at any rank.

    Blocks that are not full are rows too.
    """
    behind = (sum(max(0, rows - block) for rows in column) for column in zip(*sent_PP, strict=True))
    return max(math.ceil(ROOM * mean * len(sent_PP)), len(sent_PP) * block + max(behind))


def traffic(shape: MlpShape, sent_PP: Sequence[Sequence[int]], exchange: str) -> tuple[int, float]:
    """Bytes that leave a GPU, of the rank with most, and the floor's milliseconds.

    ``sent_PP[s][p]`` are the rows that rank s sends to rank p.
    """
    sent = [sum(row) - row[rank] for rank, row in enumerate(sent_PP)]
    arrived = [sum(column) - column[rank] for rank, column in enumerate(zip(*sent_PP, strict=True))]
    row_bytes, slot_bytes = shape.dtype.itemsize * shape.D, 4 * shape.K
    there = {"dispatch": row_bytes + 2 * slot_bytes, "combine_grad": row_bytes}
    back = {"combine": row_bytes, "dispatch_grad": row_bytes + slot_bytes}
    going, coming = (
        sum(size for name, size in sizes.items() if exchange in (name, ALL_FOUR)) for sizes in (there, back)
    )
    out = max(going * s + coming * a for s, a in zip(sent, arrived, strict=True))
    into = max(going * a + coming * s for s, a in zip(sent, arrived, strict=True))
    return out, max(out, into) / LINK_BYTES_PER_S * 1e3
