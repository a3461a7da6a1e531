"""Segments: the named parts of a layer.

A segment is a function of tensors. The tensors it reads and writes are named, so that each executor (the
plain forward here, compile units and graph capture in ``runtime/``) sees each boundary as an
explicit tensor. This module imports no model class, and configuration rules use its names without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from graphmoe.config.choices import SEGMENT_NAMES

if TYPE_CHECKING:
    import torch

CAPTURABLE = tuple(name for name in SEGMENT_NAMES if name != "optimizer")
"""Segments that replay from graphs of their own if ``graph.scope`` names them."""
SCOPES = {
    "none": (),
    "partial": ("attn", "moe_router", "moe_preprocess"),
    "moe": tuple(name for name in SEGMENT_NAMES if name.startswith("moe_")),
    "layer": tuple(name for name in CAPTURABLE if name not in ("embed", "loss")),
}
FULL_ITERATION = "full_iteration"
LAYER_SEGMENTS = SCOPES["layer"]
PARTS = ("layernorm", "core_attn", "mla_up_proj", "moe_act", "mlp", "shared_experts")
"""Pieces of segments that ``recompute.ops`` names."""
SYNC_FREE_STAGES = (0, 1, 2, 3)
"""Values of ``moe.sync_free_stage`` except auto: how much of a MoE layer never waits for the host."""
EXPERTS_STAGE = 2  # the stage from which the experts' products do not wait
CAPTURED_FROM = {"moe_router": 1, "moe_preprocess": 1, "moe_dispatch": 3, "moe_experts": 3, "moe_combine": 3}
"""The sync-free stage from which a segment may be captured; other segments never wait for the host."""


def segments_of(scope: str | Sequence[str]) -> tuple[str, ...]:
    """Return the segments that a scope names, in model order; none for ``full_iteration``, the whole step."""
    named = SCOPES.get(scope, ()) if isinstance(scope, str) else scope
    return tuple(name for name in SEGMENT_NAMES if name in named)


def waiting_segments(scope: str | Sequence[str], stage: int) -> tuple[str, ...]:
    """Return segments that a scope captures and that may wait for the host at a sync-free stage."""
    captured = CAPTURABLE if scope == FULL_ITERATION else segments_of(scope)
    return tuple(name for name in captured if CAPTURED_FROM.get(name, 0) > stage)


def lowest_stage(scope: str | Sequence[str]) -> int:
    """Return the lowest sync-free stage at which no captured segment of a scope waits for the host."""
    return next(stage for stage in SYNC_FREE_STAGES if not waiting_segments(scope, stage))


@dataclass(frozen=True)
class Segment:
    """A named part of a layer: ``run`` maps the tensors in ``reads`` to those in ``writes``."""

    name: str
    run: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    stream: Literal["compute", "comm"] = "compute"
    layer: int | None = None
    """Number of the segment's layer, multi-token-prediction layers last; None if it is in no layer."""
    dynamic: bool = False
    """True if sizes of its tensors differ from call to call: then it is part of no graph."""
    fused: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]] | None = None
    """A dynamic segment's ``run`` in the form that the pass fuse_experts gives to graphs. Its first arguments
    are the backend of the experts' kernels, and a list with a ``Gradient`` for each parameter of the
    segment's module, or empty."""

    def __post_init__(self) -> None:
        assert self.name in SEGMENT_NAMES, self.name


def part(name: str) -> AbstractContextManager[None]:
    """Annotate the operations traced inside as one of `PARTS`; no effect outside of tracing."""
    import torch

    assert name in PARTS, name
    traceback = torch.fx.traceback
    return traceback.annotate({"part": name}) if traceback.has_preserved_node_meta() else nullcontext()


class Executor(Protocol):
    """Signature of ``run_segments``, and of its compiled counterpart."""

    def __call__(
        self, segments: Sequence[Segment], tensors: dict[str, torch.Tensor], keep: tuple[str, ...]
    ) -> tuple[torch.Tensor, ...]: ...


def run_segments(
    segments: Sequence[Segment], tensors: dict[str, torch.Tensor], keep: tuple[str, ...]
) -> tuple[torch.Tensor, ...]:
    """Run the segments in order on named tensors; return those named in ``keep``."""
    values = dict(tensors)
    for segment in segments:
        with profiler_range(segment.name, "F"):
            results = segment.run(*(values[name] for name in segment.reads))
        if not isinstance(results, tuple):
            results = (results,)
        values.update(zip(segment.writes, results, strict=True))
    return tuple(values[name] for name in keep)


Range = Callable[[str, str], AbstractContextManager[object]]  # of a unit and a part
_NO_RANGE = nullcontext()
_make_range: Range | None = None


def profiler_range(unit: str, part: str) -> AbstractContextManager[object]:
    """Return a context with the profiler range ``<unit>:<part>``; no effect outside of `ranges_wanted`.

    ``part``: F forward, I dgrad, W wgrad, B both as one graph; other names for what is not a segment.
    Costs 0.1 microseconds if no ranges are wanted.
    """
    return _NO_RANGE if _make_range is None else _make_range(unit, part)


def _of_profiler(unit: str, part: str) -> AbstractContextManager[object]:
    from torch.profiler import record_function

    return record_function(f"{unit}:{part}")


@contextmanager
def ranges_wanted(make: Range = _of_profiler) -> Iterator[None]:
    """Context in which `profiler_range` makes ranges by ``make``, on all threads."""
    global _make_range
    before, _make_range = _make_range, make
    try:
        yield
    finally:
        _make_range = before
