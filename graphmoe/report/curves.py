"""Curves of runs over their steps, thinned for a page, which draws them over tokens or time too."""

import html
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from graphmoe.report.run_data import RunData
from graphmoe.run.metrics_file import Row
from graphmoe.web_page import COLOURS, Chart

MAX_POINTS = 1500
"""Points of a curve; of a longer one the smallest and largest of neighbours."""
MAX_REACHED = 500
"""Steps whose tokens and time a page has; it interpolates between them."""


class Curve(NamedTuple):
    name: str
    steps: list[int]
    values: list[float]
    run: str = ""
    """Its run, if a page has several."""
    words: str = ""
    """Shown beside a point, as HTML."""
    means: list[float] | None = None
    """Mean of the points that each stands for, if thinned."""


def curve(name: str, rows: Sequence[Row], value: str | Callable[[Row], float | None]) -> Curve:
    """Return the curve of a key of the rows, or of a function of each; rows without a value are left out."""
    of = value if callable(value) else lambda row: row.get(value)
    known = [(row["step"], v) for row in rows if (v := of(row)) is not None and math.isfinite(v)]
    return Curve(name, [step for step, _ in known], [found for _, found in known])


def over(key: str, divisor: float) -> Callable[[Row], float | None]:
    return lambda row: None if row.get(key) is None else row[key] / divisor


def thinned(whole: Curve) -> Curve:
    """Reduce to at most ``MAX_POINTS`` points: first, last, minimum and maximum of each stretch."""
    steps, values = whole.steps, whole.values
    count, stretches = len(steps), (MAX_POINTS - 2) // 2
    if count <= MAX_POINTS:
        return whole
    means = {0: values[0], count - 1: values[-1]}
    for number in range(stretches):
        places = range(number * count // stretches, (number + 1) * count // stretches)
        mean = statistics.fmean(values[place] for place in places)
        for place in (min(places, key=values.__getitem__), max(places, key=values.__getitem__)):
            means[place] = mean
    kept = sorted(means)
    return whole._replace(
        steps=[steps[n] for n in kept], values=[values[n] for n in kept], means=[means[n] for n in kept]
    )


def curves_chart(
    title: str,
    unit: str,
    curves: Iterable[Curve],
    *,
    log: bool = False,
    smooths: bool = True,
    colours: Mapping[str, str] | None = None,
    note: str = "",
) -> list[Chart]:
    """A chart of curves; empty if none has a point. ``smooths=False`` is for exact values."""
    whole = [each for each in curves if each.steps]
    if not whole:
        return []
    drawn = [thinned(each) for each in whole]
    traces = [
        {
            "type": "scatter",
            "name": each.run or each.name,
            "x": each.steps,
            "y": [_short(value) for value in each.values],
            "mode": "lines" if len(each.steps) > 30 else "lines+markers",
            "line": {"color": colours[each.run] if colours else COLOURS[place % len(COLOURS)], "width": 1.8},
            "meta": {
                "run": each.run,
                "words": each.words,
                "smooths": smooths,
                "means": each.means and [_short(value) for value in each.means],
            },
        }
        for place, each in enumerate(drawn)
    ]
    names = [each.run or each.name for each in whole]
    shorter = [
        f"{len(thin.steps):,} of {len(each.steps):,} points{f' of {name}' if len(whole) > 1 else ''}"
        for name, each, thin in zip(names, whole, drawn, strict=True)
        if thin is not each
    ]
    notes = [note, f"Drawn: {', '.join(shorter)}." if shorter and not colours else ""]
    ends = [
        f"{name} from {each.values[0]:.4g} to {each.values[-1]:.4g}"
        for name, each in zip(names, whole, strict=True)
    ]
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": unit}, **({"type": "log"} if log else {})},
        "showlegend": len(traces) > 1 and not colours,
    }
    alt = f"{title} over steps {whole[0].steps[0]} to {whole[0].steps[-1]}: {'; '.join(ends)}"
    return [Chart(title, alt, traces, layout, note=" ".join(filter(None, notes)), is_curves=True)]


def level(value: float, name: str, like: Curve, *, run: str = "") -> Curve:
    return Curve(name, [like.steps[0], like.steps[-1]], [value, value], run)


def reached(run: RunData) -> dict[str, list[float]]:
    """Return by step the tokens and seconds of all steps so far, at most ``MAX_REACHED`` steps."""
    rows, tokens, seconds = [(0, 0, 0.0)], 0, 0.0
    for row in run.steps:
        tokens, seconds = row.get("tokens") or tokens, seconds + (row.get("step_s") or 0.0)
        rows.append((row["step"], tokens, round(seconds, 3)))
    stride = math.ceil(len(rows) / MAX_REACHED)
    kept = sorted({*rows[::stride], rows[-1]})
    return dict(zip(("step", "tokens", "time"), map(list, zip(*kept, strict=True)), strict=True))


def escaped(words: Iterable[str]) -> str:
    return "<br>".join(map(html.escape, words))


def _short(value: float) -> float:
    return float(f"{value:.6g}")
