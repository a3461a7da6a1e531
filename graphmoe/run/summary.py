"""The end of a run: summary.json, what it says for people, and the value that sweeps compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graphmoe.runtime.host.writing import replace_text


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replace a file by the document, whole at any moment."""
    replace_text(path, to_json(document))


def to_json(document: dict[str, Any]) -> str:
    """Return the document as a file has it."""
    return json.dumps(document, indent=2) + "\n"


def value_of(summary: dict[str, Any]) -> float | None:
    """The final validation loss, or without validation the final loss."""
    final = summary.get("final_val_loss")
    return summary.get("final_loss") if final is None else final


def render(summary: dict[str, Any]) -> str:
    """The summary for people."""
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
    lines.append(f"results: {shown(Path(summary['folder']))}")
    return "\n".join(lines)


def shown(path: Path) -> str:
    """The path relative to where the user stands, if it lies there."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
