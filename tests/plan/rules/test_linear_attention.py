"""Rules, layers and keys of ``model.linear_attention``."""

from contextlib import nullcontext

import pytest

from graphmoe.config.schema import ConfigError, DeltaNetBackend
from graphmoe.plan.attention import is_linear, keys_per_query, masks_of_layers, model_of_layer
from graphmoe.plan.costs.sizes import refuse_unknown
from graphmoe.plan.plan import plan_of
from graphmoe.plan.rules.unused import without_effect
from tests.plan.rules.test_rules import broken
from tests.runs import config

GQA = "model.attention=gqa model.num_kv_heads=2"
HYBRID = f"{GQA} model.linear_attention=delta_net model.full_every=2"
FLA = r"^not projected: model.delta_net_backend=fla has other rates .*; use auto or triton$"
KEYS = "model.linear_key_heads=2 model.linear_value_heads=4 model.linear_conv_taps=3"
RULES = """
model.linear_attention=delta_net | model.linear_attention=delta_net applies to model.attention=gqa only; use
HYBRID model.full_every=0 | model.full_every=0 must be 2 to model.num_layers=4 with model.linear_attention=
HYBRID model.full_every=5 | model.full_every=5 must be 2 to model.num_layers=4 with model.linear_attention=
HYBRID model.window=4 | model.window=4 has no layer to apply to with model.linear_attention=delta_net; use
HYBRID model.linear_value_heads=24 | of model.linear_key_heads=16; use model.linear_value_heads=16
HYBRID model.linear_key_head_dim=96 | model.linear_key_head_dim=96 has no kernels; use 16, 32, 64, 128
HYBRID parallel.cp=2 | parallel.cp=2 splits sequences, and layers with model.linear_attention=delta_net read
HYBRID model.linear_key_heads=1 parallel.tp=2 | does not divide model.linear_key_heads=1, the key heads that
"""


@pytest.mark.parametrize("rule", RULES.strip().splitlines())
def test_a_broken_rule_is_the_one_violation(rule):
    words, message = rule.replace("HYBRID", HYBRID).split(" | ")
    (found,) = broken(words)
    assert message in found
    assert broken(f"{HYBRID} {KEYS} parallel.tp=2") == []


def test_each_nth_layer_and_those_of_later_tokens_attend():
    model = config(
        *HYBRID.split(), "model.num_layers=5", "model.num_dense_layers=1", "model.mtp_depth=1"
    ).model
    assert [is_linear(model, i) for i in range(6)] == [True, False, True, False, True, False]
    kinds = [model_of_layer(model, i).attention for i in range(6)]
    assert kinds == ["delta_net", "gqa", "delta_net", "gqa", "delta_net", "gqa"]
    assert masks_of_layers(model, 16) == {(0, 0): 2} and keys_per_query(model, 16) == 2 / 5 * 8


def test_sizes_of_a_state_have_no_effect_without_one_and_only_own_kernels_have_rates():
    gqa, hybrid = (config(*words.split(), *KEYS.split()) for words in (GQA, HYBRID))
    warnings = [*without_effect(plan_of(gqa, 1), 1)]
    assert "model.linear_conv_taps=3 has no effect with model.linear_attention=none" in warnings
    assert not any("linear" in warning for warning in without_effect(plan_of(hybrid, 1), 1))
    hybrid.compile.enabled = True
    for backend in DeltaNetBackend:
        hybrid.model.delta_net_backend = backend
        with nullcontext() if backend.value != "fla" else pytest.raises(ConfigError, match=FLA):
            refuse_unknown(hybrid)
