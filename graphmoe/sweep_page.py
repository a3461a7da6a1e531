"""How the jobs of a sweep are shown: a table for the terminal, and a page that compares their curves."""

from __future__ import annotations

import contextlib
import html
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from graphmoe import pages
from graphmoe.sweep_folder import Job, JobStatus

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_METRICS_FILE = "metrics.jsonl"  # of graphmoe.metrics, which imports torch
MAX_POINTS = 2000
"""Points of a curve at most; of a longer one every second, third, ... is drawn."""

Words = Mapping[int, Sequence[str]]
"""For each job's number the overrides that set it apart."""

_NUMBERS: dict[str, tuple[str, str]] = {
    "val loss": ("final_val_loss", ".4f"),
    "loss": ("final_loss", ".4f"),
    "tokens/s": ("median_tokens_per_s", ",.0f"),
    "steps": ("steps", "d"),
    "first step s": ("time_to_first_step_s", ".1f"),
}
"""What is shown of a run's summary, and how."""


def sweep_table(jobs: Sequence[Job], words: Words) -> Group:
    """The jobs in the order given, then the errors of those that failed, a line for each."""
    headings, rows = _cells(jobs, words, list(_NUMBERS)[:4])
    short = [name.rpartition(".")[2] for name in headings]  # lr for optim.lr, where no other key ends so
    headings = [s if short.count(s) == 1 else name for s, name in zip(short, headings, strict=True)]
    table = Table(*(Column(name, overflow="fold") for name in headings), box=SIMPLE_HEAD)
    table.columns[-1].no_wrap = True
    for cells, job in zip(rows, jobs, strict=True):
        table.add_row(*map(Text, cells), style="red" if job.status is JobStatus.failed else "")
    errors = [Text(f"job {job.number} failed: {job.brief_error}", "red") for job in jobs if job.error]
    return Group(table, *errors)


def write_page(path: Path, command: str, jobs: Sequence[Job], words: Words) -> None:
    """A page that needs no network: the table, and curves of all jobs that have any."""
    curves = [curve for job in jobs if (curve := read_curve(job, words[job.number])) is not None]
    headings, rows = _cells(jobs, words, list(_NUMBERS))
    rows = [[*row, job.brief_error] for row, job in zip(rows, jobs, strict=True)]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in [*headings, ""])
    body = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    figure = curves_figure(curves).to_html(full_html=False, include_plotlyjs=True) if curves else ""
    lines = "\n".join(f"<tr>{cells}</tr>" for cells in body)
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}</tbody>\n</table>"
    pages.write_page(path, "Sweep", command, f"{figure}\n{table}")


@dataclass(frozen=True)
class Curve:
    """What a run measured, by step."""

    name: str
    hover: str
    train: list[dict[str, Any]]
    """Rows of metrics.jsonl, with ``time``, the seconds spent in steps until then."""
    validation: list[dict[str, Any]]


