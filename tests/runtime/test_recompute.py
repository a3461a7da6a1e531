"""Recompute: bitwise the gradients without it, from fewer kept bytes, eagerly, compiled and captured."""

from __future__ import annotations

import functools
import json
from collections import Counter

import pytest
import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphmoe.config import ConfigError, RecomputeConfig
from graphmoe.gradients import Gradient
from graphmoe.segments import LAYER_SEGMENTS, Segment, run_segments
from graphmoe.torch_compat import joint_graph
from passes import PassRunner, select_passes
from runtime import compiled, unit_graphs
from runtime.capture import Capture
from runtime.captured_units import UnitCapture
from runtime.compiled import CompiledSegments
from runtime.output_views import root_of
from runtime.recompute import Recompute, RecomputedSegments, UnitRecompute
from tests.runs import assert_same_state, config, final_state, numbers, train_in
from tests.runtime.test_compiled import model_of
from tests.tolerances import assert_gradient_close

B, S, D = 2, 16, 16
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
MLA = "model.q_lora_rank=8"
GQA = ("model.attention=gqa", "model.num_kv_heads=1", "model.head_dim=4", "model.qk_norm=true")
UNFUSED = "passes.disabled=[fuse_experts]"


def recompute(**named) -> Recompute:
    return Recompute.of(RecomputeConfig(**named))


class Unmeasured(PassRunner):
    """Does not cut the graph again for each pass, to say how many bytes it saves."""

    def run(self, stage, module, unit, segments=(), saved_bytes=None):
        return super().run(stage, module, unit, segments)


def executor(wanted: Recompute | None = None, *overrides: str) -> CompiledSegments:
    passes = config(*overrides).passes
    knobs = {"fuse_loss": {"needs_grad": True}}
    return CompiledSegments(lambda trains: Unmeasured(select_passes(passes, knobs)), recompute=wanted)


_JOINTS: dict[str, fx.GraphModule] = {}


def _copied_joint(forward: fx.GraphModule, fakes: list[Tensor]) -> fx.GraphModule:
    """A copy of the joint graph, which is traced once for all that differ in what is computed again."""
    names = [node.meta.get("custom") for node in forward.graph.nodes]
    key = f"{[(fake.shape, fake.dtype) for fake in fakes]} {names} {forward.graph}"
    if key not in _JOINTS:
        _JOINTS[key] = joint_graph(forward, fakes)
    graph, copies = fx.Graph(), {}
    graph.output(graph.graph_copy(_JOINTS[key].graph, copies))
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    return fx.GraphModule(_JOINTS[key], graph)


