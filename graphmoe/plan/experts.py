"""Decisions about routed experts: dispatcher, transport and receive capacity.

`FACTS` is the table of dispatchers. Without a host count, a rank sets a receive capacity:
``moe.receive_budget`` times what balanced routing sends, since no large run can afford the worst case, all
tokens on one rank. A step that overflows it is re-run with more (docs/parallel.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from graphmoe.config.choices import look_up
from graphmoe.config.formats import FORMATS
from graphmoe.config.schema import (
    Balance,
    DeviceChoice,
    DispatchDtype,
    Fp8Recipe,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    PassesConfig,
    RunConfig,
    Transport,
)
from graphmoe.plan.layout import Layout
from graphmoe.plan.recompute import Recompute

INSTEAD = "moe.dispatcher=alltoall, or symm within a node"
"""Dispatchers that need no package."""
WORST_CASE = "worst_case"
SLACK = 64
"""A rank may exceed its share of rows by 1/SLACK before an expert is replicated: computing these rows is
faster than sending the weights."""
BLOCK_STEP = 128
"""Rows: granularity of copy-engine blocks."""


class BufferLimits(NamedTuple):
    """Limits of a package that sends bf16 rows through a buffer between the GPUs of a node."""

    hidden_step: int
    """Granularity of hidden sizes."""
    hidden_most: int | None
    top_k: int
    """Most slots of a token: one for each thread of a warp."""
    ranks: tuple[int, ...] = (2, 4, 8)
    """Ranks that share a buffer: the kernels are compiled for these (launch.cuh)."""
    experts: int = 128
    """Most experts of a rank: each is a thread of one block (``notify_dispatch`` in intranode.cu)."""


@dataclass(frozen=True)
class DispatcherFacts:
    """Needs and abilities of a dispatcher."""

    reads_peers: bool = True
    """Ranks access each other's GPU memory, and capacity needs no host count."""
    sync_free_stage: int = 3
    """The highest ``moe.sync_free_stage`` that it supports."""
    one_node: bool = False
    """Communicating ranks must be on one node."""
    platform: Literal["cuda", "rocm", "gpu"] | None = None
    """GPUs that it supports: gpu for either vendor, None for any device."""
    package: str | None = None
    """Its package in `graphmoe.config.packages.VENDORS`."""
    buffer: BufferLimits | None = None
    moves_fp8: bool = False
    """Rows can be dispatched in fp8."""


FACTS: dict[str, DispatcherFacts] = {
    "local": DispatcherFacts(reads_peers=False),
    "alltoall": DispatcherFacts(reads_peers=False, sync_free_stage=1),
    "symm": DispatcherFacts(one_node=True, moves_fp8=True),
    "nvshmem": DispatcherFacts(platform="gpu"),
    # DeepEP 1.2.1: a warp sums 256 numbers in each round of `combine` and synchronises inside it, so each of
    # its threads must have a part of every round. `dispatch` moves half a row through a warp's 8 KiB of
    # shared memory.
    "deepep": DispatcherFacts(
        one_node=True, platform="cuda", package="deepep", buffer=BufferLimits(256, 7936, top_k=32)
    ),
    # Its port to ROCm in Primus-Turbo.
    "turbo": DispatcherFacts(
        one_node=True, platform="rocm", package="turbo", buffer=BufferLimits(8, None, top_k=64)
    ),
}


def dispatcher_facts(choice: str) -> DispatcherFacts:
    """Return the facts of a dispatcher that is not auto; a plug-in has them as ``facts``."""
    return look_up(FACTS, choice, "moe.dispatcher", DispatcherFacts, "facts")


def has_experts(model: ModelConfig) -> bool:
    return model.mtp_depth > 0 or model.num_layers > model.num_dense_layers


def dispatcher_of(moe: MoEConfig, parallel: ParallelConfig) -> str:
    """Return the configured dispatcher; auto is resolved."""
    if moe.dispatcher != "auto":
        return moe.dispatcher
    alone = parallel.ep * parallel.etp == 1
    return "local" if alone else "alltoall"


def reads_peers(moe: MoEConfig, parallel: ParallelConfig) -> bool:
    """Return whether ranks access each other's GPU memory, so each must see all of them."""
    return dispatcher_facts(dispatcher_of(moe, parallel)).reads_peers


def has_room(config: RunConfig) -> bool:
    """Return whether experts get more rows than tokens; the rest is uninitialized memory."""
    return reads_peers(config.moe, config.parallel)


def runs_pass(passes: PassesConfig, name: str) -> bool:
    """Return True if a pass runs; an optional pass needs its parameters."""
    return (passes.enabled is None or name in passes.enabled) and name not in passes.disabled


