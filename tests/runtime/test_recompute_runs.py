"""Recompute in captured units and in whole runs: bitwise those without it, and the log says what it does."""

import json

import pytest
import torch
from torch import nn

from graphmoe.ops.gradients import Gradient
from graphmoe.passes.table import PassRunner, select_passes
from graphmoe.runtime.capture.capture import Capture
from graphmoe.runtime.compile.captured_units import UnitCapture
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.segments import Segment, run_segments
from tests.runs import COMPILED, assert_same_state, config, final_state, numbers, train_in
from tests.runtime.recomputed import recompute
from tests.tolerances import assert_gradient_close

pytestmark = pytest.mark.usefixtures("unmeasured")


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


RUN = (*COMPILED, "train.steps=4", "train.val_batches=0", "checkpoint.interval=4")


MTP = ("model.mtp_depth=1", "train.val_batches=1", "train.val_interval=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param("recompute.all=true", marks=pytest.mark.exhaustive),
        "recompute.ops=[layernorm,core_attn,mla_up_proj,shared_experts,mlp,moe_act]",
    ],
)
def test_compiled_training_is_bitwise_that_of_kept_values(tmp_path, caplog, asked):
    assert_bitwise_that_of_kept_values(tmp_path, caplog, asked)


@pytest.mark.parametrize(
    "asked, overrides",
    [
        pytest.param("recompute.all=true", MTP, marks=pytest.mark.slow),
        pytest.param(
            "recompute.layer_ids=[0,2]",
            ("model.num_layers=3", "train.global_batch_size=2"),
            marks=pytest.mark.slow,
        ),
        ("recompute.segments=[attn,moe_router,moe_experts]", ()),
    ],
)
def test_training_of_other_units_is_bitwise_that_of_kept_values(
    tmp_path, caplog, asked, overrides, mostly_traced
):
    assert_bitwise_that_of_kept_values(tmp_path, caplog, asked, *overrides, *mostly_traced)


def assert_bitwise_that_of_kept_values(tmp_path, caplog, asked, *overrides):
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


@pytest.mark.parametrize(
    "scope, asked",
    [
        pytest.param("layer", "recompute.all=true", marks=pytest.mark.slow),
        pytest.param(
            "full_iteration", "recompute.segments=[attn,moe_router,moe_experts]", marks=pytest.mark.slow
        ),
        ("[attn,moe_experts]", "recompute.ops=[layernorm,core_attn]"),
    ],
)
def test_captured_training_is_bitwise_that_of_the_same_units_uncaptured(tmp_path, scope, asked, as_traced):
    words = (*RUN, "compile.cache=false", f"graph.scope={scope}", asked)
    states = []
    for name, warmup in (("plain", 4), ("captured", 1)):
        train_in(tmp_path / name, *words, f"graph.warmup_steps={warmup}")
        states.append(final_state(tmp_path / name / "checkpoints", tmp_path / f"{name}_scratch", *words))
    assert numbers(tmp_path / "captured") == numbers(tmp_path / "plain")
    assert_same_state(*states)