@pytest.fixture
def graphs_as_they_are(monkeypatch):
    """Units run their graphs operation by operation: each gives the bits that it gave the first time."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph: graph)
    monkeypatch.setattr(unit_graphs, "joint_graph", _copied_joint)


def layer_gradients(execute, *overrides: str, layer: int = 1, dtype=torch.float32):
    """Loss, and the gradients of the input and of every weight of one layer."""
    model = model_of("model.num_layers=2", MLA, *overrides)
    module = model.layers[layer].to(dtype)
    for buffer in module.buffers():
        buffer.data = buffer.data.float()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, S, D, generator=generator).to(dtype).requires_grad_()
    output = module(x, *model.rope(S, x.device), execute, layer)
    loss = output.square().sum() if layer == 0 else output.x_BSD.square().sum() + output.loss
    return loss, torch.autograd.grad(loss, [x, *module.parameters()])


@functools.cache
def kept_without(*overrides: str, layer: int = 1, dtype=torch.float32) -> tuple[int, list[torch.Tensor]]:
    execute = executor(None, *(word for word in overrides if word.startswith("passes.")))
    loss, gradients = layer_gradients(execute, *overrides, layer=layer, dtype=dtype)
    assert execute.reports[0].recomputed == 0
    return execute.reports[0].kept_bytes, [loss, *gradients]


TOKENS = B * S * 4
"""Bytes of one fp32 number for each token."""
VARIANTS = {  # name: (what is asked for, overrides, layer, bytes that are kept less; None: all of them)
    "all": ({"all": True}, (), 1, None),
    "a dense layer": ({"layer_ids": [0]}, (), 0, None),
    "attn": ({"segments": ["attn"]}, (), 1, 4000),
    "mlp": ({"segments": ["mlp"]}, (), 0, 3 * TOKENS * 16),  # gate, up and their product
    "moe_router": ({"segments": ["moe_router"]}, (), 1, TOKENS * 4),  # the logits at least
    "shared_experts": ({"segments": ["shared_experts"]}, (), 1, 3 * TOKENS * 8),
    "moe_experts": ({"segments": ["moe_experts"]}, (), 1, 2 * TOKENS * 2 * 8),  # h of two slots
    "two regions": ({"segments": ["attn", "moe_experts"]}, (), 1, 4000),
    "neighbours": ({"segments": ["moe_router", "moe_preprocess", "moe_dispatch"]}, (), 1, 0),
    "layernorm": ({"ops": ["layernorm"]}, (), 1, TOKENS * 16),
    "core_attn": ({"ops": ["core_attn"]}, (), 1, TOKENS * 2 * 4),
    "mla_up_proj": ({"ops": ["mla_up_proj"]}, (), 1, 2 * TOKENS * 2 * 8),
    "moe_act": ({"ops": ["moe_act"]}, (UNFUSED,), 1, 2 * TOKENS * 8),
    "the part mlp": ({"ops": ["mlp"]}, (), 0, 3 * TOKENS * 16),
    "the part shared_experts": ({"ops": ["shared_experts"]}, (), 1, 3 * TOKENS * 8),
    "parts of gqa": ({"ops": ["layernorm", "core_attn"]}, GQA, 0, TOKENS * 16),
    "moe_experts, unfused": ({"segments": ["moe_experts"]}, ("passes.enabled=[]",), 1, 4 * TOKENS * 8),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_bitwise_those_of_kept_values_from_fewer_bytes(name, graphs_as_they_are):
    asked, overrides, layer, less = VARIANTS[name]
    before, expected = kept_without(*overrides, layer=layer)
    execute = executor(recompute(**asked), *(word for word in overrides if word.startswith("passes.")))
    loss, gradients = layer_gradients(execute, *overrides, layer=layer)
    assert all(torch.equal(a, b) for a, b in zip([loss, *gradients], expected, strict=True))
    (report,) = execute.reports
    assert report.recomputed > 0
    if less is None:
        assert report.kept_bytes == 0
    else:
        assert report.kept_bytes <= before - less


@pytest.mark.parametrize(
    "asked",
    [{"all": True}, {"segments": ["attn", "moe_experts"]}, {"ops": ["layernorm", "mla_up_proj"]}],
    ids=str,
)
def test_bf16_is_bitwise_too(asked, graphs_as_they_are):
    before, expected = kept_without(dtype=torch.bfloat16)
    execute = executor(recompute(**asked))
    loss, gradients = layer_gradients(execute, dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip([loss, *gradients], expected, strict=True))
    assert execute.reports[0].kept_bytes < before


@pytest.mark.parametrize("name", ["moe_preprocess", "moe_dispatch", "moe_combine"])
def test_segments_that_keep_nothing_of_their_own_cost_nothing(name, graphs_as_they_are):
    before, expected = kept_without()
    execute = executor(recompute(segments=[name]))
    _, gradients = layer_gradients(execute)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected[1:], strict=True))
    assert (execute.reports[0].kept_bytes, execute.reports[0].recomputed) == (before, 0)


def test_the_fused_experts_are_no_activation_to_compute_again(graphs_as_they_are):
    before, _ = kept_without()
    execute = executor(recompute(ops=["moe_act"]))
    layer_gradients(execute)
    assert (execute.reports[0].kept_bytes, execute.reports[0].recomputed) == (before, 0)


def targets(graphs, *halves: str) -> Counter:
    return Counter(
        node.target
        for half in halves
        for node in getattr(graphs.backward, half).graph.nodes
        if node.op == "call_function"
    )


def graphs_of(execute: CompiledSegments):
    ((code, _),) = execute._codes.values()
    return code.graphs


def test_what_is_expensive_is_computed_again_once_and_the_experts_as_far_as_needed(graphs_as_they_are):
    execute = executor(recompute(all=True))
    layer_gradients(execute)
    ops, graphs = torch.ops.graphmoe, graphs_of(execute)
    both = targets(graphs, "inputs", "weights")
    assert graphs.weight_gradients and both[ATTENTION] == both[ops.router.default] == 1
    assert both[ops.grouped_mlp_hidden.default] == 1 and both[ops.grouped_mlp.default] == 0
    assert targets(graphs, "weights")[ATTENTION] == 0


def test_a_border_is_read_where_it_is_kept_and_leaves_no_copy(graphs_as_they_are):
    """The norm's result is kept for the experts, so the logits that are computed again read it there."""
    execute = executor(recompute(segments=["moe_router"]))
    layer_gradients(execute)
    graphs = graphs_of(execute)
    (router,) = [
        n for n in graphs.backward.inputs.graph.nodes if n.target is torch.ops.graphmoe.router.default
    ]
    logits = router.args[0]
    assert logits.target is torch.ops.aten.mm.default and root_of(logits.args[0]).op == "placeholder"
    plain = executor()
    layer_gradients(plain)
    copies = [
        sum(node.target is torch.ops.aten.clone.default for node in each.forward.graph.nodes)
        for each in (graphs, graphs_of(plain))
    ]
    assert copies[0] == copies[1]


