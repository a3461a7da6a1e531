"""Charts of a run: curves over steps, thinned for a page, memory by kind, and loads of experts."""

import html
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from graphmoe.report.run_data import RunData
from graphmoe.run.metrics_file import Row, timed
from graphmoe.web_page import COLOURS, Chart, Frames, paragraph

MAX_POINTS = 1500
"""Most points of a curve; a longer one keeps the smallest and largest of neighbours."""
MAX_REACHED = 500
"""Most steps for which a page has tokens and time; it interpolates between them."""
MAX_FRAMES, MAX_CELLS = 40, 200_000
"""Most pictures of the heat map, and most numbers in all of them."""
KINDS = {
    "params": "weights",
    "grads": "gradients",
    "main_params": "main weights",
    "moments": "moments",
    "activations": "activations",
    "buffers": "buffers",
}
OUTSIDE_ALLOCATOR = {"communication": "communication", "dispatch": "memory shared for dispatch"}
"""Kinds of memory outside torch's allocator, and so outside a GPU's measured peak."""


def training_charts(run: RunData) -> list[Chart]:
    """Return charts of loss, learning rate, gradient norm, and terms of the loss that are not 0."""
    losses = curve("training", run.steps, "loss"), curve("validation", run.validations, "val_loss")
    norm, rate = curve("gradient norm", run.steps, "grad_norm"), curve("learning rate", run.steps, "lr")
    names = {"balance_loss": "load balance", "z_loss": "router z", "mtp_loss": "multi-token prediction"}
    added = [each for key, name in names.items() if any((each := curve(name, run.steps, key)).values)]
    title = f"Loss of {added[0].name}" if len(added) == 1 else "Other losses"
    return [
        *curves_chart("Loss", "nats per token", losses),
        *curves_chart("Learning rate", "learning rate", [rate], smooths=False),
        *curves_chart("Gradient norm", "before clipping", [norm], log=min(norm.values, default=0) > 0),
        *curves_chart(title, "before its weight", added),
    ]


def speed_charts(run: RunData) -> list[Chart]:
    """Return charts of throughput and MFU (FLOPs if the peak is unknown), without the first step."""
    later = timed(run.steps)
    note = f"Without the first step{' of each start' * (len(run.starts) > 1)}."
    note *= len(later) != len(run.steps)
    rate = curve("tokens/s", later, over("tokens_per_s", run.num_ranks))
    mfu = curve("MFU", later, over("mfu", 0.01))
    charts = curves_chart(f"Throughput of each {run.device_word}", "tokens/s", [rate], note=note)
    if mfu.steps:
        return charts + curves_chart("Model FLOPs utilisation", "MFU, %", [mfu], note=note)
    unknown = f"{note} No MFU: the peak of this device is not known; log.peak_tflops sets it.".strip()
    flops = [curve("TFLOP/s", later, "tflops")]
    return charts + curves_chart(f"Model FLOPs of each {run.device_word}", "TFLOP/s", flops, note=unknown)


def memory_charts(run: RunData) -> list[Chart]:
    peak = curve("peak of rank 0", run.steps, "memory_gib")
    return [*projected_chart(run), *curves_chart("Peak memory so far", "GiB", [peak], smooths=False)]


def projected_chart(run: RunData) -> list[Chart]:
    """Return bars of memory by kind of each pipeline rank, and measured peak; empty without a projection."""
    places, peak = run.projection.get("places"), run.summary.get("peak_memory_gib")
    if not places:
        return []
    held, outside = (
        {kind: name for kind, name in kinds.items() if any(place.get(kind) for place in places)}
        for kinds in (KINDS, OUTSIDE_ALLOCATOR)
    )
    colours = dict(zip([*KINDS, *OUTSIDE_ALLOCATOR], COLOURS, strict=False))
    traces = [
        bars(name, _rows(row, places), [place.get(kind, 0.0) for place in places], colours[kind], "GiB")
        for row, kinds in (("projected", held), ("outside the allocator", outside))
        for kind, name in kinds.items()
    ]
    if peak is not None:
        traces.append(bars("measured peak", ["measured"], [peak], "#8a94a3", "GiB"))
    most = max(place["total"] - sum(place.get(kind, 0.0) for kind in outside) for place in places)
    said = f"projected {most:.4g} GiB" + ("" if peak is None else f", measured {peak:.4g} GiB")
    notes = ["Not projected: the device's context, code of kernels, workspaces, rounding of the allocator."]
    if outside:
        more = max(sum(place.get(kind, 0.0) for kind in outside) for place in places)
        said += f", outside the allocator {more:.4g} GiB"
        notes.append(f"Shown apart, outside torch's allocator: {' and '.join(outside.values())}.")
    if run.of("run.device") == "cpu":
        notes.append("On a CPU, measured memory is that of the whole process, Python and torch included.")
    height, alt = 190 + 34 * (len(places) * (2 if outside else 1) + 1), f"Memory by kind: {said}"
    return [Chart("Memory by kind", alt, traces, bars_layout("GiB"), height, note=" ".join(notes))]


