"""The attn segment: MLA and GQA against a plain fp64 implementation, YaRN, causality."""

import cmath
import dataclasses
import math

import pytest
import torch

from graphmoe.config.schema import ModelConfig, RopeScaling
from graphmoe.model.attention import LATENT_NORM_EPS, build_attention, rope_tables
from graphmoe.plan.attention import attention_facts
from tests.ops.attention_fakes import reference_attention
from tests.tolerances import assert_forward_close, assert_gradient_close

B, S = 2, 19
MLA = ModelConfig(
    hidden_size=48, num_heads=3, kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=14,
    norm_eps=1e-3,
)  # fmt: skip
GQA = ModelConfig(attention="gqa", hidden_size=48, num_heads=6, num_kv_heads=2, head_dim=16, norm_eps=1e-3)
YARN = {
    "rope_scaling": RopeScaling.yarn, "rope_theta": 100.0, "yarn_factor": 8.0, "yarn_original_context": 32,
    "yarn_beta_fast": 4.0, "yarn_mscale": 0.7, "yarn_mscale_all_dim": 1.2,
}  # fmt: skip
CONFIGS = {
    "mla": MLA,
    "mla with q-lora": dataclasses.replace(MLA, q_lora_rank=24),
    "mla with q-lora and yarn": dataclasses.replace(MLA, q_lora_rank=24, **YARN),
    "mla, equal head sizes": dataclasses.replace(MLA, v_head_dim=18),
    "gqa": GQA,
    "gqa with qk-norm": dataclasses.replace(GQA, qk_norm=True),
    "gqa with qk-norm and yarn": dataclasses.replace(GQA, qk_norm=True, **YARN),
    "gqa with partial rotary": dataclasses.replace(GQA, rotary_fraction=0.375, qk_norm=True, **YARN),
    "gqa with one norm of all heads": dataclasses.replace(
        GQA, qk_norm=True, qk_norm_whole=True, attention_gate=True
    ),
    "one key-value head": dataclasses.replace(GQA, num_kv_heads=1),
    "as many key-value heads": dataclasses.replace(GQA, num_kv_heads=6),
}
every_config = pytest.mark.parametrize("name", CONFIGS)


def make_case(name):
    """Attention with random weights of gain 1, x that requires gradients, and the rotary tables."""
    config = CONFIGS[name]
    module, generator = build_attention(config), torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator)
        else:
            torch.nn.init.normal_(parameter, 0.0, parameter.shape[1] ** -0.5, generator)
    x = torch.randn(B, S, config.hidden_size, generator=generator).requires_grad_()
    return module, x, rope_tables(config, attention_facts(config).rotary, S, torch.device("cpu"))


@every_config
def test_the_facts_have_the_matrices_of_the_module(name):
    module, facts = build_attention(CONFIGS[name]), attention_facts(CONFIGS[name])
    matrices = {key: tuple(m.weight.shape) for key, m in module.named_children() if hasattr(m, "weight")}
    expected = {weight.name: (weight.columns, weight.rows) for weight in facts.weights}
    assert {key: shape for key, shape in matrices.items() if len(shape) == 2} == expected
    assert {*facts.up} <= {*expected} and facts.problems == ()


def yarn_correction(factor, coefficient):
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1 else 1.0


