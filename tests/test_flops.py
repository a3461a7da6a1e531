"""FLOPs per token and device peaks."""

from dataclasses import asdict

import pytest

from graphmoe.model.flops import flops_per_token
from graphmoe.model.sizes import count_parameters
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
    assert flops.total - 3 * flops.components.attention_scores == 6 * weights


def test_only_attention_scores_grow_with_the_sequence():
    model = load_preset("deepseek_v2_lite")
    short, long = (asdict(flops_per_token(model, length).components) for length in (2048, 4096))
    assert long.pop("attention_scores") == 2 * short.pop("attention_scores")
    assert long == short


def test_causal_attention_meets_half_of_the_keys():
    model = load_preset("mixtral_8x7b", num_layers=1)
    multiply_adds_over_all_keys = 4096 * 32 * (128 + 128)
    assert flops_per_token(model, 4096).components.attention_scores == 2 * multiply_adds_over_all_keys / 2


def test_a_prediction_layer_costs_one_moe_layer_one_head_and_its_projection():
    without, with_one, deeper = (
        flops_per_token(load_preset("deepseek_v3", **changes), 4096)
        for changes in ({"mtp_depth": 0}, {"mtp_depth": 1}, {"mtp_depth": 0, "num_layers": 62})
    )
    layer = deeper.forward - without.forward
    assert with_one.components.mtp == layer + without.components.head + 2 * 2 * 7168 * 7168
    assert with_one.forward - without.forward == with_one.components.mtp


def test_the_backward_is_twice_the_forward():
    flops = flops_per_token(load_preset("tiny"), 256)
    assert (flops.backward, flops.total) == (2 * flops.forward, 3 * flops.forward)


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
