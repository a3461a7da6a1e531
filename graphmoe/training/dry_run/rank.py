"""Choice of the rank that a dry run shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from graphmoe.config.schema import ComputeDtype, ModelConfig
from graphmoe.model.sizes import state_bytes
from graphmoe.model.transformer import Transformer
from graphmoe.ops.collectives import use_groups
from graphmoe.plan.pipeline.actions import Action, Table, Together
from graphmoe.plan.pipeline.check import peaks
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.pipeline.plan import PipelinePlan
from graphmoe.plan.plan import Plan
from graphmoe.runtime.ranks import Mesh
from graphmoe.runtime.torch_compat import FakeTensorMode, fake_process_group
from graphmoe.training.dry_run.collectives import CollectiveLog
from graphmoe.training.dry_run.memory import MemoryLog
from graphmoe.training.dry_run.model import fake_executor, fake_model
from graphmoe.training.dry_run.segments import CurrentSegment
from graphmoe.training.dry_run.watch import StepWatch


@dataclass(frozen=True)
class ShownRank:
    """Rank that a dry run shows."""

    rank: int
    place: int = 0
    """Along pp."""
    pipeline: PipelinePlan | None = None
    projected: tuple[int, ...] = ()
    """Bytes of each place along pp, `projected_bytes`."""

    @classmethod
    def of(cls, plan: Plan) -> ShownRank:
        """Return ``launch.fake_rank``, or the first rank of the place that is projected to hold most."""
        given, layout = plan.config.launch.fake_rank, plan.layout
        if plan.pipeline is None:
            return cls(given or 0)
        projected = projected_bytes(plan, plan.pipeline)
        rank = projected.index(max(projected)) * layout.size("stage") if given is None else given
        return cls(rank, layout.index("pp", rank), plan.pipeline, tuple(projected))

    def to_json(self) -> dict[str, Any] | None:
        """Return the pipeline's part of the document; None without a pipeline."""
        if self.pipeline is None:
            return None
        table = self.pipeline.table
        return {
            "schedule": table.schedule,
            "layout": self.pipeline.layout,
            "pp_rank": self.place,
            "stages": [*table.placement.stages_of(self.place)],
            "pieces": self.pipeline.pieces_of_place(self.place),
            "projected_bytes_by_pp_rank": [*self.projected],
        }


def projected_bytes(plan: Plan, pipeline: PipelinePlan) -> list[int]:
    """Estimate the peak bytes of each place along pp: state, and activations kept of micro-batches.

    Forwards of one layer of each kind, and of the loss, say what is kept.
    """
    config, layout = plan.config, plan.layout
    rounded = config.precision.compute is ComputeDtype.bf16
    states = [
        sum(state_bytes(config.model, layout, stages, rounded=rounded).values())
        for stages in pipeline.stages_of_places
    ]
    of_kinds = _of_kinds(plan)
    kept = [_kept(config.model, of_kinds, stage) for stage in pipeline.stages]
    last = pipeline.placement.rank_of[-1]
    once = [of_kinds["loss"].passing if place == last else 0 for place in range(layout.pp)]
    table = pipeline.table if config.compile.enabled else _with_whole_backwards(pipeline.table)
    return [round(sum(all_of)) for all_of in zip(states, peaks(table, kept), once, strict=True)]


def _with_whole_backwards(table: Table) -> Table:
    """Return the table of a run without compilation: W comes with I."""
    ranks = tuple(
        tuple(
            step._replace(kind="B") if isinstance(step, Action) and step.kind == "I" else step
            for step in steps
            if isinstance(step, Together) or step.kind != "W"
        )
        for steps in table.ranks
    )
    return replace(table, ranks=ranks)


class _Forward(NamedTuple):
    """Bytes of a forward."""

    kept: int
    """For the backward."""
    passing: int
    """The most beside them, while it runs."""


def _kept(model: ModelConfig, of_kinds: dict[str, _Forward], stage: StagePieces) -> int:
    """Return a stage's kept bytes of a micro-batch; layers of later tokens are MoE layers."""
    dense = sum(number < model.num_dense_layers for number in stage.layers)
    moe = len(stage.layers) + len(stage.mtp) - dense
    found = dense * of_kinds["dense"].kept if dense else 0
    found += moe * of_kinds["moe"].kept if moe else 0
    return found + of_kinds["loss"].kept * stage.loss


def _of_kinds(plan: Plan) -> dict[str, _Forward]:
    """Measure forwards of a micro-batch through each kind of part, on tensors without data."""
    layout, model = plan.layout, plan.config.model
    nothing = StagePieces(False, range(0), range(0), False)
    parts = {"loss": replace(nothing, mtp=range(model.mtp_depth, model.mtp_depth), loss=True)}
    if model.num_dense_layers:
        parts["dense"] = replace(nothing, layers=range(1))
    if model.num_dense_layers < model.num_layers:
        first = model.num_dense_layers
        parts["moe"] = replace(nothing, layers=range(first, first + 1))
    elif model.mtp_depth:
        parts["moe"] = replace(nothing, mtp=range(1))
    with fake_process_group(layout.size("world"), 0):
        mesh = Mesh(layout)
        use_groups(mesh)
        try:
            with FakeTensorMode(allow_fallback_kernels=False):
                stages = [*parts.values()]
                whole = fake_model(plan, mesh, stages)
                return {kind: _forward(plan, mesh, whole, stage) for kind, stage in parts.items()}
        finally:
            use_groups(None)


def _forward(plan: Plan, mesh: Mesh, model: Transformer, stage: StagePieces) -> _Forward:
    config = plan.config
    assert config.data.seq_len is not None
    rows, width = config.train.micro_batch_size, config.model.hidden_size
    tokens = torch.zeros(rows, config.data.seq_len, dtype=torch.int64)
    shape = rows, config.data.seq_len // mesh.layout.size("cp_tp"), width
    count = 1 + config.model.mtp_depth if stage.loss else 1
    received = tuple(torch.empty(shape, dtype=plan.dtype, requires_grad=True) for _ in range(count))
    memory, current = MemoryLog(), CurrentSegment()
    memory.hold("there", [*model.parameters(), *model.buffers(), tokens])
    watch = StepWatch(CollectiveLog(mesh), memory, current)
    watch.phase = "forward"
    with watch:
        output = model.stage(stage, received, tokens, tokens, fake_executor(plan, current))
    kept = memory.now["forward"]
    del output
    return _Forward(kept, memory.peak_bytes - sum(memory.held.values()) - kept)
