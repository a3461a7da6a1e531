"""Dispatchers: how tokens travel between the ranks that hold experts."""

from __future__ import annotations

import logging

import torch

from graphmoe.config.schema import DispatcherChoice, Transport
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.ops.symm import Sizes, reserve, use_peers
from graphmoe.plan.experts import FACTS, blocks_of
from graphmoe.plan.plan import Plan
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.dispatch.nvshmem import Nvshmem
from graphmoe.runtime.dispatch.symm import Symm, make_peers
from graphmoe.runtime.dispatch.vendors import close_vendor, open_buffer, open_rows, vendor_dispatcher
from graphmoe.runtime.ranks import Mesh

log = logging.getLogger(__name__)


def make_dispatcher(plan: Plan, mesh: Mesh) -> Dispatcher | None:
    """Make the dispatcher of a run; None where tokens stay on their rank."""
    if plan.dispatcher is DispatcherChoice.local:
        return None
    if plan.dispatcher is DispatcherChoice.alltoall:
        return AllToAll(mesh, plan.config.model.num_experts)
    return planned_dispatcher(plan)


def bounded_dispatcher(plan: Plan, mesh: Mesh) -> Dispatcher:
    """Make the dispatcher with room for all arrivals, which handles them in parts of the receive budget."""
    return AllToAll(mesh, plan.config.model.num_experts, chunk=plan.room())


def planned_dispatcher(plan: Plan, factor: float = 1.0) -> Dispatcher:
    """Make the dispatcher of a run that counts nothing, with room for ``factor`` times the budget."""
    assert plan.reads_peers, plan.dispatcher
    model, layout, room = plan.config.model, plan.layout, plan.room(factor)
    if plan.dispatcher is not DispatcherChoice.symm:
        return vendor_dispatcher(plan.dispatcher, model, layout, plan.tokens, room)
    block = 0
    if plan.transport is Transport.copy_engine:
        block, rows = blocks_of(plan.balanced, room, layout.size("ep_etp"))
        room = room._replace(rows=rows)
    return Symm(room, model.num_experts // layout.ep, layout.etp, block)


def open_dispatcher(plan: Plan, mesh: Mesh, device: torch.device) -> None:
    """Open what a run's dispatcher needs beside process groups. A collective of all ranks."""
    choice = plan.dispatcher
    use_peers(make_peers(mesh, device) if choice is DispatcherChoice.symm else None)
    if not plan.reads_peers:
        return
    dispatcher = planned_dispatcher(plan)
    assert dispatcher.capacity is not None
    words = _in_words(plan, dispatcher)
    log.info("%s: room for %d rows and %d slots at a time", words, *dispatcher.capacity)
    if choice is DispatcherChoice.symm and device.type == "cpu":
        log.info("CPUs have no memory in common: moe.dispatcher=symm exchanges rows by torch.distributed")
    if FACTS[choice].buffer:
        open_buffer(choice, mesh, plan.config.model.hidden_size)
    else:
        make_room(plan, mesh, dispatcher, device)


def make_room(plan: Plan, mesh: Mesh, dispatcher: Dispatcher, device: torch.device) -> None:
    """Let ranks have memory in common for what a dispatcher's capacity says, outside of captures.

    A collective of all ranks, and a no-op for dispatchers whose memory does not depend on it.
    """
    model, tokens, etp = plan.config.model, plan.tokens, plan.layout.etp
    if isinstance(dispatcher, Symm):
        row_bytes, rows = model.hidden_size * plan.dtype.itemsize, dispatcher.capacity.rows
        reserve(Sizes(tokens, row_bytes, model.top_k, model.top_k * etp, rows, dispatcher.block))
    elif isinstance(dispatcher, Nvshmem):
        open_rows(model, mesh, tokens, dispatcher.capacity.rows, plan.dtype, device)


def close_dispatcher() -> None:
    """Give back what is open, at the end of a run that went well. A collective of all ranks."""
    use_peers(None)
    close_vendor()


def _in_words(plan: Plan, dispatcher: Dispatcher) -> str:
    """Describe the choice for the log."""
    words = f"moe.dispatcher={plan.dispatcher.value}"
    if not isinstance(dispatcher, Symm) or plan.transport is None:
        return words
    blocks = f" with blocks of {dispatcher.block} rows" if dispatcher.block else ""
    return f"{words}, moe.transport={plan.transport.value}{blocks}"
