"""The end of a run: numbers of its summary.json, their text for people, and the value that sweeps compare."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphmoe.run.files import display_path
from graphmoe.run.metrics_file import Row, steps_of, validations_of


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return final losses and medians of a run; the first step is left out of the medians.

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


def value_of(summary: dict[str, Any]) -> float | None:
    """Return the final validation loss, or without validation the final loss."""
    final = summary.get("final_val_loss")
    return summary.get("final_loss") if final is None else final


def render(summary: dict[str, Any]) -> str:
    """Return the summary as text."""
    lines = []
    if summary["sample"]:
        lines += ["", "A sample of what the model writes now:", "", summary["sample"], ""]
    first, last = summary["first_val_loss"], summary["final_val_loss"]
    if not summary["finished"]:
        loss = summary["final_loss"]
        reached = "" if loss is None else f", training loss {loss:.4f}"
        lines.append(f"stopped after step {summary['steps']}{reached}")
    elif first is not None and last is not None:
        lines.append(f"validation loss {first:.3f} -> {last:.3f} in {summary['steps']} steps")
    elif summary["final_loss"] is not None:
        lines.append(f"loss {summary['final_loss']:.3f} after {summary['steps']} steps")
    lines.append(f"results: {display_path(Path(summary['folder']))}")
    return "\n".join(lines)
