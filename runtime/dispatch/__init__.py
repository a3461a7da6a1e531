"""Dispatchers: how tokens travel between the ranks that hold experts."""

from __future__ import annotations

import logging

import torch

from graphmoe.config import ComputeDtype, DispatcherChoice, RunConfig, Transport
from graphmoe.dispatch import Dispatcher
from graphmoe.dispatch_rules import dispatcher_of, reads_peers, transport_of_run
from graphmoe.layout import Layout
from graphmoe.ops.symm import Sizes, reserve, use_peers
from graphmoe.receive_budget import Load, balanced_load, capacity, routed_tokens
from graphmoe.vendor_dispatch import BUFFERED
from runtime.dispatch.alltoall import AllToAll
from runtime.dispatch.nvshmem import Nvshmem
from runtime.dispatch.peers import make_peers
from runtime.dispatch.symm import Symm
from runtime.dispatch.vendors import close_vendor, open_buffer, open_rows, vendor_dispatcher
from runtime.mesh import Mesh

log = logging.getLogger(__name__)

BLOCK_STEP = 128
"""A block has a multiple of so many rows."""


def make_dispatcher(config: RunConfig, mesh: Mesh) -> Dispatcher | None:
    """The dispatcher of a run; None where tokens stay on their rank."""
    choice = dispatcher_of(config.moe, config.parallel)
    if choice is DispatcherChoice.local:
        return None
    if choice is DispatcherChoice.alltoall:
        return AllToAll(mesh, config.model.num_experts)
    return planned_dispatcher(config, mesh.layout)


def bounded_dispatcher(config: RunConfig, mesh: Mesh) -> Dispatcher:
    """The dispatcher that has room for all that arrives, and works through it by the receive budget."""
    room = capacity(config.moe, config.model, mesh.layout, routed_tokens(config, mesh.layout))
    return AllToAll(mesh, config.model.num_experts, chunk=room)


def planned_dispatcher(config: RunConfig, layout: Layout, factor: float = 1.0) -> Dispatcher:
    """The dispatcher of a run that makes room without a count, with room for ``factor`` times the budget."""
    choice, model = dispatcher_of(config.moe, config.parallel), config.model
    assert reads_peers(config.moe, config.parallel), choice
    tokens = routed_tokens(config, layout)
    room = capacity(config.moe, model, layout, tokens, factor)
    if choice is not DispatcherChoice.symm:
        return vendor_dispatcher(choice, model, layout, tokens, room)
    block = 0
    if transport_of_run(config) is Transport.copy_engine:
        block, rows = blocks_of(balanced_load(model, layout, tokens), room, layout.size("ep_etp"))
        room = room._replace(rows=rows)
    return Symm(room, model.num_experts // layout.ep, layout.etp, block)


def blocks_of(balanced: Load, room: Load, ranks: int) -> tuple[int, int]:
    """Rows that copy engines move for each pair of ranks, and the rows that there is to be room for then.

    A block has the rows of a balanced routing, rounded up. A pair with fewer sends garbage behind them; one
    with more has a kernel pull the rest, for which there is as much room as ``room`` has beyond balance.
    """
    block = -(-balanced.rows // (ranks * BLOCK_STEP)) * BLOCK_STEP
    return block, ranks * block + max(room.rows - balanced.rows, 0)


def open_dispatcher(config: RunConfig, mesh: Mesh, device: torch.device) -> None:
    """What the operations of a run's dispatcher need beside process groups. A collective of all ranks."""
    choice = dispatcher_of(config.moe, config.parallel)
    use_peers(make_peers(mesh, device) if choice is DispatcherChoice.symm else None)
    if not reads_peers(config.moe, config.parallel):
        return
    dispatcher = planned_dispatcher(config, mesh.layout)
    assert dispatcher.capacity is not None
    words = _in_words(config, dispatcher)
    log.info("%s: room for %d rows and %d slots at a time", words, *dispatcher.capacity)
    if choice is DispatcherChoice.symm and device.type == "cpu":
        log.info("CPUs have no memory in common: moe.dispatcher=symm exchanges rows by torch.distributed")
    if choice in BUFFERED:
        open_buffer(choice, mesh, config.model.hidden_size)
    else:
        make_room(config, mesh, dispatcher, device)


def make_room(config: RunConfig, mesh: Mesh, dispatcher: Dispatcher, device: torch.device) -> None:
    """Let ranks have memory in common for what a dispatcher's capacity says, outside of captures.

    A collective of all ranks, and a no-op for dispatchers whose memory does not depend on it.
    """
    model, tokens, etp = config.model, routed_tokens(config, mesh.layout), mesh.layout.etp
    dtype = torch.bfloat16 if config.precision.compute is ComputeDtype.bf16 else torch.float32
    if isinstance(dispatcher, Symm):
        row_bytes, rows = model.hidden_size * dtype.itemsize, dispatcher.capacity.rows
        reserve(Sizes(tokens, row_bytes, model.top_k, model.top_k * etp, rows, dispatcher.block))
    elif isinstance(dispatcher, Nvshmem):
        open_rows(model, mesh, tokens, dispatcher.capacity.rows, dtype, device)


def close_dispatcher() -> None:
    """Give back what is open, at the end of a run that went well. A collective of all ranks."""
    use_peers(None)
    close_vendor()


def _in_words(config: RunConfig, dispatcher: Dispatcher) -> str:
    """What was chosen, for the log."""
    choice, transport = dispatcher_of(config.moe, config.parallel), transport_of_run(config)
    words = f"moe.dispatcher={choice.value}"
    if not isinstance(dispatcher, Symm) or transport is None:
        return words
    blocks = f" with blocks of {dispatcher.block} rows" if dispatcher.block else ""
    return f"{words}, moe.transport={transport.value}{blocks}"