class Held(TorchDispatchMode):
    """Measures the storages that operations made and something still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def num_bytes(self) -> int:
        return sum(size for made, size in self.made.items() if not made.expired())


def tokens(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randint(0, 64, (B, S + 1), generator=torch.Generator().manual_seed(seed))
    return made[:, :-1], made[:, 1:]


def held_bytes(num_layers: int, *execute) -> int:
    model = model_of(f"model.num_layers={num_layers}", "model.mtp_depth=0")
    model.loss(*tokens())  # makes the rotary tables
    with Held() as held:
        total = model.loss(*tokens(), *execute).total
    size = held.num_bytes()
    total.backward()
    return size


def test_an_eager_forward_holds_about_one_hidden_state_for_each_layer():
    execute = RecomputedSegments(recompute(all=True))
    everything = (held_bytes(4) - held_bytes(2)) / 2
    again = (held_bytes(4, execute) - held_bytes(2, execute)) / 2
    state = B * S * D * 4
    assert state <= again <= 1.1 * state and everything > 20 * state


def test_a_compiled_forward_holds_what_the_report_says(graphs_as_they_are):
    for wanted in (None, recompute(all=True), recompute(segments=["attn"])):
        execute = executor(wanted)
        model = model_of("model.num_layers=2", "model.mtp_depth=0")
        segments = model.layers[1].segments(1)
        x, (cos, sin) = torch.randn(B, S, D, requires_grad=True), model.rope(S, torch.device("cpu"))
        execute(segments, {"x": x, "cos": cos, "sin": sin}, ("x", "loss"))  # traces
        with Held() as held:
            outputs = execute(segments, {"x": x, "cos": cos, "sin": sin}, ("x", "loss"))
        handed_on = sum(output.untyped_storage().nbytes() for output in outputs)
        assert held.num_bytes() - handed_on == execute.reports[0].kept_bytes


EAGER = [
    {"all": True},
    *({"segments": [name]} for name in LAYER_SEGMENTS),
    {"layer_ids": [0, 2]},
    {"segments": ["attn", "moe_experts"], "layer_ids": [1, 3]},
    {"segments": ["moe_router", "moe_preprocess", "moe_experts", "moe_combine"]},
]


@pytest.mark.parametrize("asked", EAGER, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eager_gradients_are_bitwise_those_of_kept_values(asked, dtype):
    """Of three layers and one that predicts later tokens, over one and two micro-batches."""
    model = model_of("model.num_layers=3").to(dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.float()
    execute = RecomputedSegments(recompute(**asked))
    for num_batches in (1, 2):
        totals = []
        for run in (run_segments, execute):
            model.zero_grad()
            losses = []
            for number in range(num_batches):
                losses.append(model.loss(*tokens(number), run).total)
                losses[-1].backward()
            totals.append([*losses, *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*totals, strict=True))


def test_validation_is_not_computed_again():
    model = model_of()
    with torch.no_grad():
        total = model.loss(*tokens(), RecomputedSegments(recompute(all=True))).total
        assert total.equal(model.loss(*tokens()).total) and not total.requires_grad


def test_layers_treated_alike_share_a_compilation_and_others_do_not(graphs_as_they_are):
    execute = executor(recompute(layer_ids=[1, 2, 4]))
    model = model_of("model.num_layers=5", "model.mtp_depth=0")
    model.loss(*tokens(), execute).total.backward()
    used = {(r.unit, r.recomputed > 0): r.shared_by for r in execute.reports if r.unit.startswith("attn")}
    assert used == {("attn..mlp", False): 1, ("attn..moe_combine", True): 3, ("attn..moe_combine", False): 1}
    with torch.no_grad():
        model.loss(*tokens(), execute)
    used = {r.unit: r.shared_by for r in execute.reports if not r.trains}
    assert used["attn..moe_combine"] == 4


def test_what_is_covered_follows_names_and_layers():
    def covered(wanted: Recompute) -> list[tuple[int | None, str]]:
        return [(s.layer, s.name) for s in pieces if wanted.covers(s)]

    names = ("embed", "attn", "moe_router", "moe_experts", "loss")
    pieces = [
        Segment(n, torch.neg, ("x",), ("x",), layer=None if n == "loss" else i) for i in (0, 1) for n in names
    ]
    layers = [(i, name) for i in (0, 1) for name in names[1:4]]
    assert covered(recompute()) == [] and not recompute()
    assert covered(recompute(all=True)) == layers
    assert covered(recompute(layer_ids=[1])) == layers[3:]
    assert covered(recompute(segments=["attn"])) == [(0, "attn"), (1, "attn")]
    assert covered(recompute(segments=["attn"], layer_ids=[0])) == [(0, "attn")]
    assert covered(recompute(ops=["core_attn"], layer_ids=[0])) == []
    of_unit = recompute(segments=["attn", "moe_router", "loss"], ops=["core_attn"], layer_ids=[0]).of_unit
    assert of_unit(pieces[:5]) == UnitRecompute(
        (frozenset({"attn", "moe_router"}),), frozenset({"core_attn"})
    )
    assert of_unit(pieces[5:]) == of_unit(pieces[4:5]) == UnitRecompute()


class Noise(nn.Module):
    """Adds random numbers to x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + torch.rand_like(x)).sin()


