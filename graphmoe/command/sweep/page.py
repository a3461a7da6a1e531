"""Page of a sweep: a table of its jobs, their value over each parameter, and their curves."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphmoe.command.sweep import Job
from graphmoe.config.schema import ConfigError
from graphmoe.report.comparison import RunCurves, RunLine, curves_of_runs, run_controls, runs_table
from graphmoe.report.run_data import RunData, read_run
from graphmoe.web_page import COLOURS, Chart, grid, paragraph, write_page

MAX_LINES = len(COLOURS)
Words = Mapping[int, Sequence[str]]  # overrides that set a job apart, by its number


def write_sweep_page(path: Path, command: str, jobs: Sequence[Job], words: Words) -> None:
    """Write the sweep's page, which needs no network; names of jobs link to their own reports."""
    settings = {job.number: dict(split_word(word) for word in words[job.number]) for job in jobs}
    runs = {job.number: run for job in jobs if (run := _run_of(job)) is not None}
    names = {
        n: " ".join([str(n), *(f"{key}={value}" for key, value in own.items())])
        for n, own in settings.items()
    }
    lines = [
        RunLine(
            str(job.number), runs.get(job.number), settings[job.number], job.status.value, job.brief_error
        )
        for job in jobs
    ]
    drawn = [(job, runs[job.number]) for job in jobs if job.number in runs]
    curves = [
        RunCurves(names[job.number], run, [f"job {job.number}", *words[job.number]]) for job, run in drawn
    ]
    values = value_charts({job.number: job.value for job in jobs}, settings)
    header = paragraph(f"`{command}`") + paragraph(
        "Best first. A click on a heading sorts, one on a job's number opens its report."
    )
    sections = [
        ("Jobs", runs_table("job", lines, path.parent)),
        ("Parameters", grid(values) if values else ""),
        ("Curves", curves_of_runs(curves)),
    ]
    bar = run_controls({names[job.number]: run for job, run in drawn})
    write_page(path, "graphmoe: sweep", header, [each for each in sections if each[1]], bar)


def split_word(word: str) -> tuple[str, str]:
    """Return key and value of an override, long decimal fractions rounded to five digits."""
    key, _, value = word.partition("=")
    number = _number(value) if len(value) > 8 else None
    return key, value if number is None else format(number, ".5g")


def value_charts(
    values: Mapping[int, float | None], settings: Mapping[int, Mapping[str, str]]
) -> list[Chart]:
    """Return charts of the jobs' value by parameter; for two parameters, a line per value of the other."""
    known = {n: value for n, value in values.items() if value is not None and math.isfinite(value)}
    keys = [*dict.fromkeys(key for n in known for key in settings[n])]
    charts = []
    for key in keys:
        points = [(settings[n][key], n) for n in known if key in settings[n]]
        if len({at for at, _ in points}) < 2:
            continue
        others = [other for other in keys if other != key]
        second = others[0] if len(others) == 1 else None
        groups: dict[str, list[tuple[str, int]]] = {}
        for at, n in points:
            groups.setdefault(settings[n].get(second, "") if second else "", []).append((at, n))
        if len(groups) > MAX_LINES:
            groups, second = {"": points}, None
        charts.append(_value_chart(key, second, groups, known, settings))
    return charts


def _value_chart(
    key: str,
    second: str | None,
    groups: Mapping[str, Sequence[tuple[str, int]]],
    known: Mapping[int, float],
    settings: Mapping[int, Mapping[str, str]],
) -> Chart:
    numbers = {at: _number(at) for points in groups.values() for at, _ in points}
    measured = {at: number for at, number in numbers.items() if number is not None}
    is_number = len(measured) == len(numbers)
    axis: dict[str, Any] = {"title": {"text": key}, "type": "linear" if is_number else "category"}
    if is_number and min(measured.values()) > 0 and max(measured.values()) >= 10 * min(measured.values()):
        axis["type"] = "log"
    if is_number and len(measured) <= MAX_LINES:
        axis |= {"tickvals": [*measured.values()], "ticktext": [*measured]}
    elif is_number:
        axis["tickformat"] = "~g"
    traces = []
    for place, (name, points) in enumerate(groups.items()):
        ordered = sorted(points, key=lambda point: measured[point[0]]) if is_number else points
        words = [", ".join(f"{k}={v}" for k, v in settings[n].items()) for _, n in ordered]
        is_line = is_number and len({at for at, _ in ordered}) == len(ordered)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if is_line else "markers",
                "name": f"{second}={name}" if second else "",
                "x": [measured[at] if is_number else at for at, _ in ordered],
                "y": [known[n] for _, n in ordered],
                "text": [f"job {n}: {said}" for (_, n), said in zip(ordered, words, strict=True)],
                "hovertemplate": "%{text}<br><b>%{y:.5g}</b><extra></extra>",
                "marker": {"size": 9, "color": COLOURS[place % len(COLOURS)]},
                "line": {"color": COLOURS[place % len(COLOURS)], "width": 1.5},
            }
        )
    best = min((known[n], at) for points in groups.values() for at, n in points)
    layout = {
        "xaxis": axis,
        "yaxis": {"title": {"text": "final loss of a job"}},
        "showlegend": second is not None,
    }
    alt = f"Final loss of jobs over {key}; the smallest is {best[0]:.4g} at {best[1]}"
    return Chart(f"Value over {key}", alt, traces, layout)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _run_of(job: Job) -> RunData | None:
    try:
        return read_run(job.folder) if job.folder is not None else None
    except ConfigError:
        return None
