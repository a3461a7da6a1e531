"""Curves of a run over its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from graphmoe.report.run_data import RunData
from graphmoe.run.metrics_file import Row
from graphmoe.web_page.page import COLOURS, Chart

MAX_POINTS = 1500
"""Points of a curve. Of a longer one the smallest and the largest of neighbours are drawn."""


class Curve(NamedTuple):
    """Values over steps."""

    name: str
    steps: list[int]
    values: list[float]


def curve(name: str, rows: Sequence[Row], value: str | Callable[[Row], float | None]) -> Curve:
    """The curve of a key of the rows, or of a function of each; rows without it are left out."""
    of = value if callable(value) else lambda row: row.get(value)
    pairs = [(row["step"], of(row)) for row in rows]
    known = [(step, found) for step, found in pairs if found is not None and math.isfinite(found)]
    return Curve(name, [step for step, _ in known], [found for _, found in known])


def thinned(whole: Curve) -> Curve:
    """At most ``MAX_POINTS`` of its points: first, last, and the smallest and largest of each stretch."""
    count = len(whole.steps)
    if count <= MAX_POINTS:
        return whole
    stretches = (MAX_POINTS - 2) // 2
    kept = {0, count - 1}
    values = whole.values
    for number in range(stretches):
        places = range(number * count // stretches, (number + 1) * count // stretches)
        kept |= {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
    return Curve(whole.name, [whole.steps[n] for n in sorted(kept)], [values[n] for n in sorted(kept)])


def curves_chart(
    title: str, unit: str, curves: Iterable[Curve], *, log: bool = False, note: str = "", **words: Any
) -> Chart | None:
    """A chart of curves, each with a colour of its own; None where none has a point."""
    whole = [each for each in curves if each.steps]
    if not whole:
        return None
    drawn = [thinned(each) for each in whole]
    traces = [
        {
            "type": "scatter",
            "name": each.name,
            "x": each.steps,
            "y": each.values,
            "mode": "lines" if len(each.steps) > 30 else "lines+markers",
            "line": {"color": COLOURS[place % len(COLOURS)], "width": 1.8},
            "hovertemplate": "step %{x}: <b>%{y:.5g}</b>",
        }
        for place, each in enumerate(drawn)
    ]
    shorter = [
        f"{len(thin.steps):,} of {len(each.steps):,} points{f' of {each.name}' if len(whole) > 1 else ''}"
        for each, thin in zip(whole, drawn, strict=True)
        if thin is not each
    ]
    notes = [note, f"Drawn: {', '.join(shorter)}." if shorter else ""]
    ends = [f"{each.name} from {each.values[0]:.4g} to {each.values[-1]:.4g}" for each in whole]
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": unit}, **({"type": "log"} if log else {})},
        "showlegend": len(traces) > 1,
    }
    alt = f"{title} over steps {whole[0].steps[0]} to {whole[0].steps[-1]}: {'; '.join(ends)}"
    return Chart(title, alt, traces, layout, note=" ".join(filter(None, notes)), **words)


def loss_chart(run: RunData) -> Chart | None:
    """Training and validation."""
    curves = curve("training", run.steps, "loss"), curve("validation", run.validations, "val_loss")
    return curves_chart("Loss", "nats per token", curves)


def training_charts(run: RunData) -> list[Chart]:
    """Loss, learning rate, gradient norm."""
    norm = curve("gradient norm", run.steps, "grad_norm")
    charts = [
        loss_chart(run),
        curves_chart("Learning rate", "learning rate", [curve("learning rate", run.steps, "lr")]),
        curves_chart("Gradient norm", "before clipping", [norm], log=min(norm.values, default=0) > 0),
        _extra_losses(run),
    ]
    return [chart for chart in charts if chart is not None]


def speed_charts(run: RunData) -> list[Chart]:
    """Throughput, and MFU or what there is of it without a known peak. The first step compiles."""
    later, ranks = run.steps[1:] or run.steps, run.num_ranks
    rate = curve("tokens/s", later, lambda row: _over(row.get("tokens_per_s"), ranks))
    mfu = curve("MFU", later, lambda row: _over(row.get("mfu"), 0.01))
    note = "Without the first step." if len(run.steps) > 1 else ""
    charts = [curves_chart(f"Throughput of each {run.device_word}", "tokens/s", [rate], note=note)]
    if mfu.steps:
        charts.append(curves_chart("Model FLOPs utilisation", "MFU, %", [mfu], note=note))
    else:
        unknown = f"{note} No MFU: the peak of this device is not known; log.peak_tflops sets it.".strip()
        tflops = curve("TFLOP/s", later, "tflops")
        charts.append(
            curves_chart(f"Model FLOPs of each {run.device_word}", "TFLOP/s", [tflops], note=unknown)
        )
    return [chart for chart in charts if chart is not None]


def _extra_losses(run: RunData) -> Chart | None:
    """Terms that are added to the loss, where any of them is not 0."""
    names = {"balance_loss": "load balance", "z_loss": "router z", "mtp_loss": "multi-token prediction"}
    curves = [curve(name, run.steps, key) for key, name in names.items()]
    added = [each for each in curves if any(each.values)]
    title = f"Loss of {added[0].name}" if len(added) == 1 else "Other losses"
    return curves_chart(title, "before its weight", added)


def _over(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor
