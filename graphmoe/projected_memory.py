"""What a run would need by the projection, beside which its report shows what it needed: projection.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from graphmoe.config import ConfigError, RunConfig
from graphmoe.layout import Layout
from graphmoe.pipeline_plan import PipelinePlan
from graphmoe.projection.memory import exact_memory
from graphmoe.summary import write_json

log = logging.getLogger(__name__)

PROJECTION_FILE = "projection.json"


def write_projected_memory(
    folder: Path, config: RunConfig, layout: Layout, plan: PipelinePlan | None
) -> None:
    """Write the file; no error of a projection ends a run."""
    try:
        document = projected_memory(config, layout, plan)
    except Exception as error:
        log.warning("no projected memory in the report: %s: %s", type(error).__name__, error)
        return
    write_json(folder / PROJECTION_FILE, document)


def projected_memory(config: RunConfig, layout: Layout, plan: PipelinePlan | None) -> dict[str, Any]:
    """GiB by kind for each place along pp, ``places``, or ``why_not``."""
    try:
        places = exact_memory(config, layout, pads=torch.version.hip is not None, plan=plan)
    except ConfigError as error:
        return {"why_not": str(error)}
    gib = 1e9 / 2**30
    return {"places": [{kind: size * gib for kind, size in place.kinds_gb().items()} for place in places]}
