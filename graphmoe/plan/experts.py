"""Decisions about routed experts: dispatcher, transport, and the room for received rows.

`FACTS` is the table of dispatchers; rules, commands and ``graphmoe.runtime.dispatch`` ask it.

A rank makes room for rows of other ranks where no host counts them. The worst case is that every token of all
ranks goes to one, which no large run can afford. So room is made for ``moe.receive_budget`` times what a
balanced routing sends; a step in which more arrives is void and runs again with more room
(docs/parallel.md). A plan of replicas needs its share only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from graphmoe.config.choices import look_up
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
"""The value of ``moe.receive_budget`` that makes room for all that can arrive."""
SLACK = 64
"""A rank may have an n-th of its share of rows more before an expert is replicated: these rows take less time
than the weights on their way."""
BLOCK_STEP = 128
"""Rows; a block that copy engines move has a multiple of them."""


class BufferLimits(NamedTuple):
    """Limits of a package that moves bf16 rows through a buffer between the GPUs of a node, 2, 4 or 8."""

    hidden_step: int
    """Hidden sizes are multiples of it."""
    hidden_most: int | None
    top_k: int
    """Slots of a token at most: one for each thread of a warp."""
    ranks: tuple[int, ...] = (2, 4, 8)
    """Ranks that share a buffer: the kernels are compiled for these (launch.cuh)."""
    experts: int = 128
    """Experts of a rank: each is a thread of one block (``notify_dispatch`` in intranode.cu)."""


@dataclass(frozen=True)
class DispatcherFacts:
    """Needs and abilities of a dispatcher."""

    reads_peers: bool = True
    """Ranks reach the memory of each other's GPUs, and room is made without a count of the host."""
    sync_free_stage: int = 3
    """The highest ``moe.sync_free_stage`` that holds with it."""
    one_node: bool = False
    """Ranks that exchange must be on one node."""
    platform: Literal["cuda", "rocm", "gpu"] | None = None
    """GPUs that it runs on, of either vendor for gpu; None for any device."""
    package: str | None = None
    """Name of the package behind it in `graphmoe.config.packages.VENDORS`."""
    buffer: BufferLimits | None = None
    moves_fp8: bool = False
    """Rows can go to their experts in 8 bits."""


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
    """Return the facts of a dispatcher that is not auto; a user's object has them as ``facts``."""
    return look_up(FACTS, choice, "moe.dispatcher", DispatcherFacts, "facts")


def has_experts(model: ModelConfig) -> bool:
    """Return True where any layer has routed experts."""
    return model.mtp_depth > 0 or model.num_layers > model.num_dense_layers


def dispatcher_of(moe: MoEConfig, parallel: ParallelConfig) -> str:
    """Return the dispatcher that a configuration asks for; never auto."""
    if moe.dispatcher != "auto":
        return moe.dispatcher
    alone = parallel.ep * parallel.etp == 1
    return "local" if alone else "alltoall"


def reads_peers(moe: MoEConfig, parallel: ParallelConfig) -> bool:
    """Return True where ranks reach the memory of each other's GPUs, so that each must see all of them."""
    return dispatcher_facts(dispatcher_of(moe, parallel)).reads_peers


def has_room(config: RunConfig) -> bool:
    """Return True where experts get more rows than tokens, and whatever memory has in the others."""
    return reads_peers(config.moe, config.parallel)


def runs_pass(passes: PassesConfig, name: str) -> bool:
    """Return True where a pass that is not optional, or has its parameters, runs."""
    return (passes.enabled is None or name in passes.enabled) and name not in passes.disabled


def fuses_experts(config: RunConfig) -> bool:
    """Return True where the experts of a layer run as one operation."""
    return config.compile.enabled and runs_pass(config.passes, "fuse_experts")


def travels_in_fp8(config: RunConfig) -> bool:
    """Return True where rows go to their experts in 8 bits."""
    choice = config.moe.dispatch_dtype
    return choice is DispatchDtype.fp8 or (choice is DispatchDtype.auto and why_no_fp8_rows(config) is None)


