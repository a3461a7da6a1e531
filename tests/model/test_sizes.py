"""FLOPs per token and device peaks."""

from collections import Counter

import pytest

from graphmoe.model.sizes import count_parameters, flops_per_token
from graphmoe.plan.costs.hardware import peak_tflops
from tests.config.test_presets import PRESETS, load_preset


@pytest.mark.parametrize(
    ("preset", "gflop"), [("deepseek_v2_lite", 16.386), ("qwen3_30b_a3b", 23.006), ("mixtral_8x7b", 79.706)]
)
def test_a_training_step_costs_the_stated_gflop_per_token(preset, gflop):
    assert flops_per_token(load_preset(preset), 4096).total / 1e9 == pytest.approx(gflop, rel=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_each_active_weight_costs_six_flops_and_attention_the_rest(preset):
    model = load_preset(preset, mtp_depth=0)
    active = count_parameters(model).active
    weights = active.body - active.router + active.head
    flops = flops_per_token(model, 1024)
    assert flops.total - 3 * flops.attention_scores == 6 * weights


def test_causal_attention_meets_half_of_the_keys():
    model = load_preset("mixtral_8x7b", num_layers=1)
    multiply_adds_over_all_keys = 4096 * 32 * (128 + 128)
    assert flops_per_token(model, 4096).attention_scores == 2 * multiply_adds_over_all_keys / 2


def test_a_prediction_layer_costs_one_moe_layer_one_head_and_its_projection():
    without, with_one, deeper = (
        flops_per_token(load_preset("deepseek_v3", **changes), 4096)
        for changes in ({"mtp_depth": 0}, {"mtp_depth": 1}, {"mtp_depth": 0, "num_layers": 62})
    )
    layer = deeper.forward - without.forward
    assert with_one.mtp == layer + without.head + 2 * 2 * 7168 * 7168
    assert with_one.forward - without.forward == with_one.mtp


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI300X VF", 1307.4),
        ("AMD Instinct MI325X", 1307.4),
        ("AMD Instinct MI355X", 2516.6),
        ("AMD Instinct MI250X/MI250", 383.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_the_peak_of_a_known_device_is_found_by_its_name(device, peak):
    assert peak_tflops(device) == peak


@pytest.mark.parametrize("device", ["cpu", "", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Some GPU 9000"])
def test_an_unknown_device_has_no_peak(device):
    assert peak_tflops(device) is None


def component(name: str) -> str:
    """The component that a parameter of that name is counted under."""
    if name.startswith("mtp."):
        return "mtp"
    if "norm" in name:
        return "norms"
    places = {
        "embed.": "embedding",
        "head.weight": "head",
        ".attn.": "attention",
        ".mlp.": "dense_mlp",
        ".moe_router.": "router",
        ".moe_experts.": "routed_experts",
        ".shared_experts.": "shared_experts",
    }
    return next(label for place, label in places.items() if place in name)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_counts_equal_those_of_the_built_model_component_by_component(preset, ties):
    from graphmoe.model.build import build_model

    config = load_preset(preset, tie_embeddings=ties)
    config.num_layers = min(config.num_layers, config.num_dense_layers + 2)
    built: Counter[str] = Counter()
    for name, parameter in build_model(config, device="meta").named_parameters():
        built[component(name)] += parameter.numel()
    counted = vars(count_parameters(config).total)
    assert {label: number for label, number in counted.items() if number} == dict(built)


def test_a_tied_head_is_counted_with_the_embedding_and_computes_as_much():
    apart, tied = (load_preset("deepseek_v3", tie_embeddings=ties) for ties in (False, True))
    counts, of_tied = count_parameters(apart), count_parameters(tied)
    assert of_tied.total.head == of_tied.active.head == 0
    assert counts.total.full - of_tied.total.full == counts.total.head == apart.vocab_size * apart.hidden_size
    assert of_tied.total.body == counts.total.body
    assert flops_per_token(tied, 4096) == flops_per_token(apart, 4096)


def test_deepseek_v3_is_published_as_671_billion_with_37_active():
    counts = count_parameters(load_preset("deepseek_v3", mtp_depth=0))
    assert round(counts.total.full / 1e9) == 671
    assert int(counts.active.full / 1e9) == 37
