"""Compiled segments: the numbers of the plain model, one compilation for layers alike, torch's caches."""

import json
import math
import subprocess
import sys
from typing import Any

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
from graphmoe.runtime.compile import report as unit_report
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.torch_compat import joint_graph
from graphmoe.segments import Segment, run_segments
from tests.runs import COMPILED, ROOT, config
from tests.tolerances import assert_forward_close, assert_gradient_close


def model_of(*overrides: str) -> nn.Module:
    run = config(*COMPILED, "model.mtp_depth=1", *overrides)
    return build_model(run.model, device=torch.device("cpu"), dtype=torch.float32, seed=0, execution=run.moe)


def batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 64, (2, 16 + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def executor(*overrides: str, **named: Any) -> CompiledSegments:
    """An executor with the passes of a run; ``named`` is for it."""
    passes = config(*overrides).passes
    return CompiledSegments(PassRunner(select_passes(passes, {})), **named)


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


@pytest.mark.slow  # a compilation
def test_a_dense_model_has_the_losses_and_gradients_of_the_plain_one():
    words = ("model.num_experts=0", "model.mtp_depth=0", "model.attention=gqa", "model.num_kv_heads=1")
    model = model_of(*words, "model.rope_scaling=llama3", "model.tie_embeddings=true", "model.num_layers=3")
    expected, of_plain = gradients(model)
    output, of_compiled = gradients(model, made := executor())
    assert_forward_close(output.total, expected.total)
    assert output.counts_LE.shape == (0, 0) and [report.unit for report in made.reports][1] == "attn..mlp"
    for name, gradient in of_plain.items():
        assert_gradient_close(of_compiled[name], gradient)


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
    matches = {row.name: row.matches for report in made.reports for row in report.passes}
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
    with torch.compiler.set_stance("fail_on_recompile"):  # should Dynamo take part one day
        for _ in range(3):
            gradients(model, compiled)
    assert len(compiled.reports) == before and not compiled.recompiled


def test_another_shape_compiles_again_and_says_which_tensor_changed(caplog, as_traced):
    made = executor()
    head = model_of().loss_head
    for seq_len in (4, 4, 5):
        tensors = {"x": torch.randn(2, seq_len, 16), "labels": torch.zeros(2, seq_len, dtype=torch.long)}
        with torch.no_grad():
            made(head.segments(head.norm), tensors, ("cross_entropy",))
    said = "loss is compiled again: x was torch.float32 [2, 4, 16] and is torch.float32 [2, 5, 16]"
    assert made.recompiled == 1 and said in caplog.text


@pytest.mark.slow
def test_each_graph_is_differentiated_once(monkeypatch):
    traced = []
    monkeypatch.setattr(unit_report, "compile_graph", lambda graph: graph)
    monkeypatch.setattr(unit_graphs, "joint_graph", lambda *given: traced.append(1) or joint_graph(*given))
    made = executor()
    model_of().loss(*batch(), made)
    rows = [row for report in made.reports for row in report.passes if row.name != "split_backward"]
    assert len(traced) == len(made.reports) + sum(row.matches > 0 for row in rows)


def test_caches_are_used_and_the_last_pass_counts_kept_bytes(compiled):
    for report in compiled.reports:
        assert report.cache["fx_bypasses"] == report.cache["aot_bypasses"] == 0, report.unit
        assert report.cache["fx_hits"] + report.cache["fx_misses"] == report.graphs, report.unit
        fusions = [row.saved_bytes_after for row in report.passes if row.saved_bytes_after is not None]
        assert fusions[-1:] in ([], [report.kept_bytes]), report.unit
        assert report.kept_bytes > 0 or report.unit == "embed" or not fusions


def test_the_bytes_that_the_report_counts_are_those_that_the_forward_keeps(compiled):
    for code, report in compiled._codes.values():
        if all(row.saved_bytes_after is None for row in report.passes):
            continue
        nodes = code.graphs.forward.graph.find_nodes(op="placeholder")
        inputs = [torch.ones(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in nodes]
        with torch.no_grad():
            results = code.graphs.forward(*inputs)[code.graphs.num_outputs :]
        given, kept = (
            {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in ts)} for ts in (inputs, results)
        )
        assert sum(size for at, size in kept.items() if at not in given) == report.kept_bytes, report.unit


SECOND_PROCESS = """
import json, torch
torch.set_num_threads(1)
from tests.runtime.test_compiled import executor, gradients, model_of, passes_of
made = executor()
with torch._functorch.config.patch(strict_autograd_cache=True):
    gradients(model_of("model.num_layers=4"), made)
print(json.dumps([made.runner.uuid(), passes_of(made), [r.cache for r in made.reports]]))
"""


def passes_of(made: CompiledSegments) -> list[object]:
    return [[r.unit, *([p.name, p.matches, p.nodes_after] for p in r.passes)] for r in made.reports]


@pytest.mark.slow
def test_a_second_process_finds_everything_in_the_caches_and_reports_the_same_passes(compiled):
    line = [sys.executable, "-c", SECOND_PROCESS]
    run = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])[:2] == [compiled.runner.uuid(), passes_of(compiled)]
    for cache in json.loads(run.stdout.splitlines()[-1])[2]:
        assert cache["fx_misses"] == cache["aot_misses"] == 0 < cache["fx_hits"]


