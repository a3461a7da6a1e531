"""Floors of segments in traces: the projection's FLOPs and bytes at the best speeds of a card."""

from dataclasses import replace

import pytest

from graphmoe.pipeline_view.plans import load_preset
from graphmoe.plan.costs.hardware import card_in
from graphmoe.plan.costs.rates import ceilings
from graphmoe.plan.plan import plan_of
from graphmoe.training.floors import floors_of
from tests.runs import config

WORDS = "precision.compute=bf16", "compile.enabled=true", "train.micro_batch_size=4"
TOKENS, D = 4 * 4096, 2048
MOE = ["attn", "moe_router", "moe_preprocess", "moe_dispatch", "shared_experts", "moe_experts", "moe_combine"]
KINDS = [["embed"], ["attn", "mlp"], MOE, ["loss"], ["optimizer"]]


def floors(*words, batch=16, ranks=1, rank=0, device="NVIDIA H200", **changes):
    run = config(*WORDS, *words)
    run.model = replace(load_preset("deepseek_v2_lite"), num_layers=6, **changes)
    run.train.global_batch_size, run.data.seq_len = batch, 4096
    return floors_of(plan_of(run, ranks), rank, device)


def test_a_step_has_the_floors_of_all_its_micro_batches():
    found = floors()
    assert [[*kind] for kind in found] == KINDS
    _, dense, moe, loss, update = found
    experts = 4 * 5 * 6 * TOKENS * D * 6 * 1408 / 790e12 * 1e3  # micro-batches, layers
    forward, inputs, weights = moe["moe_experts"]
    assert forward == pytest.approx(experts, rel=0.03) and forward >= experts
    assert weights == pytest.approx(inputs) == pytest.approx(forward)
    assert moe["attn"][0] == pytest.approx(5 * dense["attn"][0])
    assert loss["loss"][0] == pytest.approx(4 * 6 * TOKENS * D * 102_400 / 790e12 * 1e3, rel=0.01)
    assert update["optimizer"][1:] == (0, 0) and update["optimizer"][0] == pytest.approx(27, abs=1)
    of_matrices, num_tflop = floors("optim.name=muon")[4]["optimizer"][0], 105  # of experts
    assert num_tflop / 790e-3 < of_matrices - 0.8 * update["optimizer"][0] < 1.15 * num_tflop / 790e-3
    more = floors(batch=32)
    assert more[2]["moe_experts"][0] == pytest.approx(2 * forward) and more[4] == update


def test_frozen_weights_have_no_wgrad_and_adapters_their_own():
    embed, dense, moe, loss, update = floors()
    adapted = floors(lora_rank=16, lora_targets=["attention", "experts"])
    fused = floors(lora_rank=16, lora_targets=["attention"])
    for found in (adapted, fused):
        assert [[*kind] for kind in found] == KINDS
        assert found[0]["embed"][1:] == (0, 0) and found[1]["mlp"][2] == found[2]["shared_experts"][2] == 0
        assert found[2]["moe_router"][2] == 0 and 0 < found[2]["attn"][2] < 0.25 * moe["attn"][2]
        assert found[3]["loss"][0] == pytest.approx(2 / 3 * loss["loss"][0], rel=0.01)
        assert found[4]["optimizer"][0] < 0.1 * update["optimizer"][0]
    assert fused[2]["moe_experts"] == (*moe["moe_experts"][:2], 0)
    assert 0 < adapted[2]["moe_experts"][2] < 0.3 * moe["moe_experts"][2]
    assert adapted[2]["moe_experts"][0] > moe["moe_experts"][0]
    assert dense["mlp"][2] > 0 and embed["embed"][2] > 0


def test_fp8_and_other_cards_have_floors_of_their_own():
    plain, fp8 = floors()[2], floors("precision.fp8=rowwise", "model.expert_ffn_size=16")[2]
    assert 790 / 1450 < fp8["moe_experts"][0] / plain["moe_experts"][0] < 0.7  # with quantization
    faster = floors(device="NVIDIA B200")
    assert faster[2]["moe_experts"][0] / plain["moe_experts"][0] == pytest.approx(989.4 / 2250, rel=0.03)
    assert (card_in("NVIDIA H200 NVL").tflops, card_in("AMD Instinct MI300X").name) == (835.5, "MI300X")
    rates = ceilings()
    assert (rates.segment_us, rates.hidden_exchange, rates.node) == (0, 0, 1)


def test_a_rank_of_a_pipeline_has_its_own_layers():
    pp = ("parallel.pp=2", "pipeline.schedule=1f1b")
    first, last = (floors(*pp, ranks=2, rank=rank) for rank in (0, 1))
    assert [[*kind] for kind in first] == [*KINDS[:3], KINDS[4]]
    assert [[*kind] for kind in last] == [*KINDS[2:]]


@pytest.mark.parametrize("words, device", [
    ((), "NVIDIA A100-SXM4-80GB"),
    ((), "NVIDIA H200 MIG 1g.18gb"),
    (("passes.disabled=[fuse_experts]",), None),
])  # fmt: skip
def test_what_is_not_projected_has_no_floors(words, device, caplog):
    caplog.set_level("INFO")
    assert floors(*words, device=device or "NVIDIA H200") == []
    assert device or "the trace has no floors of segments: not projected: passes." in caplog.text
    assert floors("compile.enabled=false") == floors()
