"""Build a run's model, the optimizer of ``parallel.dp_shard`` and the receive capacity levels."""

import functools
import logging

import torch

from graphmoe.config.formats import FORMATS
from graphmoe.config.schema import ConfigError, DpShard
from graphmoe.model.blocks import MARKED
from graphmoe.model.build import build_model, init_weights, materialise
from graphmoe.model.transformer import Transformer
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.ops.symm import forget_graphs
from graphmoe.optim.base import StepOptimizer
from graphmoe.optim.flat_buffers import Fill
from graphmoe.optim.zero1 import Optimizer
from graphmoe.plan.experts import room_bytes
from graphmoe.plan.plan import Plan
from graphmoe.run.machine import memory_gib, reachable_bytes
from graphmoe.runtime.capture import Capture
from graphmoe.runtime.compile.weight_forms import DelayedScales
from graphmoe.runtime.dispatch import bounded_dispatcher, make_room, planned_dispatcher
from graphmoe.runtime.dispatch.ladder import GROWTH, ReceiveLadder
from graphmoe.runtime.ranks import Mesh, Ranks
from graphmoe.training.memory import num_slots

log = logging.getLogger(__name__)


def build(
    plan: Plan, device: torch.device, mesh: Mesh, dispatcher: Dispatcher | None, *,
    has_values: bool = True, end_token: int | None = None,
) -> tuple[Transformer, StepOptimizer]:  # fmt: skip
    """Build this rank's model with initial weights, and its optimizer. Collective.

    Without ``has_values`` weights are uninitialized. ``end_token`` is that of ``data.document_mask``.
    *Raises* ConfigError for fsdp2 on one rank.
    """
    shards = plan.parallel.dp_shard is DpShard.fsdp2
    if shards and mesh.layout.size("world") == 1:
        raise ConfigError(
            "parallel.dp_shard=fsdp2 shards weights over ranks, and this run has one; use "
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
    if plan.data.source_facts.marks:
        model.mask_documents(MARKED)
    elif plan.data.document_mask:
        assert end_token is not None
        model.mask_documents(end_token)
    fill: Fill | None = None
    if shards:  # a bucket's weights are filled at a time: no rank ever has the whole model
        materialise(model, device, allocates=False)
        how = plan.model.init_std, plan.train.seed, mesh.layout, mesh.rank
        fill = functools.partial(init_weights, model, *how) if has_values else (lambda _: None)
    optimizer = Optimizer(model, plan.optim, plan.train, mesh, fill=fill, in_turns=plan.weight_places > 1)
    if (by := FORMATS.get(plan.precision.fp8)) and by.is_delayed:
        tokens = plan.train.global_batch_size * plan.seq_len
        matrices = {name: w for name, w in model.named_parameters() if w.dim() > 1}
        optimizer.weight_forms.keep(DelayedScales(matrices, tokens, mesh.group("stage")))
    return model, optimizer


SPARE = 1.03  # factor of the allocator's reserved memory over the allocated peak, due to fragmentation


def receive_ladder(
    plan: Plan,
    mesh: Mesh,
    ranks: Ranks,
    model: Transformer,
    device: torch.device,
    capture: Capture | None,
    *,
    fused: bool,
) -> ReceiveLadder | None:
    """Return the capacity levels for overflows; None if the receive buffers fit any routing."""
    if model.dispatcher is None or model.dispatcher.capacity is None:
        return None
    levels = levels_of(plan)
    if len(levels) == 1:
        return None

    def use(dispatchers: tuple[Dispatcher, ...], program: int | None) -> None:
        if capture and capture.use(program):  # first: frees memory of other graphs
            forget_graphs()
        if program is not None:
            make_room(plan, mesh, max(dispatchers, key=lambda each: each.capacity or ()), device)
        model.use(dispatchers)

    # graphs of experts keep their results in each micro-batch slot
    slots = num_slots(plan.pipeline is not None, plan.ep_overlap) if "moe_experts" in plan.captured else 1

    def num_bytes(dispatchers: tuple[Dispatcher, ...]) -> int:
        rooms = [each.capacity for each in dispatchers if each.capacity is not None]
        return slots * room_bytes(rooms, plan.model, plan.layout, plan.dtype.itemsize, fused=fused)

    def has_memory(now: tuple[Dispatcher, ...], then: tuple[Dispatcher, ...]) -> bool:
        more = num_bytes(then) - num_bytes(now)
        unused = capture.maker.pool_unused_bytes() if capture else 0
        found = ranks.gather(has_bytes(more, device, unused))
        if not all(found):
            log.warning("a rank lacks %.2f GiB for a larger receive capacity", more / 2**30)
        return all(found)

    last, in_fp8 = bounded_dispatcher(plan, mesh), plan.experts_in_fp8
    words = f"the counts of the host{', where experts are not in 8 bits' * in_fp8}"
    return ReceiveLadder(levels, last, model.num_moe_layers, use, has_memory, words)


def has_bytes(more: int, device: torch.device, pool_unused: int) -> bool:
    """Return whether ``more`` bytes fit beside a step's peak; ``pool_unused``: free in the graphs' pool."""
    if device.type != "cuda":
        return True
    # A replayed step needs all of the pool. The old graphs free it before larger ones are captured.
    lasting = torch.cuda.memory_allocated(device)
    so_far = max(memory_gib(device) * 2**30, lasting + pool_unused)
    return SPARE * so_far + more <= reachable_bytes(device)


def levels_of(plan: Plan) -> list[Dispatcher]:
    """Return dispatchers, each with `GROWTH` times the capacity of the one before, up to the worst case."""
    found, factor = [planned_dispatcher(plan)], 1.0
    while plan.room(factor) != plan.worst:
        factor *= GROWTH
        found.append(planned_dispatcher(plan, factor))
    return found
