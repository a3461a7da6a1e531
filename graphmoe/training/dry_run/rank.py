"""Choice of the rank that a dry run shows."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphmoe.config.schema import ComputeDtype
from graphmoe.model.sizes import state_bytes
from graphmoe.model.transformer import Transformer
from graphmoe.plan.pipeline.actions import Action, Table, Together
from graphmoe.plan.pipeline.check import peaks
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.pipeline.plan import PipelinePlan
from graphmoe.plan.plan import Plan
from graphmoe.runtime.ranks import Mesh
from graphmoe.training.dry_run.collectives import CollectiveLog
from graphmoe.training.dry_run.model import fake_executor, fake_mesh, fake_model
from graphmoe.training.dry_run.watch import MemoryLog, StepWatch


def shown_rank(plan: Plan, projected: Sequence[int]) -> int:
    """Return ``launch.fake_rank``, or the first rank of the place along pp that is projected to hold most."""
    if (given := plan.config.launch.fake_rank) is not None:
        return given
    return projected.index(max(projected)) * plan.layout.size("stage") if projected else 0


def projected_bytes(plan: Plan, pipeline: PipelinePlan) -> list[int]:
    """Estimate the peak bytes of each place along pp: state, and activations kept of micro-batches.

    Forwards of one layer of each kind, and of the loss, say what is kept.
    """
    config, model, table = plan.config, plan.config.model, pipeline.table
    rounded = config.precision.compute is ComputeDtype.bf16
    states = [
        sum(state_bytes(model, plan.layout, stages, rounded=rounded).values())
        for stages in pipeline.stages_of_places
    ]
    kept_of, passing_of = _bytes_of_kinds(plan)
    kept = []
    for stage in pipeline.stages:
        dense = sum(number < model.num_dense_layers for number in stage.layers)
        moe = len(stage.layers) + len(stage.mtp) - dense  # layers of later tokens are MoE layers
        counts = {"dense": dense, "moe": moe, "loss": int(stage.loss)}
        kept.append(sum(count * kept_of[kind] for kind, count in counts.items() if count))
    last = pipeline.placement.rank_of[-1]
    once = [passing_of["loss"] if place == last else 0 for place in range(plan.layout.pp)]
    if not config.compile.enabled:
        table = _with_whole_backwards(table)
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


def _bytes_of_kinds(plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """Measure forwards of a micro-batch through each kind of part, on tensors without data.

    The bytes kept for the backward, and the most beside them while it runs.
    """
    model, nothing = plan.config.model, StagePieces(False, range(0), range(0), False)
    first = model.num_dense_layers
    parts = {"loss": replace(nothing, mtp=range(model.mtp_depth, model.mtp_depth), loss=True)}
    if first:
        parts["dense"] = replace(nothing, layers=range(1))
    if first < model.num_layers:
        parts["moe"] = replace(nothing, layers=range(first, first + 1))
    elif model.mtp_depth:
        parts["moe"] = replace(nothing, mtp=range(1))
    with fake_mesh(plan, 0) as mesh:
        whole = fake_model(plan, mesh, [*parts.values()])
        found = {kind: _forward(plan, mesh, whole, stage) for kind, stage in parts.items()}
    return {kind: kept for kind, (kept, _) in found.items()}, {
        kind: most for kind, (_, most) in found.items()
    }


def _forward(plan: Plan, mesh: Mesh, model: Transformer, stage: StagePieces) -> tuple[int, int]:
    config = plan.config
    assert config.data.seq_len is not None
    rows, positions = config.train.micro_batch_size, config.data.seq_len // mesh.layout.size("cp_tp")
    tokens = torch.zeros(rows, config.data.seq_len, dtype=torch.int64)
    shape = rows, positions, config.model.hidden_size
    count = 1 + config.model.mtp_depth if stage.loss else 1
    received = tuple(torch.empty(shape, dtype=plan.dtype, requires_grad=True) for _ in range(count))
    memory = MemoryLog()
    memory.hold("there", [*model.parameters(), *model.buffers(), tokens])
    watch = StepWatch(CollectiveLog(mesh), memory)
    watch.phase = "forward"
    with watch:
        output = model.stage(stage, received, tokens, tokens, fake_executor(plan, watch))
    kept = memory.now["forward"]
    del output
    return kept, memory.peak_bytes - sum(memory.held.values()) - kept
