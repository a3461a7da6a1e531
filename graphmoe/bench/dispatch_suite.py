"""The cases of ``suite=dispatch``: how tokens travel between the ranks of one node, each way by itself and
beside the experts' products of another micro-batch.

Suffixes: T tokens, K slots, E experts, P ranks, D hidden.
"""

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from graphmoe.bench import dispatch_ways as ways
from graphmoe.bench import rank_group
from graphmoe.bench.arguments import BLOCKS, BenchArgs
from graphmoe.bench.cases import Case, CaseFailed, Cell, Measured, Row, Suite, route, run_cases, times_of
from graphmoe.bench.dispatch_ways import LINK_BYTES_PER_S
from graphmoe.bench.rank_group import Call, RankGroup, Turn, joined_ranks, samples_ms
from graphmoe.config.packages import VENDORS as VENDOR_PACKAGES
from graphmoe.config.packages import is_installed
from graphmoe.config.schema import ConfigError
from graphmoe.ops.collectives import use_groups
from graphmoe.ops.grouped_mlp.choice import MlpShape, call_op, choose_backends, random_inputs
from graphmoe.ops.symm import use_peers
from graphmoe.ops.timing import spread
from graphmoe.plan.experts import FACTS, Load
from graphmoe.runtime.dispatch import close_dispatcher, open_buffer
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.dispatch.deepep import DeepEP
from graphmoe.runtime.dispatch.symm import Symm, make_peers

FULL = {"v2_lite": MlpShape(16384, 2048, 1408, 64, 6)}
TINY = {"v2_lite": MlpShape(64, 32, 16, 8, 2)}
VENDORS = {choice: choice for choice, facts in FACTS.items() if facts.buffer}
"""Dispatchers through a package's buffer, by the name of their way."""
MOST_SHARE = 4.0
STEP = 16
"""Rows of a block are a multiple of this."""
BESIDE = {"dispatch": "forward", "combine": "forward", "combine_grad": "dgrad", "dispatch_grad": "dgrad"}
"""The direction of the experts that each exchange runs beside."""


@dataclass(frozen=True)
class DispatchCase:
    """One way at one shape and routing."""

    label: str
    shape: MlpShape
    routing: str
    way: str
    share: float | None = None
    """Rows of a block over the mean of those that one rank sends to another; None without blocks."""

    @property
    def place(self) -> str:
        return f"{self.label}/{self.routing}"

    @property
    def name(self) -> str:
        """Such as v2_lite/natural/pull, or v2_lite/balanced/copy_engine_0.95."""
        return f"{self.place}/{self.way}"


def dispatch_cases(
    shapes: Mapping[str, MlpShape], blocks: str, vendors: Iterable[str] = ()
) -> list[DispatchCase]:
    """Every way at every shape and routing, `alltoall` first. *Raises* ConfigError for bad ``blocks``."""
    try:
        shares = [float(word) for word in blocks.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= MOST_SHARE for share in shares):
        raise ConfigError(
            f"blocks={blocks}: use rows of a block over the mean between two ranks, above 0 and at most "
            f"{MOST_SHARE:g}, such as blocks={BLOCKS}"
        )
    of_way: dict[str, float | None] = {"alltoall": None, "pull": None}
    of_way |= {f"copy_engine_{share:g}": share for share in shares}
    of_way |= dict.fromkeys(choice for choice in vendors)
    return [
        DispatchCase(label, shape, routing, way, share)
        for label, shape in shapes.items()
        for routing in ("natural", "balanced")
        for way, share in of_way.items()
    ]


def vendors_of(device: torch.device, shapes: Mapping[str, MlpShape]) -> tuple[list[str], list[str]]:
    """Dispatchers through a package's buffer that can run on such a device, and why one cannot."""
    if device.type != "cuda":
        return [], []
    choice = "turbo" if torch.version.hip else "deepep"
    package, limits = VENDOR_PACKAGES[choice], FACTS[choice].buffer
    assert limits is not None
    if not is_installed(package.module):
        why = f"the package {package.module} is not installed; install it with: {package.install}"
        return [], [f"{choice}: {why}"]
    if any(shape.D % limits.hidden_step for shape in shapes.values()):
        why = f"it moves rows of a multiple of {limits.hidden_step} numbers; use shapes=full"
        return [], [f"{choice}: {why}"]
    return [choice], []


