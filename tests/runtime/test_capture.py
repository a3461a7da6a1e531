"""Captures at any scope: counts of nodes, addresses that must stay, and runs with bad steps and signals."""

import ctypes
import json
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graphmoe.model.transformer import Transformer
from graphmoe.runtime.capture import graphs
from graphmoe.runtime.capture.capture import REPORT_FILE, Capture, CaptureReport, Span
from graphmoe.runtime.capture.graphs import GraphMaker
from tests.runs import COMPILED, assert_same_state, final_state, metrics, numbers, trainer_in

pytestmark = pytest.mark.usefixtures("unmeasured", "as_traced")
UNREAD = ("train.steps=9", "train.val_batches=0", "checkpoint.interval=0", "graph.warmup_steps=1")
FULL = ("graph.scope=full_iteration",)
AT_EVERY_SCOPE = pytest.mark.parametrize(
    "words",
    [FULL, ("graph.scope=layer", *COMPILED, "compile.cache=false")],
    ids=lambda words: words[0].partition("=")[2],
)


class CountingMaker(GraphMaker):
    """Maker of graphs with as many nodes as are given here, one after the other."""

    def __init__(self, *counts: int | None) -> None:
        self.counts = list(counts)

    def make(self, run, given=(), pool=0):
        return SimpleNamespace(nodes=self.counts.pop(0))


def span_of(unit: str, *counts: int | None) -> Span:
    span, maker = Span(unit, (unit,)), CountingMaker(*counts)
    for _ in counts:
        span.make(maker, lambda: ())
    return span


def test_nodes_are_summed_and_a_sum_with_an_unknown_count_is_unknown(tmp_path):
    report = CaptureReport("layer", "device", 3, [span_of("attn", 5, 7), span_of("mlp", 4)])
    assert [span.nodes for span in report.spans] == [12, 4]
    assert "3 graphs of 16 nodes in" in report.line()
    report.spans.append(span_of("loss", 5, None, 2))
    report.write(tmp_path)
    written = json.loads((tmp_path / REPORT_FILE).read_text())
    assert [span["nodes"] for span in written["spans"]] == [12, 4, None]
    assert (written["nodes"], written["graphs"]) == (None, 6) and " nodes " not in report.line()


@pytest.mark.parametrize("hip, function", [(None, "cuGraphGetNodes"), ("7.0", "hipGraphGetNodes")])
def test_nodes_are_what_the_driver_counts_or_nothing(monkeypatch, hip, function):
    def get_nodes(graph, nodes, count):
        count._obj.value = graph.value // 2
        return 0 if graph.value < 100 else 700

    asked = []
    library = SimpleNamespace(**{function: get_nodes})
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: asked.append(name) or library)
    assert graphs._count_nodes(42) == 21 and graphs._count_nodes(420) is None
    assert set(asked) == {"libamdhip64.so" if hip else "libcuda.so.1"}
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: SimpleNamespace())
    assert graphs._count_nodes(42) is None

    def fail(name, mode):
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert graphs._count_nodes(42) is None


def test_what_is_watched_may_move_before_the_capture_and_not_after():
    holder = {"weight": torch.zeros(3), "bias": torch.zeros(3)}
    capture = Capture("layer", torch.device("cpu"), warmup_steps=2)
    capture.watch({f"layers.0.attn.norm.{key}": (holder, key) for key in holder})
    for _ in range(4):
        if not capture.ready:
            holder["weight"] = torch.zeros(3)
        with capture.step():
            holder["weight"].add_(1)  # in place
    holder["weight"] = holder["weight"].clone()
    moved = r"^layers.0.attn.norm.weight: at another address than when graph.scope=layer was captured"
    with pytest.raises(RuntimeError, match=moved), capture.step():
        raise AssertionError("the step ran")
    del holder["bias"]
    moved = r"^layers.0.attn.norm.weight and 1 more: .* change tensors in place, such as by copy_$"
    with pytest.raises(RuntimeError, match=moved), capture.step():
        raise AssertionError("the step ran")


