"""What is in a run's metrics.jsonl, read without torch."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphmoe.config.untrusted import FileError, from_json, read_bytes
from graphmoe.run.records import MetricsRow

METRICS_FILE = "metrics.jsonl"
Row = dict[str, Any]

log = logging.getLogger(__name__)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a metrics.jsonl, none where there is no file.

    Lines that are none are left out, with a warning: but for the last, which a kill may have torn.
    *Raises* FileError for what is no file of lines.
    """
    return read_lines(path, MetricsRow)


def read_lines(path: Path, kind: type[Any]) -> list[Row]:
    """Return the lines of a file that are of a ``TypedDict``, as `read_rows` does."""
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
        log.warning("%d of %d lines are left out: %s", len(wrong), len(lines), wrong[0])
    return rows


def steps_of(rows: Sequence[Row]) -> list[Row]:
    """Those of training steps."""
    return [row for row in rows if "loss" in row]


def validations_of(rows: Sequence[Row]) -> list[Row]:
    """Those of validations."""
    return [row for row in rows if "val_loss" in row]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Final losses and medians of a run; the first step is left out of the medians.

    The final validation loss is that of the last step, and None where an earlier one was validated last.
    """
    steps, validations = steps_of(rows), validations_of(rows)
    timed = steps[1:] or steps
    last = validations[-1] if validations and steps and validations[-1]["step"] >= steps[-1]["step"] else None
    summary: dict[str, Any] = {
        "final_loss": steps[-1]["loss"] if steps else None,
        "first_val_loss": validations[0]["val_loss"] if validations else None,
        "final_val_loss": last["val_loss"] if last else None,
        "best_val_loss": min((v["val_loss"] for v in validations if v["val_loss"] is not None), default=None),
        "skipped_steps": steps[-1].get("skipped_total", 0) if steps else 0,
    }
    for name in ("step_s", "tokens_per_s", "tflops", "mfu"):
        values = [row[name] for row in timed if row.get(name) is not None]
        summary[f"median_{name}"] = statistics.median(values) if values else None
    return summary