def experts_in_fp8(config: RunConfig) -> bool:
    """Return True where routed experts compute in 8 bits."""
    return config.precision.fp8 is not Fp8Recipe.none and "experts" in config.precision.fp8_products


def fp8_vendor(config: RunConfig) -> str | None:
    """Return the library that was asked for and multiplies experts in 8 bits; None for our kernels."""
    experts = config.moe.experts
    return experts if experts_in_fp8(config) and experts == "turbo" else None


def keeps_replicas(config: RunConfig) -> bool:
    """Return True where weights of replicas are kept for the backward, as asked for or in separate steps.

    In 8 bits that reads others, and a backward that computes experts again would get the weights again.
    """
    kept = config.moe.replica_keep or not fuses_experts(config)
    return kept and not (experts_in_fp8(config) or recomputes_experts(config))


def brings_weights(config: RunConfig) -> bool:
    """Return True where weights of replicas come along with rows, to the operation of fuse_experts."""
    return config.moe.balance is Balance.replicas and fuses_experts(config) and not experts_in_fp8(config)


def recomputes_experts(config: RunConfig) -> bool:
    """Return True where the backward of any MoE layer computes its routed experts again."""
    recompute, model = Recompute.of(config.recompute), config.model
    layers = range(model.num_dense_layers, model.num_layers + model.mtp_depth)
    return any(recompute.covers("moe_experts", layer) for layer in layers)


def why_no_fp8_rows(config: RunConfig) -> str | None:
    """Return why rows cannot go to their experts in 8 bits; None where they can."""
    dispatcher, precision = dispatcher_of(config.moe, config.parallel), config.precision
    if precision.fp8 is Fp8Recipe.none:
        return "precision.fp8=none computes with more"
    if precision.fp8 is not Fp8Recipe.rowwise:
        return f"precision.fp8={precision.fp8.value} stores them with other scales than those of rows"
    if "experts" not in precision.fp8_products:
        return f"the experts of precision.fp8_products=[{','.join(precision.fp8_products)}] compute with more"
    if vendor := fp8_vendor(config):
        return f"moe.experts={vendor} stores them in a form of its own"
    if dispatcher == "local":
        return "no rows travel, since each rank has all experts"
    if not dispatcher_facts(dispatcher).moves_fp8:
        return f"moe.dispatcher={dispatcher} moves no such rows"
    if config.model.layer != "standard":
        return f"model.layer={config.model.layer} may compute with more"
    return None


def transport_of(config: RunConfig, *, on_nvidia: bool) -> Transport | None:
    """Return the mover of the rows of symm, never auto; None with other dispatchers.

    auto takes copy engines where products run beside transfers and copies take no multiprocessor from them.
    """
    if dispatcher_of(config.moe, config.parallel) != "symm":
        return None
    if config.moe.transport is not Transport.auto:
        return config.moe.transport
    return Transport.copy_engine if config.pipeline.ep_overlap and on_nvidia else Transport.pull


def transport_of_run(config: RunConfig) -> Transport | None:
    """Return ``transport_of`` on the devices of the run itself, whose configuration is resolved.

    A dry run is of GPUs of the vendor that this torch is built for (AMD's for ROCm, else NVIDIA's), whatever
    this machine has.
    """
    import torch

    on_gpu = config.run.device is DeviceChoice.cuda or config.launch.fake_world is not None
    return transport_of(config, on_nvidia=on_gpu and torch.version.hip is None)


def why_no_replicas(config: RunConfig) -> str | None:
    """Return why no experts can be replicated; None where they can."""
    if config.parallel.ep <= 1:
        return f"parallel.ep={config.parallel.ep} has all experts on every rank"
    dispatcher = dispatcher_of(config.moe, config.parallel)
    if dispatcher != "symm":
        return f"moe.dispatcher={dispatcher} sends rows to the rank that owns their expert"
    if config.parallel.etp > 1:
        return f"parallel.etp={config.parallel.etp} shares each expert out to several ranks"
    if vendor := fp8_vendor(config):
        return f"moe.experts={vendor} in 8 bits takes scales over weights of free slots too"
    if config.model.layer != "standard":
        return f"model.layer={config.model.layer} may have other experts"
    return None


