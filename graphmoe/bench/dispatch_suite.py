"""The cases of ``suite=dispatch``: how tokens travel between the ranks of one node, each way by itself and
beside the experts' products of another micro-batch.

Suffixes: T tokens, K slots, E experts, P ranks, W places of a token in the send plan, N rows received,
D hidden.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from graphmoe.bench import dispatch_times
from graphmoe.bench import dispatch_ways as ways
from graphmoe.bench.arguments import BLOCKS, BenchArgs
from graphmoe.bench.cases import Measured, chosen, free_memory, is_first, one_by_one, route, table
from graphmoe.bench.dispatch_times import Call, Streams, Turn, samples_ms
from graphmoe.bench.dispatch_ways import LINK_BYTES_PER_S
from graphmoe.bench.rank_group import RankGroup, RanksFailed, joined_ranks
from graphmoe.config.packages import VENDORS as VENDOR_PACKAGES
from graphmoe.config.packages import is_installed
from graphmoe.config.schema import ConfigError, DispatcherChoice
from graphmoe.ops.grouped_mlp.choice import MlpShape, call_op, choose_backends, random_inputs
from graphmoe.ops.symm import use_peers
from graphmoe.ops.timing import spread
from graphmoe.plan.experts import FACTS
from graphmoe.runtime.dispatch.symm import make_peers
from graphmoe.runtime.dispatch.vendors import close_vendor, open_buffer

log = logging.getLogger(__name__)
FULL = {"v2_lite": MlpShape(16384, 2048, 1408, 64, 6)}
TINY = {"v2_lite": MlpShape(64, 32, 16, 8, 2)}
ROUTINGS = ("natural", "balanced")
VENDORS = {choice.value: choice for choice, facts in FACTS.items() if facts.buffer}
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
    shapes: Mapping[str, MlpShape], blocks: str, vendors: Iterable[DispatcherChoice] = ()
) -> list[DispatchCase]:
    """Every way at every shape and routing, `alltoall` first. *Raises* ConfigError for bad ``blocks``."""
    of_way: dict[str, float | None] = {"alltoall": None, "pull": None}
    of_way |= {f"copy_engine_{share:g}": share for share in _shares(blocks)}
    of_way |= dict.fromkeys(choice.value for choice in vendors)
    return [
        DispatchCase(label, shape, routing, way, share)
        for label, shape in shapes.items()
        for routing in ROUTINGS
        for way, share in of_way.items()
    ]


def vendors_of(device: torch.device, shapes: Mapping[str, MlpShape]) -> dict[DispatcherChoice, str | None]:
    """Dispatchers through a package's buffer that are for such a device, and why one cannot run, or None."""
    if device.type != "cuda":
        return {}
    choice = DispatcherChoice.turbo if torch.version.hip else DispatcherChoice.deepep
    package, limits, why = VENDOR_PACKAGES[choice.value], FACTS[choice].buffer, None
    assert limits is not None
    if not is_installed(package.module):
        why = f"the package {package.module} is not installed; install it with: {package.install}"
    elif any(shape.D % limits.hidden_step for shape in shapes.values()):
        why = f"it moves rows of a multiple of {limits.hidden_step} numbers; use shapes=full"
    return {choice: why}


@dataclass
class DispatchRow:
    """Times of one exchange by one way, of the slowest rank, or the error of one without numbers."""

    case: str
    way: str
    exchange: str
    ranks: int
    shape: dict[str, int]
    block: int | None = None
    """Rows for each rank that go by copy engines; None for ways without them."""
    captured: bool = False
    """True if rounds were replays of a graph."""
    out_bytes: int = 0
    """Bytes that leave a GPU for others, of the rank with most; without rows of padding."""
    floor_ms: float = 0.0
    """Time of the bytes that leave or enter a GPU, of the rank with most, at `LINK_BYTES_PER_S`."""
    samples_ms: list[float] = field(default_factory=list)
    p10_ms: float | None = None
    median_ms: float | None = None
    p90_ms: float | None = None
    bytes_per_s: float | None = None
    time_over_floor: float | None = None
    time_over_alltoall: float | None = None
    products_samples_ms: list[float] = field(default_factory=list)
    products_ms: float | None = None
    """The experts' products alone."""
    both_samples_ms: list[float] = field(default_factory=list)
    both_ms: float | None = None
    """The exchange beside them."""
    hidden: float | None = None
    """1 - (both - products) / alone: the share of the exchange's time that the products cover."""
    error: str | None = None

    def take(self, alone: Sequence[float], products: Sequence[float], both: Sequence[float]) -> None:
        """Fill in the samples and the numbers that follow from them."""
        self.samples_ms, self.products_samples_ms, self.both_samples_ms = (
            [round(ms, 6) for ms in samples] for samples in (alone, products, both)
        )
        self.p10_ms, self.median_ms, self.p90_ms = (round(ms, 6) for ms in spread(alone))
        self.products_ms, self.both_ms = (round(spread(samples)[1], 6) for samples in (products, both))
        self.bytes_per_s = self.out_bytes / self.median_ms * 1e3
        self.time_over_floor = self.median_ms / self.floor_ms
        self.hidden = 1 - (self.both_ms - self.products_ms) / self.median_ms

    def compare(self, baseline: DispatchRow | None) -> None:
        """Fill in the ratio to the same exchange by `alltoall`, where that was measured."""
        if baseline is not None and baseline.median_ms and self.median_ms:
            self.time_over_alltoall = self.median_ms / baseline.median_ms


