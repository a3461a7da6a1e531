"""``suite=dispatch``: token exchange between ranks of one node, alone and beside expert GEMMs.

Suffixes: T tokens, K slots, E experts, P ranks, N rows received, D hidden.
"""

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.bench import BenchArgs, cases, rank_group
from graphmoe.bench.cases import Call, Case, CaseFailed, Row, mlp_inputs, route
from graphmoe.bench.rank_group import RankGroup, Turn, joined_ranks, samples_ms
from graphmoe.config import packages
from graphmoe.ops.collectives import use_groups
from graphmoe.ops.dispatch import Dispatcher, SendPlan, send_plan
from graphmoe.ops.grouped_mlp.choice import MlpShape, call_op, choose_backends
from graphmoe.ops.router import round_robin
from graphmoe.ops.symm import use_peers
from graphmoe.ops.timing import spread
from graphmoe.plan.experts import FACTS, Load
from graphmoe.runtime.dispatch import close_dispatcher, open_buffer
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.dispatch.deepep import DeepEP
from graphmoe.runtime.dispatch.symm import Symm, make_peers

LABEL = "v2_lite"
ALL_FOUR = "all four"
ROOM = 1.5  # rows of the received tensors over those that arrive on average, as moe.receive_budget has it
LINK_BYTES_PER_S = 325e9  # of an H200 to all others of its node by NVLink, one direction, measured
STEP = 16  # rows of a copy-engine block are a multiple of this
BESIDE = {"dispatch": "forward", "combine": "forward", "combine_grad": "dgrad", "dispatch_grad": "dgrad"}
"""The exchanges of a step, and the direction of the experts that each runs beside."""


class Way(NamedTuple):
    calls: Mapping[str, Call]  # collectives by name, on the stream that the way was made on
    results: Mapping[str, Tensor]  # equal for all ways, bit for bit
    captures: bool  # if the exchanges can be part of a graph


def way_of(dispatcher: Dispatcher, h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, plan: SendPlan) -> Way:
    """Return timeable calls of dispatch, combine and their gradients for these tokens, and their results."""
    leaves = h_TD.clone().requires_grad_(), weight_TK.clone().requires_grad_()
    received_ND, weight_NK, number_NK, *rest = dispatcher.dispatch(*leaves, expert_TK, *plan)
    handle, sum_ND = rest[-len(dispatcher.handle) :], received_ND.detach().requires_grad_()
    y_TD = dispatcher.combine(sum_ND, *plan, *handle)
    # A way may send the weights of slots of experts elsewhere, or not
    of_rows = received_ND.detach(), weight_NK.detach().masked_fill(number_NK < 0, 0)
    out, grad = (received_ND, weight_NK), functools.partial(torch.autograd.grad, retain_graph=True)
    calls: dict[str, Call] = {
        "dispatch": lambda: dispatcher.dispatch(h_TD, weight_TK, expert_TK, *plan),
        "combine": lambda: dispatcher.combine(of_rows[0], *plan, *handle),
        "combine_grad": lambda: grad(y_TD, sum_ND, h_TD)[0],
        "dispatch_grad": lambda: grad(out, leaves, of_rows),
    }
    again_TD = dispatcher.combine(calls["combine_grad"](), *plan, *handle)
    dh_TD, dweight_TK = calls["dispatch_grad"]()
    results = {"y": calls["combine"](), "dh": dh_TD, "dweight": dweight_TK, "again": again_TD}
    return Way(calls, results, captures=h_TD.is_cuda and dispatcher.capacity is not None)


def rows_of(sent_PP: Sequence[Sequence[int]], mean: float, block: int) -> int:
    """Return the receive capacity: `ROOM` times the mean, or what the fullest rank receives, if larger."""
    # Blocks that are not full are rows too
    behind = (sum(max(0, rows - block) for rows in column) for column in zip(*sent_PP, strict=True))
    return max(math.ceil(ROOM * mean * len(sent_PP)), len(sent_PP) * block + max(behind))


def traffic(shape: MlpShape, sent_PP: Sequence[Sequence[int]], exchange: str) -> tuple[int, float]:
    """Return bytes that leave the GPU that sends most, and the least ms; sent_PP: rows [source][target]."""
    sent = [sum(row) - row[rank] for rank, row in enumerate(sent_PP)]
    arrived = [sum(column) - column[rank] for rank, column in enumerate(zip(*sent_PP, strict=True))]
    row_bytes, slot_bytes = shape.dtype.itemsize * shape.D, 4 * shape.K
    # The first and last exchange carry weights of slots, the first expert numbers too
    there = {"dispatch": row_bytes + 2 * slot_bytes, "combine_grad": row_bytes}
    back = {"combine": row_bytes, "dispatch_grad": row_bytes + slot_bytes}
    going, coming = (
        sum(size for name, size in sizes.items() if exchange in (name, ALL_FOUR)) for sizes in (there, back)
    )
    out = max(going * s + coming * a for s, a in zip(sent, arrived, strict=True))
    into = max(going * a + coming * s for s, a in zip(sent, arrived, strict=True))
    return out, max(out, into) / LINK_BYTES_PER_S * 1e3


