"""Several runs on one page: their curves over each other, and what sets them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from graphmoe.report.curves import Curve, curve, curves_chart
from graphmoe.report.run_data import RunData
from graphmoe.run.metrics_file import Row
from graphmoe.web_page.page import Chart, grid, paragraph, table, write_page

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
    charts = comparison_charts(runs, names)
    differences = config_differences(runs)
    sections = [
        ("Numbers", table(["", *names], numbers(runs), numbers_from=1)),
        ("Curves", grid(charts) if charts else paragraph("None of the runs has recorded a step.")),
        (
            "Configuration",
            table(["key", *names], differences)
            if differences
            else paragraph("The runs have the same configuration."),
        ),
    ]
    states = table(
        ["run", "state", "folder"], [(n, r.state, r.folder) for n, r in zip(names, runs, strict=True)]
    )
    write_page(path, f"graphmoe: {len(runs)} runs", states, sections)


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


def comparison_charts(runs: Sequence[RunData], names: Sequence[str]) -> list[Chart]:
    """A chart for each number over steps that any run has."""

    def over(of: Callable[[RunData], Curve]) -> list[Curve]:
        return [of(run)._replace(name=name) for run, name in zip(runs, names, strict=True)]

    def key(name: str) -> list[Curve]:
        return over(lambda run: curve("", run.steps, name))

    def rate(run: RunData) -> Curve:
        def of_each(row: Row) -> float | None:
            whole = row.get("tokens_per_s")
            return None if whole is None else whole / run.num_ranks

        return curve("", run.steps[1:] or run.steps, of_each)

    charts = [
        curves_chart("Training loss", "nats per token", key("loss")),
        curves_chart(
            "Validation loss", "nats per token", over(lambda run: curve("", run.validations, "val_loss"))
        ),
        curves_chart("Throughput of each device", "tokens/s", over(rate)),
        curves_chart("Model FLOPs utilisation", "MFU", key("mfu")),
        curves_chart("Peak memory so far", "GiB", key("memory_gib")),
        curves_chart("Learning rate", "learning rate", key("lr")),
        curves_chart("Router entropy", "nats", key("router_entropy")),
    ]
    return [chart for chart in charts if chart is not None]