def test_gradients_buffers_moments_and_new_parameters_are_watched_too(tmp_path):
    trainer = trainer_in(tmp_path, *UNREAD, *FULL)
    for _ in range(3):
        trainer._train_step()
    model, optimizer = trainer.model, trainer.optimizer
    norm, router = model.layers[1].attn.norm, model.routers()[0]
    gradient = vars(optimizer.gradient_of(norm.weight))

    def as_parameter(old: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(old.detach().clone())

    moves = {
        "layers.1.attn.norm.weight": (norm._parameters, "weight", as_parameter),
        r"layers\.1\..*selection_bias": (router._buffers, "selection_bias", torch.clone),
        "the gradient of layers.1.attn.norm.weight": (gradient, "total", torch.clone),
        "the optimizer's exp_avg_sq": (optimizer.families[0].moments, "exp_avg_sq", torch.clone),
        "the optimizer's applied": (vars(optimizer), "applied", torch.clone),
    }
    for name, (holder, key, moved) in moves.items():
        old = holder[key]
        holder[key] = moved(old)
        with pytest.raises(RuntimeError, match=f"^{name}: at another address"):
            trainer._train_step()
        holder[key] = old
        trainer._train_step()
    trainer.loader.close()


POISONED, STOPPED_AFTER = (4, 9), 5


def run_with_bad_steps(folder, monkeypatch, words, stop_after=None):
    """A trainer after a run in which a number on the device makes the gradients of some steps NaN."""
    scale, whole = torch.ones(()), Transformer.loss

    def loss(self, *arguments):
        output = whole(self, *arguments)
        return output._replace(total=output.total * scale) if torch.is_grad_enabled() else output

    with monkeypatch.context() as patch:
        patch.setattr(Transformer, "loss", loss)
        trainer = trainer_in(folder, *words)
        step, weights = trainer._train_step, trainer.optimizer.main

        def train_step() -> None:
            poisoned = trainer.step + 1 in POISONED
            scale.fill_(math.nan if poisoned else 1.0)
            before = [weight.clone() for weight in weights]
            step()
            assert all(map(torch.equal, before, weights)) == poisoned
            if trainer.step == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)

        trainer._train_step = train_step
        assert trainer.run() == (stop_after is None)
    return trainer


@AT_EVERY_SCOPE
def test_a_run_with_bad_steps_validations_and_a_signal_goes_on_as_if_nothing_was_captured(
    tmp_path, monkeypatch, words
):
    words = (*words, "train.steps=10", "optim.warmup_steps=3", "checkpoint.interval=4")
    run_with_bad_steps(tmp_path / "plain", monkeypatch, (*words, "graph.warmup_steps=10"))
    captured = (*words, "graph.warmup_steps=2")
    stopped = run_with_bad_steps(tmp_path / "captured", monkeypatch, captured, STOPPED_AFTER)
    assert (stopped.step, stopped.stopped_by, stopped.store.latest()) == (5, "SIGTERM", [5, 4])
    ended = run_with_bad_steps(tmp_path / "captured", monkeypatch, captured)
    assert ended.execution.capture.ready and ended.optimizer.applied.item() == 8
    rows = metrics(tmp_path / "captured")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps if row["skipped"]] == list(POISONED)
    assert sorted(row["step"] for row in rows if "val_loss" in row) == [0, 3, 6, 9, 10]
    assert len({row["lr"] for row in steps}) == 8  # a skipped step does not advance the schedule
    assert numbers(tmp_path / "captured") == numbers(tmp_path / "plain")
    plain, replayed = (
        final_state(tmp_path / name / "checkpoints", tmp_path / f"{name}_scratch", *words)
        for name in ("plain", "captured")
    )
    assert_same_state(plain, replayed)