def ways(blocks: Iterable[float], vendors: Iterable[str] = ()) -> dict[str, float | None]:
    """Return the compared variants by name, with block sizes relative to a rank pair's mean rows."""
    shares = {f"copy_engine_{share:g}": share for share in blocks}
    return {"alltoall": None, "pull": None} | shares | dict.fromkeys(vendors)


def vendors_of(device: torch.device, hidden: int) -> tuple[list[str], list[str]]:
    """Return the vendor dispatchers that can run here, and why others cannot."""
    if device.type != "cuda":
        return [], []
    choice = "turbo" if torch.version.hip else "deepep"
    package, limits = packages.VENDORS[choice], FACTS[choice].buffer
    assert limits is not None
    if not packages.is_installed(package.module):
        why = f"the package {package.module} is not installed; install it with: {package.install}"
    elif hidden % limits.hidden_step:
        why = f"it moves rows of a multiple of {limits.hidden_step} numbers; use shapes=full"
    else:
        return [choice], []
    return [], [f"{choice}: {why}"]


def measure_exchanges(args: BenchArgs, device: torch.device, full: bool) -> cases.Measured:
    shape = cases.layers(full)[LABEL]
    vendors, left_out = vendors_of(device, shape.D)
    with joined_ranks(device) as ranks:
        if ranks.rank:
            logging.getLogger().setLevel(logging.WARNING)
        suite = DispatchSuite(ranks, args.repeats)
        made = suite.cases(shape, ways(args.blocks, vendors))
        rows = cases.run_cases(made, "{exchange} {median_ms:.3f} ms".format_map, args.out, args.only)
        close_dispatcher()
    method = {"ranks": ranks.size, "rounds": rank_group.ROUNDS[device.type], "experts": suite.backends}
    method |= {"warm_up_samples": rank_group.WARM_UP_SAMPLES, "priority": rank_group.PRIORITY}
    return rows, left_out, method | {"link_bytes_per_s": LINK_BYTES_PER_S}


