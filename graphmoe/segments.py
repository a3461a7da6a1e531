"""The vocabulary of segments: the named pieces that a layer is made of.

A segment is a function of tensors. What it reads and writes is named, so that whoever runs it (the
plain forward here, compile units and graph capture in ``runtime/``) sees each boundary as an
explicit tensor. This module knows no model class and imports none of the project.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

SEGMENT_NAMES = (
    "embed",
    "attn",
    "mlp",
    "moe_router",
    "moe_preprocess",
    "moe_dispatch",
    "shared_experts",
    "moe_experts",
    "moe_combine",
    "loss",
    "optimizer",
)


CAPTURABLE = tuple(name for name in SEGMENT_NAMES if name != "optimizer")
"""Segments that replay from graphs of their own where ``graph.scope`` names them."""
SCOPES = {
    "none": (),
    "partial": ("attn", "moe_router", "moe_preprocess"),
    "moe": tuple(name for name in SEGMENT_NAMES if name.startswith("moe_")),
    "layer": tuple(name for name in CAPTURABLE if name not in ("embed", "loss")),
}
"""Words for lists of segments."""
FULL_ITERATION = "full_iteration"
"""The scope that is the whole step."""


def segments_of(scope: str | Sequence[str]) -> tuple[str, ...]:
    """The segments that a scope names, in their order; none for ``full_iteration``, which names the step."""
    named = SCOPES.get(scope, ()) if isinstance(scope, str) else scope
    return tuple(name for name in SEGMENT_NAMES if name in named)


@dataclass(frozen=True)
class Segment:
    """One named piece of a layer: ``run`` maps the tensors in ``reads`` to those in ``writes``."""

    name: str
    run: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    stream: Literal["compute", "comm"] = "compute"

    def __post_init__(self) -> None:
        assert self.name in SEGMENT_NAMES, self.name


class Executor(Protocol):
    """What runs segments on named tensors: ``run_segments``, or its compiled counterpart."""

    def __call__(
        self, segments: Sequence[Segment], tensors: dict[str, torch.Tensor], keep: tuple[str, ...]
    ) -> tuple[torch.Tensor, ...]: ...


def run_segments(
    segments: Sequence[Segment], tensors: dict[str, torch.Tensor], keep: tuple[str, ...]
) -> tuple[torch.Tensor, ...]:
    """Run the segments in order on named tensors; returns those named in ``keep``."""
    values = dict(tensors)
    for segment in segments:
        results = segment.run(*(values[name] for name in segment.reads))
        if isinstance(results, torch.Tensor):
            results = (results,)
        values.update(zip(segment.writes, results, strict=True))
    return tuple(values[name] for name in keep)