def memory_remarks(run: RunData) -> str:
    if run.projection.get("places"):
        return ""
    why = run.projection.get("why_not", "the run recorded none")
    return paragraph(f"No projected memory: {why.removeprefix('not projected: ')}.")


def _rows(name: str, places: Sequence[Any]) -> list[str]:
    return [name] if len(places) == 1 else [f"{name}, pp {place}" for place in range(len(places))]


def bars(name: str, rows: Sequence[str], sizes: Sequence[float], colour: str, unit: str) -> dict[str, Any]:
    """Return a Plotly trace of horizontal bars, one for each row."""
    trace = {"type": "bar", "orientation": "h", "name": name, "y": rows, "x": sizes}
    return {**trace, "marker": {"color": colour}, "hovertemplate": f"%{{y}}: <b>%{{x:.4g}} {unit}</b>"}


def bars_layout(below: str) -> dict[str, Any]:
    """Return Plotly's layout of stacked horizontal bars, the first row at the top."""
    return {"barmode": "stack", "xaxis": {"title": {"text": below}}, "yaxis": {"autorange": "reversed"}}


def bar_chart(
    title: str, alt: str, sizes: Mapping[str, Sequence[float]], rows: Sequence[str], unit: str, below: str
) -> Chart:
    """Return a chart of stacked bars, with a colour for each name in ``sizes``."""
    named = zip(sizes.items(), itertools.cycle(COLOURS), strict=False)
    traces = [bars(name, rows, of_rows, colour, unit) for (name, of_rows), colour in named]
    return Chart(title, alt, traces, bars_layout(below), 130 + 26 * len(rows))


def expert_charts(run: RunData) -> list[Chart]:
    """Return charts: experts' loads over time, fullest expert and rank over the mean, router entropy."""
    routed = [row for row in run.steps if row.get("load_max_over_mean")]
    curves = [curve("mean of layers", routed, lambda row: statistics.fmean(row["load_max_over_mean"]))]
    if any(len(row["load_max_over_mean"]) > 1 for row in routed):
        curves.append(curve("worst layer", routed, lambda row: max(row["load_max_over_mean"])))
    of_ranks = curve("fullest rank", run.steps, "rank_load")
    if any(load != 1 for load in of_ranks.values):  # ranks share the experts
        planned = curve("fullest rank with replicas", run.steps, "planned_rank_load")
        curves += [of_ranks, planned] if planned.steps else [of_ranks]
    entropy = [curve("mean of layers", run.steps, "router_entropy")] if routed else []
    if (experts := run.of("model.num_experts")) and entropy and entropy[0].steps:
        ends = [entropy[0].steps[0], entropy[0].steps[-1]]
        entropy.append(Curve(f"even: ln {experts}", ends, [math.log(experts)] * 2))
    entropies = curves_chart("Router entropy", "nats", entropy)
    loads = loads_chart(run.expert_loads)
    replicas = curve("all MoE layers", run.steps, "replicas")
    copies = curves_chart("Replicas of experts", "in a micro-batch", [replicas], note=_moved(run))
    return [*loads, *curves_chart("Fullest expert", "load / mean", curves), *copies, *entropies]


def _moved(run: RunData) -> str:
    moved = [row["replica_gb"] for row in run.steps if row.get("replica_gb") is not None]
    if not moved:
        return ""
    size = statistics.fmean(moved)
    return f"Replicas moved {size:.3g} GB of weights and gradients per micro-batch (mean of all steps)."


