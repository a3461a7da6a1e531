"""Decisions about routed experts: dispatcher, transport and receive capacity.

If the host reads no row counts, capacity is ``moe.receive_budget`` times the rows of balanced routing: the
worst case, all tokens on one rank, is too large. An overflowed step reruns with more (docs/parallel.md).
"""

from __future__ import annotations

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
    PassesConfig,
    RunConfig,
    Transport,
)
from graphmoe.plan.layout import Layout
from graphmoe.plan.recompute import Recompute
from graphmoe.segments import segments_of

EXPERT_KEYS = (
    "top_k", "expert_ffn_size", "shared_ffn_size", "shared_gate", "expert_bias", "swiglu_limit",
    "moe_every", "router_bias", "input_scaling", "score_function", "softmax_after_topk",
    "renormalise", "routed_scale", "num_groups", "topk_groups", "group_score", "selection_bias",
    "bias_update_rate", "aux_loss", "aux_loss_coef", "z_loss_coef", "mtp_depth", "mtp_loss_weight",
)  # fmt: skip
"""Keys of ``model`` that only MoE layers read."""
TRAINING_KEYS = {"name", "hf_family", "attention_backend", "bias_update_rate", "aux_loss", "aux_loss_coef"}
TRAINING_KEYS |= {"lora_rank", "lora_alpha", "lora_targets"}
TARGETS = {"attn": "attention", "mlp": "mlp", "shared_experts": "shared_experts", "moe_experts": "experts"}
"""Entry of ``model.lora_targets`` by segment, and by module of a layer."""
TRAINING_KEYS |= {"delta_net_backend", "z_loss_coef", "mtp_loss_weight", "init_std", "peak_lr"}
"""Keys of ``model`` that config.json lacks, or that only training uses."""
INSTEAD = "moe.dispatcher=alltoall, or symm within a node"  # dispatchers that need no package
WORST_CASE = "worst_case"
# A rank may exceed its share by 1/SLACK before replication: computing is faster than sending weights
SLACK = 64
EXCHANGING = {"moe_dispatch", "moe_experts", "moe_combine"}  # segments that send replica weights or read them
BLOCK_STEP = 128  # granularity of copy-engine blocks, in rows


class BufferLimits(NamedTuple):
    """Limits of a package that sends bf16 tokens through a buffer between GPUs of a node."""

    hidden_step: int
    """Hidden sizes must be a multiple of this."""
    hidden_most: int | None
    top_k: int
    """Most slots of a token: one per thread of a warp."""
    ranks: tuple[int, ...] = (2, 4, 8)
    """Ranks per buffer that the kernels are compiled for (launch.cuh)."""
    experts: int = 128
    """Most experts of a rank: one per thread of a block (``notify_dispatch`` in intranode.cu)."""


@dataclass(frozen=True)
class DispatcherFacts:
    reads_peers: bool = True
    """True if ranks access each other's GPU memory, so that capacity needs no host count."""
    sync_free_stage: int = 3
    """The highest ``moe.sync_free_stage`` that the dispatcher supports."""
    one_node: bool = False
    platform: Literal["cuda", "rocm", "gpu"] | None = None
    """Supported GPUs: gpu for either vendor, None for any device."""
    package: str | None = None
    buffer: BufferLimits | None = None
    moves_fp8: bool = False
    """True if rows can be dispatched in fp8."""


