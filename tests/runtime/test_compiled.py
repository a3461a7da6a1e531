"""Compiled segments: the numbers of the plain model, one compilation for layers alike, torch's caches."""

import json
import math
import subprocess
import sys

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn

from graphmoe.model.build import build_model
from graphmoe.ops.gradients import Gradient
from graphmoe.passes import PASSES, select_passes
from graphmoe.passes.base import PassRunner
from graphmoe.runtime.compile import graphs as unit_graphs
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.torch_compat import joint_graph
from graphmoe.segments import Segment, run_segments
from tests.runs import COMPILED, ROOT, config
from tests.tolerances import assert_forward_close, assert_gradient_close


def model_of(*overrides: str) -> nn.Module:
    run = config(*COMPILED, "model.mtp_depth=1", *overrides)
    return build_model(run.model, device=torch.device("cpu"), dtype=torch.float32, seed=0, execution=run.moe)


def batch(seq_len: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 64, (2, seq_len + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def executor(*overrides: str) -> CompiledSegments:
    passes = config(*overrides).passes
    return CompiledSegments(PassRunner(select_passes(passes, {})))


def gradients(model: nn.Module, *execute: CompiledSegments):
    model.zero_grad()
    output = model.loss(*batch(), *execute)
    output.total.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def compiled() -> CompiledSegments:
    made = executor()
    model = model_of("model.num_layers=4")
    with torch._functorch.config.patch(strict_autograd_cache=True):
        gradients(model, made)
        with torch.no_grad():
            model.loss(*batch(), made)
    return made


def test_losses_and_every_gradient_are_those_of_the_plain_model(compiled):
    model = model_of("model.num_layers=4")
    expected, of_plain = gradients(model)
    output, of_compiled = gradients(model, compiled)
    for name in ("total", "cross_entropy", "mtp", "stats_L3"):
        assert_forward_close(getattr(output, name), getattr(expected, name))
    assert output.counts_LE.equal(expected.counts_LE)
    assert of_compiled.keys() == of_plain.keys()
    for name, gradient in of_compiled.items():
        assert_gradient_close(gradient, of_plain[name])


@pytest.mark.slow  # two compilations
@pytest.mark.parametrize("words", [(), ("passes.disabled=[fuse_router]",)], ids=["fused", "plain"])
def test_a_balance_loss_beside_a_large_bias_has_the_gradient_of_the_plain_router(words):
    model, made = model_of("model.aux_loss=sequence", "model.aux_loss_coef=1"), executor(*words)
    layer = model.layers[-1]
    layer.moe_router.selection_bias.copy_(torch.arange(len(layer.moe_router.selection_bias)))
    (router,) = [segment for segment in layer.segments() if segment.name == "moe_router"]
    x, found = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(2)), []
    for execute in (run_segments, made):
        model.zero_grad()
        _, _, loss, stats = execute([router], {"x": x}, ("weight", "experts", "loss", "stats"))
        loss.backward()
        found.append((loss.detach(), stats, layer.moe_router.gate.weight.grad.clone()))
    (_, of_plain, expected), (_, of_compiled, gradient) = found
    assert_forward_close(of_compiled, of_plain)
    assert_gradient_close(gradient, expected)
    (report,) = made.reports
    matches = {row.name: row.matches for row in report.passes}
    assert matches.get("fuse_router", 0) == (not words)


def test_validation_runs_the_forward_of_training(compiled):
    model = model_of("model.num_layers=4")
    with torch.no_grad():
        total = model.loss(*batch(), compiled).total
        assert_forward_close(total, model.loss(*batch()).total)
    units = ["embed", "attn..mlp", "attn..moe_combine", "loss", "embed..moe_combine", "loss"]
    assert not total.requires_grad and [report.unit for report in compiled.reports] == units


def test_layers_alike_share_one_compilation_and_nothing_is_compiled_after_the_first_step(compiled):
    used = {report.unit: report.shared_by for report in compiled.reports}
    assert used["attn..moe_combine"] == 3 * used["attn..mlp"] > 0
    model, before = model_of("model.num_layers=4"), len(compiled.reports)
    torch.compiler.set_stance("fail_on_recompile")  # should Dynamo take part one day
    try:
        for _ in range(3):
            gradients(model, compiled)
    finally:
        torch.compiler.set_stance("default")
    assert len(compiled.reports) == before and not compiled.recompiled


def test_another_shape_compiles_again_and_says_which_tensor_changed(caplog):
    made = executor()
    head = model_of().loss_head
    for seq_len in (4, 4, 5):
        tensors = {"x": torch.randn(2, seq_len, 16), "labels": torch.zeros(2, seq_len, dtype=torch.long)}
        with torch.no_grad():
            made(head.segments(head.norm), tensors, ("cross_entropy",))
    assert made.recompiled == 1
    assert (
        "loss is compiled again: x was torch.float32 [2, 4, 16] and is torch.float32 [2, 5, 16]"
        in caplog.text
    )


@pytest.mark.slow
def test_each_graph_is_differentiated_once(monkeypatch):
    traced = []
    monkeypatch.setattr(unit_graphs, "joint_graph", lambda *given: traced.append(1) or joint_graph(*given))
    made = executor()
    model_of().loss(*batch(), made)
    rows = [row for report in made.reports for row in report.passes if row.name != "split_backward"]
    assert len(traced) == len(made.reports) + sum(row.matches > 0 for row in rows)


def test_no_cache_of_torch_is_bypassed(compiled):
    for report in compiled.reports:
        assert report.cache["fx_bypasses"] == report.cache["aot_bypasses"] == 0, report.unit
        assert report.cache["fx_hits"] + report.cache["fx_misses"] == report.graphs, report.unit


SECOND_PROCESS = """
import json, torch
torch.set_num_threads(1)
from tests.runtime.test_compiled import executor, gradients, model_of
made = executor()
with torch._functorch.config.patch(strict_autograd_cache=True):
    gradients(model_of("model.num_layers=4"), made)
rows = [[r.unit, r.cache, [[p.name, p.matches, p.nodes_after] for p in r.passes]] for r in made.reports]
print(json.dumps([made.runner.uuid(), rows]))
"""


@pytest.mark.slow
def test_a_second_process_finds_everything_in_the_caches_and_reports_the_same_passes(compiled):
    line = [sys.executable, "-c", SECOND_PROCESS]
    run = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    uuid, rows = json.loads(run.stdout.splitlines()[-1])
    assert uuid == compiled.runner.uuid()
    first = compiled.reports
    assert [unit for unit, _, _ in rows] == [report.unit for report in first]
    for (unit, cache, passes), report in zip(rows, first, strict=True):
        assert cache["fx_misses"] == cache["aot_misses"] == 0 < cache["fx_hits"], unit
        assert passes == [[p.name, p.matches, p.nodes_after] for p in report.passes]


def test_the_bytes_that_the_report_counts_are_those_that_the_forward_keeps(compiled):
    for code, report in compiled._codes.values():
        fusions = [row for row in report.passes if row.saved_bytes_after is not None]
        if not fusions:
            continue
        nodes = code.graphs.forward.graph.find_nodes(op="placeholder")
        inputs = [torch.ones(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in nodes]
        with torch.no_grad():
            results = code.graphs.forward(*inputs)
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in inputs}
        kept = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in results[code.graphs.num_outputs :]
        }
        measured = sum(size for pointer, size in kept.items() if pointer not in held)
        assert measured == fusions[-1].saved_bytes_after, report.unit
        assert measured > 0 or report.unit == "embed"