def measure_exchanges(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=dispatch``. Equal on all ranks."""
    shapes = FULL if full else TINY
    vendors, left_out = vendors_of(device, shapes)
    cases = dispatch_cases(shapes, args.blocks, vendors)
    with joined_ranks(device) as ranks:
        if ranks.rank:
            logging.getLogger().setLevel(logging.WARNING)
        suite = DispatchSuite(ranks, args.repeats)
        made = [suite.case(case) for case in cases]
        rows = run_cases(made, "{exchange} {median_ms:.3f} ms".format_map, args.out, args.only)
        close_dispatcher()
    method = {
        "ranks": ranks.size,
        "rounds": rank_group.ROUNDS[device.type],
        "warm_up_samples": rank_group.WARM_UP_SAMPLES,
        "experts": suite.backends,
        "priority": rank_group.PRIORITY,
        "link_bytes_per_s": LINK_BYTES_PER_S,
    }
    return rows, left_out, method


class DispatchSuite:
    """Runs cases on all ranks. What it is asked, and its rows, are equal on all of them.

    Times of a row are those of the slowest rank; its ``hidden`` is 1 - (both - products) / alone, the share
    of the exchange's time that the experts' products cover.
    """

    def __init__(self, ranks: RankGroup, repeats: int) -> None:
        self._ranks, self._repeats = ranks, repeats
        self._alltoall_ms: dict[tuple[str, str], float] = {}
        self.backends = ""
        """Backends of the experts' products: forward, dgrad, wgrad."""
        self._products_of = functools.cache(lambda shape: ranks.together(lambda: self._bind_products(shape)))
        self._open = functools.cache(lambda way, hidden: open_buffer(VENDORS[way], ranks.mesh, hidden))
        use_groups(ranks.mesh)
        use_peers(make_peers(ranks.mesh, ranks.device))

    def case(self, case: DispatchCase) -> Case:
        """Return the case whose run, a collective, measures each exchange and all four.

        Before anything is timed, the case's results must be those of `alltoall` in every bit.
        """
        sizes = {name: size for name, size in asdict(case.shape).items() if name != "dtype"}
        about = {"case": case.place, "way": case.way, "exchange": ways.ALL_FOUR, "ranks": self._ranks.size}
        return Case(case.name, about | {"shape": sizes}, lambda: self._measured(case))

    def _measured(self, case: DispatchCase) -> list[Row]:
        ranks, shape = self._ranks, case.shape
        if shape.E % ranks.size or shape.K * ranks.size > shape.E:
            raise CaseFailed(f"{shape.E} experts and top-{shape.K} do not go into {ranks.size} ranks")
        tokens = ranks.together(lambda: ways.tokens_of(shape, case.routing, ranks))
        sent_PP = ranks.gather(tokens.plan.send_counts_P.tolist())
        mean = sum(map(sum, sent_PP)) / ranks.size**2
        block = 0 if case.share is None else STEP * max(round(case.share * mean / STEP), 1)
        rows, experts = ways.rows_of(sent_PP, mean, block), shape.E // ranks.size

        def made() -> ways.Way:
            reference = ways.way_of(AllToAll(ranks.mesh, shape.E), tokens)
            if case.way == "alltoall":
                return reference
            if case.way in VENDORS:
                self._open(case.way, shape.D)
                way = ways.way_of(DeepEP(Load(ranks.size * shape.T, 0), experts), tokens)
            else:
                way = ways.way_of(Symm(Load(rows, 0), experts, 1, block), tokens)
            if differ := ways.differing(way, reference):
                raise RuntimeError(f"not what alltoall gives: {', '.join(differ)}")
            return way

        way = ranks.together(lambda: ranks.in_exchanges(made))
        products = self._products_of(replace(shape, E=experts))
        found = []
        for name in (*BESIDE, ways.ALL_FOUR):
            parts = ways.EXCHANGES if name == ways.ALL_FOUR else (name,)
            out_bytes, floor_ms = ways.traffic(shape, sent_PP, name)
            times = self._times([(way.calls[part], products[BESIDE[part]]) for part in parts], way, floor_ms)
            if case.way == "alltoall":
                self._alltoall_ms[case.place, name] = times["median_ms"]
            baseline = self._alltoall_ms.get((case.place, name))
            found.append(
                {"exchange": name}
                | {"block": block or None, "captured": way.captures, "out_bytes": out_bytes}
                | {"floor_ms": floor_ms, **times, "bytes_per_s": out_bytes / times["median_ms"] * 1e3}
                | {"time_over_alltoall": times["median_ms"] / baseline if baseline else None}
            )
        return found

    def _times(self, parts: Sequence[tuple[Call, Call]], way: ways.Way, floor_ms: float) -> Row:
        def timed(turns: Sequence[Turn]) -> list[float]:
            return samples_ms(self._ranks, turns, repeats=self._repeats, captures=way.captures)

        alone, products, both = self._ranks.together(
            lambda: (timed([(e, None) for e, _ in parts]), timed([(None, p) for _, p in parts]), timed(parts))
        )
        row = times_of(alone, floor_ms)
        for name, samples in {"products": products, "both": both}.items():
            row[f"{name}_samples_ms"] = [round(ms, 6) for ms in samples]
            row[f"{name}_ms"] = round(spread(samples)[1], 6)
        row["hidden"] = 1 - (row["both_ms"] - row["products_ms"]) / row["median_ms"]
        return row

    def _bind_products(self, shape: MlpShape) -> dict[str, Call]:
        """Calls of the experts of a rank on a natural routing of as many tokens, by direction."""
        device = self._ranks.device
        choice = self._ranks.together(
            lambda: choose_backends("auto", shape, device, None) if self._ranks.rank == 0 else ""
        )
        self.backends = self._ranks.gather(choice)[0]
        generator = torch.Generator(device).manual_seed(0)
        _, plan, weight_TK = route(shape.T, shape.E, shape.K, generator, device)
        inputs = {
            direction: random_inputs(direction, shape, weight_TK, plan, generator)
            for direction in ("forward", "dgrad")
        }
        return {
            direction: functools.partial(call_op, direction, *tensors, self.backends)
            for direction, tensors in inputs.items()
        }


_DISPATCH_COLUMNS: dict[str, Cell] = {
    "case": "{case}",
    "way": "{way}",
    "exchange": "{exchange}",
    "ms": "{median_ms:.4f}",
    "p10 to p90": "{p10_ms:.4f} to {p90_ms:.4f}",
    "MB out": lambda row: f"{row['out_bytes'] / 1e6:,.1f}",
    "GB/s": lambda row: f"{row['bytes_per_s'] / 1e9:.1f}",
    "of alltoall": "{time_over_alltoall:.2f}",
    "time / floor": "{time_over_floor:.2f}",
    "experts ms": "{products_ms:.4f}",
    "both ms": "{both_ms:.4f}",
    "hidden %": lambda row: f"{100 * row['hidden']:.1f}",
}


def _dispatch_legend(document: dict[str, Any]) -> Iterator[str]:
    method = document["method"]
    yield (
        f"{method['ranks']} ranks. Times: of a round, medians of {method['repeats']} samples of "
        f"{method['rounds']} rounds, of the slowest rank in each. Rounds are one graph, but with alltoall, "
        "whose host waits for counts. All four: the exchanges of a step, one after the other."
    )
    yield (
        f"Floor: what leaves or enters a GPU at {LINK_BYTES_PER_S / 1e9:.0f} GB/s. Hidden: 1 - (both - "
        f"experts) / ms. Experts run on {method['experts']}: their forward beside dispatch and combine, row "
        "gradients beside the gradients of these; beside all four these one after the other."
    )


DISPATCH = Suite(measure_exchanges, _DISPATCH_COLUMNS, _dispatch_legend)
