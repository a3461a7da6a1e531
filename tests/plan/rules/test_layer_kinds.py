"""Refusals of chunks, layers without rotary embedding, scaled inputs and dense layers in between."""

import pytest

from graphmoe.plan.plan import plan_of
from graphmoe.plan.rules.unused import without_effect
from tests.plan.rules.test_linear_attention import GQA, config
from tests.plan.rules.test_rules import broken

RULES = """
model.qk_norm_weight=false | model.qk_norm_weight=false applies to model.attention=gqa only; use
model.attention=gqa model.qk_norm_weight=false | with model.qk_norm=false; use model.qk_norm_weight=true
model.attention=gqa model.qk_norm=true model.qk_norm_weight=false model.qk_norm_whole=true | use one of them
model.attention_chunk=8 | model.attention_chunk=8 applies to model.attention=gqa only; use model.atten
model.attention=gqa model.attention_chunk=8 model.window=8 | use model.attention_chunk=0 or model.window=0
model.attention=gqa model.attention_chunk=8 model.head_dim=320 | has kernels for heads up to 256, and
model.attention=gqa model.num_kv_heads=2 parallel.cp=4 model.attention_chunk=16 | =16 cannot run with
model.attention=gqa model.nope_every=1 | must be 0 or 2 to model.num_layers=4; with 1 no layer
model.attention=gqa model.attention_temperature_floor=8 | has no effect with model.nope_every=0; use
model.attention=gqa model.attention_temperature_scale=0.2 | use model.attention_temperature_scale=0.1
model.moe_every=5 | model.moe_every=5 leaves no layer with experts of model.num_layers=4 after
model.input_scaling=true | model.top_k=2 weights several outputs, and model.input_scaling=true scales the one
model.input_scaling=true model.top_k=1 model.layer=graphmoe.model.layer:MoELayer | use model.layer=standard
"""


@pytest.mark.parametrize("rule", RULES.strip().splitlines())
def test_each_is_the_one_violation_and_says_what_would_do(rule):
    words, _, message = rule.partition(" | ")
    (found,) = broken(words)
    assert message in found


def test_a_ring_runs_sequences_of_one_chunk():
    words = "model.attention=gqa model.num_kv_heads=2 parallel.cp=4 data.seq_len=64 model.attention_chunk="
    assert broken(f"{words}64") == [] != broken(f"{words}63")


@pytest.mark.parametrize("words", ["attention_sinks=true", "window=4", "window=4 model.attention_sinks=true"])
@pytest.mark.parametrize("backend", ["sdpa", "flash4", "te", "turbo"])
def test_a_backend_without_effect_is_named(backend, words):
    run = config(*GQA.split(), *f"model.{words} model.attention_backend={backend}".split())
    warned = any("model.attention_backend=" in line for line in without_effect(plan_of(run, 1), 1))
    assert warned == (backend == "sdpa" or (backend == "flash4" and "window" in words))
