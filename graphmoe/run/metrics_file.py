"""Functions that read metrics.jsonl without torch, cut it on resume, and summarise it."""

import json
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphmoe.config.ranges import number_of
from graphmoe.config.untrusted import FileError, from_json, read_bytes
from graphmoe.run.files import REPORT_FILE, MetricsRow, display_path
from graphmoe.runtime.host.files import replace_text

Row = dict[str, Any]

# host seconds of rank 0 waiting for data, or outside of steps
BESIDE_STEPS = ("data_s", "validation_s", "checkpoint_s")

log = logging.getLogger(__name__)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a metrics.jsonl; none if it does not exist. *Raises* FileError."""
    return read_lines(path, MetricsRow)


def read_lines(path: Path, kind: type[Any]) -> list[Row]:
    """Return the valid JSON lines of a file; none if it does not exist. *Raises* FileError."""
    if not path.exists():
        return []
    rows: list[Row] = []
    wrong: list[FileError] = []
    lines = read_bytes(path).decode("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(from_json(line, kind, f"{path} line {number}"))
        except FileError as error:
            if number < len(lines) or line.endswith("}"):
                wrong.append(error)
    if wrong:
        log.warning("%d of %d lines are invalid and ignored; the first: %s", len(wrong), len(lines), wrong[0])
    return rows


def steps_of(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "loss" in row]


def timed(steps: Sequence[Row]) -> list[Row]:
    """Return the steps except the first after each start or resume, which compiles; all if none remain."""
    later = [row for place, row in enumerate(steps) if place and row.get("start_s") is None]
    return later or [*steps]


def validations_of(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "val_loss" in row]


def cut_metrics(path: Path, step: int) -> int:
    """Atomically drop unreadable rows and those after ``step``; return their number."""
    if not path.exists():
        return 0
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = text.removesuffix("\n").split("\n") if text else []
    kept, unreadable = [], []
    for number, line in enumerate(lines, start=1):
        row = json_object(line)
        if row is None or not isinstance(row.get("step", step), int):
            unreadable.append(number)
        elif row.get("step", step) <= step:
            kept.append(line)
    if unreadable and unreadable != [len(lines)]:
        log.warning("%s: dropped lines that are no JSON object: %s", path, unreadable)
    if len(kept) < len(lines) or not text.endswith("\n"):
        replace_text(path, "".join(f"{line}\n" for line in kept), durably=True)
    return len(lines) - len(kept)


def json_object(text: str) -> Row | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return final losses, medians and sums; medians leave out the first step of each start."""
    steps, validations = steps_of(rows), validations_of(rows)
    last = validations[-1] if validations and steps and validations[-1]["step"] >= steps[-1]["step"] else None
    summary: dict[str, Any] = {
        "final_loss": steps[-1]["loss"] if steps else None,
        "first_val_loss": validations[0]["val_loss"] if validations else None,
        "first_val_step": validations[0]["step"] if validations else None,
        "final_val_loss": last["val_loss"] if last else None,
        "best_val_loss": min((v["val_loss"] for v in validations if v["val_loss"] is not None), default=None),
        "skipped_steps": steps[-1].get("skipped_total", 0) if steps else 0,
    }
    for name in ("step_s", "tokens_per_s", "tflops", "mfu"):
        values = [row[name] for row in timed(steps) if row.get(name) is not None]
        summary[f"median_{name}"] = statistics.median(values) if values else None
    for name in BESIDE_STEPS:
        values = [row[name] for row in steps if row.get(name) is not None]
        summary[name] = sum(values) if values else None
    return summary


def value_of(summary: dict[str, Any]) -> float | None:
    """Return the final validation loss, else the final training loss."""
    final = summary.get("final_val_loss")
    return summary.get("final_loss") if final is None else final


def render(summary: dict[str, Any]) -> str:
    lines = []
    if summary["sample"]:
        prompt = json.dumps(summary.get("sample_prompt"), ensure_ascii=False)
        lines += ["", f"A sample of what the model writes now, from {prompt} on:", "", summary["sample"], ""]
    first, last = summary["first_val_loss"], summary["final_val_loss"]
    if not summary["finished"]:
        loss = summary["final_loss"]
        reached = "" if loss is None else f", training loss {loss:.4f}"
        lines.append(f"stopped after step {summary['steps']}{reached}")
    elif first is not None and last is not None:
        lines.append(_validated(first, summary["first_val_step"], last, summary["steps"]))
    elif summary["final_loss"] is not None:
        lines.append(f"loss {summary['final_loss']:.3f} after {number_of(summary['steps'], 'step')}")
    folder = Path(summary["folder"])
    lines.append(f"results: {display_path(folder)}")
    if (folder / REPORT_FILE).exists():
        lines.append(f"report: {display_path(folder / REPORT_FILE)}")
    return "\n".join(lines)


def _validated(first: float, first_step: int, last: float, steps: int) -> str:
    if first_step == steps:
        return f"validation loss {last:.3f} after step {steps}"
    if first_step > 1:
        return f"validation loss {first:.3f} at step {first_step} -> {last:.3f} at step {steps}"
    return f"validation loss {first:.3f} -> {last:.3f} in {number_of(steps, 'step')}"
