"""Dispatchers of tokens to the ranks of their experts: choice, checks, shared memory."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace

import torch

from graphmoe.config.choices import look_up
from graphmoe.config.packages import require_package
from graphmoe.config.schema import ConfigError, GraphConfig, ModelConfig, MoEConfig, Transport
from graphmoe.ops import IN_USE
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.ops.replicas.exchange import room_bytes
from graphmoe.ops.symm import Sizes as Exchange
from graphmoe.ops.symm import reserve, use_peers
from graphmoe.ops.symm.peers import Region
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.experts import INSTEAD, Load, blocks_of, dispatcher_facts
from graphmoe.plan.layout import Layout
from graphmoe.plan.plan import Plan
from graphmoe.runtime.dispatch import deepep, nvshmem
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.dispatch.deepep import DeepEP
from graphmoe.runtime.dispatch.nvshmem import Nvshmem
from graphmoe.runtime.dispatch.symm import Symm, make_peers
from graphmoe.runtime.ranks import Mesh, Ranks
from graphmoe.runtime.torch_compat import has_nvshmem
from graphmoe.segments import segments_of

log = logging.getLogger(__name__)

Maker = Callable[[Plan, Mesh | None, float], Dispatcher | None]
"""(plan, mesh, factor of the receive capacity) -> dispatcher; without a mesh if it reads peer memory."""
# read by torch: number of blocks of an NVSHMEM exchange
PROGRAMS = "TORCH_SYMMMEM_NBLOCKS"


def make_dispatcher(plan: Plan, mesh: Mesh) -> Dispatcher | None:
    """Make the dispatcher of a run; None if tokens stay on their rank."""
    return _maker(plan.dispatcher)(plan, mesh, 1.0)


def _maker(choice: str) -> Maker:
    return look_up(MAKERS, choice, "moe.dispatcher", attribute="make")


def bounded_dispatcher(plan: Plan, mesh: Mesh) -> Dispatcher:
    """Make a dispatcher without a receive limit, whose experts run in chunks of the receive capacity."""
    return AllToAll(mesh, plan.model.num_experts, chunk=plan.room())


def planned_dispatcher(plan: Plan, factor: float = 1.0) -> Dispatcher:
    """Make the sync-free dispatcher of a run, with ``factor`` times its receive capacity."""
    assert plan.reads_peers, plan.dispatcher
    dispatcher = _maker(plan.dispatcher)(plan, None, factor)
    assert dispatcher is not None
    return dispatcher


def _symm(plan: Plan, mesh: Mesh | None, factor: float) -> Symm:
    model, layout, room, block = plan.model, plan.layout, plan.room(factor), 0
    if plan.transport is Transport.copy_engine:
        block, rows = blocks_of(plan.balanced, room, layout.size("ep_etp"), plan.exact_of)
        room = room._replace(rows=rows)
    experts = model.num_experts // layout.ep + plan.replica_slots
    return Symm(room, experts, layout.etp, block, plan.sends_weights, plan.keeps_replicas)


def _nvshmem(plan: Plan, mesh: Mesh | None, factor: float) -> Nvshmem:
    return Nvshmem(plan.room(factor), plan.model.num_experts // plan.layout.ep, plan.layout.etp)


def _deepep(plan: Plan, mesh: Mesh | None, factor: float) -> DeepEP:
    # its buffer always holds all rows, so only the slots are limited
    room = Load(plan.layout.size("ep_etp") * plan.tokens, plan.room(factor).slots)
    return DeepEP(room, plan.model.num_experts // plan.layout.ep)


def _alltoall(plan: Plan, mesh: Mesh | None, factor: float) -> AllToAll:
    assert mesh is not None
    return AllToAll(mesh, plan.model.num_experts)


MAKERS: dict[str, Maker] = {
    "local": lambda *_: None,
    "alltoall": _alltoall,
    "symm": _symm,
    "nvshmem": _nvshmem,
    "deepep": _deepep,
    "turbo": _deepep,
}
"""Dispatcher makers by value of ``moe.dispatcher``, with the names in `graphmoe.plan.experts.FACTS`."""


def open_dispatcher(plan: Plan, mesh: Mesh, device: torch.device) -> None:
    """Allocate a dispatcher's communication memory, if it has any. Collective over all ranks."""
    choice = plan.dispatcher
    use_peers(make_peers(mesh, device) if choice == "symm" else None)
    if not plan.reads_peers:
        return
    dispatcher = planned_dispatcher(plan)
    assert dispatcher.capacity is not None
    words = _in_words(plan, dispatcher)
    log.info("%s: receive capacity of %d rows and %d expert slots", words, *dispatcher.capacity)
    if choice == "symm" and device.type == "cpu":
        log.info("CPUs have no memory in common: moe.dispatcher=symm exchanges rows by torch.distributed")
    if dispatcher_facts(choice).buffer:
        open_buffer(choice, mesh, plan.model.hidden_size)
    else:
        make_room(plan, mesh, dispatcher, device)


