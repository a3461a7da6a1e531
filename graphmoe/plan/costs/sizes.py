"""Tokens, routed rows and heads of one micro-batch on one rank, which determine tensor sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from graphmoe.config.choices import ATTENTIONS, LAYERS
from graphmoe.config.formats import FORMATS
from graphmoe.config.schema import (
    AttentionBackend,
    ComputeDtype,
    ConfigError,
    DeltaNetBackend,
    Fp8Recipe,
    Fp8WeightGrad,
    GradDtype,
    MasterDtype,
    ModelConfig,
    RunConfig,
    Transport,
)
from graphmoe.plan.attention import AttentionFacts, attention_facts, is_hybrid, is_linear, model_of_layer
from graphmoe.plan.costs.rates import FP32
from graphmoe.plan.experts import (
    Load,
    arrivals_of,
    blocks_of,
    dispatcher_facts,
    experts_of,
    is_moe,
    routed_tokens,
    sent_load,
    transport_of,
)
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.layouts import StagePieces


@dataclass(frozen=True, eq=False)
class Sizes:
    """Sizes on any rank of a layout; compared by identity, as a cache key."""

    model: ModelConfig
    layout: Layout
    element_bytes: int
    sequences: int
    seq_len: int
    room: Load
    """Rows and slots that a rank's experts receive, or their capacity."""
    is_planned: bool
    """True if receive capacity is fixed, so the host counts no rows."""
    pads_values: bool
    """True if attention pads value heads to the size of query heads."""
    block: int = 0
    """Rows that copy engines send per pair of ranks."""
    fp8: frozenset[str] = frozenset()
    """Names of the GEMMs in fp8, of `graphmoe.config.choices.FP8_PRODUCTS`."""
    fp8_skips: frozenset[int] = frozenset()
    bf16_weight_grads: bool = False
    """True if the wgrad of dense fp8 GEMMs is in bf16."""
    fp8_rows: bool = False
    replica_slots: int = 0
    keeps_replicas: bool = False
    """True if replica weights are saved from forward to backward."""
    sends_weights: bool = False
    """True if replica weights are sent with dispatched tokens."""
    on_nvidia: bool = True
    dispatcher: str = "local"
    overlaps: bool = False
    """True if a micro-batch is exchanged while another is computed."""
    has_masters: bool = True
    """True if bf16 weights have fp32 master weights, from which they can be restored."""
    rounds_sums: bool = False
    """True if gradients of several micro-batches add up in bf16, each after its wgrad."""

    @classmethod
    def from_config(cls, config: RunConfig, layout: Layout, *, on_nvidia: bool) -> Sizes:
        """Return the sizes of a resolved configuration; padding and transport depend on ``on_nvidia``."""
        assert config.data.seq_len is not None
        choice = config.moe.dispatcher
        exchanges = choice not in ("local", "alltoall")
        backend = config.model.attention_backend
        facts = attention_facts(config.model)
        asked = backend is AttentionBackend.padded_flash
        model, tokens, block = config.model, routed_tokens(config, layout), 0
        experts, arrivals = experts_of(config), arrivals_of(config.moe, model, layout, tokens)
        if exchanges:
            room = arrivals.room()
            if dispatcher_facts(choice).buffer:  # holds all tokens of all ranks, so only slots are limited
                room = room._replace(rows=layout.size("ep_etp") * tokens)
        else:  # no capacity; as in a dry run
            room = sent_load(config.moe, model, layout, tokens)
        if transport_of(config, on_nvidia=on_nvidia) is Transport.copy_engine:
            block, rows = blocks_of(arrivals.balanced, room, layout.size("ep_etp"), arrivals.exact_of)
            room = room._replace(rows=rows)
        several = config.train.global_batch_size > config.train.micro_batch_size * layout.dp
        precision, num_layers = config.precision, model.num_layers + model.mtp_depth
        in_fp8 = precision.fp8 is not Fp8Recipe.none
        return cls(
            model,
            layout,
            2 if config.precision.compute is ComputeDtype.bf16 else 4,
            config.train.micro_batch_size,
            config.data.seq_len,
            room,
            exchanges,
            facts.head != facts.value and (asked or (not on_nvidia and backend is AttentionBackend.auto)),
            block,
            frozenset(precision.fp8_products if in_fp8 else ()) - {"experts" if experts.fp8_vendor else ""},
            frozenset(layer % num_layers for layer in precision.fp8_skip_layers if in_fp8),
            precision.fp8_wgrad is Fp8WeightGrad.bf16,
            experts.fp8_rows,
            arrivals.replica_slots,
            experts.keeps_replicas,
            experts.sends_weights,
            on_nvidia,
            choice,
            overlaps(config, layout),
            config.optim.master_dtype is MasterDtype.fp32 and not config.optim.offload,
            config.optim.grad_dtype is GradDtype.bf16 and several,
        )

    @functools.cached_property
    def plain(self) -> Sizes:
        """Sizes without fp8 and LoRA."""
        none: frozenset[Any] = frozenset()
        if not (self.fp8 or self.model.lora_rank):
            return self
        return replace(self, fp8=none, fp8_skips=none, fp8_rows=False, model=replace(self.model, lora_rank=0))

    @property
    def expert_elements(self) -> int:
        return 3 * self.model.hidden_size * self.model.expert_ffn_size // self.layout.etp

    @property
    def pulled_bytes(self) -> int:
        """Bytes of one expert's weights, in the dtype in which they are sent to a replica."""
        return self.expert_elements * (1 if "experts" in self.fp8 else self.element_bytes)

    def of_layer(self, index: int) -> Sizes:
        sizes = self.plain if index in self.fp8_skips else self
        if not is_hybrid(self.model):
            return sizes
        return sizes.of_linear if is_linear(self.model, index) else sizes.of_full

    @functools.cached_property
    def of_linear(self) -> Sizes:
        return replace(self, model=model_of_layer(self.model, 0))

    @functools.cached_property
    def of_full(self) -> Sizes:
        return replace(self, model=model_of_layer(self.model, self.model.num_layers))

    @functools.cached_property
    def attention(self) -> AttentionFacts:
        return attention_facts(self.model)

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads or self.model.num_heads

    @property
    def value_head(self) -> int:
        """Elements of a value head after padding."""
        return self.attention.head if self.pads_values else self.attention.value

    @property
    def tokens(self) -> int:
        """Tokens of the residual stream on a rank."""
        return self.sequences * self.seq_len // (self.layout.tp * self.layout.cp)

    @property
    def gathered(self) -> int:
        return self.tokens * self.layout.tp

    def ranks_of(self, segment: str) -> int:
        """Return how many ranks share a dense segment's matrices, and gather their tokens for it."""
        return 1 if segment == "shared_experts" else self.layout.tp

    @property
    def exchanging(self) -> int:
        return 1 if self.layout.ring else self.layout.cp

    @property
    def attended(self) -> int:
        """Tokens whose queries a rank's attention processes."""
        return self.gathered * self.exchanging

    @property
    def state(self) -> int:
        """Bytes of the residual stream of a rank."""
        return self.tokens * self.model.hidden_size * self.element_bytes

    def heads(self, count: int) -> int:
        return count // (self.layout.tp * self.exchanging)


