"""A PNG with the timelines of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphmoe.config.schema import ConfigError
from graphmoe.pipeline_view.bars import (
    COLOURS,
    WORDS,
    Bar,
    Panel,
    bars_of,
    idle_shares,
    kinds_of,
    shown_peak,
    summary,
    text_colour,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MATPLOTLIB = "pip install 'graphmoe[dev]'"
WIDTH_IN, DPI = 16.0, 120
ROW_IN, HEAD_IN, LEGEND_IN = 0.34, 0.75, 0.45
"""Heights of a rank's row, of what is around a panel, and of the legend."""
_FONT, _SMALLEST_FONT = 7.0, 4.5
_DIGIT_WIDTH = 0.64
"""Width of a digit as a share of the font's size."""


def draw_chart(path: Path, panels: Sequence[Panel]) -> None:
    """Write the panels one below the other on a common axis of time.

    *Raises* ConfigError where the file cannot be written or matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            f"{path}: a PNG needs matplotlib: {MATPLOTLIB}; html=... needs nothing more"
        ) from error

    drawn = [bars_of(panel) for panel in panels]
    ranks = [panel.timeline.placement.num_ranks for panel in panels]
    height = sum(ROW_IN * count + HEAD_IN for count in ranks) + LEGEND_IN
    figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
    rows = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=ranks)[:, 0]
    end = max((bar.end for bars in drawn for bar in bars), default=1.0)
    for axes, panel, bars in zip(rows, panels, drawn, strict=True):
        axes.set_xlim(0, end)
        _draw(axes, panel, bars)
        _label(axes, bars, points_per_time=0.86 * WIDTH_IN * 72 / end)
    rows[-1].set_xlabel(f"time, {panels[0].unit}" if panels[0].unit else "time, in the unit of the costs")
    kinds = kinds_of([bar for bars in drawn for bar in bars])
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in kinds],
        loc="outside upper left",
        ncols=len(COLOURS),
        frameon=False,
    )
    try:
        figure.savefig(path, dpi=DPI, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error


def _draw(axes: Axes, panel: Panel, bars: Sequence[Bar]) -> None:
    """Draw the bars of a panel as one collection, and the words beside its rows."""
    from matplotlib.collections import PolyCollection

    corners = [
        [(bar.start, bar.low), (bar.end, bar.low), (bar.end, bar.high), (bar.start, bar.high)] for bar in bars
    ]
    colours = [bar.colour for bar in bars]
    axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.4))
    num_ranks = panel.timeline.placement.num_ranks
    idle = idle_shares(panel.timeline)
    axes.set_ylim(num_ranks - 0.5, -0.5)
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    right = axes.secondary_yaxis("right")
    right.set_yticks(
        range(num_ranks),
        [f"{idle[rank]:.1%} idle, {shown_peak(panel.timeline, rank)}" for rank in range(num_ranks)],
        fontsize=8,
    )
    for side in (axes, right):
        side.tick_params(axis="y", length=0)
        side.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{panel.title}: {summary(panel)}", loc="left", fontsize=10)


def _label(axes: Axes, bars: Sequence[Bar], points_per_time: float) -> None:
    """Write the micro-batch into each bar that has room for it."""
    for bar in bars:
        if bar.kind == "comm":
            continue
        room = (bar.end - bar.start) * points_per_time - 1
        size = min(_FONT, room / (_DIGIT_WIDTH * len(bar.label)), 0.8 * 72 * ROW_IN * (bar.high - bar.low))
        if size >= _SMALLEST_FONT:
            axes.text(
                (bar.start + bar.end) / 2,
                (bar.low + bar.high) / 2,
                bar.label,
                size=size,
                color=text_colour(bar.colour),
                ha="center",
                va="center_baseline",
                clip_on=True,
                in_layout=False,
            )
