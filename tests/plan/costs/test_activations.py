"""Projected activations are those that a dry run finds alive when the backward begins, by segment."""

from collections import Counter
from collections.abc import Sequence

import pytest
from torch import UntypedStorage

from graphmoe.plan.attention import attention_facts
from graphmoe.plan.costs.activations import RECEIVED, stage_activations
from graphmoe.plan.costs.sizes import Sizes, deferred_bytes
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.layouts import all_pieces, pieces_of
from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.compile.code import UnitCode
from graphmoe.runtime.torch_compat import storage_of
from graphmoe.training import dry_run as dry
from graphmoe.training.dry_run.watch import MemoryLog
from tests.runs import config, slow_but

pytestmark = pytest.mark.usefixtures("unmeasured")
MODEL = (
    "model.vocab_size=1024", "model.hidden_size=128", "model.num_layers=2", "model.dense_ffn_size=352",
    "model.num_heads=4", "model.kv_lora_rank=48", "model.qk_nope_head_dim=32", "model.qk_rope_head_dim=16",
    "model.v_head_dim=32", "model.num_experts=8", "model.expert_ffn_size=80", "model.shared_ffn_size=96",
    "model.selection_bias=false", "model.context_length=256", "compile.enabled=true",
    "precision.compute=bf16", "launch.fake_world=1",
)  # fmt: skip
GQA = (
    "model.attention=gqa", "model.num_kv_heads=2", "model.head_dim=32", "model.num_dense_layers=0",
    "model.num_layers=1",
)  # fmt: skip
HYBRID = (
    *GQA[:-2], "model.linear_attention=delta_net", "model.full_every=2", "model.linear_key_heads=2",
    "model.linear_value_heads=4", "model.linear_key_head_dim=32", "model.linear_value_head_dim=32",
)  # fmt: skip
LATENT = ("model.q_lora_rank=40", "model.score_function=sigmoid", "model.renormalise=true")
TWO, FP8 = "launch.fake_world=2", "precision.fp8=rowwise"
SYMM = (TWO, "parallel.ep=2", "moe.dispatcher=symm", "moe.balance=none")
RING = (*GQA, TWO, "parallel.cp=2", "parallel.cp_method=ring")
NORMS = (*GQA, "model.qk_norm=true", "model.shared_ffn_size=0")
WHOLE = (*GQA, "model.qk_norm=true", "model.qk_norm_whole=true", "model.rotary_fraction=0.5")
GATE = "model.shared_gate=true"
BIASES = ("model.expert_bias=true", "model.router_bias=true", "model.swiglu_limit=7")
SCALED = ("model.input_scaling=true", "model.top_k=1", "model.score_function=sigmoid")
NOPE = (
    *GQA, "model.num_layers=4", "model.moe_every=2", "model.qk_norm=true", "model.qk_norm_weight=false",
    "model.nope_every=2", "model.attention_chunk=48", "model.attention_temperature_floor=32",
)  # fmt: skip
CASES: dict[str, Sequence[str]] = {
    "a dense and a MoE layer": (), "latent queries": LATENT, "grouped queries": GQA,
    "norms, without shared experts": NORMS, "multi-token prediction": ("model.mtp_depth=1", *GQA),
    "one norm of all heads": (*WHOLE, GATE), "8 bits, a gate": (FP8, GATE),
    "one norm of all heads, tp": (*WHOLE, GATE, TWO, "parallel.tp=2"),
    "tp": (TWO, "parallel.tp=2"), "cp": (TWO, "parallel.cp=2"), "a ring": RING, "ep": (TWO, "parallel.ep=2"),
    "ep on a receive budget": (*GQA, *SYMM), "ep with replicas": (*GQA, *SYMM[:-1], "moe.balance=replicas"),
    "biases": (*GQA, *BIASES), "biases, ep": (TWO, "parallel.ep=2", *GQA, *BIASES),
    "biases, ep on a receive budget": (*GQA, *SYMM, *BIASES),
    "scaled input": SCALED, "scaled input, ep": (TWO, "parallel.ep=2", *GQA, *SCALED),
    "scaled input, ep on a receive budget": (*GQA, *SYMM, *SCALED), "8 bits, scaled input": (FP8, *SCALED),
    "scaled input without shared experts": (*GQA, *SCALED, "model.shared_ffn_size=0"),
    "8 bits, scaled input without shared experts": (FP8, *GQA, *SCALED, "model.shared_ffn_size=0"),
    "scaled input in fp32": (*SCALED, "precision.compute=fp32"),
    "scaled input, router again": (*GQA, *SCALED, "recompute.segments=[attn,moe_router]"),
    "scaled input without shared experts, ep": (*GQA, *SYMM, *SCALED, "model.shared_ffn_size=0"),
    "8 bits, scaled input, ep": (FP8, *SYMM, *SCALED),
    "scaled input, norms again": ("recompute.ops=[layernorm]", *SCALED),
    "layers without rotary embedding, each second of experts": (*NOPE, *SCALED),
    "every layer again": ("recompute.all=true",),
    "router and attention again": (*GQA, "recompute.segments=[attn,moe_router]"),
    "norms, attention and its heads again": ("recompute.ops=[layernorm,core_attn,mla_up_proj]",),
    "MLP and shared experts in parts": ("recompute.ops=[mlp,shared_experts]",),
    "ep, every layer again": (TWO, "parallel.ep=2", "recompute.all=true"),
    "8 bits, one scale": ("precision.fp8=tensorwise",),
    "8 bits, bf16 weight gradients": (FP8, "model.q_lora_rank=48", "precision.fp8_wgrad=bf16"),
    "8 bits, uneven latent queries": (FP8, *LATENT),
    "8 bits, without shared experts": (FP8, *GQA, "model.shared_ffn_size=0"),
    "8 bits of experts alone": (FP8, "precision.fp8_products=[experts]"),
    "8 bits but for a layer": (FP8, "precision.fp8_skip_layers=[-1]"),
    "8 bits, tp": (FP8, TWO, "parallel.tp=2"), "8 bits, a ring": (FP8, *RING), "8 bits, ep": (FP8, *SYMM),
    "8 bits, ep, every layer again": (FP8, *SYMM, "recompute.all=true"),
}  # fmt: skip
ADAPTED = ("model.lora_rank=8", "model.lora_targets=[attention,mlp,shared_experts,experts]")
FUSED = ("model.lora_rank=8", "model.lora_targets=[attention]")
PARTS = "recompute.ops=[layernorm,core_attn,mla_up_proj,mlp,shared_experts]"
CASES |= {
    "adapters": ADAPTED, "adapters of attention": FUSED, "adapters, parts again": (*ADAPTED, PARTS),
    "adapters, latent queries": (*LATENT, *ADAPTED),
    "adapters, prediction": (*GQA, *FUSED, "model.mtp_depth=1"),
    "adapters, tp": (*GQA, *ADAPTED[:1], TWO, "parallel.tp=2"), "adapters, ep": (*GQA, *SYMM, *ADAPTED),
    "adapters, ep, again": (*GQA, *SYMM, *ADAPTED, "recompute.all=true"),
    "adapters of attention, ep": (*GQA, *SYMM, *FUSED),
    "adapters of attention, ep, alltoall": (*GQA, TWO, "parallel.ep=2", "moe.dispatcher=alltoall", *FUSED),
    "adapters, ep, alltoall": (*GQA, TWO, "parallel.ep=2", "moe.dispatcher=alltoall", *ADAPTED),
}  # fmt: skip
CASES["a state, a window of all keys"] = HYBRID
CASES["a state, in 8 bits"] = (FP8, *HYBRID)
CASES["a state, tp"] = (*HYBRID, TWO, "parallel.tp=2")
TOLERANCE = 0.05
"""Relative tolerance of a segment's bytes: projections leave out scalars and sums over sequences."""
EXCHANGED = ("", "moe_dispatch", "moe_experts", "moe_combine")
"""Names counted as one with alltoall, whose segments are part of no graph and have no names in a dry run."""
OF_THE_STEP = 8_268
"""Bytes of token ids and labels in a dry run."""