def overlaps(config: RunConfig, layout: Layout) -> bool:
    """Return whether a micro-batch is exchanged while another is computed: one alone has none beside it."""
    return config.pipeline.ep_overlap and (
        config.train.global_batch_size > config.train.micro_batch_size * layout.dp
    )


def deferred_bytes(sizes: Sizes, pieces: StagePieces, saved: float) -> float:
    """Return what a stage's dgrad hands to a deferred wgrad: inputs of GEMMs, and their outputs' gradients.

    ``saved``: bytes that its forward saves.
    """
    model, rows = sizes.model, sizes.gathered
    if model.lora_rank:
        return saved
    num_mtp, depth = len(pieces.mtp), model.num_layers
    layers = sum(_operands(sizes, i) for i in (*pieces.layers, *(depth + k for k in pieces.mtp)))
    of_head = FP32 * model.vocab_size // sizes.layout.tp * model.hidden_size * (model.mtp_depth + 1)
    joined = sizes.element_bytes * rows * model.hidden_size * (pieces.embed + 3 * num_mtp)
    return layers + joined + of_head * pieces.loss


def _operands(sizes: Sizes, index: int) -> float:
    moe, sizes = is_moe(sizes.model, index), sizes.of_layer(index)
    model, tp, d, (rows, slots) = sizes.model, sizes.layout.tp, sizes.model.hidden_size, sizes.room
    *first, last = sizes.attention.weights
    of_attention = {each.rows for each in first}, [each.columns / tp for each in first]
    found = {"attn": sizes.gathered * (sum(map(sum, of_attention)) + last.rows / tp + d)}
    dense, of_token = ("shared_experts", model.shared_ffn_size) if moe else ("mlp", model.dense_ffn_size / tp)
    found[dense] = (sizes.tokens if moe else sizes.gathered) * (2 * d + 3 * of_token)
    has_rows = sizes.layout.size("ep_etp") > 1
    if moe and (sizes.is_planned or not has_rows):  # else wgrad of experts is part of dgrad
        found["experts"] = slots * 3 * (model.expert_ffn_size // sizes.layout.etp) + 2 * has_rows * rows * d
    of_router = moe * FP32 * sizes.tokens * (d + model.num_experts)
    return of_router + sum(n * (1 if name in sizes.fp8 else sizes.element_bytes) for name, n in found.items())


def refuse_unknown(config: RunConfig) -> None:
    """Raise ConfigError for settings whose memory or rates are unknown to the estimates."""
    problems, recipe = [], config.precision.fp8
    unknown = [name for name, each in FORMATS.items() if each.rates == "unknown"]
    if recipe in unknown:
        known = " or ".join(name for name in Fp8Recipe if name not in (*unknown, "auto"))
        problems.append(f"bytes and rates of precision.fp8={recipe} are not known here; use {known}")
    if not config.compile.enabled:
        problems.append("compile.enabled=false saves what autograd chooses; use compile.enabled=true")
    if attention_facts(config.model).kept is None:
        problems.append(
            f"the facts of model.attention={config.model.attention} do not say what its backward saves; "
            f"give them kept, or use model.attention={' or '.join(ATTENTIONS.names)}"
        )
    if is_hybrid(config.model) and config.model.delta_net_backend is DeltaNetBackend.fla:
        problems.append(
            "model.delta_net_backend=fla has other rates and saves other activations; use auto or triton"
        )
    if config.model.layer not in LAYERS.names:
        problems.append(f"model.layer={config.model.layer} saves unknown activations; use {LAYERS.names[0]}")
    if config.passes.enabled is not None or config.passes.disabled:
        problems.append("passes.enabled and passes.disabled change what is saved; leave them out")
    if problems:
        raise ConfigError("not projected: " + "; ".join(problems))
