"""Build a run's model and the optimizer of ``parallel.dp_shard``."""

import functools
import logging
from collections.abc import Sequence

import torch
from torch import nn

from graphmoe.config.formats import FORMATS
from graphmoe.config.schema import ConfigError, DpShard
from graphmoe.model.build import build_model, init_weights, materialise
from graphmoe.model.transformer import Transformer
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.optim.base import StepOptimizer
from graphmoe.optim.fsdp import ShardedOptimizer
from graphmoe.optim.zero1 import Optimizer
from graphmoe.plan.plan import Plan
from graphmoe.runtime.compile.weight_forms import DelayedScales
from graphmoe.runtime.ranks import Mesh

log = logging.getLogger(__name__)


def build(
    plan: Plan,
    device: torch.device,
    mesh: Mesh,
    dispatcher: Dispatcher | None,
    *,
    has_values: bool = True,
) -> tuple[Transformer, StepOptimizer]:
    """Build this rank's model with initial weights, and its optimizer. Collective.

    Without ``has_values`` weights are uninitialized. *Raises* ConfigError for fsdp2 on one rank.
    """
    shards = plan.parallel.dp_shard is DpShard.fsdp2
    if shards and mesh.layout.size("world") == 1:
        raise ConfigError(
            "parallel.dp_shard=fsdp2 shares weights out to ranks, and this run has 1; use "
            "parallel.dp_shard=zero1, or launch.nproc=2 or more"
        )
    model = build_model(
        plan.model,
        device="meta" if shards else device,
        dtype=plan.dtype,
        seed=plan.train.seed if has_values else None,
        execution=plan.moe,
        layout=mesh.layout,
        rank=mesh.rank,
        dispatcher=dispatcher,
        stages=plan.own_stages(mesh.index("pp")),
    )
    if not shards:
        whole = Optimizer(model, plan.optim, plan.train, mesh)
        if (by := FORMATS.get(plan.precision.fp8)) and by.is_delayed:
            tokens = plan.train.global_batch_size * plan.seq_len
            matrices = {name: w for name, w in model.named_parameters() if w.dim() > 1}
            whole.weight_forms.keep(DelayedScales(matrices, tokens, mesh.group("stage")))
        return model, whole
    fill = functools.partial(_fill, plan, device, mesh, model)
    optimizer = ShardedOptimizer(model, plan.optim, plan.train, mesh, device, fill)
    own, held = (sum(t.numel() for t in of.values()) for of in (optimizer.main, optimizer.weights))
    log.info(
        "parallel.dp_shard=fsdp2: of %d parameters this rank keeps %d, with gradient and moments %.2f GiB",
        held,
        own,
        4 * (2 + len(optimizer.moments)) * own / 2**30,
    )
    return model, optimizer


def _fill(
    plan: Plan, device: torch.device, mesh: Mesh, model: Transformer, block: Sequence[nn.Module]
) -> None:
    materialise(nn.ModuleList(block), device)
    only = {parameter for module in block for parameter in module.parameters()}
    init_weights(model, plan.model.init_std, plan.train.seed, mesh.layout, mesh.rank, only)
