"""When each rank of a pipeline did, or would do, what: the result of a simulation or of a recorded run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphmoe.plan.pipeline.actions import Placement, Step

Track = Literal["compute", "comm"]


@dataclass(frozen=True)
class Span:
    """One step or transfer of one rank; times have the unit of the costs, for a run microseconds."""

    rank: int
    track: Track
    step: Step
    """What is done; on the track ``comm`` what is waited for: the action whose input travels."""
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All spans of one step of training, and what is made of them."""

    schedule: str
    placement: Placement
    num_micro_batches: int
    spans: tuple[Span, ...]
    """In the order of ranks, then of time."""
    makespan: float
    """From the first start to the last end of any rank."""
    bubble: float
    """The share of makespan * ranks in which a rank computes nothing, 0 to 1."""
    peak_activations: tuple[float, ...]
    """By rank: the most that was kept at once, in activations of a rank's whole stage for one micro-batch."""
    peak_bytes: tuple[float, ...] | None = None
    """By rank, where it was measured or the cost of an activation is known."""
