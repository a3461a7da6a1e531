"""Model and executor of a dry run: tensors have a shape and no data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graphmoe.config.schema import AttentionBackend
from graphmoe.model.build import build_model
from graphmoe.model.moe import Experts
from graphmoe.model.transformer import Transformer
from graphmoe.ops.gradients import Gradient
from graphmoe.passes.table import PassRunner, select_passes
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.plan import Plan
from graphmoe.runtime.compile.recompute import RecomputedSegments
from graphmoe.runtime.dispatch import make_dispatcher
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.ranks import Mesh
from graphmoe.runtime.torch_compat import tensors_of
from graphmoe.segments import Executor, run_segments
from graphmoe.training.dry_run.segments import CurrentSegment, GraphSegments, NotedSegments


def fake_model(plan: Plan, mesh: Mesh, stages: Sequence[StagePieces] = ()) -> Transformer:
    """Build a rank's part of the model without data, inside a FakeTensorMode.

    Its dispatcher assumes balanced experts where the host would count rows.
    """
    config, dispatcher = plan.config, make_dispatcher(plan, mesh)
    if isinstance(dispatcher, AllToAll):
        dispatcher = BalancedAllToAll(mesh, config.model.num_experts, plan.tokens, config.model.top_k)
    model = build_model(
        replace(config.model, attention_backend=AttentionBackend.auto),
        device="meta",
        dtype=plan.dtype,
        seed=None,
        execution=config.moe,
        layout=mesh.layout,
        rank=mesh.rank,
        dispatcher=dispatcher,
        stages=stages,
    )
    places = [*tensors_of(model).values()]
    fakes = {meta: _fake(meta) for meta in (holder[key] for holder, key in places)}
    for holder, key in places:
        holder[key] = fakes[holder[key]]
    if isinstance(dispatcher, BalancedAllToAll):
        for module in model.modules():
            if isinstance(module, Experts):
                module.assumed_rows = dispatcher.expert_rows
    return model


def fake_executor(
    plan: Plan, current: CurrentSegment, gradient_of: Callable[[Tensor], Gradient] | None = None
) -> Executor:
    """Return an executor that keeps for the backward the tensors that the run's own keeps."""
    config, recompute = plan.config, plan.recompute
    if not config.compile.enabled:
        return NotedSegments(RecomputedSegments(recompute) if recompute else run_segments, current)

    def runner(trains: bool) -> PassRunner:
        knobs: dict[str, dict[str, Any]] = {
            "fuse_loss": {"needs_grad": trains},
            "fuse_experts": {"backend": "triton"},
        }
        return PassRunner(select_passes(config.passes, knobs), None)

    return GraphSegments(current, runner, gradient_of, recompute=recompute)


def _fake(meta: Tensor) -> Tensor:
    """Return the fake tensor of a parameter or buffer on the meta device."""
    fake = torch.empty(meta.shape, dtype=meta.dtype)
    if isinstance(meta, nn.Parameter):
        fake = nn.Parameter(fake)
        if hasattr(meta, "parallel"):
            fake.parallel = meta.parallel  # type: ignore[attr-defined]
    return fake


class BalancedAllToAll(AllToAll):
    """`AllToAll` of equal rows for each rank, as if a token's experts were on as many ranks as can be.

    That is the most that a balanced routing sends. Rows of ``rows_of_each`` are for each rank of ``ep_etp``,
    ``expert_rows`` are those of all experts of this rank.
    """

    def __init__(self, mesh: Mesh, num_experts: int, num_tokens: int, top_k: int) -> None:
        """``num_tokens`` is the number that each rank routes at once."""
        super().__init__(mesh, num_experts)
        layout = mesh.layout
        blocks = min(top_k, layout.ep)
        self.rows_of_each = -(-num_tokens * blocks // layout.ep)
        self.expert_rows = num_tokens * top_k * layout.etp

    def _on_host(self, counts: Tensor) -> Any:
        rows: Any = self.rows_of_each
        for length in reversed(counts.shape):
            rows = [rows] * length
        return rows
