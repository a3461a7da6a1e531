"""Use of experts: their loads over time, the fullest ones, and the entropy of the routers."""

from __future__ import annotations

import math
import statistics

from graphmoe.report.curves import curve, curves_chart
from graphmoe.report.run_data import RunData
from graphmoe.run.metrics_file import Row
from graphmoe.web_page.page import Chart, Frames

MAX_FRAMES, MAX_CELLS = 40, 200_000
"""Pictures of the heat map, and numbers in all of them."""


def expert_charts(run: RunData) -> list[Chart]:
    """Charts that the run has data for."""
    charts = [loads_chart(run.expert_loads), fullest_chart(run), entropy_chart(run)]
    return [chart for chart in charts if chart is not None]


def loads_chart(rows: list[Row]) -> Chart | None:
    """The load of each expert of each layer, a picture for each of some times; None without any."""
    if not rows:
        return None
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
    layout = {
        "xaxis": {"title": {"text": "expert"}, "showgrid": False, "dtick": _tick(experts)},
        "yaxis": {"title": {"text": "MoE layer"}, "showgrid": False, "autorange": "reversed",
                  "dtick": _tick(layers)},
    }  # fmt: skip
    fullest = max((load, layer, e) for layer, of in enumerate(last["load"]) for e, load in enumerate(of))
    alt = (
        f"Heat map of the load of {experts} experts in {layers} MoE layers over the mean of the layer, at "
        f"{len(shown)} times; at step {last['step']} the fullest is expert {fullest[2]} of MoE layer "
        f"{fullest[1]} with {fullest[0]:.3g}"
    )
    means = statistics.median(row["steps"] for row in shown)
    note = f"1 is the mean of the layer. Each picture is the mean of {means:g} steps; {len(shown)} of "
    return Chart(
        "Load of experts",
        alt,
        [trace],
        layout,
        height_px=min(700, max(260, 130 + 22 * layers)),
        is_wide=True,
        frames=Frames("up to step", [str(row["step"]) for row in shown], [row["load"] for row in shown]),
        note=f"{note}{len(rows)} recorded ones are here.",
    )


def fullest_chart(run: RunData) -> Chart | None:
    """The fullest expert over the mean, and the fullest rank where ranks share the experts."""

    routed = [row for row in run.steps if row.get("load_max_over_mean")]
    curves = [curve("mean of layers", routed, lambda row: statistics.fmean(row["load_max_over_mean"]))]
    if any(len(row["load_max_over_mean"]) > 1 for row in routed):
        curves.append(curve("worst layer", routed, lambda row: max(row["load_max_over_mean"])))
    of_ranks = curve("fullest rank", run.steps, "rank_load")
    if any(load != 1 for load in of_ranks.values):
        curves.append(of_ranks)
    return curves_chart("Fullest expert", "load / mean", curves)


def entropy_chart(run: RunData) -> Chart | None:
    """Entropy of the routers' scores, with what an even choice would have."""
    if not any(row.get("load_max_over_mean") for row in run.steps):
        return None
    entropy = curve("mean of layers", run.steps, "router_entropy")
    experts = run.of("model.num_experts")
    chart = curves_chart("Router entropy", "nats", [entropy])
    if chart is None or not experts:
        return chart
    most = math.log(experts)
    even = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": most, "y1": most}
    label = {"text": f"even: ln {experts}", "xref": "paper", "x": 1, "y": most, "showarrow": False}
    chart.layout["shapes"] = [{**even, "line": {"dash": "dot", "width": 1, "color": "#888888"}}]
    chart.layout["annotations"] = [{**label, "xanchor": "right", "yanchor": "top"}]
    return chart


def _tick(count: int) -> int:
    return max(1, 2 ** math.ceil(math.log2(max(count, 1) / 16)))
