"""The rows of ``suite=dispatch``, and their table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphmoe.ops.timing import spread

LINK_BYTES_PER_S = 325e9
"""Of a GPU to all others of its node by NVLink, in one direction, as measured on H200s."""


@dataclass
class DispatchRow:
    """What one exchange took by one way, or why there are no numbers. Times are of the slowest rank."""

    case: str
    way: str
    exchange: str
    ranks: int
    shape: dict[str, int]
    block: int | None = None
    """Rows for each rank that go by copy engines; None for ways without them."""
    captured: bool = False
    """Whether rounds were replays of a graph."""
    out_bytes: int = 0
    """What leaves a GPU for others, of the rank with most; without rows of padding."""
    floor_ms: float = 0.0
    """What leaves or enters a GPU, of the rank with most, at `LINK_BYTES_PER_S`."""
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
        """Fill in the samples and what follows from them."""
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


def render_dispatch(document: dict[str, Any]) -> Iterator[str]:
    """The table, and what a reader must know of it."""
    yield (
        "| case | way | exchange | ms | p10 to p90 | MB out | GB/s | of alltoall | time / floor "
        "| experts ms | both ms | hidden % |"
    )
    yield f"|{'---|' * 12}"
    yield from map(_line, document["rows"])
    yield ""
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


def _line(row: dict[str, Any]) -> str:
    head = f"| {row['case']} | {row['way']} | {row['exchange']} |"
    if row["error"]:
        return f"{head} failed: {row['error'].replace('|', '/')} |{' |' * 8}"
    ratio = row["time_over_alltoall"]
    cells = [
        f"{row['median_ms']:.4f}",
        f"{row['p10_ms']:.4f} to {row['p90_ms']:.4f}",
        f"{row['out_bytes'] / 1e6:,.1f}",
        f"{row['bytes_per_s'] / 1e9:.1f}",
        "" if ratio is None else f"{ratio:.2f}",
        f"{row['time_over_floor']:.2f}",
        f"{row['products_ms']:.4f}",
        f"{row['both_ms']:.4f}",
        f"{100 * row['hidden']:.1f}",
    ]
    return f"{head} {' | '.join(cells)} |"
