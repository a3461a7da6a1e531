"""The cases of ``suite=dispatch``: how tokens travel between the ranks of one node, each way by itself and
beside the experts' products of another micro-batch.

Suffixes: T tokens, K slots, E experts, P ranks, W places of a token in the send plan, N rows received,
D hidden.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from graphmoe.bench import dispatch_ways as ways
from graphmoe.bench.cases import free_memory
from graphmoe.bench.dispatch_table import LINK_BYTES_PER_S, DispatchRow
from graphmoe.bench.dispatch_times import Call, Streams, Turn, samples_ms
from graphmoe.bench.rank_group import RankGroup, RanksFailed
from graphmoe.bench.routing import route
from graphmoe.config.packages import is_installed
from graphmoe.config.schema import ConfigError, DispatcherChoice
from graphmoe.ops.dispatch import send_plan
from graphmoe.ops.grouped_mlp.choice import MlpShape, call_op, choose_backends, random_inputs
from graphmoe.ops.router import round_robin
from graphmoe.ops.symm import use_peers
from graphmoe.plan.vendor_dispatch import BUFFERED
from graphmoe.runtime.dispatch.peers import make_peers
from graphmoe.runtime.dispatch.vendors import close_vendor, open_buffer

log = logging.getLogger(__name__)
FULL = {"v2_lite": MlpShape(16384, 2048, 1408, 64, 6)}
TINY = {"v2_lite": MlpShape(64, 32, 16, 8, 2)}
ROUTINGS = ("natural", "balanced")
ALL_FOUR = "all four"
VENDORS = {choice.value: choice for choice in BUFFERED}
"""Dispatchers through a package's buffer, by the name of their way."""
ROOM = 1.5
"""Rows of the received tensors over those that arrive on average, as `moe.receive_budget` has it."""
BLOCKS = "0.5,0.8,0.95,1.1"
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
    takes, why = BUFFERED[choice], None
    if not is_installed(takes.package):
        why = f"the package {takes.package} is not installed; install it with: {takes.install}"
    elif any(shape.D % takes.hidden_step for shape in shapes.values()):
        why = f"it moves rows of a multiple of {takes.hidden_step} numbers; use shapes=full"
    return {choice: why}


class DispatchSuite:
    """Runs cases on all ranks. What it is asked, and its rows, are equal on all of them."""

    def __init__(self, ranks: RankGroup, repeats: int) -> None:
        self._ranks, self._repeats = ranks, repeats
        self._streams = Streams(ranks.device)
        self._baselines: dict[tuple[str, str], DispatchRow] = {}
        self._products: dict[MlpShape, dict[str, Call]] = {}
        self.backends = ""
        """Of the experts' products: forward, dgrad, wgrad."""
        self._is_open = False
        """Whether there is a package's buffer, for rows of the one shape."""
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
            return [self._row(case, ALL_FOUR, error=error)]
        try:
            rows = self._measured(case)
        except RanksFailed as failed:
            rows = [self._row(case, ALL_FOUR, error=str(failed))]
        free_memory(ranks.device, after_error=any(row.error for row in rows))
        return rows

    def _measured(self, case: DispatchCase) -> list[DispatchRow]:
        ranks, shape = self._ranks, case.shape
        tokens = ranks.together(lambda: tokens_of(shape, case.routing, ranks))
        sent_PP = ranks.gather(tokens.plan.send_counts_P.tolist())
        mean = sum(map(sum, sent_PP)) / ranks.size**2
        block = 0 if case.share is None else STEP * max(round(case.share * mean / STEP), 1)
        rows, experts = rows_of(sent_PP, mean, block), shape.E // ranks.size

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
        for name in (*BESIDE, ALL_FOUR):
            row = self._row(case, name, block=block if case.share else None, captured=way.captures)
            row.out_bytes, row.floor_ms = traffic(shape, sent_PP, name)
            parts = ways.EXCHANGES if name == ALL_FOUR else (name,)
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


def tokens_of(shape: MlpShape, routing: str, ranks: RankGroup) -> ways.Tokens:
    """This rank's tokens in bf16, routed at random or to all experts alike."""
    T, D, E, K = shape.T, shape.D, shape.E, shape.K
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    h_TD = torch.randn(T, D, generator=generator, device=ranks.device).to(shape.dtype)
    drawn, weight_TK = route(T, E, K, generator, ranks.device)
    balanced = routing == "balanced"
    expert_TK = round_robin(T, K, E, ranks.device) if balanced else drawn.expert_TK
    return ways.Tokens(h_TD, weight_TK, expert_TK, send_plan(expert_TK, E, ranks.size, 1))


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
    if exchange == ALL_FOUR:
        going, coming = sum(there.values()), sum(back.values())
    else:
        going, coming = there.get(exchange, 0), back.get(exchange, 0)
    out = max(going * s + coming * a for s, a in zip(sent, arrived, strict=True))
    into = max(going * a + coming * s for s, a in zip(sent, arrived, strict=True))
    return out, max(out, into) / LINK_BYTES_PER_S * 1e3


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
