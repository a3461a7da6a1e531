"""Tensors of a published folder, each a part of one of our tensors."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphmoe.checkpoint.hf.family import Family, Form, Piece
from graphmoe.config.schema import AttentionBias, ModelConfig
from graphmoe.ops import accumulator
from graphmoe.plan.attention import attention_facts, model_of_layer
from graphmoe.plan.experts import is_moe

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# added in fp32: around 0 bf16 has more bits than around 1
CENTRED = Form(lambda w: w.to(accumulator(w)) + 1, lambda w: w - 1, of_experts=False)
FUSED = ".experts.gate_up_proj"
"""Suffix of a tensor's name in folders of transformers 5, which store a layer's experts as one tensor."""


def pieces(family: Family, config: ModelConfig, *, fused: bool = False) -> list[Piece]:
    """Return all tensors of a published folder; those without ``repeats`` cover each element of ours once."""
    if fused and family.experts is None:
        family = replace(family, moe="mlp", gate_up_down=None)
    found = [
        Piece(EMBEDDING, "embed.weight"),
        Piece("model.norm.weight", "loss_head.norm.weight"),
        _head(config),
    ]
    for i in range(config.num_layers):
        own, dense = model_of_layer(config, i), not is_moe(config, i)
        found += _layer(family, own, f"model.layers.{i}", f"layers.{i}", dense=dense)
    for k in range(config.mtp_depth):
        found += _mtp(family, config, f"model.layers.{config.num_layers + k}", f"mtp.{k}")
    if family.centred_norms:
        found = [replace(piece, form=CENTRED) if _is_norm(piece.ours) else piece for piece in found]
    return [_renamed(piece, family) for piece in found] if family.renames else found


def _is_norm(ours: str) -> bool:
    return ours.endswith("norm.weight") and not ours.endswith(".out_norm.weight")


def _renamed(piece: Piece, family: Family) -> Piece:
    theirs, repeats = piece.theirs, piece.repeats
    for ours, published in family.renames:
        theirs, repeats = theirs.replace(ours, published), repeats and repeats.replace(ours, published)
    return replace(piece, theirs=theirs, repeats=repeats)


def _head(config: ModelConfig) -> Piece:
    if config.tie_embeddings:
        return Piece(HEAD, "embed.weight", repeats=EMBEDDING, written=False)
    return Piece(HEAD, "loss_head.head.weight")


def _mtp(family: Family, config: ModelConfig, theirs: str, ours: str) -> Iterator[Piece]:
    """Yield the tensors of a multi-token-prediction layer, with its copies of embedding and head."""
    head = _head(config)
    if family.mtp_copies:
        yield Piece(f"{theirs}.embed_tokens.weight", "embed.weight", repeats=EMBEDDING)
    yield Piece(f"{theirs}.enorm.weight", f"{ours}.embed_norm.weight")
    yield Piece(f"{theirs}.hnorm.weight", f"{ours}.hidden_norm.weight")
    yield Piece(f"{theirs}.eh_proj.weight", f"{ours}.proj.weight")
    yield from _layer(family, config, theirs, f"{ours}.layer", dense=False)
    yield Piece(f"{theirs}.shared_head.norm.weight", f"{ours}.norm.weight")
    if family.mtp_copies:
        yield Piece(f"{theirs}.shared_head.head.weight", head.ours, repeats=head.repeats or head.theirs)


def _layer(family: Family, config: ModelConfig, theirs: str, ours: str, *, dense: bool) -> Iterator[Piece]:
    yield Piece(f"{theirs}.input_layernorm.weight", f"{ours}.attn.norm.weight")
    if attention_facts(config).recurrence:
        assert family.linear_attention is not None
        yield from family.linear_attention(config, theirs, f"{ours}.attn")
    else:
        yield from _attention(family, config, theirs, ours)
    block = f"{theirs}.{family.moe}"
    their_norm = f"{theirs}.post_attention_layernorm.weight"
    if dense:
        yield Piece(their_norm, f"{ours}.mlp.norm.weight")
        yield from _swiglu(block, f"{ours}.mlp", config.dense_ffn_size)
        return
    yield Piece(their_norm, f"{ours}.moe_router.norm.weight")
    yield Piece(f"{block}.{family.router}.weight", f"{ours}.moe_router.gate.weight")
    if config.router_bias:
        yield Piece(f"{block}.{family.router}.bias", f"{ours}.moe_router.gate.bias")
    if config.selection_bias:
        yield Piece(f"{block}.{family.router}.e_score_correction_bias", f"{ours}.moe_router.selection_bias")
    if config.shared_ffn_size:
        yield from _swiglu(f"{block}.shared_experts", f"{ours}.shared_experts", config.shared_ffn_size)
    if config.shared_gate:
        yield Piece(f"{block}.shared_expert_gate.weight", f"{ours}.shared_experts.gate.weight")
    yield from _experts(family, config, block, f"{ours}.moe_experts")


def _attention(family: Family, config: ModelConfig, theirs: str, ours: str) -> Iterator[Piece]:
    forms = family.row_forms(config)
    for their_name, our_names in family.attention_names(config).items():
        stored = _stacked(config, f"{theirs}.self_attn.{their_name}", f"{ours}.attn", our_names.split())
        yield from (replace(piece, form=forms.get(our_names)) for piece in stored)
    for name in "" if config.attention_bias is AttentionBias.none else config.attention_bias:
        yield Piece(f"{theirs}.self_attn.{name}_proj.bias", f"{ours}.attn.biases.{name}")
    if config.attention_sinks:
        yield Piece(f"{theirs}.self_attn.sinks", f"{ours}.attn.sinks_H")


def _stacked(config: ModelConfig, theirs: str, ours: str, names: Sequence[str]) -> Iterator[Piece]:
    if len(names) == 1:
        yield Piece(f"{theirs}.weight", f"{ours}.{names[0]}.weight")
        return
    widths = {weight.name: weight.columns for weight in attention_facts(config).weights}
    ends = [*itertools.accumulate((widths[name] for name in names), initial=0)]
    for name, *rows in zip(names, ends, ends[1:], strict=False):
        whole = Piece(f"{theirs}.weight", f"{ours}.{name}.weight")
        yield replace(whole, rows=slice(*rows), num_rows=ends[-1])


def _experts(family: Family, config: ModelConfig, block: str, ours: str) -> Iterator[Piece]:
    if family.experts is not None:
        yield from family.experts(config, f"{block}.experts", ours)
        return
    if family.gate_up_down is None:
        yield Piece(f"{block}.experts.gate_up_proj", f"{ours}.w_gate_up")
        yield Piece(f"{block}.experts.down_proj", f"{ours}.w_down")
        return
    gate, up, down = family.gate_up_down
    width = config.expert_ffn_size
    for e in range(config.num_experts):
        expert = f"{block}.experts.{e}"
        yield Piece(f"{expert}.{gate}.weight", f"{ours}.w_gate_up", (e, slice(0, width)))
        yield Piece(f"{expert}.{up}.weight", f"{ours}.w_gate_up", (e, slice(width, 2 * width)))
        yield Piece(f"{expert}.{down}.weight", f"{ours}.w_down", (e,))


def _swiglu(theirs: str, ours: str, width: int) -> Iterator[Piece]:
    yield Piece(f"{theirs}.gate_proj.weight", f"{ours}.gate_up.weight", (slice(0, width),))
    yield Piece(f"{theirs}.up_proj.weight", f"{ours}.gate_up.weight", (slice(width, 2 * width),))
    yield Piece(f"{theirs}.down_proj.weight", f"{ours}.down.weight")
