"""Layers as lists of segments: names, order, and boundaries that hide nothing."""

import dataclasses

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphmoe.config.choices import SEGMENT_NAMES
from graphmoe.config.schema import Balance, MoEConfig
from graphmoe.model.layer import DenseLayer, MoELayer
from graphmoe.plan.experts import Load
from graphmoe.plan.layout import Layout
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.dispatch.symm import Symm
from graphmoe.runtime.ranks import Mesh
from tests.model.models import MLA, B, S, filled
from tests.tolerances import assert_gradient_close

CONFIG = dataclasses.replace(
    MLA, num_experts=8, top_k=3, z_loss_coef=0.01, aux_loss_coef=0.1, selection_bias=True
)
MOE_NAMES = "attn moe_router moe_preprocess moe_dispatch shared_experts moe_experts moe_combine"
PARTS = {"layernorm", "mla_up_proj", "core_attn", "moe_act", "shared_experts"}
GROUPED = dataclasses.replace(CONFIG, attention="gqa", num_kv_heads=1, head_dim=8)
NOT_SHARED = dataclasses.replace(CONFIG, shared_ffn_size=0)
REST = MOE_NAMES.replace("shared_experts ", "")
LAYERS = {  # name: (config, dense layer, segment names, parts)
    "dense": (CONFIG, True, "attn mlp", {*PARTS, "mlp"} - {"moe_act", "shared_experts"}),
    "moe": (CONFIG, False, MOE_NAMES, PARTS),
    "moe without shared experts": (NOT_SHARED, False, REST, PARTS - {"shared_experts"}),
    "gqa": (GROUPED, False, MOE_NAMES, PARTS - {"mla_up_proj"}),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def make_layer(name):
    config, dense, *_ = LAYERS[name]
    return filled(DenseLayer(config) if dense else MoELayer(config, MoEConfig()))


def make_tensors(name, seed=0):
    """Inputs of the first segment: residual stream and rotary tables."""
    config = LAYERS[name][0]
    rotary = config.head_dim if config.attention == "gqa" else config.qk_rope_head_dim
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, S, config.hidden_size, generator=generator).requires_grad_()
    angle = torch.rand(S, rotary // 2, generator=generator)
    return {"x": x, "cos": angle.cos(), "sin": angle.sin()}


@every_layer
def test_segments_have_the_names_and_the_order_of_the_vocabulary(name):
    names = [segment.name for segment in make_layer(name).segments()]
    assert names == LAYERS[name][2].split()
    assert names == sorted(names, key=SEGMENT_NAMES.index)


@every_layer
def test_a_trace_says_which_operations_are_parts(name):
    layer, (x, cos, sin) = make_layer(name), make_tensors(name).values()
    with torch.no_grad(), torch.fx.traceback.preserve_node_meta():
        graph = make_fx(lambda *tensors: tuple(layer(*tensors)))(x.detach(), cos, sin).graph
    of: dict[str, set[str]] = {}
    for node in graph.nodes:
        of.setdefault(node.meta.get("custom", {}).get("part", ""), set()).add(str(node.target))
    assert of.keys() - {""} == LAYERS[name][3]
    assert "aten.rsqrt.default" in of["layernorm"]
    assert all("aten.silu.default" in of[part] for part in {"mlp", "shared_experts", "moe_act"} & of.keys())
    assert {part for part, targets in of.items() if any("attention" in t for t in targets)} == {"core_attn"}


def by_segment(segments, batches, loss_of):
    """Run and differentiate micro-batches in turns; tensors and gradients cross only where segments declare.

    Returns all tensors and the gradient of x of each.
    """
    tapes = [(dict(tensors), []) for tensors in batches]
    for segment in segments:
        for values, tape in tapes:
            inputs = [values[n].detach() for n in segment.reads]
            inputs = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]
            outputs = segment.run(*inputs)
            outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
            values.update(zip(segment.writes, outputs, strict=True))
            tape.append((segment, inputs, outputs))
    for values, tape in tapes:
        ends = {n: t.detach().requires_grad_() for n, t in values.items() if t.is_floating_point()}
        loss_of(ends).backward()
        gradients = {n: t.grad for n, t in ends.items() if t.grad is not None}
        for segment, inputs, outputs in reversed(tape):
            incoming = {n: gradients.pop(n) for n in segment.writes if n in gradients}
            pairs = [(t, incoming[n]) for n, t in zip(segment.writes, outputs, strict=True) if n in incoming]
            pairs = [(t, g) for t, g in pairs if t.requires_grad]
            if pairs:
                torch.autograd.backward(*zip(*pairs, strict=True))
            for n, t in zip(segment.reads, inputs, strict=True):
                if t.grad is not None:
                    gradients[n] = gradients.get(n, 0) + t.grad
        yield values, gradients["x"]


@every_layer
def test_micro_batches_in_turns_share_nothing_and_pass_gradients_through_the_declared_tensors_only(name):
    def loss_of(values):
        return values["x"].square().sum() + values.get("loss", 0.0)

    layer = make_layer(name)
    batches = [make_tensors(name, seed) for seed in (1, 2)]
    kept = ("x",) if LAYERS[name][1] else ("x", "loss", "stats", "counts")
    wholes = []
    for tensors in batches:
        out = layer(tensors["x"], tensors["cos"], tensors["sin"])
        out = (out,) if isinstance(out, torch.Tensor) else [each for each in out if each is not None]
        wholes.append(dict(zip(kept, out, strict=True)))
        loss_of(wholes[-1]).backward()
    expected = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    found = by_segment(layer.segments(), batches, loss_of)
    for (values, dx), tensors, whole in zip(found, batches, wholes, strict=True):
        assert all(torch.equal(values[key], output) for key, output in whole.items())
        assert_gradient_close(dx, tensors["x"].grad)
    for parameter_name, parameter in layer.named_parameters():
        assert bool(parameter.grad.any()), parameter_name
        assert_gradient_close(parameter.grad, expected[parameter_name])


def test_a_layer_hands_out_the_plan_of_replicas_unless_rows_go_in_chunks():
    room = Load(64, 128)
    layer = MoELayer(CONFIG, MoEConfig(balance=Balance.replicas), dispatcher=Symm(room, 16, 1))
    planned = layer.writes
    layer.use(AllToAll(Mesh(Layout()), 8, chunk=room))
    assert {*planned} - {*layer.writes} == {"replicas"}
    for dispatcher in layer._paths:
        layer.use(dispatcher)
        assert {*layer.writes} <= {name for segment in layer.segments() for name in segment.writes}
