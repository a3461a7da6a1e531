"""The schema's sections on how micro-batches follow each other, and what is recorded of that."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PipelineConfig:
    """How micro-batches follow each other, over the ranks of ``parallel.pp`` too, docs/pipeline.md."""

    schedule: str = "1f1b"
    """Which micro-batch each stage works on next, where parallel.pp > 1: gpipe, 1f1b, interleaved, zb1p, zbv,
    v_half or v_min."""
    virtual_stages: int | None = None
    """Stages on each rank; null: as few as the schedule takes."""
    microbatches: int | None = None
    """Micro-batches of a step on each rank; null: what train.global_batch_size and micro_batch_size give."""
    layout: str | None = None
    """What each stage has, such as "Et|(tt|)*6L"; null: what gives the busiest rank least to do."""
    costs: list[str] = field(default_factory=list)
    """Milliseconds of a micro-batch, forward and backward together, by which layers are shared out where no
    layout is given, such as [dense:3.1,moe:6.7,loss:9.3]; []: modelled times."""
    ep_overlap: bool = False
    """Run the backward of each micro-batch in turns with the forward of the next, and shared experts and
    weight gradients while tokens travel, so that transfers hide beside products, docs/expert_parallel.md."""


@dataclass
class ProfileConfig:
    """What a run records of its time, docs/profiling.md."""

    steps: list[int] = field(default_factory=list)
    """First and last step, counted from 1, that torch's profiler records, kernels and memory, or one number
    for one step; files are in the run's folder profile/, which graphmoe.trace reads. Empty: none."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that record profile.steps."""
    pipeline: bool = False
    """Record when each stage works on which micro-batch in the steps that are logged, in pipeline.json, which
    graphmoe.pipeline_view draws; where parallel.pp > 1."""
