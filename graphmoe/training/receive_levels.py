"""Receive capacity levels of a run, and their memory."""

import logging

import torch

from graphmoe.model.transformer import Transformer
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.ops.symm import forget_graphs
from graphmoe.plan.experts import room_bytes
from graphmoe.plan.plan import Plan
from graphmoe.run.machine import memory_gib, reachable_bytes
from graphmoe.runtime.capture.capture import Capture
from graphmoe.runtime.dispatch import bounded_dispatcher, make_room, planned_dispatcher
from graphmoe.runtime.dispatch.ladder import GROWTH, ReceiveLadder
from graphmoe.runtime.ranks import Mesh, Ranks

log = logging.getLogger(__name__)

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

    def num_bytes(dispatchers: tuple[Dispatcher, ...]) -> int:
        rooms = [each.capacity for each in dispatchers if each.capacity is not None]
        return room_bytes(rooms, plan.model, plan.layout, plan.dtype.itemsize, fused=fused)

    def has_memory(now: tuple[Dispatcher, ...], then: tuple[Dispatcher, ...]) -> bool:
        more = num_bytes(then) - num_bytes(now)
        unused = capture.maker.pool_unused_bytes() if capture else 0
        found = ranks.gather(has_bytes(more, device, unused))
        if not all(found):
            log.warning("not every rank has %.2f GiB left for a larger receive capacity", more / 2**30)
        return all(found)

    last, in_fp8 = bounded_dispatcher(plan, mesh), plan.experts_in_fp8
    words = f"the counts of the host{', where experts are not in 8 bits' * in_fp8}"
    return ReceiveLadder(levels, last, model.num_moe_layers, use, has_memory, words)


def has_bytes(more: int, device: torch.device, pool_unused: int) -> bool:
    """Return whether ``more`` bytes than a step's peak fit; ``pool_unused``: free in the graphs' pool."""
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
