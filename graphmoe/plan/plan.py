"""The plan of a run: all that follows from its configuration and number of ranks by arithmetic.

It is made once, when the number of ranks is known; what builds and runs the model asks the plan, and does not
derive the same from the configuration again.
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
    """Decisions about a run on some number of ranks; ``plan_of`` makes it."""

    config: RunConfig
    """Resolved."""
    layout: Layout
    """Places of the ranks along the parallel dimensions, with those that hold the embedding."""
    pipeline: PipelinePlan | None
    """Pipeline of the layers over ranks along pp; None where each has all of them."""
    dispatcher: str
    """Never auto."""
    transport: Transport | None
    """Mover of the rows of symm, never auto; None with other dispatchers."""
    num_micro_batches: int
    """Micro-batches of a step on each rank."""
    tokens: int
    """Tokens that each rank routes at once."""
    recompute: Recompute
    """Parts that the backward computes again."""
    experts: str
    """Kernels of the routed experts that are asked for; auto leaves the choice to their measured times."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and activations of the model."""
        return dtype_of(self.config.precision.compute)

    @property
    def reads_peers(self) -> bool:
        """True where ranks reach the memory of each other's GPUs, and room is made without a count."""
        return reads_peers(self.config.moe, self.config.parallel)

    @property
    def global_micro_batches(self) -> int:
        """Micro-batches of a step on all ranks together."""
        return self.num_micro_batches * self.layout.dp

    @property
    def captures_step(self) -> bool:
        """True where one graph holds the whole step."""
        return self.config.graph.scope == FULL_ITERATION

    @property
    def captured(self) -> frozenset[str]:
        """Names of the segments that replay from graphs of their own."""
        return frozenset(segments_of(self.config.graph.scope))

    @functools.cached_property
    def balanced(self) -> Load:
        """Rows and slots that arrive at a rank where routing is balanced."""
        return balanced_load(self.config.model, self.layout, self.tokens)

    @property
    def worst(self) -> Load:
        """Rows and slots that arrive at a rank if as many tokens go there as can."""
        return worst_load(self.config.moe, self.config.model, self.layout, self.tokens)

    @property
    def replica_slots(self) -> int:
        """Experts of others that a rank can compute; 0 without replicas."""
        return replica_slots(self.config.moe, self.config.model, self.layout.ep)

    def replica_bytes(self, backends: str) -> int:
        """Bytes that a replica moves in a micro-batch: weights twice, or once, and its gradient home.

        ``backends`` are those of the fused experts, empty where none run. Sums in fp32 travel so.
        """
        numbers = 3 * self.config.model.hidden_size * self.config.model.expert_ffn_size
        times, in_fp8 = 1 if keeps_replicas(self.config) else 2, experts_in_fp8(self.config)
        of_gradient = 4 if in_fp8 or backends.split(",")[-1] == "triton" else self.dtype.itemsize
        return numbers * (times * (1 if in_fp8 else self.dtype.itemsize) + of_gradient)

    @property
    def exact_of(self) -> int | None:
        """Tokens of each rank where all that can arrive by a plan of replicas has room; else None."""
        return self.tokens if is_exact(self.config.moe, self.config.model, self.layout) else None

    def room(self, factor: float = 1.0) -> Load:
        """Return the room for ``factor`` times the receive budget."""
        return capacity(self.config.moe, self.config.model, self.layout, self.tokens, factor)

    def slower_than_1f1b(self) -> str | None:
        """Name a schedule to use instead where the run's own is slower than 1f1b by simulation."""
        return run_slower_than_1f1b(self.config, self.layout)

    @property
    def stages(self) -> tuple[StagePieces, ...]:
        """Stages by number; one has the whole model where layers are not shared out."""
        model = self.config.model
        return self.pipeline.stages if self.pipeline else (all_pieces(model.num_layers, model.mtp_depth),)

    def stage_numbers(self, place: int) -> tuple[int, ...]:
        """Return the numbers of the stages of a place along pp, in the model's order."""
        return self.pipeline.placement.stages_of(place) if self.pipeline else (0,)

    def own_stages(self, place: int) -> list[StagePieces]:
        """Return the stages of a place along pp, in the model's order."""
        return [self.stages[number] for number in self.stage_numbers(place)]


def dtype_of(compute: ComputeDtype) -> torch.dtype:
    """Return torch's name of a choice that is no longer auto."""
    import torch

    return {ComputeDtype.bf16: torch.bfloat16, ComputeDtype.fp32: torch.float32}[compute]


def plan_of(config: RunConfig, num_ranks: int) -> Plan:
    """Return the plan of a resolved configuration on so many ranks. *Raises* ConfigError."""
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
