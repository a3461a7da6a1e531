"""Delta-net layers beside transformers' module: values and all gradients; documents one by one."""

import dataclasses

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from graphmoe import load_hf, save_hf
from graphmoe.config.schema import LinearAttention, ModelConfig
from graphmoe.model.build import init_weights
from graphmoe.model.delta_net import GatedDeltaNet
from tests.parity.hf_models import CASES, random_model, tensors_in
from tests.tolerances import relative_error

B, S, WIDTH, UNREAD = 2, 70, 24, torch.empty(0)
CONFIG = ModelConfig(
    attention="gqa", linear_attention=LinearAttention.delta_net, full_every=4, hidden_size=WIDTH,
    linear_key_heads=2, linear_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32, norm_eps=1e-5,
)  # fmt: skip


def ours_of(config, seed=0):
    module, generator = GatedDeltaNet(config), torch.Generator().manual_seed(seed)
    init_weights(module, 0.3, seed)
    for parameter in (module.norm.weight, module.out_norm.weight, module.dt_bias_V):
        torch.nn.init.uniform_(parameter, 0.5, 1.5, generator)
    # transformers subtracts sums of decays, and loses 1e-4 of the gradient of strong ones
    module.log_rate_V.data.clamp_(max=1.0)
    x = torch.randn(B, S, WIDTH, generator=generator, requires_grad=True)
    return module, x, torch.randn(B, S, WIDTH, generator=generator)


def theirs_of(config, named):
    """Transformers' module with our parameters ``named``, and functions of its gradients to ours."""
    H, V = config.linear_key_heads, config.linear_value_heads
    K, W, r = config.linear_key_head_dim, config.linear_value_head_dim, V // H
    module = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=WIDTH, linear_num_key_heads=H, linear_num_value_heads=V, linear_key_head_dim=K,
            linear_value_head_dim=W, linear_conv_kernel_dim=config.linear_conv_taps,
            rms_norm_eps=config.norm_eps,
        ),
        0,
    )  # fmt: skip

    def by_head(*names):
        return torch.cat([named[f"{name}_proj.weight"].unflatten(0, (H, -1)) for name in names], 1).flatten(
            0, 1
        )

    def apart(weight, sizes, *names):
        parts = weight.unflatten(0, (H, -1)).split(sizes, 1)
        return {f"{name}_proj.weight": part.flatten(0, 1) for name, part in zip(names, parts, strict=True)}

    with torch.no_grad():
        module.in_proj_qkvz.weight.copy_(by_head("q", "k", "v", "gate"))
        module.in_proj_ba.weight.copy_(by_head("beta", "decay"))
        module.conv1d.weight.copy_(torch.cat([named[f"convs.{name}"] for name in "qkv"])[:, None])
        pairs = {"A_log": "log_rate_V", "dt_bias": "dt_bias_V", "norm.weight": "out_norm.weight"}
        pairs |= {"out_proj.weight": "out_proj.weight"}
        for theirs, ours in pairs.items():
            module.get_parameter(theirs).copy_(named[ours])

    def gradients():
        convs = module.conv1d.weight.grad[:, 0].split([H * K, H * K, V * W])
        return {
            **apart(module.in_proj_qkvz.weight.grad, [K, K, r * W, r * W], "q", "k", "v", "gate"),
            **apart(module.in_proj_ba.weight.grad, [r, r], "beta", "decay"),
            **{f"convs.{name}": part for name, part in zip("qkv", convs, strict=True)},
            **{ours: module.get_parameter(theirs).grad for theirs, ours in pairs.items()},
        }

    return module, gradients


SHAPES = {"grouped": {}, "one to one": {"linear_value_heads": 2}, "two taps": {"linear_conv_taps": 2}}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients_are_those_of_transformers(changes):
    config = dataclasses.replace(CONFIG, **changes)
    ours, x, grad = ours_of(config)
    named = dict(ours.named_parameters())
    theirs, gradients = theirs_of(config, named)
    found = ours(x, UNREAD, UNREAD)
    found.backward(grad)
    actual = {name: parameter.grad for name, parameter in named.items()} | {"x": x.grad}
    x.grad = ours.norm.weight.grad = None
    expected = x + theirs(ours.norm(x))
    expected.backward(grad)
    actual["result"] = found - x
    wanted = {"result": expected - x, "x": x.grad, "norm.weight": ours.norm.weight.grad} | gradients()
    assert wanted.keys() == actual.keys()
    for name, value in wanted.items():
        error = relative_error(actual[name], value)
        assert error < 1e-4, (name, error)


def test_a_packed_sequence_is_its_documents_one_by_one():
    ours, x, _ = ours_of(CONFIG)
    starts = torch.tensor([[0, 1, 3, 40, 64], [0, 2, 6, 63, 65]])
    position_S = torch.arange(S)
    first_BS = torch.where(position_S[:, None] >= starts[:, None], starts[:, None], 0).amax(2).int()
    found = ours(x, UNREAD, UNREAD, first_BS)
    for row, whole, first in zip(x, found, starts.tolist(), strict=True):
        for start, end in zip(first, [*first[1:], S], strict=True):
            alone = ours(row[None, start:end], UNREAD, UNREAD)[0]
            torch.testing.assert_close(whole[start:end], alone, rtol=1e-5, atol=1e-5)


def test_centred_norms_in_bf16_keep_their_bits_in_fp32(tmp_path):
    theirs = random_model(CASES["qwen3_next"])
    theirs.model.norm.weight.data.mul_(0.01)
    theirs.bfloat16().save_pretrained(tmp_path)
    config, ours = load_hf(tmp_path, dtype=torch.float32)
    assert config.linear_attention is LinearAttention.delta_net and config.full_every == 2
    assert torch.equal(ours.loss_head.norm.weight, theirs.model.norm.weight.float() + 1)
    save_hf(ours.bfloat16(), config, tmp_path / "short")
    written = tensors_in(tmp_path / "short")["model.norm.weight"]
    assert 0 < (written - theirs.model.norm.weight).abs().max() < 0.004  # half of a bit of 1 in bf16


def test_initial_rates_are_uniform_and_steps_have_a_bias_of_one():
    module = GatedDeltaNet(dataclasses.replace(CONFIG, linear_value_heads=4000))
    init_weights(module, 0.02, 0)
    rates = module.log_rate_V.exp()
    assert 0.01 <= rates.min() < 0.1 and 15.9 < rates.max() <= 16
    assert rates.mean().item() == pytest.approx(8, abs=0.3) and rates.std().item() == pytest.approx(
        4.6, abs=0.2
    )
    assert module.dt_bias_V.eq(1).all()
