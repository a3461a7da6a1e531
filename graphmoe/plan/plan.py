"""The plan of a run: all that follows by arithmetic from its configuration and number of ranks.

Made once; run-time code reads the plan and does not derive the same from the configuration.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphmoe.config.schema import ComputeDtype, RunConfig, Transport
from graphmoe.plan.experts import (
    Load,
    balanced_load,
    capacity,
    dispatcher_of,
    experts_in_fp8,
    is_exact,
    keeps_replicas,
    reads_peers,
    replica_slots,
    routed_tokens,
    transport_of_run,
    worst_load,
)
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.layouts import StagePieces, all_pieces
from graphmoe.plan.pipeline.plan import PipelinePlan, num_micro_batches, pipeline_of, run_slower_than_1f1b
from graphmoe.plan.recompute import Recompute
from graphmoe.segments import FULL_ITERATION, segments_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Plan:
    """Decisions about a run on a number of ranks; made by ``plan_of``."""

    config: RunConfig
    layout: Layout
    """Sizes of the parallel dimensions, and the ranks with the embedding."""
    pipeline: PipelinePlan | None
    """Pipeline over pp; None if each rank has all layers."""
    dispatcher: str
    transport: Transport | None
    num_micro_batches: int
    tokens: int
    recompute: Recompute
    experts: str
    """Requested kernels of the routed experts; auto chooses by measured times."""

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.config.precision.compute)

    @property
    def reads_peers(self) -> bool:
        return reads_peers(self.config.moe, self.config.parallel)

    @property
    def global_micro_batches(self) -> int:
        return self.num_micro_batches * self.layout.dp

    @property
    def captures_step(self) -> bool:
        return self.config.graph.scope == FULL_ITERATION

    @property
    def captured(self) -> frozenset[str]:
        """Segments that are captured in their own graphs."""
        return frozenset(segments_of(self.config.graph.scope))

    @functools.cached_property
    def balanced(self) -> Load:
        """Rows and slots that a rank receives under balanced routing."""
        return balanced_load(self.config.model, self.layout, self.tokens)

    @property
    def worst(self) -> Load:
        """Rows and slots that a rank receives if as many tokens as possible are routed to it."""
        return worst_load(self.config.moe, self.config.model, self.layout, self.tokens)

    @property
    def replica_slots(self) -> int:
        """Replica slots per rank; 0 without replicas."""
        return replica_slots(self.config.moe, self.config.model, self.layout.ep)

    def replica_bytes(self, backends: str) -> int:
        """Bytes communicated for a replica in a micro-batch: weights once or twice, and the gradient to its
        owner.

        ``backends`` are those of the fused experts, or empty.
        """
        numbers = 3 * self.config.model.hidden_size * self.config.model.expert_ffn_size
        times, in_fp8 = 1 if keeps_replicas(self.config) else 2, experts_in_fp8(self.config)
        # fp32 sums are sent in fp32
        of_gradient = 4 if in_fp8 or backends.split(",")[-1] == "triton" else self.dtype.itemsize
        return numbers * (times * (1 if in_fp8 else self.dtype.itemsize) + of_gradient)

    @property
    def exact_of(self) -> int | None:
        """Tokens of each rank if a replica plan has capacity for all that can arrive; else None."""
        return self.tokens if is_exact(self.config.moe, self.config.model, self.layout) else None

    def room(self, factor: float = 1.0) -> Load:
        return capacity(self.config.moe, self.config.model, self.layout, self.tokens, factor)

    def slower_than_1f1b(self) -> str | None:
        """Return a faster schedule if simulation finds the run's own slower than 1f1b."""
        return run_slower_than_1f1b(self.config, self.layout)

    @property
    def stages(self) -> tuple[StagePieces, ...]:
        """Stages by number; one with the whole model without pp."""
        model = self.config.model
        return self.pipeline.stages if self.pipeline else (all_pieces(model.num_layers, model.mtp_depth),)

    def stage_numbers(self, place: int) -> tuple[int, ...]:
        return self.pipeline.placement.stages_of(place) if self.pipeline else (0,)

    def own_stages(self, place: int) -> list[StagePieces]:
        return [self.stages[number] for number in self.stage_numbers(place)]


def dtype_of(compute: ComputeDtype) -> torch.dtype:
    import torch

    return {ComputeDtype.bf16: torch.bfloat16, ComputeDtype.fp32: torch.float32}[compute]


def plan_of(config: RunConfig, num_ranks: int) -> Plan:
    """Return the plan of a resolved configuration. *Raises* ConfigError."""
    layout = Layout.of(config.parallel, num_ranks)
    pipeline = pipeline_of(config, layout)
    if pipeline is not None:
        layout = replace(layout, embed_on=pipeline.embed_on)
    return Plan(
        config,
        layout,
        pipeline,
        dispatcher_of(config.moe, config.parallel),
        transport_of_run(config),
        num_micro_batches(config, layout),
        routed_tokens(config, layout),
        Recompute.of(config.recompute),
        config.moe.experts,
    )