class DispatchSuite:
    """Maker of the suite's cases on all ranks; each rank gives equal arguments and gets equal rows."""

    def __init__(self, ranks: RankGroup, repeats: int) -> None:
        self._ranks, self._repeats = ranks, repeats
        self._alltoall_ms: dict[tuple[str, str], float] = {}
        self.backends = ""  # of the experts' products: forward, dgrad, wgrad
        self._products_of = functools.cache(lambda shape: ranks.together(lambda: self._bind_products(shape)))
        self._open = functools.cache(lambda way, hidden: open_buffer(way, ranks.mesh, hidden))
        use_groups(ranks.mesh)
        use_peers(make_peers(ranks.mesh, ranks.device))

    def cases(self, shape: MlpShape, ways: Mapping[str, float | None]) -> list[Case]:
        sizes = {name: size for name, size in asdict(shape).items() if name != "dtype"}
        found = []
        for routing in ("natural", "balanced"):
            for way, share in ways.items():
                about: Row = {"case": f"{LABEL}/{routing}", "way": way, "exchange": ALL_FOUR}
                about |= {"ranks": self._ranks.size, "shape": sizes}
                run = functools.partial(self._measured, shape, routing, way, share)
                found.append(Case(f"{LABEL}/{routing}/{way}", about, run))
        return found

    def _measured(self, shape: MlpShape, routing: str, way: str, share: float | None) -> list[Row]:
        ranks = self._ranks
        if shape.E % ranks.size or shape.K * ranks.size > shape.E:
            raise CaseFailed(
                f"{shape.E} experts must split evenly over {ranks.size} ranks, {shape.K} (top_k) or more each"
            )
        tokens = ranks.together(lambda: self._tokens(shape, routing))
        sent_PP = ranks.gather(tokens[-1].send_counts_P.tolist())
        mean = sum(map(sum, sent_PP)) / ranks.size**2
        block = 0 if share is None else STEP * max(round(share * mean / STEP), 1)
        rows, experts = rows_of(sent_PP, mean, block), shape.E // ranks.size

        def make() -> Way:
            reference = way_of(AllToAll(ranks.mesh, shape.E), *tokens)
            if way == "alltoall":
                return reference
            dispatcher: Dispatcher = Symm(Load(rows, 0), experts, 1, block)
            if way in FACTS:
                self._open(way, shape.D)
                dispatcher = DeepEP(Load(ranks.size * shape.T, 0), experts)
            found = way_of(dispatcher, *tokens)
            wrong = [name for name, each in reference.results.items() if not found.results[name].equal(each)]
            if wrong:
                raise RuntimeError(f"results differ from alltoall's: {', '.join(wrong)}")
            return found

        made = ranks.together(lambda: ranks.in_exchanges(make))
        products = self._products_of(replace(shape, E=experts))
        found = []
        for name in (*BESIDE, ALL_FOUR):
            parts = [*BESIDE] if name == ALL_FOUR else [name]
            out_bytes, floor_ms = traffic(shape, sent_PP, name)
            turns = [(made.calls[part], products[BESIDE[part]]) for part in parts]
            row: Row = {"exchange": name, "block": block or None, "captured": made.captures}
            row |= {
                "out_bytes": out_bytes,
                "floor_ms": floor_ms,
                **self._times(turns, made.captures, floor_ms),
            }
            row["bytes_per_s"] = out_bytes / row["median_ms"] * 1e3
            if way == "alltoall":
                self._alltoall_ms[routing, name] = row["median_ms"]
            baseline = self._alltoall_ms.get((routing, name))
            found.append(row | {"time_over_alltoall": row["median_ms"] / baseline if baseline else None})
        return found

    def _tokens(self, shape: MlpShape, routing: str) -> tuple[Tensor, Tensor, Tensor, SendPlan]:
        ranks, (T, E, K) = self._ranks, (shape.T, shape.E, shape.K)
        generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
        h_TD = torch.randn(T, shape.D, generator=generator, device=ranks.device).to(shape.dtype)
        expert_TK, _, weight_TK = route(T, E, K, generator)
        if routing == "balanced":
            expert_TK = round_robin(T, K, E, ranks.device)
        return h_TD, weight_TK, expert_TK, send_plan(expert_TK, E, ranks.size, 1)

    def _times(self, turns: Sequence[tuple[Call, Call]], captures: bool, floor_ms: float) -> Row:
        def timed(turns: Sequence[Turn]) -> list[float]:
            return samples_ms(self._ranks, turns, repeats=self._repeats, captures=captures)

        alone, products, both = self._ranks.together(
            lambda: (timed([(e, None) for e, _ in turns]), timed([(None, p) for _, p in turns]), timed(turns))
        )
        row = cases.times_of(alone, floor_ms)
        for name, samples in {"products": products, "both": both}.items():
            row[f"{name}_samples_ms"] = [round(ms, 6) for ms in samples]
            row[f"{name}_ms"] = round(spread(samples)[1], 6)
        return row | {"hidden": 1 - (row["both_ms"] - row["products_ms"]) / row["median_ms"]}

    def _bind_products(self, shape: MlpShape) -> dict[str, Call]:
        ranks, directions = self._ranks, ("forward", "dgrad")
        choice = ranks.together(
            lambda: choose_backends("auto", shape, ranks.device, None) if ranks.rank == 0 else ""
        )
        self.backends = ranks.gather(choice)[0]
        inputs = mlp_inputs(shape, torch.Generator(ranks.device).manual_seed(0), *directions)
        return {
            direction: functools.partial(call_op, direction, *tensors, self.backends)
            for direction, tensors in zip(directions, inputs, strict=True)
        }


DISPATCH = cases.Suite(
    measure_exchanges,
    "case: {case} | way: {way} | exchange: {exchange} | ms: {median_ms:.4f} | "
    "p10 to p90: {p10_ms:.4f} to {p90_ms:.4f} | MB out: {out_bytes:M*,.1f} | GB/s: {bytes_per_s:G*.1f} | "
    "of alltoall: {time_over_alltoall:.2f} | time / floor: {time_over_floor:.2f} | "
    "experts ms: {products_ms:.4f} | both ms: {both_ms:.4f} | hidden %: {hidden:%*.1f}",
    "{method[ranks]} ranks. Times: of a round, medians of {method[repeats]} samples of {method[rounds]} "
    "rounds, of the slowest rank in each. Rounds are one graph, but with alltoall, whose host waits for "
    "counts. All four: the exchanges of a step, one after the other.\n"
    "Floor: what leaves or enters a GPU at {method[link_bytes_per_s]:G*.0f} GB/s. Hidden: 1 - (both - "
    "experts) / ms. Experts run on {method[experts]}: their forward beside dispatch and combine, row "
    "gradients beside the gradients of these; beside all four these one after the other.",
)