def read_curve(job: Job, words: Sequence[str]) -> Curve | None:
    """The curves of a job's run, None where it has not measured anything."""
    path = job.folder / _METRICS_FILE if job.folder else None
    if path is None or not path.is_file():
        return None
    train: list[dict[str, Any]] = []
    validation: list[dict[str, Any]] = []
    time_s, tokens = 0.0, 0
    for row in _json_rows(path):
        if "loss" in row:
            time_s, tokens = time_s + (row["step_s"] or 0.0), row["tokens"]
            train.append({**row, "time": time_s})
        elif "val_loss" in row:
            validation.append({**row, "time": time_s, "tokens": tokens})
    every = -(-len(train) // MAX_POINTS) or 1
    short = ("=".join(_split(word)) for word in words)
    name = html.escape(" ".join([str(job.number), *short]))
    hover = "<br>".join([f"job {job.number}", *map(html.escape, words)])
    return Curve(name, hover, train[::-every][::-1], validation)


_PANELS = (
    ("training loss", "train", "loss"),
    ("validation loss", "validation", "val_loss"),
    ("tokens/s", "train", "tokens_per_s"),
)
_AXES = {"step": "step", "tokens": "tokens", "time in steps, s": "time"}
_BUTTONS = {"type": "buttons", "direction": "right", "y": 1.03, "yanchor": "bottom"}


def curves_figure(curves: Sequence[Curve]) -> Figure:
    """Training loss, validation loss and speed, one below the other, with buttons for what they are over.

    A click in the legend hides a job in all of them.
    """
    from plotly.colors import qualitative
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    titles = [title for title, _, _ in _PANELS]
    figure = make_subplots(
        rows=len(_PANELS), cols=1, shared_xaxes=True, vertical_spacing=0.06, subplot_titles=titles
    )
    drawn: list[list[dict[str, Any]]] = []
    for curve, colour in zip(curves, itertools.cycle(qualitative.D3), strict=False):
        for panel, (_, source, key) in enumerate(_PANELS, start=1):
            rows = getattr(curve, source)
            trace = Scatter(
                x=[row["step"] for row in rows],
                y=[row[key] for row in rows],
                name=curve.name,
                legendgroup=curve.name,
                showlegend=panel == 1,
                mode="lines+markers" if source == "validation" or len(rows) == 1 else "lines",
                line={"color": colour},
                hovertemplate=f"{curve.hover}<br>%{{x}}: <b>%{{y:.5g}}</b><extra></extra>",
            )
            figure.add_trace(trace, row=panel, col=1)
            drawn.append(rows)
    figure.update_layout(
        height=330 * len(_PANELS),
        template="plotly_white",
        updatemenus=[_axis_buttons(drawn), _scale_buttons()],
        legend={"orientation": "h", "y": -0.06, "yanchor": "top"},
        margin={"t": 90, "l": 70, "r": 30},
    )
    figure.update_xaxes(title_text="step", row=len(_PANELS), col=1)
    return figure


def _axis_buttons(drawn: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Buttons that draw each trace, made of these rows, over steps, tokens or time."""
    title = f"xaxis{len(_PANELS)}.title.text"
    buttons = [
        {
            "label": label,
            "method": "update",
            "args": [{"x": [[row[key] for row in rows] for rows in drawn]}, {title: label}],
        }
        for label, key in _AXES.items()
    ]
    return {**_BUTTONS, "buttons": buttons, "x": 0, "xanchor": "left"}


def _scale_buttons() -> dict[str, Any]:
    buttons = [
        {"label": f"{kind} loss", "method": "relayout", "args": [{"yaxis.type": kind, "yaxis2.type": kind}]}
        for kind in ("linear", "log")
    ]
    return {**_BUTTONS, "buttons": buttons, "x": 1, "xanchor": "right"}


def _cells(jobs: Sequence[Job], words: Words, wanted: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: a column for each key that differs, and each wanted number that is known."""
    settings = {job.number: dict(_split(word) for word in words[job.number]) for job in jobs}
    keys = list(dict.fromkeys(key for job in jobs for key in settings[job.number]))
    summaries = {job.number: job.summary or {} for job in jobs}
    numbers = [
        (name, *_NUMBERS[name])
        for name in wanted
        if any(summary.get(_NUMBERS[name][0]) is not None for summary in summaries.values())
    ]
    rows = []
    for job in jobs:
        mine = summaries[job.number]
        known = [format(mine[key], form) if mine.get(key) is not None else "" for _, key, form in numbers]
        own = [settings[job.number].get(key, "") for key in keys]
        rows.append([str(job.number), *own, *known, job.status.value])
    return ["job", *keys, *(name for name, _, _ in numbers), "state"], rows


def _split(word: str) -> tuple[str, str]:
    """Key and value of an override; long fractions, as an optimiser chooses them, with five digits."""
    key, _, value = word.partition("=")
    with contextlib.suppress(ValueError):
        value = format(float(value), ".5g") if len(value) > 8 else value
    return key, value


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a run that was killed may have torn the last one."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
