"""Several runs on one page: a table of differing keys and results, and their curves in common charts."""

import itertools
import os
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from graphmoe.report.charts import MAX_POINTS, Curve, curve, curves_chart, escaped, over, reached
from graphmoe.report.run_data import RunData
from graphmoe.run.files import REPORT_FILE
from graphmoe.run.metrics_file import Row
from graphmoe.web_page import COLOURS, Link, chips, controls, grid, paragraph, table, write_page

COMPARISON_FILE = "comparison.html"
MAX_KEYS = 8
"""Most configuration keys that get a column in the table of runs; another table has all."""
NO_SETTING = ("run.name", "log.", "profile.")
Number = Callable[[RunData], float | None]

NUMBERS: dict[str, tuple[Number, str]] = {
    "val loss": (lambda run: run.summary.get("final_val_loss"), ".4f"),
    "loss": (lambda run: run.summary.get("final_loss"), ".4f"),
    "tokens/s each": (RunData.tokens_per_s_per_rank, ",.0f"),
    "MFU": (lambda run: run.median("mfu"), ".1%"),
    "s per step": (lambda run: run.median("step_s"), ".4g"),
    "rank load": (lambda run: _rank_load(run.steps), ".2f"),
    "peak GiB": (lambda run: run.summary.get("peak_memory_gib"), ",.2f"),
    "first step s": (lambda run: run.summary.get("time_to_first_step_s"), ",.1f"),
    "steps": (lambda run: run.summary.get("steps"), "d"),
}


def _rank_load(steps: Sequence[Row]) -> float | None:
    loads = [row.get("planned_rank_load") or row.get("rank_load") or 1 for row in steps]
    return statistics.median(loads) if loads and max(loads) > 1 else None


def write_comparison(runs: Sequence[RunData], path: Path) -> None:
    names = names_of(runs)
    differences = config_differences(runs)
    same = paragraph("The runs have the same configuration.")
    configuration = table(["key", *names], differences) if differences else same
    known, columns = dict(zip(names, runs, strict=True)), column_keys(differences, typed_keys(runs))
    chosen = [row for row in differences if row[0] in columns]
    lines = [
        RunLine(name, run, {row[0]: row[place] for row in chosen}, run.state)
        for place, (name, run) in enumerate(known.items(), start=1)
    ]
    more = len(differences) - len(chosen)
    left_out = paragraph(f"{more} more keys differ: see Configuration.") if more else ""
    header = paragraph("A click on a heading sorts, one on a run's name opens its report.")
    curves = curves_of_runs([RunCurves(name, run, [name]) for name, run in known.items()])
    sections = [
        ("Runs", header + runs_table("run", lines, path.parent) + left_out),
        ("Curves", curves or paragraph("None of the runs has recorded a step.")),
        ("Configuration", configuration),
    ]
    write_page(path, f"graphmoe: {len(runs)} runs", "", sections, run_controls(known))


def run_controls(runs: Mapping[str, RunData]) -> str:
    known = {name: reached(run) for name, run in runs.items() if run.steps}
    return controls(known) if known else ""


def names_of(runs: Sequence[RunData]) -> list[str]:
    """Return names of the runs' folders, with enough parents to tell them apart."""
    parts = [run.folder.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number} {name}" for number, name in enumerate(names, start=1)]  # a folder named twice


class RunLine(NamedTuple):
    name: str
    run: RunData | None
    settings: Mapping[str, str]
    state: str
    error: str = ""


def runs_table(first: str, lines: Sequence[RunLine], folder: Path) -> str:
    """Return a table with a line for each run; its name links to its report, relative to ``folder``."""
    keys = dict.fromkeys(key for line in lines for key in line.settings)
    numbers = {
        name: [_shown(line.run, number, form) for line in lines] for name, (number, form) in NUMBERS.items()
    }
    numbers = {name: cells for name, cells in numbers.items() if any(cells)}
    errors = any(line.error for line in lines)
    rows = [
        [
            _link(line, folder),
            *(cells[place] for cells in numbers.values()),
            line.state,
            *(line.settings.get(key, "") for key in keys),
            *([line.error] if errors else []),
        ]
        for place, line in enumerate(lines)
    ]
    head = [first, *numbers, "state", *keys, *(["error"] if errors else [])]
    return table(head, rows, numbers_from=1, numbers_to=1 + len(numbers), is_sorted=True)


