"""What a run would need by the projection, beside which its report shows what it needed: projection.json."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.plan.plan import Plan
from graphmoe.project.memory import PlaceMemory, exact_memory
from graphmoe.run.files import PROJECTION_FILE, write_json

log = logging.getLogger(__name__)

OUTSIDE_ALLOCATOR = ("communication", "dispatch")
"""Buffers that torch's allocator does not hold: those of communicators, and memory that ranks share."""


def write_projected_memory(folder: Path, plan: Plan) -> None:
    """Write the file; no error of a projection ends a run."""
    try:
        write_json(folder / PROJECTION_FILE, projected_memory(plan))
    except Exception as error:
        log.warning("no projected memory in the report: %s: %s", type(error).__name__, error)


def projected_memory(plan: Plan) -> dict[str, Any]:
    """GiB by kind for each place along pp, ``places``, or ``why_not``.

    ``buffers`` are those of torch's allocator, the others kinds of their own; ``total`` is of all kinds.
    """
    try:
        run, on_nvidia = with_its_transport(plan), torch.version.hip is None
        places = exact_memory(run, plan.layout, on_nvidia=on_nvidia, plan=plan.pipeline)
    except ConfigError as error:
        return {"why_not": str(error)}
    return {"places": [_gib_by_kind(place) for place in places]}


def with_its_transport(plan: Plan) -> RunConfig:
    """The configuration with the transport that the run chooses on its own devices, in the place of auto."""
    config, transport = plan.config, plan.transport
    return config if transport is None else replace(config, moe=replace(config.moe, transport=transport))


def allocated_bytes(place: PlaceMemory) -> float:
    """What torch's allocator holds of a place's memory, as torch.cuda.max_memory_allocated counts it."""
    return place.total - sum(_outside(place).values())


def _gib_by_kind(place: PlaceMemory) -> dict[str, float]:
    outside = _outside(place)
    sizes = {
        **place.state,
        "activations": place.activations,
        "buffers": sum(place.buffers.values()) - sum(outside.values()),
        **outside,
        "total": place.total,
    }
    return {kind: size / 2**30 for kind, size in sizes.items()}


def _outside(place: PlaceMemory) -> dict[str, float]:
    return {kind: place.buffers[kind] for kind in OUTSIDE_ALLOCATOR}