FACTS: dict[str, DispatcherFacts] = {
    "local": DispatcherFacts(reads_peers=False),
    "alltoall": DispatcherFacts(reads_peers=False, sync_free_stage=1),
    "symm": DispatcherFacts(one_node=True, moves_fp8=True),
    "nvshmem": DispatcherFacts(platform="gpu"),
    # DeepEP 1.2.1: in each round of `combine` a warp sums 256 numbers and synchronises, so each of its
    # threads must have a part of every round. `dispatch` moves half a row through a warp's 8 KiB of
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
    """Return the properties of a dispatcher (not auto); a plug-in's are its attribute ``facts``."""
    return look_up(FACTS, choice, "moe.dispatcher", DispatcherFacts, "facts")


def has_experts(model: ModelConfig) -> bool:
    return len(moe_layers(model)) > 0


def is_moe(model: ModelConfig, layer: int) -> bool:
    """Return whether a layer has routed experts; multi-token-prediction layers, the last, always do."""
    if layer >= model.num_layers:
        return True
    return layer >= model.num_dense_layers and (layer + 1) % max(model.moe_every, 1) == 0


def moe_layers(model: ModelConfig) -> list[int]:
    """Return the numbers of the layers that have routed experts."""
    return [layer for layer in range(model.num_layers + model.mtp_depth) if is_moe(model, layer)]


def num_dense(model: ModelConfig) -> int:
    """Return the number of layers that have a dense MLP."""
    return model.num_layers + model.mtp_depth - len(moe_layers(model))


def adapted_of(model: ModelConfig, layer: int) -> set[str]:
    """Return the entries of ``model.lora_targets`` that name matrices of a layer."""
    shared = ["shared_experts"] * (model.shared_ffn_size > 0)
    there = ["experts", *shared] if is_moe(model, layer) else ["mlp"]
    return {"attention", *there} & {*model.lora_targets}


def adapts(model: ModelConfig, segment: str) -> bool:
    """Return whether matrices of a segment, of `TARGETS`, have LoRA adapters."""
    return model.lora_rank > 0 and TARGETS.get(segment) in model.lora_targets


def adapts_experts(model: ModelConfig) -> bool:
    """Return whether routed experts have LoRA adapters."""
    return adapts(model, "moe_experts") and has_experts(model)


def runs_pass(passes: PassesConfig, name: str) -> bool:
    return (passes.enabled is None or name in passes.enabled) and name not in passes.disabled


@dataclass(frozen=True)
class ExpertPlan:
    """Decisions about the routed experts of a configuration, on any layout and device."""

    dispatcher: str
    """Name of the dispatcher, never auto."""
    reads_peers: bool
    """True if ranks access each other's GPU memory; receive buffers then have unused rows."""
    balance: Balance
    """Kind of balancing, never auto."""
    fuses_experts: bool
    """True if a layer's experts run as one op; adapters of LoRA are separate steps."""
    experts_in_fp8: bool
    fp8_vendor: str | None
    """Library that computes fp8 experts; None for our kernels."""
    recomputes_experts: bool
    fp8_rows: bool
    """True if rows are dispatched in fp8."""
    no_fp8_rows: str | None
    """Why rows cannot be dispatched in fp8; None if they can."""
    no_replicas: str | None
    """Why experts cannot be replicated; None if they can."""
    keeps_replicas: bool
    """True if replica weights are saved for the backward."""
    sends_weights: bool
    """True if exchanges of tokens send replica weights too, and the op of pass fuse_experts reads these."""


def experts_of(config: RunConfig) -> ExpertPlan:
    moe, dispatcher = config.moe, config.moe.dispatcher
    fused = config.compile.enabled and runs_pass(config.passes, "fuse_experts")
    fused = fused and not adapts_experts(config.model)
    in_fp8 = config.precision.fp8 is not Fp8Recipe.none and "experts" in config.precision.fp8_products
    vendor = moe.experts if in_fp8 and moe.experts == "turbo" else None
    recompute, model = Recompute.of(config.recompute), config.model
    recomputed = any(recompute.covers("moe_experts", layer) for layer in moe_layers(model))
    no_fp8_rows = _why_no_fp8_rows(config, dispatcher, vendor)
    no_replicas = _why_no_replicas(config, dispatcher, vendor)
    balance = moe.balance
    if balance is Balance.auto:
        # no replicas if experts run in separate steps, which save their weights for the backward
        balance = Balance.replicas if fused and no_replicas is None else Balance.none
    chosen, captured = moe.dispatch_dtype, {*segments_of(config.graph.scope)}
    # graphs and uncaptured code do not read what the other fetched; graphs know a replica plan by its address
    reads_sent = not captured & EXCHANGING or captured >= {"moe_preprocess", *EXCHANGING}
    return ExpertPlan(
        dispatcher=dispatcher,
        reads_peers=dispatcher_facts(dispatcher).reads_peers,
        balance=balance,
        fuses_experts=fused,
        experts_in_fp8=in_fp8,
        fp8_vendor=vendor,
        recomputes_experts=recomputed,
        fp8_rows=chosen is DispatchDtype.fp8 or (chosen is DispatchDtype.auto and no_fp8_rows is None),
        no_fp8_rows=no_fp8_rows,
        no_replicas=no_replicas,
        # fp8 reads other copies, and a recomputing backward fetches the weights again anyway
        keeps_replicas=(moe.replica_keep or not fused) and not (in_fp8 or recomputed),
        sends_weights=balance is Balance.replicas and fused and not in_fp8 and reads_sent,
    )


def _why_no_fp8_rows(config: RunConfig, dispatcher: str, vendor: str | None) -> str | None:
    precision = config.precision
    if precision.fp8 is Fp8Recipe.none:
        return "precision.fp8=none does not use fp8"
    if not FORMATS[precision.fp8].dispatched:
        return f"precision.fp8={precision.fp8.value} does not scale by row"
    if "experts" not in precision.fp8_products:
        return f"the experts of precision.fp8_products=[{','.join(precision.fp8_products)}] do not use fp8"
    if vendor:
        return f"moe.experts={vendor} has its own quantized layout"
    if dispatcher == "local":
        return "no rows are dispatched, since each rank has all experts"
    if not dispatcher_facts(dispatcher).moves_fp8:
        return f"moe.dispatcher={dispatcher} cannot send fp8 rows"
    if config.model.layer != "standard":
        return f"model.layer={config.model.layer} may not use fp8"
    if config.model.expert_bias:
        return "the gradient of model.expert_bias=true reads rows that are not quantized"
    return None


def _why_no_replicas(config: RunConfig, dispatcher: str, vendor: str | None) -> str | None:
    if config.parallel.ep <= 1:
        return f"parallel.ep={config.parallel.ep} has all experts on every rank"
    if dispatcher != "symm":
        return f"moe.dispatcher={dispatcher} sends rows to the rank that owns their expert"
    if config.parallel.etp > 1:
        return f"parallel.etp={config.parallel.etp} splits each expert over several ranks"
    if vendor:
        return f"moe.experts={vendor} in fp8 computes scales over weights of unused slots too"
    if config.model.layer != "standard":
        return f"model.layer={config.model.layer} may have other experts"
    if config.model.expert_bias:
        return "model.expert_bias=true adds biases, which are not replicated"
    if config.model.lora_rank:
        return f"model.lora_rank={config.model.lora_rank} freezes weights, whose replicas send gradients"
    return None


def transport_of(config: RunConfig, *, on_nvidia: bool) -> Transport | None:
    """Return the transport (copy engines or kernels) of dispatcher symm, never auto; None for others."""
    if config.moe.dispatcher != "symm":
        return None
    if config.moe.transport is not Transport.auto:
        return config.moe.transport
    # copy engines use no multiprocessor, so GEMMs run beside the transfers at full speed
    return Transport.copy_engine if config.pipeline.ep_overlap and on_nvidia else Transport.pull


def transport_of_run(config: RunConfig) -> Transport | None:
    """Return symm's transport on this run's devices, else None; ``config`` is resolved."""
    import torch

    # a dry run models GPUs of the vendor that this torch is built for, whatever this machine has
    on_gpu = config.run.device is DeviceChoice.cuda or config.launch.fake_world is not None
    return transport_of(config, on_nvidia=on_gpu and torch.version.hip is None)


def replica_slots(moe: MoEConfig, model: ModelConfig, ep: int) -> int:
    if moe.balance is not Balance.replicas:
        return 0
    return model.num_experts // ep if moe.replica_slots == "auto" else int(moe.replica_slots)


def slack_of(slots: int) -> int:
    """Return the rows above the mean that a rank may get without replication; ``slots`` per rank."""
    return slots // SLACK


class Load(NamedTuple):
    """Rows (tokens) and slots (token, local expert) that a rank receives, or its capacity for them."""

    rows: int
    """Tokens; each counts once, however many of its experts are local."""
    slots: int
    """Slots of local experts: rows of the expert GEMMs."""


def routed_tokens(config: RunConfig, layout: Layout) -> int:
    assert config.data.seq_len is not None
    return config.train.micro_batch_size * config.data.seq_len // (layout.tp * layout.cp)


def balanced_load(model: ModelConfig, layout: Layout, tokens: int) -> Load:
    """Return a rank's expected load under uniform routing, if each rank routes ``tokens``."""
    top_k = min(model.top_k, model.num_experts)  # 0 without experts
    here, slots = model.num_experts // layout.ep, tokens * top_k * layout.etp
    # hypergeometric: the probability that all top_k experts of a token are on other ranks
    elsewhere = math.comb(model.num_experts - here, top_k) / math.comb(model.num_experts, top_k)
    return Load(math.ceil(layout.size("ep_etp") * tokens * (1 - elsewhere)), slots)


def sent_load(moe: MoEConfig, model: ModelConfig, layout: Layout, tokens: int) -> Load:
    """Return the load that alltoall is counted with: of uniform routing.

    ``force_balance`` is counted with the most rows that a balanced routing sends.
    """
    load = balanced_load(model, layout, tokens)
    return (
        load._replace(rows=tokens * min(model.top_k, layout.ep) * layout.etp) if moe.force_balance else load
    )


def room_bytes(
    rooms: Sequence[Load], model: ModelConfig, layout: Layout, element_bytes: int, *, fused: bool
) -> int:
    """Return the bytes of tensors on a rank whose size is the receive capacity, ``rooms`` per MoE layer.

    Saved per MoE layer: per row the plan of its slots, and if ``fused`` token and weights; per slot gate and
    up, and if not ``fused`` token, weight and three stages of the activation. The running layer also has
    per row a sum, both gradients and symm's peer memory; per slot output, activation and gradients.
    ``recompute`` is ignored.
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


@dataclass(frozen=True)
class Arrivals:
    """Expected and largest rows and slots that a rank receives in a micro-batch, and its capacity."""

    balanced: Load
    """Load of uniform routing."""
    worst: Load
    """Load if as many tokens as possible are routed to the rank; with an exact replica plan the mean plus
    slack.
    """
    budget: float | None
    """``moe.receive_budget``; None if capacity covers the worst case."""
    replica_slots: int
    """Replica slots per rank; 0 without replicas."""
    exact_of: int | None
    """Tokens of each rank if the replica plan never lacks slots; else None."""

    def room(self, factor: float = 1.0) -> Load:
        """Return the capacity for ``factor`` times the receive budget, at most the worst case."""
        if self.budget is None:
            return self.worst
        budget = self.budget * factor
        rows = min(math.ceil(self.balanced.rows * budget), self.worst.rows)
        per_row = self.worst.slots // self.worst.rows
        return Load(rows, min(math.ceil(self.balanced.slots * budget), rows * per_row))


def arrivals_of(moe: MoEConfig, model: ModelConfig, layout: Layout, tokens: int) -> Arrivals:
    """Return expected and worst loads, and capacity, for a resolved ``moe``; ``tokens`` per rank."""
    rows, owned = layout.size("ep_etp") * tokens, model.num_experts // layout.ep
    replicas = replica_slots(moe, model, layout.ep)
    is_exact = 0 < replicas == owned
    if is_exact:
        slots = tokens * model.top_k
        slots += slack_of(slots)
        rows = min(rows, slots)
    else:
        slots = rows * min(model.top_k, owned)
    return Arrivals(
        balanced_load(model, layout, tokens),
        Load(rows, slots),
        None if is_exact or moe.receive_budget == WORST_CASE else float(moe.receive_budget),
        replicas,
        tokens if is_exact else None,
    )


def blocks_of(balanced: Load, room: Load, ranks: int, exact_of: int | None = None) -> tuple[int, int]:
    """Return the rows per pair of ranks that copy engines transfer, and a rank's capacity of rows."""
    # a block holds the rows of balanced routing: pairs with fewer pad it, and for pairs with more a kernel
    # fetches the rest
    block = -(-balanced.rows // (ranks * BLOCK_STEP)) * BLOCK_STEP
    beyond = max(room.rows - balanced.rows, 0)
    if exact_of is not None:
        full, rest = divmod(room.rows, exact_of)  # the most is beyond if few ranks send all their rows
        beyond = full * max(exact_of - block, 0) + max(rest - block, 0)
    return block, ranks * block + beyond