class Drop(nn.Module):
    """Attention whose weights are dropped at random."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


@pytest.mark.parametrize("module", [Noise(), nn.Dropout(0.5), Drop()], ids=["rand", "dropout", "attention"])
@pytest.mark.parametrize("eager", [True, False])
def test_random_numbers_in_what_is_computed_again_are_refused(module, eager, graphs_as_they_are):
    wanted = recompute(segments=["attn"])
    execute = RecomputedSegments(wanted) if eager else executor(wanted, "passes.enabled=[split_backward]")
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    segments = [Segment(name, module, ("x",), ("x",), layer=0) for name in ("attn", "mlp")]
    (y,) = execute(segments[1:], {"x": x}, ("x",))  # not covered
    y.sum().backward()
    with torch.no_grad():
        execute(segments, {"x": x}, ("x",))  # not computed again
    with pytest.raises(ConfigError, match="recompute covers .*attn, which draws random numbers"):
        execute(segments, {"x": x}, ("x",))


class Scale(nn.Module):
    """A few operations with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sin().exp()


@pytest.mark.parametrize("names", [("attn",), ("attn", "mlp")], ids=str)
def test_a_captured_unit_computes_again_inside_its_graph(names, graphs_as_they_are):
    modules = [Scale(), Scale()]
    segments = [
        Segment(name, module, ("x",), ("x",), layer=0)
        for name, module in zip(("attn", "mlp"), modules, strict=True)
    ]
    gradients = {id(m.weight): Gradient(torch.full((4,), torch.nan)) for m in modules}
    capture = Capture("test", torch.device("cpu"), warmup_steps=1)
    shared = UnitCapture(frozenset(names), capture)
    split = select_passes(config("passes.enabled=[split_backward]").passes, {})
    execute = CompiledSegments(
        lambda trains: PassRunner(split), lambda p: gradients[id(p)], shared, recompute(all=True)
    )
    for step in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).requires_grad_()
        (plain,) = run_segments(segments, {"x": x}, ("x",))
        of_x, *of_weights = torch.autograd.grad(plain.sum(), [x, *(m.weight for m in modules)])
        with capture.step():
            (y,) = execute(segments, {"x": x}, ("x",))
            y.sum().backward()
        assert_gradient_close(x.grad, of_x)
        for module, expected in zip(modules, of_weights, strict=True):
            assert_gradient_close(gradients[id(module.weight)].total, expected)
            gradients[id(module.weight)].finish()
    assert capture.report.spans[0].graphs == 2
    assert {(report.kept_bytes, report.recomputed > 0) for report in execute.reports} == {(0, True)}