class EndOfForward(MemoryLog):
    """Log that keeps the bytes that the forward left when the backward began."""

    left: dict[str, int] | None = None

    def saw(self, result: object, phase: str, segment: str = "") -> None:
        if phase == "backward" and EndOfForward.left is None:
            EndOfForward.left = dict(self.by_segment)
        super().saw(result, phase, segment)


FAST = ("latent queries", "ep, every layer again", "8 bits, ep", "adapters, ep")


@pytest.mark.parametrize("words", slow_but(CASES, *FAST))
def test_each_segment_keeps_what_a_dry_run_finds(words, monkeypatch):
    run = config(*MODEL, *words)
    monkeypatch.setattr(dry, "MemoryLog", EndOfForward)
    monkeypatch.setattr(EndOfForward, "left", None)
    handed, dgrad = dict[int, UntypedStorage](), UnitCode.backward_inputs
    spied = lambda *given: [results := dgrad(*given), handed.update(map(storage_of, results[1]))][0]  # noqa: E731
    monkeypatch.setattr(UnitCode, "backward_inputs", spied)
    dry.dry_run(run)
    found = Counter(EndOfForward.left)
    rotary = 4 * run.model.context_length * attention_facts(run.model).rotary
    rotary += rotary // run.parallel.cp if run.parallel.cp_method.value == "ring" else 0
    found[""] = max(found[""] - rotary - OF_THE_STEP, 0)
    sizes = Sizes.from_config(run, Layout.of(run.parallel, run.launch.fake_world), on_nvidia=False)
    whole = all_pieces(run.model.num_layers, run.model.mtp_depth)
    kept = stage_activations(sizes, Recompute.of(run.recompute), whole)
    projected = sum(kept.values(), Counter())
    if run.parallel.ep > 1 and run.moe.dispatcher == "alltoall":
        found["dispatched"] = sum(found.pop(name, 0) for name in EXCHANGED)
        projected["dispatched"] = sum(projected.pop(name, 0) for name in EXCHANGED)
    for name in projected.keys() | found.keys() - {""}:
        assert projected[name] == pytest.approx(found[name], rel=TOLERANCE, abs=4_300), name
    if words in map(CASES.get, FAST[:3:2]):  # recomputed segments hand copies too
        num_bytes = sum(storage.nbytes() for storage in handed.values())
        assert deferred_bytes(sizes, whole, 0.0) == pytest.approx(num_bytes, rel=TOLERANCE)


def test_stages_together_keep_the_activations_of_the_whole_model_and_those_received():
    run = config(*MODEL, "model.mtp_depth=1")
    sizes = Sizes.from_config(run, Layout(), on_nvidia=False)
    whole = stage_activations(sizes, Recompute(), all_pieces(2, 1))
    stages = [stage_activations(sizes, Recompute(), pieces) for pieces in pieces_of("Et|t|m|L", 2, 1, 4)]
    together = sum((kept for stage in stages for kept in stage.values()), Counter())
    received = [stage.get(RECEIVED, {}).get(RECEIVED, 0) for stage in stages]
    assert received == [0, sizes.state, sizes.state, 2 * sizes.state]
    only_whole = sum(whole.values(), Counter())
    assert together.total() == pytest.approx(only_whole.total() + 2 * sizes.state, rel=1e-3)
