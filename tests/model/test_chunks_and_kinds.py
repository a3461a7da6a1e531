"""Chunks of attention, layers without rotary embedding, scaled inputs, dense layers in between."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from graphmoe.config.schema import AttentionBackend, MoEConfig, ScoreFunction
from graphmoe.model import attention as module
from graphmoe.model.attention import CoreAttention, temperature
from graphmoe.model.blocks import document_starts
from graphmoe.model.build import build_model
from graphmoe.model.layer import DenseLayer, MoELayer
from graphmoe.model.sizes import count_parameters, forward_flops, layer_weights
from graphmoe.plan.costs.layer_parts import swiglu_weights
from graphmoe.plan.layout import ALONE
from graphmoe.plan.pipeline.layouts import pieces_of
from graphmoe.project.estimates import _alike
from tests.model.models import GQA, S, filled, make_batch
from tests.tolerances import assert_gradient_close

LLAMA4 = dataclasses.replace(
    GQA, num_layers=5, num_dense_layers=0, moe_every=2, attention_chunk=5, nope_every=4, qk_norm_weight=False,
    attention_temperature_floor=3, top_k=1, input_scaling=True, selection_bias=False, renormalise=False,
)  # fmt: skip
START = torch.tensor([[0] * 3 + [3] * 6 + [9] * 4, [0] * 13], dtype=torch.int32)


def heads(length=13, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, length, n, 6, generator=generator, dtype=dtype) for n in (4, 2, 2)]


@pytest.mark.parametrize("chunk", [1, 4, 5, 12])
@pytest.mark.parametrize("first", [None, START], ids=["whole", "documents"])
def test_a_query_sees_its_own_chunk_and_document(chunk, first):
    q, k, v = heads()
    attend = CoreAttention(0.3, AttentionBackend.sdpa, 1, False, chunk=chunk)
    position = torch.arange(13)
    start = (0 * START if first is None else START)[..., None]
    seen = (position <= position[:, None]) & (position >= start)
    seen &= (position - start) // chunk == (position[:, None] - start) // chunk
    scores = 0.3 * torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(2, dim=2))
    p = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    expected = torch.einsum("bhst,bthd->bshd", p, v.repeat_interleave(2, dim=2))
    torch.testing.assert_close(attend(q, k, v, first), expected)


def test_a_sequence_of_one_chunk_runs_the_kernel_without_a_mask(monkeypatch):
    q, k, v = heads()
    plain = CoreAttention(0.3, AttentionBackend.sdpa, 1, False)
    monkeypatch.setattr(module, "within_chunks", None)
    for chunk in (13, 14, 8192):
        assert torch.equal(dataclasses.replace(plain, chunk=chunk)(q, k, v), plain(q, k, v))
    with pytest.raises(TypeError):
        dataclasses.replace(plain, chunk=12)(q, k, v)


def test_the_temperature_is_that_of_the_published_code():
    position = torch.tensor([0, 8190, 8191, 16382, 16383, 1_000_000])
    expected = 1 + 0.1 * torch.log(1 + torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 122.0]))
    torch.testing.assert_close(temperature(position, 8192, 0.1), expected)
    assert temperature(position, 8192, 0.1).dtype == torch.float32


def test_attended_pairs_are_those_of_each_layer():
    model, end = build_model(LLAMA4), 0
    tokens, _ = make_batch()
    tokens = tokens.clamp_min(1)
    tokens[0, 3] = tokens[1, 7] = end
    first = document_starts(tokens, end)
    position = torch.arange(S)
    of_documents = (position <= position[:, None]) & (position >= first[..., None])
    start = first[..., None]
    of_chunks = of_documents & ((position - start) // 5 == (position[:, None] - start) // 5)
    pairs = (4 * of_chunks.sum() + of_documents.sum()) / 5
    torch.testing.assert_close(model._attended(first), pairs)
    assert of_chunks.sum() < of_documents.sum()


def test_layers_have_experts_and_rotary_embedding_by_number():
    model = build_model(dataclasses.replace(LLAMA4, mtp_depth=1))
    assert [type(layer) for layer in model.layers] == [DenseLayer, MoELayer] * 2 + [DenseLayer]
    assert [layer.attn.rotates for layer in (*model.layers, model.mtp[0].layer)] == [True] * 3 + [
        False,
        True,
        True,
    ]
    assert [layer.attn.attend.chunk for layer in model.layers] == [5, 5, 5, 0, 5]
    assert not [name for name, _ in model.named_parameters() if "q_norm" in name or "k_norm" in name]
    assert model.num_moe_layers == 3
    places = [[*model.moe_layers(pieces)] for pieces in pieces_of("Et|tt|t|tm|L", 5, 1, 5)]
    assert places == [[], [0], [1], [2], []]
    later = dataclasses.replace(LLAMA4, num_dense_layers=3)
    assert [isinstance(layer, MoELayer) for layer in build_model(later).layers] == [False] * 3 + [True, False]


@pytest.mark.parametrize("moe_every, of_moe", [(2, 2), (3, 1)])
def test_parameters_and_flops_are_those_of_both_kinds(moe_every, of_moe):
    config = dataclasses.replace(LLAMA4, moe_every=moe_every)
    model = build_model(config, device="meta")
    assert count_parameters(config)["total"]["full"] == sum(p.numel() for p in model.parameters())
    for i, layer in enumerate(model.layers):
        found = {name: p.shape for name, p in layer.named_parameters()}
        wanted = layer_weights(config, ALONE, i)
        assert {name.split(".", 2)[2]: p.shape for name, p in wanted.items()} == found
    flops = forward_flops(config, S)
    assert flops["dense_mlp"] == 2 * (5 - of_moe) * swiglu_weights(config, config.dense_ffn_size)
    assert flops["routed_experts"] == 2 * of_moe * swiglu_weights(config, config.expert_ffn_size)


def test_stages_of_layers_in_the_same_order_are_projected_once():
    stages = pieces_of("Ett|tt|t|tt|tL", 8, 0, 5)
    model = dataclasses.replace(LLAMA4, num_layers=8)
    assert [[*_alike(stage, model).layers] for stage in stages] == [[0, 1], [0, 1], [0], [1, 2], [1]]


@pytest.mark.parametrize("function", [ScoreFunction.sigmoid, ScoreFunction.softmax])
def test_the_score_multiplies_the_input_of_the_expert(function):
    """All gradients too, of the gate by the scaled input alone: the weights of the outputs are 1."""
    config = dataclasses.replace(LLAMA4, score_function=function, attention_chunk=0, nope_every=0)
    layer = filled(MoELayer(config, MoEConfig())).double()
    x = torch.randn(2, S, config.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    table = torch.ones(S, config.head_dim // 2), torch.zeros(S, config.head_dim // 2)
    x.requires_grad_()
    found = layer(x, *table)
    attended = layer.attn(x, *table)
    h = layer.moe_router.norm(attended).flatten(0, 1)
    logits = (h.float() @ layer.moe_router.gate.weight.float().T).double()
    scores = logits.sigmoid() if function is ScoreFunction.sigmoid else logits.softmax(-1)
    chosen, outputs = scores.argmax(-1), []
    for token, expert in enumerate(chosen):
        gate, up = (layer.moe_experts.w_gate_up[expert] @ (scores[token, expert] * h[token])).chunk(2)
        outputs.append(layer.moe_experts.w_down[expert] @ (F.silu(gate) * up))
    expected = attended + (torch.stack(outputs) + layer.shared_experts(h)).view_as(x)
    torch.testing.assert_close(found.x_BSD, expected, rtol=1e-5, atol=1e-5)  # scores are in fp32
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parameters = {name: p for name, p in layer.named_parameters() if "bias" not in name}
    ours, theirs = (
        torch.autograd.grad(y, [x, *parameters.values()], grad, retain_graph=True)
        for y in (found.x_BSD, expected)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert_gradient_close(one.float(), other.float())
