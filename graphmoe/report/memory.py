"""Memory of a run: what was projected, what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphmoe.report.curves import curve, curves_chart
from graphmoe.report.run_data import RunData
from graphmoe.web_page.page import COLOURS, Chart, paragraph

KINDS = {
    "params": "weights",
    "grads": "gradients",
    "main_params": "main weights",
    "moments": "moments",
    "activations": "activations",
    "buffers": "buffers",
}
OUTSIDE_ALLOCATOR = {"communication": "communication", "dispatch": "memory shared for dispatch"}
"""Kinds that the measured peak of a GPU leaves out, as their writer names them, which imports torch."""


def memory_charts(run: RunData) -> list[Chart]:
    """Projected beside measured, and the peak over steps."""
    peak = curve("peak of rank 0", run.steps, "memory_gib")
    charts = [projected_chart(run), curves_chart("Peak memory so far", "GiB", [peak])]
    return [chart for chart in charts if chart is not None]


def projected_chart(run: RunData) -> Chart | None:
    """A bar by kind for each place of the pipeline, and one of the peak that was measured.

    What torch's allocator does not hold has bars of its own.
    """
    places, peak = run.projection.get("places"), run.summary.get("peak_memory_gib")
    if not places:
        return None
    held, outside = _kinds_in(places, KINDS), _kinds_in(places, OUTSIDE_ALLOCATOR)
    colours = dict(zip([*KINDS, *OUTSIDE_ALLOCATOR], COLOURS, strict=False))
    traces = [
        _bars(name, _rows(row, places), [place.get(kind, 0.0) for place in places], colours[kind])
        for row, kinds in (("projected", held), ("outside the allocator", outside))
        for kind, name in kinds.items()
    ]
    if peak is not None:
        traces.append(_bars("measured peak", ["measured"], [peak], "#8a94a3"))
    layout = {"barmode": "stack", "xaxis": {"title": {"text": "GiB"}}, "yaxis": {"autorange": "reversed"}}
    most = max(place["total"] - sum(place.get(kind, 0.0) for kind in outside) for place in places)
    said = f"projected {most:.4g} GiB" + ("" if peak is None else f", measured {peak:.4g} GiB")
    notes = ["Not projected: the device's context, code of kernels, workspaces, rounding of the allocator."]
    if outside:
        more = max(sum(place.get(kind, 0.0) for kind in outside) for place in places)
        said += f", outside the allocator {more:.4g} GiB"
        notes.append(f"Apart, as torch's allocator does not hold them: {' and '.join(outside.values())}.")
    if run.of("run.device") == "cpu":
        notes.append("On a CPU the measured is all memory of the process, Python and torch too.")
    height = 190 + 34 * (len(places) * (2 if outside else 1) + 1)
    return Chart("Memory by kind", f"Memory by kind: {said}", traces, layout, height, note=" ".join(notes))


def memory_remarks(run: RunData) -> str:
    """Why there is no projection, if there is none."""
    if run.projection.get("places"):
        return ""
    why = run.projection.get("why_not", "the run recorded none")
    return paragraph(f"No projected memory: {why.removeprefix('not projected: ')}.")


def _kinds_in(places: Sequence[Mapping[str, float]], kinds: Mapping[str, str]) -> dict[str, str]:
    """Kinds of which a place has any, with their names."""
    return {kind: name for kind, name in kinds.items() if any(place.get(kind) for place in places)}


def _rows(name: str, places: Sequence[Any]) -> list[str]:
    return [name] if len(places) == 1 else [f"{name}, pp {place}" for place in range(len(places))]


def _bars(name: str, rows: Sequence[str], sizes_gib: Sequence[float], colour: str) -> dict[str, Any]:
    trace = {"type": "bar", "orientation": "h", "name": name, "y": rows, "x": sizes_gib}
    return {**trace, "marker": {"color": colour}, "hovertemplate": "%{y}: <b>%{x:.4g} GiB</b>"}