def fuses_experts(config: RunConfig) -> bool:
    """Return whether a layer's experts run as one operation."""
    return config.compile.enabled and runs_pass(config.passes, "fuse_experts")


def travels_in_fp8(config: RunConfig) -> bool:
    choice = config.moe.dispatch_dtype
    return choice is DispatchDtype.fp8 or (choice is DispatchDtype.auto and why_no_fp8_rows(config) is None)


def experts_in_fp8(config: RunConfig) -> bool:
    return config.precision.fp8 is not Fp8Recipe.none and "experts" in config.precision.fp8_products


def fp8_vendor(config: RunConfig) -> str | None:
    """Return the library that computes fp8 experts; None for our kernels."""
    experts = config.moe.experts
    return experts if experts_in_fp8(config) and experts == "turbo" else None


def keeps_replicas(config: RunConfig) -> bool:
    """Return whether replica weights are saved for the backward."""
    kept = config.moe.replica_keep or not fuses_experts(config)
    # fp8 reads other copies, and a recomputing backward fetches the weights again anyway
    return kept and not (experts_in_fp8(config) or recomputes_experts(config))


def brings_weights(config: RunConfig) -> bool:
    """Return whether replica weights are sent with the rows, to the operation of fuse_experts."""
    return config.moe.balance is Balance.replicas and fuses_experts(config) and not experts_in_fp8(config)


def recomputes_experts(config: RunConfig) -> bool:
    recompute, model = Recompute.of(config.recompute), config.model
    layers = range(model.num_dense_layers, model.num_layers + model.mtp_depth)
    return any(recompute.covers("moe_experts", layer) for layer in layers)


def why_no_fp8_rows(config: RunConfig) -> str | None:
    """Return why rows cannot be dispatched in fp8; None if they can."""
    dispatcher, precision = dispatcher_of(config.moe, config.parallel), config.precision
    if precision.fp8 is Fp8Recipe.none:
        return "precision.fp8=none does not use fp8"
    if not FORMATS[precision.fp8].dispatched:
        return f"precision.fp8={precision.fp8.value} does not scale by row"
    if "experts" not in precision.fp8_products:
        return f"the experts of precision.fp8_products=[{','.join(precision.fp8_products)}] do not use fp8"
    if vendor := fp8_vendor(config):
        return f"moe.experts={vendor} has its own quantized layout"
    if dispatcher == "local":
        return "no rows are dispatched, since each rank has all experts"
    if not dispatcher_facts(dispatcher).moves_fp8:
        return f"moe.dispatcher={dispatcher} cannot send fp8 rows"
    if config.model.layer != "standard":
        return f"model.layer={config.model.layer} may not use fp8"
    return None


def transport_of(config: RunConfig, *, on_nvidia: bool) -> Transport | None:
    """Return the transport of symm's rows, never auto; None with other dispatchers."""
    if dispatcher_of(config.moe, config.parallel) != "symm":
        return None
    if config.moe.transport is not Transport.auto:
        return config.moe.transport
    # copy engines use no multiprocessor, so GEMMs run beside the transfers at full speed
    return Transport.copy_engine if config.pipeline.ep_overlap and on_nvidia else Transport.pull


def transport_of_run(config: RunConfig) -> Transport | None:
    """Return ``transport_of`` on the devices of the run itself; its configuration is resolved."""
    import torch

    # a dry run models GPUs of the vendor that this torch is built for, whatever this machine has
    on_gpu = config.run.device is DeviceChoice.cuda or config.launch.fake_world is not None
    return transport_of(config, on_nvidia=on_gpu and torch.version.hip is None)


def why_no_replicas(config: RunConfig) -> str | None:
    """Return why experts cannot be replicated; None if they can."""
    if config.parallel.ep <= 1:
        return f"parallel.ep={config.parallel.ep} has all experts on every rank"
    dispatcher = dispatcher_of(config.moe, config.parallel)
    if dispatcher != "symm":
        return f"moe.dispatcher={dispatcher} sends rows to the rank that owns their expert"
    if config.parallel.etp > 1:
        return f"parallel.etp={config.parallel.etp} splits each expert over several ranks"
    if vendor := fp8_vendor(config):
        return f"moe.experts={vendor} in fp8 computes scales over weights of unused slots too"
    if config.model.layer != "standard":
        return f"model.layer={config.model.layer} may have other experts"
    return None


def balance_of(config: RunConfig) -> Balance:
    """Return the configured balance of ranks; auto is resolved."""
    if config.moe.balance is not Balance.auto:
        return config.moe.balance
    # no replicas if experts run in separate steps, which save their weights for the backward
    fits = fuses_experts(config) and why_no_replicas(config) is None
    return Balance.replicas if fits else Balance.none