def make_room(plan: Plan, mesh: Mesh, dispatcher: Dispatcher, device: torch.device) -> None:
    """Grow the shared memory to a dispatcher's capacity. Collective over all ranks, not in a capture."""
    if isinstance(dispatcher, Symm):
        sizes = plan.sizes(on_nvidia=torch.version.hip is None)
        of_dispatcher = replace(sizes, room=dispatcher.capacity, block=dispatcher.block)
        exchange, apart = _shared(of_dispatcher, plan.graph)
        reserve(exchange, apart)
    elif isinstance(dispatcher, Nvshmem):
        open_rows(plan.model, mesh, plan.tokens, dispatcher.capacity.rows, plan.dtype, device)


def shared_bytes(sizes: Sizes, moe: MoEConfig, graph: GraphConfig) -> int:
    """Return the bytes that each rank shares with peers: rows on their way, symm's replicas; else 0."""
    model, ranks = sizes.model, sizes.layout.size("ep_etp")
    if dispatcher_facts(moe.dispatcher).buffer:
        return deepep.buffer_bytes(model.hidden_size, ranks)
    if moe.dispatcher == "nvshmem":
        dtype = torch.bfloat16 if sizes.element_bytes == 2 else torch.float32
        places = model.top_k * sizes.layout.etp
        rows = sizes.tokens, places, sizes.room.rows, model.hidden_size
        return 2 * max(nvshmem.bytes_of(*rows, dtype, model.top_k, ranks), nvshmem.MIN_BYTES)
    if moe.dispatcher != "symm":
        return 0
    exchange, apart = _shared(sizes, graph)
    return Region.with_room_for(exchange, sizes.layout.size("ep_etp")).num_bytes + apart


def _shared(sizes: Sizes, graph: GraphConfig) -> tuple[Exchange, int]:
    # sizes of an exchange, and bytes of replicas apart from it
    model, weights, apart = sizes.model, 0, 0
    if sizes.replica_slots:
        experts, width = model.num_experts // sizes.layout.ep, model.expert_ffn_size
        shapes = (experts, 2 * width, model.hidden_size), (experts, model.hidden_size, width)
        along, of_slots = sizes.sends_weights, (sizes.element_bytes, sizes.replica_slots)
        is_apart = not along or bool(segments_of(graph.scope))  # captured graphs read no weights of others
        weights, apart = room_bytes(shapes, *of_slots, along=along, apart=is_apart)
    row_bytes, places = sizes.element_bytes * model.hidden_size, model.top_k * sizes.layout.etp
    slots = model.top_k + sizes.fp8_rows  # a row's scale is sent as one more slot weight
    return Exchange(sizes.tokens, row_bytes, slots, places, sizes.room.rows, sizes.block, weights), apart


