"""The report of one run as a page."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from graphmoe.report.charts import (
    expert_charts,
    memory_charts,
    memory_remarks,
    speed_charts,
    training_charts,
)
from graphmoe.report.run_data import RunData, read_run
from graphmoe.report.work import capture_section, compile_section, pipeline_section, segments_section
from graphmoe.web_page import Chart, folds, grid, paragraph, table, tiles, write_page

REPORT_FILE = "report.html"
NO_STEPS = "No step of training is recorded yet: the run writes them every `train.log_interval` steps."
NO_EXPERTS = "No experts: the model has no MoE layer, or no step is recorded yet."


def write_report(folder: Path, to: Path | None = None, *, max_trace_bytes: float = math.inf) -> Path:
    """Make the page of what a run's folder has by now; returns its file, by default report.html there.

    Traces of more than ``max_trace_bytes`` are not read. *Raises* ConfigError for a folder that is no run's,
    ImportError without Plotly.
    """
    run = read_run(folder)
    sections = [
        ("Training", _charts(training_charts(run), NO_STEPS)),
        ("Speed", _charts(speed_charts(run), NO_STEPS) + _rates(run)),
        ("Memory", _charts(memory_charts(run), NO_STEPS) + memory_remarks(run)),
        ("Experts", _charts(expert_charts(run), NO_EXPERTS) + _loads_hint(run)),
        ("Segments", segments_section(run, max_trace_bytes)),
        ("Pipeline", pipeline_section(run)),
        ("Compilation", compile_section(run)),
        ("Capture", capture_section(run)),
        ("Configuration", _configuration(run)),
        ("Environment", _environment(run)),
    ]
    path = to or folder / REPORT_FILE
    write_page(path, f"graphmoe: {run.name}", _header(run), [each for each in sections if each[1]])
    return path


def _header(run: RunData) -> str:
    """The tiles, the command, and what could not be read."""
    environment, summary = run.environment, run.summary
    validation, peak = summary.get("final_val_loss"), summary.get("peak_memory_gib")
    rate, mfu, tflops = run.tokens_per_s_per_rank(), run.median("mfu"), run.median("tflops")
    ranks, speed = f"{run.num_ranks} x " * (run.num_ranks > 1), f"{_number(tflops, '.4g')} TFLOP/s, median"
    entries = [
        (
            "model",
            run.of("model.name") or "?",
            ", ".join(filter(None, [run.of("precision.compute"), run.state])),
        ),
        ("device", f"{ranks}{environment.get('device', '?')}", str(environment.get("host", ""))),
        ("parallel layout", run.layout(), f"global batch {run.of('train.global_batch_size')}"),
        (f"tokens/s/{run.device_word}", _number(rate, ",.0f"), "median without the first step"),
        ("MFU", _number(mfu, ".1%"), "peak of the device is not known" if mfu is None else speed),
        ("final loss", _number(summary.get("final_loss"), ".4f"), f"validation {_number(validation, '.4f')}"),
        ("peak memory", f"{_number(peak, ',.2f')} GiB", "largest of all ranks"),
        ("first step", f"{_number(summary.get('time_to_first_step_s'), ',.1f')} s", "after the command"),
    ]
    command = environment.get("command")
    said = paragraph(f"`{shlex.join(command)}`") if isinstance(command, list) else ""
    damaged = f"Not readable: {', '.join(run.unreadable)}." if run.unreadable else ""
    return tiles(entries) + said + (paragraph(damaged) if damaged else "")


def _charts(charts: list[Chart], otherwise: str) -> str:
    return grid(charts) if charts else paragraph(otherwise)


def _rates(run: RunData) -> str:
    keys = ("step_s", "tokens_per_s", "tflops", "mfu")
    names = zip(keys, ("s per step", "tokens/s of all", "TFLOP/s of each", "MFU"), strict=True)
    known = [(name, f"{run.median(key):,.5g}") for key, name in names if run.median(key) is not None]
    return table(["median without the first step", ""], known, numbers_from=1) if known else ""


def _loads_hint(run: RunData) -> str:
    missing = bool(run.steps) and not run.expert_loads and run.steps[0].get("load_max_over_mean")
    return paragraph("No heat map: the run recorded no expert_load.jsonl.") if missing else ""


def _configuration(run: RunData) -> str:
    """A folded table for each section."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, value in run.flat_config().items():
        groups.setdefault(key.partition(".")[0] if "." in key else "others", []).append((key, value))
    if not groups:
        return paragraph("The run's folder has no resolved.yaml.")
    return folds((f"{name} ({len(rows)})", table([], rows)) for name, rows in groups.items())


def _environment(run: RunData) -> str:
    environment = dict(run.environment)
    packages = environment.pop("packages", None) or {}
    rows = [(key, value) for key, value in environment.items() if key != "command" and value is not None]
    rows += [(name, version) for name, version in packages.items() if version is not None]
    return table([], rows) if rows else paragraph("The run's folder has no env.json.")


def _number(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)
