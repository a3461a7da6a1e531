"""Files of a run's folder: their names, JSON, and paths as a user reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graphmoe.runtime.host.files import replace_text

CONFIG_FILE = "resolved.yaml"
ENVIRONMENT_FILE = "env.json"
"""Written when training begins."""
METRICS_FILE = "metrics.jsonl"
EXPERT_LOADS_FILE = "expert_load.jsonl"
SUMMARY_FILE = "summary.json"
PROJECTION_FILE = "projection.json"
COMPILE_FILE, CAPTURE_FILE, PIPELINE_FILE = "compile_report.json", "capture_report.json", "pipeline.json"
"""Reports that `graphmoe.runtime` names by itself, since it imports nothing of a run; a test compares."""


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replace a file by the document, whole at any moment."""
    replace_text(path, to_json(document))


def to_json(document: dict[str, Any]) -> str:
    """Return the document as a file has it."""
    return json.dumps(document, indent=2) + "\n"


def display_path(path: Path) -> str:
    """Return the path relative to where the user stands, if it lies there."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