class Scale(nn.Module):
    """x times its weight, turned: an output that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(0, 1) * self.weight).sin()


SPLIT = [spec for spec in PASSES if spec.name == "split_backward"]


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_weight_of_two_segments_gets_both_gradients(accumulates):
    scale = Scale()
    segments = [Segment("attn", scale, ("x",), ("x",)), Segment("mlp", scale, ("x",), ("x",))]
    gradient = Gradient(torch.full((4,), math.nan))
    made = CompiledSegments(PassRunner(SPLIT), (lambda p: gradient) if accumulates else None)
    x = torch.randn(3, 5, 4, requires_grad=True)
    (expected,) = run_segments(segments, {"x": x}, ("x",))
    of_weight, of_x = torch.autograd.grad(expected.square().sum(), (scale.weight, x))
    for micro_batches in (1, 3, 2):
        for _ in range(micro_batches):
            (y,) = made(segments, {"x": x}, ("x",))
            x.grad = scale.weight.grad = None
            y.square().sum().backward()
        assert_forward_close(y, expected)
        assert_gradient_close(x.grad, of_x)
        assert (scale.weight.grad is None) == accumulates
        if accumulates:
            assert_gradient_close(gradient.total / micro_batches, of_weight)
            gradient.finish()
    assert [report.graphs for report in made.reports] == [4 if accumulates else 3]  # W again, to add


def test_a_unit_adds_to_the_gradient_that_another_unit_began_and_begins_its_own():
    shared, own = Scale(), Scale()
    segments = [
        Segment("attn", nn.Sequential(shared, own), ("x",), ("x",)),
        Segment("mlp", shared, ("x",), ("x",), stream="comm"),
    ]
    gradients = {id(m.weight): Gradient(torch.full((4,), math.nan)) for m in (shared, own)}
    made = CompiledSegments(PassRunner(SPLIT), lambda p: gradients[id(p)])
    x = torch.randn(3, 5, 4)
    (expected,) = run_segments(segments, {"x": x}, ("x",))
    wanted = torch.autograd.grad(expected.square().sum(), (shared.weight, own.weight))
    (y,) = made(segments, {"x": x}, ("x",))
    y.square().sum().backward()  # that of mlp comes first
    for module, gradient in zip((shared, own), wanted, strict=True):
        assert_gradient_close(gradients[id(module.weight)].total, gradient)


def test_a_gradient_that_could_not_be_made_leaves_nothing_to_be_added_to():
    scale, gradient = Scale(), Gradient(torch.full((4,), math.nan))
    made = CompiledSegments(PassRunner(SPLIT), lambda p: gradient)
    x = torch.randn(3, 5, 4)
    (y,) = made([Segment("attn", scale, ("x",), ("x",))], {"x": x}, ("x",))
    ((code, _),) = made._codes.values()
    works = code._weights[False]
    code._weights[False] = None  # calling it raises
    with pytest.raises(TypeError):
        y.sum().backward()
    code._weights[False] = works
    (y,) = made([Segment("attn", scale, ("x",), ("x",))], {"x": x}, ("x",))
    y.sum().backward()
    (wanted,) = torch.autograd.grad(scale(x).sum(), scale.weight)
    assert_gradient_close(gradient.total, wanted)


def test_only_graphs_that_change_their_inputs_are_not_timed(monkeypatch):
    patches = []

    def compiler(graph, fakes, *, config_patches):
        patches.append(config_patches)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compiler)
    made = CompiledSegments(PassRunner(SPLIT), lambda p: Gradient(torch.zeros(4)))
    x = torch.randn(3, 5, 4, requires_grad=True)
    (y,) = made([Segment("attn", Scale(), ("x",), ("x",))], {"x": x}, ("x",))
    y.sum().backward()
    untimed = {"triton.autotune_pointwise": False}
    assert patches == [{}, {}, untimed]  # F, I and W
    assert set(untimed) <= set(torch._inductor.config.get_config_copy())


def test_gradients_of_gradients_are_refused():
    made = CompiledSegments(PassRunner([]))
    x = torch.randn(3, 5, 4, requires_grad=True)
    (y,) = made([Segment("mlp", Scale(), ("x",), ("x",))], {"x": x}, ("x",))
    with pytest.raises(RuntimeError, match="no gradients of gradients; use compile.enabled=false"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
