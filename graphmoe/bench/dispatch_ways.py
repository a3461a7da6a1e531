"""Ways by which tokens travel between ranks: the dispatchers, with each of their four exchanges by itself.

Suffixes: T tokens, K slots, P ranks, W places of a token in the send plan, N rows received, D hidden.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import graphmoe.ops.symm  # noqa: F401  # registers the operations
from graphmoe.bench.cases import route
from graphmoe.bench.rank_group import RankGroup
from graphmoe.ops.dispatch import SendPlan, send_plan
from graphmoe.ops.grouped_mlp.choice import MlpShape
from graphmoe.ops.router import round_robin
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.ranks import Mesh

ops = torch.ops.graphmoe
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


def by_alltoall(tokens: Tokens, mesh: Mesh, num_experts: int) -> Way:
    """The dispatcher `alltoall`, whose host waits for counts in each dispatch."""
    dispatcher, plan = AllToAll(mesh, num_experts), tokens.plan
    leaves = tokens.h_TD.clone().requires_grad_(), tokens.weight_TK.clone().requires_grad_()
    received_ND, weight_NK, number_NK, *handle = dispatcher.dispatch(*leaves, tokens.expert_TK, *plan)
    sum_ND = received_ND.detach().requires_grad_()
    y_TD = dispatcher.combine(sum_ND, *plan, *handle)
    of_rows = received_ND.detach(), of_experts_here(weight_NK.detach(), number_NK)
    return _way(
        lambda: dispatcher.dispatch(tokens.h_TD, tokens.weight_TK, tokens.expert_TK, *plan),
        lambda of_N=of_rows[0]: dispatcher.combine(of_N, *plan, *handle),
        lambda: torch.autograd.grad(y_TD, sum_ND, tokens.h_TD, retain_graph=True)[0],
        lambda: torch.autograd.grad((received_ND, weight_NK), leaves, of_rows, retain_graph=True),
        captures=False,
    )


def by_symm(tokens: Tokens, rows: int, experts: int, block: int) -> Way:
    """The operations of `symm`: the first ``block`` rows for each rank go by copy engines, others by pull."""
    *given, plan = tokens

    def dispatch() -> tuple[Tensor, ...]:
        return ops.symm_dispatch(*given, *plan, rows, experts, 1, block)

    received_ND, weight_NK, number_NK, arrivals_PP = dispatch()
    dweight_NK, back = of_experts_here(weight_NK, number_NK), (plan.send_ends_P, plan.send_row_TW)
    return _way(
        dispatch,
        lambda of_N=received_ND: ops.symm_combine(of_N, *plan, arrivals_PP, block),
        lambda: ops.symm_combine_grad(tokens.h_TD, *plan, arrivals_PP, rows, block),
        lambda: ops.symm_dispatch_grad(received_ND, dweight_NK, *back, arrivals_PP, block),
        captures=tokens.h_TD.is_cuda,
    )


def by_buffer(tokens: Tokens, ranks: int, experts: int) -> Way:
    """The operations of `deepep` and `turbo`, through the buffer in use, with room for the worst case."""
    *given, _ = tokens

    def dispatch() -> tuple[Tensor, ...]:
        return ops.buffer_dispatch(*given, ranks * len(tokens.h_TD), experts)

    received_ND, weight_NK, number_NK, _, *handle = dispatch()
    dweight_NK = of_experts_here(weight_NK, number_NK)
    return _way(
        dispatch,
        lambda of_N=received_ND: ops.buffer_combine(of_N, *handle),
        lambda: ops.buffer_combine_grad(tokens.h_TD, *handle),
        lambda: ops.buffer_dispatch_grad(received_ND, dweight_NK, number_NK, *handle),
        captures=tokens.h_TD.is_cuda,
    )


def of_experts_here(weight_NK: Tensor, number_NK: Tensor) -> Tensor:
    """Set weights of slots of experts elsewhere, which a way may send or not, to 0."""
    return weight_NK.masked_fill(number_NK < 0, 0)


def differing(actual: Way, expected: Way) -> list[str]:
    """Names of the results that are not the same in every bit. Waits for the device."""
    return [name for name, wanted in expected.results.items() if not actual.results[name].equal(wanted)]


def _way(
    dispatch: Callable[[], tuple[Tensor, ...]],
    combine: Callable[..., Tensor],
    combine_grad: Callable[[], Tensor],
    dispatch_grad: Callable[[], tuple[Tensor, ...]],
    *,
    captures: bool,
) -> Way:
    """The four exchanges, each called once for its results; `combine` takes other rows too."""
    y_TD = combine().detach()
    again_TD = combine(combine_grad())
    dh_TD, dweight_TK = dispatch_grad()
    results = {"y": y_TD, "dh": dh_TD, "dweight": dweight_TK, "again": again_TD}
    calls: dict[str, Callable[[], object]] = dict(
        zip(EXCHANGES, (dispatch, combine, combine_grad, dispatch_grad), strict=True)
    )
    return Way(calls, results, captures)


def tokens_of(shape: MlpShape, routing: str, ranks: RankGroup) -> Tokens:
    """This rank's tokens in bf16, routed at random or to all experts alike."""
    T, D, E, K = shape.T, shape.D, shape.E, shape.K
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    h_TD = torch.randn(T, D, generator=generator, device=ranks.device).to(shape.dtype)
    drawn, weight_TK = route(T, E, K, generator, ranks.device)
    balanced = routing == "balanced"
    expert_TK = round_robin(T, K, E, ranks.device) if balanced else drawn.expert_TK
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