def loads_chart(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return a heat map of the load of each expert of each layer, by time."""
    if not rows:
        return []
    layers, experts = len(rows[0]["load"]), len(rows[0]["load"][0])
    count = max(2, min(MAX_FRAMES, MAX_CELLS // (layers * experts), len(rows)))
    shown = [rows[round(n * (len(rows) - 1) / (count - 1))] for n in range(count)] if len(rows) > 1 else rows
    largest = max(2.0, *(load for row in shown for layer in row["load"] for load in layer))
    last = shown[-1]
    trace = {
        "type": "heatmap",
        "z": last["load"],
        "zmin": 0,
        "zmax": largest,
        "colorscale": [[0, "#2b6cb0"], [1 / largest, "#f2efe6"], [1, "#c0392b"]],
        "colorbar": {"title": {"text": "load / mean", "side": "right"}, "thickness": 12},
        "hovertemplate": "MoE layer %{y}, expert %{x}: <b>%{z:.3g}</b> of the mean<extra></extra>",
        "xgap": 1 if experts <= 64 else 0,
        "ygap": 1 if layers <= 64 else 0,
    }
    xaxis, yaxis = (
        {"title": {"text": text}, "showgrid": False, "dtick": max(1, 2 ** math.ceil(math.log2(number / 16)))}
        for text, number in (("expert", experts), ("MoE layer", layers))
    )
    yaxis["autorange"] = "reversed"
    fullest = max((load, layer, e) for layer, of in enumerate(last["load"]) for e, load in enumerate(of))
    alt = (
        f"Heat map of the load of {experts} experts in {layers} MoE layers over the mean of the layer, at "
        f"{len(shown)} times; at step {last['step']} the fullest is expert {fullest[2]} of MoE layer "
        f"{fullest[1]} with {fullest[0]:.3g}"
    )
    means = statistics.median(row["steps"] for row in shown)
    note = f"1 is the mean of the layer. Each picture is the mean of {means:g} steps; {len(shown)} of "
    note += f"{len(rows)} recorded ones are here."
    layout, height = {"xaxis": xaxis, "yaxis": yaxis}, min(700, max(260, 130 + 22 * layers))
    frames = Frames([str(row["step"]) for row in shown], [row["load"] for row in shown])
    return [Chart("Load of experts", alt, [trace], layout, height, is_wide=True, frames=frames, note=note)]


class Curve(NamedTuple):
    name: str
    steps: list[int]
    values: list[float]
    run: str = ""
    """Name of the curve's run, if the page has several runs."""
    words: str = ""
    """HTML text shown beside a point."""
    means: list[float] | None = None
    """Mean of the points that each drawn point replaces; None unless thinned."""


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
    """Return a chart of curves, none if none has a point; ``smooths=False``: the page never smooths it."""
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
            "meta": {"run": each.run, "words": each.words, "smooths": smooths,
                     "means": each.means and [_short(value) for value in each.means]},
        }
        for place, each in enumerate(drawn)
    ]  # fmt: skip
    names = [each.run or each.name for each in whole]
    shorter = [
        f"{len(thin.steps):,} of {len(each.steps):,} points{f' of {name}' if len(whole) > 1 else ''}"
        for name, each, thin in zip(names, whole, drawn, strict=True)
        if thin is not each
    ]
    notes = [note, f"Drawn: {', '.join(shorter)}." if shorter and not colours else ""]
    named = zip(names, whole, strict=True)
    ends = [f"{name} from {each.values[0]:.4g} to {each.values[-1]:.4g}" for name, each in named]
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": unit}, **({"type": "log"} if log else {})},
        "showlegend": len(traces) > 1 and not colours,
    }
    alt = f"{title} over steps {whole[0].steps[0]} to {whole[0].steps[-1]}: {'; '.join(ends)}"
    return [Chart(title, alt, traces, layout, note=" ".join(filter(None, notes)), is_curves=True)]


def reached(run: RunData) -> dict[str, list[float]]:
    """Return by step the tokens and seconds since the start, at most ``MAX_REACHED`` steps."""
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