def test_an_eager_step_that_computes_again_is_captured_bitwise(tmp_path):
    words = ("train.steps=4", "graph.warmup_steps=1", "train.val_interval=4", "checkpoint.interval=4")
    for name, more in (
        ("plain", ()),
        ("again", ("recompute.all=true",)),
        ("captured", ("recompute.all=true", "graph.scope=full_iteration")),
    ):
        train_in(tmp_path / name, *words, *more)
    for name in ("again", "captured"):
        assert numbers(tmp_path / name) == numbers(tmp_path / "plain")


RUN = ("compile.enabled=true", "train.steps=4", "train.val_interval=4", "checkpoint.interval=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked, overrides",
    [
        ("recompute.all=true", ("model.mtp_depth=1",)),
        ("recompute.layer_ids=[0,2]", ("model.num_layers=3", "train.micro_batch_size=4")),
        ("recompute.segments=[attn,moe_router,moe_experts]", ("model.aux_loss_coef=0.1",)),
        ("recompute.ops=[layernorm,core_attn,mla_up_proj,shared_experts,mlp,moe_act]", (MLA,)),
    ],
)
def test_compiled_training_is_bitwise_that_of_kept_values(tmp_path, caplog, asked, overrides):
    states = []
    for name, words in (("plain", ()), ("again", (asked,))):
        train_in(tmp_path / name, *RUN, *overrides, *words)
        states.append(
            final_state(tmp_path / name / "checkpoints", tmp_path / f"{name}_scratch", *RUN, *overrides)
        )
    assert numbers(tmp_path / "again") == numbers(tmp_path / "plain")
    assert_same_state(*states)
    units = [
        json.loads((tmp_path / n / "compile_report.json").read_text())["units"] for n in ("plain", "again")
    ]
    plain, again = ({u["unit"]: u for u in found if u["for"] == "training"} for found in units)
    assert all(again[name]["kept_bytes"] <= unit["kept_bytes"] for name, unit in plain.items())
    assert any(unit["recomputed"] > 0 for unit in again.values())
    unused = "recompute.ops=moe_act has no effect with the pass fuse_experts"
    assert (unused in caplog.text) == ("moe_act" in asked)


@pytest.mark.slow
def test_compiled_bf16_agrees_within_its_rounding():
    """Inductor keeps fp32 between operations that it fuses, and the second computation is fused otherwise."""
    made = []
    for wanted in (None, recompute(all=True)):
        _, gradients = layer_gradients(executor(wanted), dtype=torch.bfloat16)
        made.append(gradients)
    for kept, again in zip(*made, strict=True):
        assert_gradient_close(again, kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scope, asked",
    [
        ("layer", "recompute.all=true"),
        ("partial", "recompute.all=true"),
        ("full_iteration", "recompute.segments=[attn,moe_experts]"),
        ("[attn,moe_experts]", "recompute.ops=[layernorm,core_attn]"),
    ],
)
def test_captured_training_is_bitwise_that_of_the_same_units_uncaptured(tmp_path, scope, asked):
    words = (*RUN, f"graph.scope={scope}", asked)
    states = []
    for name, warmup in (("plain", 4), ("captured", 1)):
        train_in(tmp_path / name, *words, f"graph.warmup_steps={warmup}")
        states.append(final_state(tmp_path / name / "checkpoints", tmp_path / f"{name}_scratch", *words))
    assert numbers(tmp_path / "captured") == numbers(tmp_path / "plain")
    assert_same_state(*states)
