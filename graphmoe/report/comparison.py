"""Several runs on one page: their curves over each other, and the numbers and settings that differ."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from graphmoe.report.charts import MAX_POINTS, Curve, curve, over, thinned
from graphmoe.report.run_data import RunData
from graphmoe.web_page import COLOURS, chart_of, grid, paragraph, table, write_page

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COMPARISON_FILE = "comparison.html"
Number = Callable[[RunData], float | None]

NUMBERS: dict[str, tuple[Number, str]] = {
    "tokens/s of each device, median": (RunData.tokens_per_s_per_rank, ",.0f"),
    "MFU, median": (lambda run: run.median("mfu"), ".1%"),
    "s per step, median": (lambda run: run.median("step_s"), ".4g"),
    "peak memory, GiB": (lambda run: run.summary.get("peak_memory_gib"), ",.2f"),
    "final loss": (lambda run: run.summary.get("final_loss"), ".4f"),
    "final validation loss": (lambda run: run.summary.get("final_val_loss"), ".4f"),
    "first step, s": (lambda run: run.summary.get("time_to_first_step_s"), ",.1f"),
    "steps": (lambda run: run.summary.get("steps"), ",d"),
}


def write_comparison(runs: Sequence[RunData], path: Path) -> None:
    """Make the page. *Raises* ImportError without Plotly."""
    names = names_of(runs)
    curves = curves_of_runs([run_curves(run, name) for run, name in zip(runs, names, strict=True)])
    configuration = paragraph("The runs have the same configuration.")
    if differences := config_differences(runs):
        configuration = table(["key", *names], differences)
    sections = [
        ("Numbers", table(["", *names], numbers(runs), numbers_from=1)),
        ("Curves", curves or paragraph("None of the runs has recorded a step.")),
        ("Configuration", configuration),
    ]
    states = [(name, run.state, run.folder) for name, run in zip(names, runs, strict=True)]
    header = table(["run", "state", "folder"], states)
    write_page(path, f"graphmoe: {len(runs)} runs", header, sections)


def names_of(runs: Sequence[RunData]) -> list[str]:
    """Names of the folders, with as many of those above as tell them apart."""
    parts = [run.folder.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def numbers(runs: Sequence[RunData]) -> list[list[str]]:
    """A row for each number that any run has."""
    rows = []
    for name, (number, form) in NUMBERS.items():
        values = [number(run) for run in runs]
        if any(value is not None for value in values):
            rows.append([name, *("" if value is None else format(value, form) for value in values)])
    return rows


def config_differences(runs: Sequence[RunData]) -> list[list[str]]:
    """A row for each key that has not the same value in all runs; empty where a run has no such key."""
    flat = [run.flat_config() for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = [[key, *(each.get(key, "") for each in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


_LOSSES = ("training loss", "validation loss")
_PANELS: dict[str, Callable[[RunData], Curve]] = {
    "training loss": lambda run: curve("", run.steps, "loss"),
    "validation loss": lambda run: curve("", run.validations, "val_loss"),
    # without the first step, which compiles
    "tokens/s of each device": lambda run: curve(
        "", run.steps[1:] or run.steps, over("tokens_per_s", run.num_ranks)
    ),
    "model FLOPs utilisation": lambda run: curve("", run.steps, "mfu"),
    "peak memory so far, GiB": lambda run: curve("", run.steps, "memory_gib"),
    "learning rate": lambda run: curve("", run.steps, "lr"),
    "router entropy, nats": lambda run: curve("", run.steps, "router_entropy"),
}
_AXES = {"step": None, "tokens": 0, "time in steps, s": 1}
"""Indices into the numbers that a step has reached."""


class RunCurves(NamedTuple):
    """Curves of a run as they are drawn, by panel."""

    name: str
    hover: str
    panels: dict[str, Curve]
    is_thinned: bool
    reached: dict[int, tuple[int, float]]
    """Tokens, and seconds spent in steps, by step."""


def run_curves(run: RunData, name: str, hover: Sequence[str] = ()) -> RunCurves:
    """The curves of a run, with lines to show beside a point."""
    reached: dict[int, tuple[int, float]] = {}
    time_s, tokens = 0.0, 0
    for row in sorted([*run.steps, *run.validations], key=lambda row: row["step"]):
        if "loss" in row:
            time_s, tokens = time_s + (row.get("step_s") or 0.0), row.get("tokens", tokens)
        reached[row["step"]] = tokens, time_s
    whole = {title: make(run) for title, make in _PANELS.items()}
    drawn = {title: thinned(each) for title, each in whole.items()}
    return RunCurves(
        html.escape(name), "<br>".join(map(html.escape, hover or [name])), drawn, drawn != whole, reached
    )


def curves_of_runs(runs: Sequence[RunCurves]) -> str:
    """The chart of all runs; empty where none has a point."""
    runs = [run for run in runs if any(each.steps for each in run.panels.values())]
    if not runs:
        return ""
    note = f"Of more than {MAX_POINTS:,} points the smallest and largest of each stretch are drawn."
    alt = f"Losses, speed and other numbers by step, a curve for each run: {', '.join(r.name for r in runs)}"
    shown = note if any(run.is_thinned for run in runs) else ""
    return grid([chart_of(curves_figure(runs), "Curves", alt, is_zoomed=True, note=shown)])


def curves_figure(runs: Sequence[RunCurves]) -> Figure:
    """Panels one below the other, with buttons for the axis of all and the scale of losses.

    A click in the legend hides a run in all of them.
    """
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    traces = [(run, title, each) for run in runs for title, each in run.panels.items() if each.steps]
    titles = [title for title in _PANELS if any(each[1] == title for each in traces)]
    colours = {run.name: colour for run, colour in zip(runs, itertools.cycle(COLOURS), strict=False)}
    figure = make_subplots(
        rows=len(titles),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.18 / len(titles),
        subplot_titles=titles,
    )
    in_legend: set[str] = set()
    for run, title, drawn in traces:
        scatter = Scatter(
            x=drawn.steps,
            y=drawn.values,
            name=run.name,
            legendgroup=run.name,
            showlegend=run.name not in in_legend,
            mode="lines+markers" if title == "validation loss" or len(drawn.steps) == 1 else "lines",
            line={"color": colours[run.name]},
            hovertemplate=f"{run.hover}<br>%{{x}}: <b>%{{y:.5g}}</b><extra></extra>",
        )
        in_legend.add(run.name)
        figure.add_trace(scatter, row=titles.index(title) + 1, col=1)
    places = {
        axis: [
            each.steps if n is None else [run.reached[s][n] for s in each.steps] for run, _, each in traces
        ]
        for axis, n in _AXES.items()
    }
    below = f"xaxis{len(titles) if len(titles) > 1 else ''}.title.text"
    axes = [f"yaxis{number or ''}.type" for number in range(len(titles) + 1) if number != 1]
    of_losses = [axis for axis, title in zip(axes, titles, strict=True) if title in _LOSSES]
    figure.update_layout(
        height=330 * len(titles),
        updatemenus=[
            _buttons("left", "update", {axis: [{"x": x}, {below: axis}] for axis, x in places.items()}),
            _buttons(
                "right",
                "relayout",
                {f"{kind} loss": [dict.fromkeys(of_losses, kind)] for kind in ("linear", "log")},
            ),
        ],
        legend={"orientation": "h", "y": -0.18 / len(titles), "yanchor": "top"},
        margin={"t": 90, "l": 70, "r": 30},
    )
    figure.update_xaxes(title_text="step", row=len(titles), col=1)
    return figure


def _buttons(side: str, method: str, arguments: Mapping[str, list[Any]]) -> dict[str, Any]:
    place = {
        "x": 0 if side == "left" else 1,
        "xanchor": side,
        "y": 1.0,
        "yanchor": "bottom",
        "pad": {"b": 30},
    }
    buttons = [{"label": label, "method": method, "args": args} for label, args in arguments.items()]
    return {"type": "buttons", "direction": "right", "buttons": buttons, **place}