def _shown(run: RunData | None, number: Number, form: str) -> str:
    value = number(run) if run is not None else None
    return "" if value is None else format(value, form)


def _link(line: RunLine, folder: Path) -> str | Link:
    report = line.run.folder / REPORT_FILE if line.run is not None else None
    if report is None or not report.is_file():
        return line.name
    return Link(line.name, os.path.relpath(report.resolve(), folder.resolve()))


def config_differences(runs: Sequence[RunData]) -> list[list[str]]:
    """Return a row for each key whose values differ, with "" for a run that lacks it; without `run.auto`."""
    flat = [run.flat_config() for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each if key != "run.auto")  # keys have its values
    rows = [[key, *(each.get(key, "") for each in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def typed_keys(runs: Sequence[RunData]) -> set[str]:
    """Return keys and groups that were set on the runs' command lines."""
    commands = [run.environment.get("command") or [] for run in runs]
    words = [word.lstrip("+~") for command in commands for word in command if "=" in word]
    return {word.partition("=")[0].partition("@")[0] for word in words}


def column_keys(differences: Sequence[Sequence[str]], typed: Collection[str] = ()) -> list[str]:
    """Return the keys that get a column: those set on a command line, if any; of a group, only its name."""
    keys = [row[0] for row in differences if not row[0].startswith(NO_SETTING)]
    keys = [key for key in keys if key in typed or key.partition(".")[0] in typed] or keys
    named = {key.removesuffix("name") for key in keys if key.endswith(".name")}
    groups = [key for key in keys if key.endswith(".name") or key[: key.rfind(".") + 1] not in named]
    return groups[:MAX_KEYS]


_PANELS: dict[str, tuple[str, Callable[[RunData], Curve], dict[str, Any]]] = {
    "Loss": ("nats per token", lambda run: curve("", run.steps, "loss"), {}),
    "Validation loss": ("nats per token", lambda run: curve("", run.validations, "val_loss"), {}),
    # without the first step, which compiles
    "Tokens/s each": (
        "tokens/s",
        lambda run: curve("", run.steps[1:] or run.steps, over("tokens_per_s", run.num_ranks)),
        {},
    ),
    "MFU": ("MFU, %", lambda run: curve("", run.steps, over("mfu", 0.01)), {}),
    "Peak memory so far": ("GiB", lambda run: curve("", run.steps, "memory_gib"), {"smooths": False}),
    "Learning rate": ("learning rate", lambda run: curve("", run.steps, "lr"), {"smooths": False}),
    "Router entropy": ("nats", lambda run: curve("", run.steps, "router_entropy"), {}),
}


class RunCurves(NamedTuple):
    name: str
    run: RunData
    words: Sequence[str]


def curves_of_runs(runs: Sequence[RunCurves]) -> str:
    """Return charts of all runs, in their colours, and buttons that hide a run; empty without a point."""
    colours = {each.name: colour for each, colour in zip(runs, itertools.cycle(COLOURS), strict=False)}
    charts = []
    for title, (unit, make, options) in _PANELS.items():
        curves = [make(each.run)._replace(run=each.name, words=escaped(each.words)) for each in runs]
        charts += curves_chart(title, unit, curves, colours=colours, **options)
    if not charts:
        return ""
    note = (
        f"Of more than {MAX_POINTS:,} points of a curve the smallest and largest of each stretch are drawn."
    )
    is_thinned = any(len(each.run.steps) > MAX_POINTS for each in runs)
    return chips(colours) + grid(charts) + paragraph(note) * is_thinned
