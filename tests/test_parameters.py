"""Parameters, counted on a small model on the meta device."""

from collections import Counter

import pytest

from graphmoe.model.flops import flops_per_token
from graphmoe.model.sizes import count_parameters
from tests.config.test_presets import PRESETS, load_preset


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


def test_two_prediction_layers_cost_twice_one():
    one, two = (count_parameters(load_preset("tiny", mtp_depth=depth)) for depth in (1, 2))
    assert two.total.mtp == 2 * one.total.mtp > 0
    assert two.total.full - one.total.full == one.total.mtp


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


def test_only_routed_experts_differ_between_total_and_active():
    counts = count_parameters(load_preset("deepseek_v2_lite"))
    total, active = vars(counts.total), vars(counts.active)
    assert {name for name in total if total[name] != active[name]} == {"routed_experts"}
    assert counts.total.routed_experts * 6 == counts.active.routed_experts * 64


def test_the_body_leaves_out_embedding_head_norms_and_prediction_layers():
    total = count_parameters(load_preset("deepseek_v3")).total
    assert total.full - total.body == total.embedding + total.head + total.norms + total.mtp
    assert total.mtp > 0
