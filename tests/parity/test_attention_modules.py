"""The attn segment beside modules of transformers: windows, sinks, biases and the output gate, in fp64."""

import dataclasses

import pytest
import torch
from transformers import GptOssConfig, Qwen3NextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from graphmoe.config.schema import AttentionBias, ModelConfig, RopeScaling
from graphmoe.model.attention import build_attention, inverse_frequencies, rope_tables
from graphmoe.plan.attention import keys_per_query, model_of_layer

B, S, WIDTH = 2, 21, 24
GQA = ModelConfig(
    attention="gqa", hidden_size=WIDTH, num_heads=4, num_kv_heads=2, head_dim=10, norm_eps=1e-5, num_layers=4
)
GPT_OSS = dataclasses.replace(
    GQA, window=5, full_every=2, attention_sinks=True, attention_bias=AttentionBias.qkvo
)
QWEN3_NEXT = dataclasses.replace(GQA, attention_gate=True, qk_norm=True)
SHAPE = {
    "hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "num_hidden_layers": 4, "rms_norm_eps": 1e-5, "attn_implementation": "eager",
}  # fmt: skip


def gpt_oss(layer):
    config = GptOssConfig(**SHAPE, attention_bias=True, sliding_window=5)
    return GPT_OSS, GptOssAttention(config, layer), 5 if config.layer_types[layer][0] == "s" else S


def qwen3_next(layer):
    return QWEN3_NEXT, Qwen3NextAttention(Qwen3NextConfig(**SHAPE, attention_bias=False), layer), S


@pytest.mark.parametrize("make, layer", [(gpt_oss, 0), (gpt_oss, 1), (qwen3_next, 3)])
def test_values_and_gradients_are_those_of_transformers(make, layer):
    config, theirs, window = make(layer)
    ours, theirs = build_attention(model_of_layer(config, layer)).double(), theirs.double()
    generator = torch.Generator().manual_seed(0)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.25, generator)
    torch.nn.init.ones_(ours.norm.weight)
    pairs = {f"{name}_proj.weight": f"{name}_proj.weight" for name in "qkv"}
    pairs |= {"o_proj.weight": "out_proj.weight", "sinks": "sinks_H"}
    pairs |= {f"{name}_proj.bias": f"biases.{name}" for name in "qkvo"}
    pairs |= {f"{name}_norm.weight": f"{name}_norm.weight" for name in "qk"}
    parameters, shift = dict(ours.named_parameters()), int(config.qk_norm)
    for name, parameter in theirs.named_parameters():
        given = parameters[pairs[name]].detach()
        parameter.data.copy_(given - shift if "norm" in name else given)  # theirs is centred at zero
    x = torch.randn(B, S, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    tables = rope_tables(config, 10, S, torch.device("cpu"))
    position_S = torch.arange(S)
    seen_ST = (position_S <= position_S[:, None]) & (position_S > position_S[:, None] - window)
    mask = torch.zeros(S, S, dtype=torch.float64).masked_fill(~seen_ST, -torch.inf)[None, None]
    copies = 1 if make is gpt_oss else 2  # of the tables, one for each half of a head
    whole = [torch.cat([table] * copies, dim=-1)[None].double() for table in tables]
    expected = x + theirs(ours.norm(x), tuple(whole), mask)[0]
    found = ours(x, *tables)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # both rotate in fp32
    grad = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, [x, *theirs.parameters()], grad)
    names = [pairs[name] for name, _ in theirs.named_parameters()]
    actual = torch.autograd.grad(found, [x, *(parameters[name] for name in names)], grad)
    for name, one, other in zip(["x", *names], actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("dim, fast, slow", [(64, 32.0, 1.0), (10, 4.0, 0.5), (128, 1.0, 1.0)])
def test_yarn_has_the_frequencies_of_transformers(dim, fast, slow, truncate):
    """The ramp's ends are whole rotation pairs, or not; 1 and 1 are the same pair."""
    keys = {"factor": 32.0, "beta_fast": fast, "beta_slow": slow, "truncate": truncate}
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "original_max_position_embeddings": 4096, **keys}
    theirs, magnitude = ROPE_INIT_FUNCTIONS["yarn"](GptOssConfig(head_dim=dim, rope_parameters=rope), "cpu")
    ours = dataclasses.replace(
        GPT_OSS, rope_scaling=RopeScaling.yarn, rope_theta=150000.0, yarn_factor=32.0, yarn_beta_fast=fast,
        yarn_beta_slow=slow, yarn_truncate=truncate,
    )  # fmt: skip
    torch.testing.assert_close(inverse_frequencies(ours, dim), theirs, rtol=1e-6, atol=0)
    cos, _ = rope_tables(ours, dim, 1, torch.device("cpu"))
    assert cos[0, 0].item() == pytest.approx(magnitude, rel=1e-6)
    other = inverse_frequencies(dataclasses.replace(ours, yarn_truncate=not truncate), dim)
    assert torch.equal(other, inverse_frequencies(ours, dim)) is (fast == slow)


@pytest.mark.parametrize(
    "window, full_every, seq_len", [(0, 0, 8), (3, 0, 8), (3, 2, 8), (3, 4, 8), (9, 2, 8)]
)
def test_keys_per_query_is_the_mean_of_all_layers(window, full_every, seq_len):
    config = dataclasses.replace(GQA, window=window, full_every=full_every)
    windows = [model_of_layer(config, i).window or seq_len for i in range(config.num_layers)]
    counts = [sum(min(i + 1, each) for i in range(seq_len)) / seq_len for each in windows]
    halves = sum(min(each, seq_len) / seq_len for each in windows) / 2 / len(windows)  # of the query itself
    assert keys_per_query(config, seq_len) == pytest.approx(sum(counts) / len(counts) - halves)


@pytest.mark.parametrize(
    "chunk, nope_every, seq_len", [(3, 0, 8), (3, 2, 9), (4, 3, 8), (9, 2, 8), (8, 4, 8)]
)
def test_keys_per_query_counts_those_of_chunks(chunk, nope_every, seq_len):
    config = dataclasses.replace(GQA, attention_chunk=chunk, nope_every=nope_every)
    own = [model_of_layer(config, i).attention_chunk for i in range(config.num_layers)]
    assert own == [0 if nope_every and (i + 1) % nope_every == 0 else chunk for i in range(4)]
    chunks = [each or seq_len for each in own]
    # half of a query's own position, as for causal attention
    counts = [sum(i % each + 0.5 for i in range(seq_len)) / seq_len for each in chunks]
    assert keys_per_query(config, seq_len) == pytest.approx(sum(counts) / len(counts))