def replica_slots(moe: MoEConfig, model: ModelConfig, ep: int) -> int:
    if moe.balance is not Balance.replicas:
        return 0
    return model.num_experts // ep if moe.replica_slots == "auto" else int(moe.replica_slots)


def is_exact(moe: MoEConfig, model: ModelConfig, layout: Layout) -> bool:
    """Return whether a replica plan has all slots that it can need."""
    return replica_slots(moe, model, layout.ep) == model.num_experts // layout.ep


def slack_of(slots: int) -> int:
    """Rows that a rank may exceed its share by before an expert is replicated; ``slots`` of one rank."""
    return slots // SLACK


class Load(NamedTuple):
    """Rows and slots received by a rank, or the capacity for them."""

    rows: int
    """Tokens; each counts once, however many of its experts are local."""
    slots: int
    """Slots of local experts: rows of the expert GEMMs."""


def routed_tokens(config: RunConfig, layout: Layout) -> int:
    assert config.data.seq_len is not None
    return config.train.micro_batch_size * config.data.seq_len // (layout.tp * layout.cp)


def worst_load(moe: MoEConfig, model: ModelConfig, layout: Layout, tokens: int) -> Load:
    """Return the most that a rank can receive; with an exact replica plan its share and slack."""
    rows = layout.size("ep_etp") * tokens
    if is_exact(moe, model, layout):
        slots = tokens * model.top_k
        slots += slack_of(slots)
        return Load(min(rows, slots), slots)
    return Load(rows, rows * min(model.top_k, model.num_experts // layout.ep))


def balanced_load(model: ModelConfig, layout: Layout, tokens: int) -> Load:
    """Return the expected load of uniform routing; ``tokens`` per rank."""
    here, slots = model.num_experts // layout.ep, tokens * model.top_k * layout.etp
    # hypergeometric: the probability that all top_k experts of a token are on other ranks
    elsewhere = math.comb(model.num_experts - here, model.top_k) / math.comb(model.num_experts, model.top_k)
    return Load(math.ceil(layout.size("ep_etp") * tokens * (1 - elsewhere)), slots)


def room_bytes(
    rooms: Sequence[Load], model: ModelConfig, layout: Layout, element_bytes: int, *, fused: bool
) -> int:
    """Bytes of a rank's tensors that are as large as there is room in each MoE layer, while a step runs.

    The forward of each MoE layer keeps, of a row, the plan of its slots, and with ``fused`` experts the token
    and the weights; of a slot, gate and up, and in separate steps the token, the weight, and the activation
    in three stages. One layer at a time needs more: a row's sum, both gradients and its place in the region
    of symm; a slot's output, activation and gradients. ``recompute`` is ignored, though it may keep less.
    """
    width, inner = model.hidden_size * element_bytes, model.expert_ffn_size // layout.etp * element_bytes
    of_row, of_slot = 8 * model.top_k, 2 * inner
    if fused:
        of_row += width + 4 * model.top_k
    else:
        of_slot += width + 4 + 3 * inner
    kept = sum(room.rows * of_row + room.slots * of_slot for room in rooms)
    largest = max(rooms)
    return kept + largest.rows * (4 * width + 8 * model.top_k) + largest.slots * (2 * width + 5 * inner)


def capacity(moe: MoEConfig, model: ModelConfig, layout: Layout, tokens: int, factor: float = 1.0) -> Load:
    """Capacity for ``factor`` times the receive budget, at most the worst case."""
    worst = worst_load(moe, model, layout, tokens)
    if moe.receive_budget == WORST_CASE or is_exact(moe, model, layout):
        return worst
    balanced, budget = balanced_load(model, layout, tokens), moe.receive_budget * factor
    rows = min(math.ceil(balanced.rows * budget), worst.rows)
    return Load(rows, min(math.ceil(balanced.slots * budget), rows * (worst.slots // worst.rows)))


def blocks_of(balanced: Load, room: Load, ranks: int, exact_of: int | None = None) -> tuple[int, int]:
    """Return the rows that copy engines send for each pair of ranks, and the row capacity."""
    # a block holds the rows of balanced routing; a pair with fewer sends garbage behind them, and a kernel
    # pulls the rest of a pair with more
    block = -(-balanced.rows // (ranks * BLOCK_STEP)) * BLOCK_STEP
    beyond = max(room.rows - balanced.rows, 0)
    if exact_of is not None:
        full, rest = divmod(room.rows, exact_of)  # most if few ranks send all that they have
        beyond = full * max(exact_of - block, 0) + max(rest - block, 0)
    return block, ranks * block + beyond