def measure_exchanges(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=dispatch``. Equal on all ranks."""
    shapes = FULL if full else TINY
    vendors = vendors_of(device, shapes)
    left_out = [f"{choice.value}: {missing}" for choice, missing in vendors.items() if missing]
    for line in left_out * is_first():
        log.info("left out: %s", line)
    here = [choice for choice, missing in vendors.items() if not missing]
    cases = chosen(dispatch_cases(shapes, args.blocks, here), args.only)
    with joined_ranks(device) as ranks:
        if ranks.rank:
            logging.getLogger().setLevel(logging.WARNING)
        suite = DispatchSuite(ranks, args.repeats)
        rows = one_by_one(
            cases,
            suite.run,
            lambda found: ", ".join(row.error or f"{row.exchange} {row.median_ms:.3f} ms" for row in found),
            args.out,
        )
        suite.close()
    method = {
        "ranks": ranks.size,
        "rounds": dispatch_times.ROUNDS[device.type],
        "warm_up_samples": dispatch_times.WARM_UP_SAMPLES,
        "experts": suite.backends,
        "priority": dispatch_times.PRIORITY,
        "link_bytes_per_s": LINK_BYTES_PER_S,
    }
    return rows, left_out, method


class DispatchSuite:
    """Runs cases on all ranks. What it is asked, and its rows, are equal on all of them."""

    def __init__(self, ranks: RankGroup, repeats: int) -> None:
        self._ranks, self._repeats = ranks, repeats
        self._streams = Streams(ranks.device)
        self._baselines: dict[tuple[str, str], DispatchRow] = {}
        self._products: dict[MlpShape, dict[str, Call]] = {}
        self.backends = ""
        """Backends of the experts' products: forward, dgrad, wgrad."""
        self._is_open = False
        """True once there is a package's buffer, for rows of the one shape."""
        use_peers(make_peers(ranks.mesh, ranks.device))

    def close(self) -> None:
        """Give back what is open. A collective of all ranks."""
        close_vendor()

    def run(self, case: DispatchCase) -> list[DispatchRow]:
        """The rows of a case: each exchange, and all four. Collective. Raises nothing.

        Before anything is timed, the case's results must be those of `alltoall` in every bit.
        """
        ranks, shape = self._ranks, case.shape
        if shape.E % ranks.size or shape.K * ranks.size > shape.E:
            error = f"{shape.E} experts and top-{shape.K} do not go into {ranks.size} ranks"
            return [self._row(case, ways.ALL_FOUR, error=error)]
        try:
            rows = self._measured(case)
        except RanksFailed as failed:
            rows = [self._row(case, ways.ALL_FOUR, error=str(failed))]
        free_memory(ranks.device, after_error=any(row.error for row in rows))
        return rows

    def _measured(self, case: DispatchCase) -> list[DispatchRow]:
        ranks, shape = self._ranks, case.shape
        tokens = ranks.together(lambda: ways.tokens_of(shape, case.routing, ranks))
        sent_PP = ranks.gather(tokens.plan.send_counts_P.tolist())
        mean = sum(map(sum, sent_PP)) / ranks.size**2
        block = 0 if case.share is None else STEP * max(round(case.share * mean / STEP), 1)
        rows, experts = ways.rows_of(sent_PP, mean, block), shape.E // ranks.size

        def made() -> ways.Way:
            reference = ways.by_alltoall(tokens, ranks.mesh, shape.E)
            if case.way == "alltoall":
                return reference
            if case.way in VENDORS:
                self._open(case)
                way = ways.by_buffer(tokens, ranks.size, experts)
            else:
                way = ways.by_symm(tokens, rows, experts, block)
            if differ := ways.differing(way, reference):
                raise RuntimeError(f"not what alltoall gives: {', '.join(differ)}")
            return way

        way = ranks.together(lambda: self._streams.in_exchanges(made))
        products = self._products_of(replace(shape, E=experts))
        found = []
        for name in (*BESIDE, ways.ALL_FOUR):
            row = self._row(case, name, block=block if case.share else None, captured=way.captures)
            row.out_bytes, row.floor_ms = ways.traffic(shape, sent_PP, name)
            parts = ways.EXCHANGES if name == ways.ALL_FOUR else (name,)
            self._take(row, [(way.calls[part], products[BESIDE[part]]) for part in parts])
            if case.way == "alltoall":
                self._baselines[case.place, name] = row
            row.compare(self._baselines.get((case.place, name)))
            found.append(row)
        return found

    def _open(self, case: DispatchCase) -> None:
        """The buffer of a package for rows of a case."""
        if not self._is_open:
            open_buffer(VENDORS[case.way], self._ranks.mesh, case.shape.D)
            self._is_open = True

    def _take(self, row: DispatchRow, parts: Sequence[tuple[Call, Call]]) -> None:
        """Time exchanges alone, their products alone and both."""

        def timed(turns: Sequence[Turn]) -> list[float]:
            return samples_ms(self._ranks, self._streams, turns, repeats=self._repeats, captures=row.captured)

        def all_times() -> tuple[list[float], ...]:
            alone = [(exchange, None) for exchange, _ in parts]
            return timed(alone), timed([(None, products) for _, products in parts]), timed(parts)

        row.take(*self._ranks.together(all_times))

    def _products_of(self, shape: MlpShape) -> dict[str, Call]:
        """Calls of the experts of a rank on a natural routing of as many tokens, by direction."""
        if shape not in self._products:
            self._products[shape] = self._ranks.together(lambda: self._bind_products(shape))
        return self._products[shape]

    def _bind_products(self, shape: MlpShape) -> dict[str, Call]:
        device = self._ranks.device
        chosen = choose_backends("auto", shape, device, None) if self._ranks.rank == 0 else ""
        self.backends = self._ranks.gather(chosen)[0]
        generator = torch.Generator(device).manual_seed(0)
        routing, weight_TK = route(shape.T, shape.E, shape.K, generator, device)
        return {
            direction: functools.partial(
                call_op,
                direction,
                *random_inputs(direction, shape, weight_TK, routing.plan, generator),
                self.backends,
            )
            for direction in ("forward", "dgrad")
        }

    def _row(
        self,
        case: DispatchCase,
        exchange: str,
        *,
        block: int | None = None,
        captured: bool = False,
        error: str | None = None,
    ) -> DispatchRow:
        sizes = {name: size for name, size in asdict(case.shape).items() if name != "dtype"}
        return DispatchRow(
            case.place, case.way, exchange, self._ranks.size, sizes, block, captured, error=error
        )


def _shares(blocks: str) -> list[float]:
    """Shares of the mean, as the command line has them. *Raises* ConfigError."""
    try:
        shares = [float(word) for word in blocks.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= MOST_SHARE for share in shares):
        raise ConfigError(
            f"blocks={blocks}: use rows of a block over the mean between two ranks, above 0 and at most "
            f"{MOST_SHARE:g}, such as blocks={BLOCKS}"
        )
    return shares


def render_dispatch(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table and its legend."""

    def ratio(row: dict[str, Any]) -> str:
        return "" if row["time_over_alltoall"] is None else f"{row['time_over_alltoall']:.2f}"

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "case": lambda row: row["case"],
        "way": lambda row: row["way"],
        "exchange": lambda row: row["exchange"],
        "ms": lambda row: f"{row['median_ms']:.4f}",
        "p10 to p90": lambda row: f"{row['p10_ms']:.4f} to {row['p90_ms']:.4f}",
        "MB out": lambda row: f"{row['out_bytes'] / 1e6:,.1f}",
        "GB/s": lambda row: f"{row['bytes_per_s'] / 1e9:.1f}",
        "of alltoall": ratio,
        "time / floor": lambda row: f"{row['time_over_floor']:.2f}",
        "experts ms": lambda row: f"{row['products_ms']:.4f}",
        "both ms": lambda row: f"{row['both_ms']:.4f}",
        "hidden %": lambda row: f"{100 * row['hidden']:.1f}",
    }
    yield from table(columns, document["rows"], named=3)
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
