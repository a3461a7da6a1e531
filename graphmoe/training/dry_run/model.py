"""The model of a dry run and what executes it: tensors that have a shape and no data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graphmoe.config.schema import AttentionBackend, RunConfig
from graphmoe.model.build import build_model
from graphmoe.model.moe import Experts
from graphmoe.model.transformer import Transformer
from graphmoe.ops.gradients import Gradient
from graphmoe.passes import PassRunner, select_passes
from graphmoe.plan.plan import Plan
from graphmoe.plan.stages import StagePieces
from graphmoe.runtime.compile.recompute import Recompute, RecomputedSegments
from graphmoe.runtime.dispatch import make_dispatcher
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.ranks import Mesh
from graphmoe.runtime.torch_compat import tensors_of
from graphmoe.segments import Executor, run_segments
from graphmoe.training.dry_run.balanced import BalancedAllToAll
from graphmoe.training.dry_run.segments import GraphSegments, Running, ToldSegments


def fake_model(plan: Plan, mesh: Mesh, stages: Sequence[StagePieces] = ()) -> Transformer:
    """What the rank of a mesh has of the model, without data; called inside a FakeTensorMode.

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
    config: RunConfig, running: Running, gradient_of: Callable[[Tensor], Gradient] | None = None
) -> Executor:
    """What keeps for the backward what the run's own executor keeps."""
    recompute = Recompute.of(config.recompute)
    if not config.compile.enabled:
        return ToldSegments(RecomputedSegments(recompute) if recompute else run_segments, running)

    def runner(trains: bool) -> PassRunner:
        knobs: dict[str, dict[str, Any]] = {
            "fuse_loss": {"needs_grad": trains},
            "fuse_experts": {"backend": "triton"},
        }
        return PassRunner(select_passes(config.passes, knobs), None)

    return GraphSegments(running, runner, gradient_of, recompute=recompute)


def _fake(meta: Tensor) -> Tensor:
    """What stands for a parameter or buffer on the meta device."""
    fake = torch.empty(meta.shape, dtype=meta.dtype)
    if isinstance(meta, nn.Parameter):
        fake = nn.Parameter(fake)
        if hasattr(meta, "parallel"):
            fake.parallel = meta.parallel  # type: ignore[attr-defined]
    return fake
