"""What is in a run's metrics.jsonl, read without torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The objects of a file of JSON lines, none where there is no file.

    Others are left out: a run that was killed may have torn the last one.
    """
    rows: list[Row] = []
    if not path.is_file():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
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
        "skipped_steps": steps[-1]["skipped_total"] if steps else 0,
    }
    for name in ("step_s", "tokens_per_s", "tflops", "mfu"):
        values = [row[name] for row in timed if row[name] is not None]
        summary[f"median_{name}"] = statistics.median(values) if values else None
    return summary