def close_dispatcher() -> None:
    """Free shared memory and buffers after a successful run. Collective over all ranks."""
    use_peers(None)
    IN_USE.shared.clear()
    deepep.close_buffer()
    nvshmem.use_rows(None)


def _in_words(plan: Plan, dispatcher: Dispatcher) -> str:
    words = f"moe.dispatcher={plan.dispatcher}"
    if not isinstance(dispatcher, Symm) or plan.transport is None:
        return words
    blocks = f" with blocks of {dispatcher.block} rows" if dispatcher.block else ""
    balance = f"replicas, {plan.replica_slots} a rank" if plan.replica_slots else "none"
    return f"{words}, moe.transport={plan.transport.value}{blocks}, moe.balance={balance}"


def open_buffer(choice: str, mesh: Mesh, hidden_size: int) -> None:
    """Allocate the buffer of deepep or turbo. Collective over all ranks."""
    group = mesh.group("ep_etp")
    assert group is not None
    if choice == "turbo":
        from primus_turbo.pytorch import deep_ep  # type: ignore[import-not-found]
    else:
        import deep_ep  # type: ignore[import-not-found]

    deepep.use_buffer(deepep.open_buffer(deep_ep, group, hidden_size))


def open_rows(
    model: ModelConfig, mesh: Mesh, tokens: int, rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Grow nvshmem's memory to ``rows`` received rows. Collective over all ranks, not in a capture."""
    group = mesh.group("ep_etp")
    assert group is not None
    places = model.top_k * mesh.layout.etp
    size = nvshmem.bytes_of(tokens, places, rows, model.hidden_size, dtype, model.top_k, group.size())
    if not nvshmem.has_rows(group, size):
        nvshmem.use_rows(nvshmem.PeerRows(group, size, device))


def check_dispatcher(choice: str, device: torch.device, layout: Layout, ranks: Ranks) -> None:
    """Check package, hardware and layout of a dispatcher. *Raises* ConfigError."""
    check_package(choice, device.type)
    group = layout.group("ep_etp", ranks.rank)
    spans = choice != "auto" and dispatcher_facts(choice).one_node
    if spans and len({rank // ranks.local_size for rank in group}) > 1:
        raise ConfigError(
            f"moe.dispatcher={choice} exchanges between GPUs of one node, and the ranks "
            f"{', '.join(map(str, group))} of a group of parallel.ep={layout.ep} are on several; use "
            f"parallel.ep of {ranks.local_size} or a divisor, or moe.dispatcher=nvshmem or alltoall"
        )


def check_package(choice: str, device_type: str) -> None:
    """Check that this machine can run the dispatcher. *Raises* ConfigError."""
    key, facts = f"moe.dispatcher={choice}", dispatcher_facts(choice)
    if facts.platform is None:
        return
    if device_type != "cuda":
        raise ConfigError(f"{key} runs on GPUs, and this run is on a {device_type}; use moe.dispatcher=auto")
    if choice == "nvshmem":
        _check_nvshmem(key)
    if facts.package:
        require_package("moe.dispatcher", choice, INSTEAD)
    if facts.platform == ("cuda" if torch.version.hip else "rocm"):
        other = {"cuda": "CUDA", "rocm": "ROCm"}[facts.platform]
        raise ConfigError(f"{key} is for GPUs with {other}, which this torch lacks; use {INSTEAD}")


def _check_nvshmem(key: str) -> None:
    if not has_nvshmem():
        raise ConfigError(
            f"{key} needs a torch with NVSHMEM and its library libnvshmem_host.so.3, and one of them is "
            f"missing; install nvidia-nvshmem-cu13 (or cu12, as torch's CUDA is), or use {INSTEAD}"
        )
    if os.environ.get(PROGRAMS):
        raise ConfigError(
            f"{key} aligns rows to torch's default number of thread blocks, and "
            f"{PROGRAMS}={os.environ[PROGRAMS]} sets another; unset {PROGRAMS}"
        )