def expected_frequencies(config, dim):
    """Radians per token of each pair, one after the other, from the definition."""
    frequencies = [config.rope_theta ** (-2 * j / dim) for j in range(dim // 2)]
    if config.rope_scaling is RopeScaling.none:
        return frequencies

    def pair_that_turns(times):
        """j with original_context * theta^(-2j/dim) = 2 pi * times."""
        wavelength = config.yarn_original_context / times
        return dim / 2 * math.log(wavelength / (2 * math.pi), config.rope_theta)

    first = max(math.floor(pair_that_turns(config.yarn_beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(config.yarn_beta_slow)), dim - 1)
    mixed = []
    for j, frequency in enumerate(frequencies):
        slow = 0.0 if j <= first else 1.0 if j >= last else (j - first) / (last - first)
        mixed.append(frequency * (1 - slow) + frequency / config.yarn_factor * slow)
    return mixed


def turned(pairs, config, dim):
    """Complex pairs [..., S, heads, dim / 2] turned by position times frequency."""
    size = 1.0
    if config.rope_scaling is RopeScaling.yarn:
        size = yarn_correction(config.yarn_factor, config.yarn_mscale)
        size /= yarn_correction(config.yarn_factor, config.yarn_mscale_all_dim)
    turn = [[cmath.rect(size, s * f) for f in expected_frequencies(config, dim)] for s in range(S)]
    return pairs * torch.tensor(turn, dtype=torch.complex128)[:, None]


def turned_neighbours(x, config):
    pairs = turned(torch.complex(x[..., ::2], x[..., 1::2]), config, x.shape[-1])
    return torch.view_as_real(pairs).flatten(-2)


def turned_halves(x, config):
    width = round(x.shape[-1] * config.rotary_fraction)
    x, rest = x[..., :width], x[..., width:]
    pairs = turned(torch.complex(*x.chunk(2, dim=-1)), config, width)
    return torch.cat([pairs.real, pairs.imag, rest], dim=-1)


def rms_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def mla_reference(x, w, config):
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    h = rms_norm(x, w["norm.weight"], config.norm_eps)
    if config.q_lora_rank:
        compressed = rms_norm(h @ w["q_down.weight"].T, w["q_norm.weight"], LATENT_NORM_EPS)
        q = compressed @ w["q_up.weight"].T
    else:
        q = h @ w["q_proj.weight"].T
    q = q.view(B, S, config.num_heads, nope + rope)
    down = h @ w["kv_down.weight"].T
    latent = rms_norm(down[..., : config.kv_lora_rank], w["kv_norm.weight"], LATENT_NORM_EPS)
    shared_key = turned_neighbours(down[..., None, config.kv_lora_rank :], config)
    kv = (latent @ w["kv_up.weight"].T).view(B, S, config.num_heads, nope + value)
    key = torch.cat([kv[..., :nope], shared_key.expand(B, S, config.num_heads, rope)], dim=-1)
    query = torch.cat([q[..., :nope], turned_neighbours(q[..., nope:], config)], dim=-1)
    out = reference_attention(query, key, kv[..., nope:], scale=scale_of(config, nope + rope))
    return x + out.flatten(2) @ w["out_proj.weight"].T


def gqa_reference(x, w, config):
    size, eps = config.head_dim, config.norm_eps
    h = rms_norm(x, w["norm.weight"], eps)
    q, k, v = ((h @ w[f"{name}_proj.weight"].T).view(B, S, -1, size) for name in "qkv")
    if config.attention_gate:
        q, gate = q.unflatten(2, (-1, 2)).unbind(3)
    if config.qk_norm_whole:
        q, k = (
            rms_norm(x.flatten(2), w[f"{name}_norm.weight"], eps).unflatten(-1, (-1, size))
            for name, x in (("q", q), ("k", k))
        )
    elif config.qk_norm:
        q, k = rms_norm(q, w["q_norm.weight"], eps), rms_norm(k, w["k_norm.weight"], eps)
    q, k = turned_halves(q, config), turned_halves(k, config)
    out = reference_attention(q, k, v, scale=scale_of(config, size))
    if config.attention_gate:
        out = out * gate.sigmoid()
    return x + out.flatten(2) @ w["out_proj.weight"].T


def scale_of(config, size):
    if config.rope_scaling is RopeScaling.none:
        return size**-0.5
    return size**-0.5 * yarn_correction(config.yarn_factor, config.yarn_mscale_all_dim) ** 2


@every_config
def test_values_and_all_gradients_match_a_plain_fp64_implementation(name):
    module, x, rope = make_case(name)
    out = module(x, *rope)
    exact_x = x.detach().double().requires_grad_()
    exact = {n: p.detach().double().requires_grad_() for n, p in module.named_parameters()}
    reference = mla_reference if CONFIGS[name].attention == "mla" else gqa_reference
    expected = reference(exact_x, exact, CONFIGS[name])
    assert_forward_close(out, expected)
    assert_forward_close(out - x, expected - exact_x)  # what attention adds, without the residual
    incoming = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(out, (x, *module.parameters()), incoming)
    wanted = torch.autograd.grad(expected, (exact_x, *exact.values()), incoming.double())
    for actual, exact_gradient in zip(gradients, wanted, strict=True):
        assert_gradient_close(actual, exact_gradient)
