"""How the jobs of a sweep are shown: a table for the terminal, and a page that compares their curves."""

from __future__ import annotations

import contextlib
import html
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from graphmoe.command.sweep.folder import Job, JobStatus
from graphmoe.report.curves import MAX_POINTS, Curve, curve, thinned
from graphmoe.run.files import METRICS_FILE
from graphmoe.run.metrics_file import read_rows, steps_of, validations_of
from graphmoe.web_page.page import chart_of, grid, paragraph, table
from graphmoe.web_page.page import write_page as write_whole

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

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
    curves = [each for job in jobs if (each := read_curves(job, words[job.number])) is not None]
    headings, rows = _cells(jobs, words, list(_NUMBERS))
    rows = [[*row, job.brief_error] for row, job in zip(rows, jobs, strict=True)]
    content = table([*headings, ""], rows)
    if curves:
        names = ", ".join(each.name for each in curves)
        alt = f"Training loss, validation loss and tokens/s by step, a curve for each job: {names}"
        note = f"Of more than {MAX_POINTS:,} points the smallest and largest of each stretch are drawn."
        shown = note if any(each.is_thinned for each in curves) else ""
        chart = chart_of(curves_figure(curves), "Curves", alt, is_zoomed=True, note=shown)
        content = grid([chart]) + content
    write_whole(path, "graphmoe: sweep", paragraph(f"`{command}`"), [("", content)])


@dataclass(frozen=True)
class JobCurves:
    """What a run measured."""

    name: str
    hover: str
    panels: Sequence[Curve]
    """As they are drawn, one for each of `_PANELS`."""
    is_thinned: bool
    """Whether one of them has more points than are drawn."""
    reached: dict[int, tuple[int, float]]
    """Tokens, and seconds spent in steps, by step."""

    def over(self, axis: str, drawn: Curve) -> Sequence[float]:
        """Where points of one of its curves stand on an axis of `_AXES`."""
        place = _AXES[axis]
        return drawn.steps if place is None else [self.reached[step][place] for step in drawn.steps]


def read_curves(job: Job, words: Sequence[str]) -> JobCurves | None:
    """The curves of a job's run, None where it has not measured anything."""
    path = job.folder / METRICS_FILE if job.folder else None
    if path is None or not path.is_file():
        return None
    rows = read_rows(path)
    steps, validations = steps_of(rows), validations_of(rows)
    reached: dict[int, tuple[int, float]] = {}
    time_s, tokens = 0.0, 0
    for row in rows:
        if "loss" in row:
            time_s, tokens = time_s + (row.get("step_s") or 0.0), row.get("tokens", tokens)
            reached[row["step"]] = tokens, time_s
        elif "val_loss" in row:
            reached.setdefault(row["step"], (tokens, time_s))
    short = ("=".join(_split(word)) for word in words)
    name = html.escape(" ".join([str(job.number), *short]))
    hover = "<br>".join([f"job {job.number}", *map(html.escape, words)])
    whole = [curve(title, validations if key == "val_loss" else steps, key) for title, key in _PANELS.items()]
    drawn = [*map(thinned, whole)]
    return JobCurves(name, hover, drawn, drawn != whole, reached)


_PANELS = {"training loss": "loss", "validation loss": "val_loss", "tokens/s": "tokens_per_s"}
_AXES = {"step": None, "tokens": 0, "time in steps, s": 1}
"""Places in what a step has reached."""
_BUTTONS = {"type": "buttons", "direction": "right", "y": 1.03, "yanchor": "bottom"}


def curves_figure(jobs: Sequence[JobCurves]) -> Figure:
    """Training loss, validation loss and speed, one below the other, with buttons for what they are over.

    A click in the legend hides a job in all of them.
    """
    from plotly.colors import qualitative
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=len(_PANELS), cols=1, shared_xaxes=True, vertical_spacing=0.06, subplot_titles=[*_PANELS]
    )
    for job, colour in zip(jobs, itertools.cycle(qualitative.D3), strict=False):
        for panel, (key, drawn) in enumerate(zip(_PANELS.values(), job.panels, strict=True), start=1):
            trace = Scatter(
                x=drawn.steps,
                y=drawn.values,
                name=job.name,
                legendgroup=job.name,
                showlegend=panel == 1,
                mode="lines+markers" if key == "val_loss" or len(drawn.steps) == 1 else "lines",
                line={"color": colour},
                hovertemplate=f"{job.hover}<br>%{{x}}: <b>%{{y:.5g}}</b><extra></extra>",
            )
            figure.add_trace(trace, row=panel, col=1)
    figure.update_layout(
        height=330 * len(_PANELS),
        updatemenus=[_axis_buttons(jobs), _scale_buttons()],
        legend={"orientation": "h", "y": -0.06, "yanchor": "top"},
        margin={"t": 90, "l": 70, "r": 30},
    )
    figure.update_xaxes(title_text="step", row=len(_PANELS), col=1)
    return figure


def _axis_buttons(jobs: Sequence[JobCurves]) -> dict[str, Any]:
    """Buttons that draw the traces of all jobs over steps, tokens or time."""
    title = f"xaxis{len(_PANELS)}.title.text"
    buttons = [
        {
            "label": axis,
            "method": "update",
            "args": [{"x": [job.over(axis, drawn) for job in jobs for drawn in job.panels]}, {title: axis}],
        }
        for axis in _AXES
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