def balance_of(config: RunConfig) -> Balance:
    """Return the balance of ranks that a configuration asks for; never auto.

    auto makes no replicas where experts run in separate steps, which keep their weights for the backward.
    """
    if config.moe.balance is not Balance.auto:
        return config.moe.balance
    fits = fuses_experts(config) and why_no_replicas(config) is None
    return Balance.replicas if fits else Balance.none


def replica_slots(moe: MoEConfig, model: ModelConfig, ep: int) -> int:
    """Return how many experts of others a rank can compute; 0 without replicas."""
    if moe.balance is not Balance.replicas:
        return 0
    return model.num_experts // ep if moe.replica_slots == "auto" else int(moe.replica_slots)


def is_exact(moe: MoEConfig, model: ModelConfig, layout: Layout) -> bool:
    """Return True where a plan of replicas has as many slots as it can need."""
    return replica_slots(moe, model, layout.ep) == model.num_experts // layout.ep


def slack_of(slots: int) -> int:
    """Rows that a rank may have beyond its share before an expert is replicated; a rank routes ``slots``."""
    return slots // SLACK


class Load(NamedTuple):
    """Rows and slots that arrive at a rank, or room for them."""

    rows: int
    """Tokens; each comes once, however many of its experts are here."""
    slots: int
    """Their slots of experts that are here: rows of the experts' products."""


def routed_tokens(config: RunConfig, layout: Layout) -> int:
    """Tokens that each rank routes at once."""
    assert config.data.seq_len is not None
    return config.train.micro_batch_size * config.data.seq_len // (layout.tp * layout.cp)


def worst_load(moe: MoEConfig, model: ModelConfig, layout: Layout, tokens: int) -> Load:
    """Return all tokens of all ranks of ep_etp, each with all its slots here as far as there are experts.

    Where a plan of replicas has as many slots as it can need, a rank's share and the slack instead.
    """
    rows = layout.size("ep_etp") * tokens
    if is_exact(moe, model, layout):
        slots = tokens * model.top_k
        slots += slack_of(slots)
        return Load(min(rows, slots), slots)
    return Load(rows, rows * min(model.top_k, model.num_experts // layout.ep))


def balanced_load(model: ModelConfig, layout: Layout, tokens: int) -> Load:
    """Return the load where each token's experts are drawn alike from all; ``tokens`` are those of one rank.

    A token comes here with the probability that not all its ``top_k`` experts are others, which is
    hypergeometric.
    """
    here, slots = model.num_experts // layout.ep, tokens * model.top_k * layout.etp
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
    """Room for ``factor`` times the receive budget, or for the worst case if that is less, or exact."""
    worst = worst_load(moe, model, layout, tokens)
    if moe.receive_budget == WORST_CASE or is_exact(moe, model, layout):
        return worst
    balanced, budget = balanced_load(model, layout, tokens), moe.receive_budget * factor
    rows = min(math.ceil(balanced.rows * budget), worst.rows)
    return Load(rows, min(math.ceil(balanced.slots * budget), rows * (worst.slots // worst.rows)))


def blocks_of(balanced: Load, room: Load, ranks: int, exact_of: int | None = None) -> tuple[int, int]:
    """Return the rows that copy engines move for each pair of ranks, and the rows to make room for.

    A block has the rows of a balanced routing, rounded up. A pair with fewer rows sends garbage behind them;
    of a pair with more, a kernel pulls the rest, for which there is as much room as ``room`` has beyond
    balance. Where ``room`` is exact, for ranks of ``exact_of`` tokens, as much as can be behind the blocks.
    """
    block = -(-balanced.rows // (ranks * BLOCK_STEP)) * BLOCK_STEP
    beyond = max(room.rows - balanced.rows, 0)
    if exact_of is not None:
        full, rest = divmod(room.rows, exact_of)  # most if few ranks send all that they have
        beyond = full * max(exact_of - block, 0) + max(rest - block, 0)
    return block, ranks * block + beyond