class Scale(nn.Module):
    """x times its weight, turned: an output that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(0, 1) * self.weight).sin()


SPLIT = [spec for spec in PASSES if spec.name == "split_backward"]


def executor_of(*gradients: tuple[Scale, Gradient]) -> CompiledSegments:
    """An executor that only splits backwards, and whose units add to these gradients, if there are any."""
    found = {id(scale.weight): gradient for scale, gradient in gradients}
    return CompiledSegments(PassRunner(SPLIT), (lambda p: found[id(p)]) if gradients else None)


def of(scale: nn.Module, name: str = "attn", **named: str) -> Segment:
    return Segment(name, scale, ("x",), ("x",), **named)


def full_of_nan() -> Gradient:
    return Gradient(torch.full((4,), math.nan))


UNITS = {"one unit": {}, "two units": {"stream": "comm"}}


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("units", UNITS)
def test_a_weight_of_two_segments_gets_both_gradients(request, units, accumulates):
    if units == "two units":
        request.getfixturevalue("as_traced")
    sums = {scale: full_of_nan() for scale in (Scale(), Scale())}
    shared, own = sums
    segments = [of(nn.Sequential(shared, own)), of(shared, "mlp", **UNITS[units])]
    made = executor_of(*sums.items()) if accumulates else executor_of()
    x = torch.randn(3, 5, 4, requires_grad=True)
    (expected,) = run_segments(segments, {"x": x}, ("x",))
    of_x, *of_weights = torch.autograd.grad(expected.square().sum(), (x, shared.weight, own.weight))
    for micro_batches in (1, 3, 2):
        for _ in range(micro_batches):
            (y,) = made(segments, {"x": x}, ("x",))
            x.grad = shared.weight.grad = own.weight.grad = None
            y.square().sum().backward()  # that of mlp comes first
        assert_forward_close(y, expected)
        assert_gradient_close(x.grad, of_x)
        for (scale, gradient), wanted in zip(sums.items(), of_weights, strict=True):
            assert (scale.weight.grad is None) == accumulates
            found = gradient.total / micro_batches if accumulates else scale.weight.grad
            assert_gradient_close(found, wanted)
            gradient.finish()
    graphs = 4 if accumulates else 3  # W again, to add
    assert [each.graphs for each in made.reports] == [graphs] * (1 + (units == "two units"))


def test_a_gradient_that_could_not_be_made_leaves_nothing_to_be_added_to(as_traced):
    scale, gradient = Scale(), full_of_nan()
    made = executor_of((scale, gradient))
    x = torch.randn(3, 5, 4)
    (y,) = made([of(scale)], {"x": x}, ("x",))
    ((code, _),) = made._codes.values()
    works = code._weights[False]
    code._weights[False] = None  # calling it raises
    with pytest.raises(TypeError):
        y.sum().backward()
    code._weights[False] = works
    (y,) = made([of(scale)], {"x": x}, ("x",))
    y.sum().backward()
    (wanted,) = torch.autograd.grad(scale(x).sum(), scale.weight)
    assert_gradient_close(gradient.total, wanted)


def test_only_graphs_that_change_their_inputs_are_not_timed(monkeypatch):
    patches = []

    def compiler(graph, fakes, *, config_patches):
        patches.append(config_patches)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compiler)
    scale, x = Scale(), torch.randn(3, 5, 4, requires_grad=True)
    (y,) = executor_of((scale, full_of_nan()))([of(scale)], {"x": x}, ("x",))
    y.sum().backward()
    untimed = {"triton.autotune_pointwise": False}
    assert patches == [{}, {}, untimed]  # F, I and W
    assert set(untimed) <= set(torch._inductor.config.get_config_copy())


def test_gradients_of_gradients_are_refused(as_traced):
    x = torch.randn(3, 5, 4, requires_grad=True)
    (y,) = executor_of()([of(Scale())], {"x": x}, ("x",))
    with pytest.raises(RuntimeError, match="no gradients of gradients; use compile.enabled=false"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
