"""FLOPs per token and device peaks."""

from collections import Counter
from dataclasses import replace

import pytest

from graphmoe.config.schema import AttentionBias, LinearAttention
from graphmoe.model.build import build_model
from graphmoe.model.sizes import COMPONENTS, count_parameters, flops_per_token, forward_flops
from graphmoe.pipeline_view.plans import load_preset
from graphmoe.plan.costs.hardware import peak_tflops
from tests.model.models import HYBRID
from tests.runs import PRESETS


@pytest.mark.parametrize(
    ("preset", "gflop"), [("deepseek_v2_lite", 16.386), ("qwen3_30b_a3b", 23.006), ("mixtral_8x7b", 79.706)]
)
def test_a_training_step_costs_the_stated_gflop_per_token(preset, gflop):
    assert flops_per_token(load_preset(preset), 4096) / 1e9 == pytest.approx(gflop, rel=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_each_active_weight_costs_six_flops_and_attention_the_rest(preset):
    biased = replace(load_preset(preset), mtp_depth=0)
    no_biases = {"attention_bias": AttentionBias.none, "attention_sinks": False}
    model = replace(biased, **no_biases, expert_bias=False, router_bias=False)
    assert flops_per_token(biased, 1024) == flops_per_token(model, 1024)
    active = count_parameters(model)["active"]
    named = build_model(model, device="meta").named_parameters()
    # added, of one number for each head, or of one for each token
    uncounted = (".biases.", "log_rate_V", "dt_bias_V", "shared_experts.gate.")
    others = sum(p.numel() for name, p in named if any(part in name for part in uncounted))
    head = model.vocab_size * model.hidden_size  # a tied one too
    weights = active["body"] - active["router"] - others + head
    scores = forward_flops(model, 1024)["attention_scores"]
    assert flops_per_token(model, 1024) - 3 * scores == 6 * weights


@pytest.mark.parametrize("preset, total, active", [("gpt_oss_20b", 20.9, 3.6), ("gpt_oss_120b", 116.8, 5.1)])
def test_gpt_oss_has_the_published_billions_of_parameters(preset, total, active):
    counts = count_parameters(load_preset(preset))
    published = counts["active"]["full"] - counts["active"]["embedding"]
    assert (round(counts["total"]["full"] / 1e9, 1), round(published / 1e9, 1)) == (total, active)
    experts = counts["total"]["routed_experts"] - counts["active"]["routed_experts"]
    layers, model = load_preset(preset).num_layers, load_preset(preset)
    of_one = 3 * 2880**2 + 3 * 2880  # gate, up and down, with their biases
    assert experts == layers * (model.num_experts - model.top_k) * of_one


def test_a_prediction_layer_costs_one_moe_layer_one_head_and_its_projection():
    without, with_one, deeper = (
        forward_flops(replace(load_preset("deepseek_v3"), **changes), 4096)
        for changes in ({"mtp_depth": 0}, {"mtp_depth": 1}, {"mtp_depth": 0, "num_layers": 62})
    )
    before = sum(without.values())
    layer = sum(deeper.values()) - before
    assert with_one["mtp"] == layer + without["head"] + 2 * 2 * 7168 * 7168
    assert sum(with_one.values()) - before == with_one["mtp"]


PEAKS = {
    "AMD Instinct MI300X VF": 1307.4, "AMD Instinct MI250X/MI250": 383.0, "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5, "NVIDIA H200 NVL": 835.5, "NVIDIA H20": 148.0,
    "NVIDIA GeForce RTX 4090": 165.2, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "Some GPU 9000": None,
    "cpu": None, "": None,
}  # fmt: skip


def test_the_peak_of_a_known_device_is_found_by_its_name_and_others_have_none():
    assert {device: peak_tflops(device) for device in PEAKS} == PEAKS


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_counts_equal_those_of_the_built_model_component_by_component(preset, ties):
    config = replace(load_preset(preset), tie_embeddings=ties)
    config.num_layers = min(config.num_layers, config.num_dense_layers + 2)
    built: Counter[str] = Counter()
    for name, parameter in build_model(config, device="meta").named_parameters():
        built[next(label for part, label in COMPONENTS.items() if part in name)] += parameter.numel()
    counted = count_parameters(config)["total"]
    assert {label: counted[label] for label in COMPONENTS.values() if counted[label]} == dict(built)
    assert counted["full"] == built.total()


def test_layers_with_a_state_are_counted_beside_those_that_attend():
    hybrid = replace(HYBRID, num_layers=6, mtp_depth=1)  # layers 2 and 5 attend, and the prediction layer
    built = dict(build_model(hybrid, device="meta").named_parameters())
    assert count_parameters(hybrid)["total"]["full"] == sum(weight.numel() for weight in built.values())
    gqa = replace(hybrid, linear_attention=LinearAttention.none, full_every=0)
    found, of_gqa = (forward_flops(model, 64) for model in (hybrid, gqa))
    recurrences = 4 * 6 * 2 * 16 * 16  # read for the key, write, read for the query, of two heads
    scores = of_gqa["attention_scores"] / 3 + recurrences
    assert found["attention_scores"] == pytest.approx(scores, rel=1e-3)  # a rounded mean of layers
    weights = sum(
        weight.numel()
        for name, weight in built.items()
        if name.startswith("layers.") and ".attn." in name and weight.dim() == 2
    )
    assert found["attention_projections"] == 2 * weights
    assert {key for key, flops in found.items() if flops != of_gqa[key]} <= {
        "attention_projections", "attention_scores",
    }  # fmt: skip


def test_a_tied_head_is_counted_with_the_embedding_and_computes_as_much():
    apart, tied = (replace(load_preset("deepseek_v3"), tie_embeddings=ties) for ties in (False, True))
    counts, of_tied = (count_parameters(each)["active"] for each in (apart, tied))
    assert of_tied["head"] == 0 and counts["body"] == of_tied["body"]
    assert counts["full"] - of_tied["full"] == counts["head"] == apart.vocab_size * apart.hidden_size
    assert flops_per_token(tied, 4096) == flops_per_token(apart, 4096)
    published = count_parameters(replace(apart, mtp_depth=0))
    assert [int(published[kind]["full"] / 1e9) for kind in ("total", "active")] == [671, 37]
