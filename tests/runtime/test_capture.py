"""Captures at any scope: counts of nodes, addresses that must stay, and runs with bad steps and signals."""

import ctypes
import json
import os
import signal
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graphmoe.runtime.capture import REPORT_FILE, Capture, CapturedStep, CaptureReport, graphs, nodes
from graphmoe.runtime.capture.graphs import GraphMaker, Span
from graphmoe.segments import profiler_range, ranges_wanted
from tests.runs import COMPILED, assert_same_state, final_state, metrics, numbers, spoil_steps, trainer_in

pytestmark = pytest.mark.usefixtures("unmeasured", "as_traced")
UNREAD = ("train.steps=9", "train.val_batches=0", "checkpoint.interval=0", "graph.warmup_steps=1")
FULL = ("graph.scope=full_iteration",)
LAYERS = pytest.param(("graph.scope=layer", *COMPILED, "compile.cache=false"), marks=pytest.mark.slow)


def span_of(unit: str, *counts: int | None) -> Span:
    """A span of graphs with so many nodes each."""
    span = Span(unit, (unit,))
    for count in counts:
        graph = SimpleNamespace(nodes=count)
        span.make(SimpleNamespace(make=lambda *_, graph=graph: graph), lambda: ())
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

    def load(name, mode):
        assert name.startswith("libamdhip64.so" if hip else "libcuda.so.1")
        if not there:
            raise OSError(f"{name}: no such file")
        return there[0]

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(ctypes, "CDLL", load)
    there = [SimpleNamespace(**{function: get_nodes})]
    assert nodes.count_nodes(42) == 21 and nodes.count_nodes(420) is None
    for there[:] in ([SimpleNamespace()], []):
        assert nodes.count_nodes(42) is None


class Driver:
    """A driver that captures nodes of (type, name); those without a name have a kernel of a library."""

    def __init__(self):
        self.nodes = []

    def cuStreamGetCaptureInfo_v2(self, stream, status, number, graph, *_):  # noqa: N802
        graph._obj.value = 7
        return stream.value != 5

    def cuGraphGetNodes(self, graph, nodes, count):  # noqa: N802
        count._obj.value = len(self.nodes)
        if nodes is not None:
            nodes[:] = range(1, len(self.nodes) + 1)
        return graph.value != 7

    def cuGraphNodeGetType(self, node, kind):  # noqa: N802
        kind._obj.value = self.nodes[node.value - 1][0]
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, kernel):  # noqa: N802
        name = self.nodes[node.value - 1][1]
        kernel._obj.function, kernel._obj.kernel = (node.value, None) if name else (None, node.value)
        return 0

    def cuFuncGetName(self, name, function):  # noqa: N802
        if function.value:
            name._obj.value = self.nodes[function.value - 1][1].encode()
        return not function.value

    def cuKernelGetName(self, name, kernel):  # noqa: N802
        name._obj.value = f"_Z3of{kernel.value}v".encode()
        return 0


def test_nodes_of_a_capture_are_named_by_the_ranges_that_made_them(monkeypatch):
    real, driver = ctypes.CDLL, Driver()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name, **mode: driver if name.startswith("libcuda") else real(name)
    )
    ranges, none = nodes.NodeRanges(5), nodes.NodeRanges(6)
    with ranges_wanted(ranges.range):
        driver.nodes += [(2, ""), (5, "")]
        with profiler_range("attn", "F"):
            driver.nodes += [(0, "_Z3addi"), (0, "triton_red")]
            with profiler_range("weights", "8 bits"):
                driver.nodes += [(1, "")]
            driver.nodes += [(0, "_Zwrong")]
        with profiler_range("mlp", "F"):
            pass
    driver.nodes += [(0, ""), (12, "")]
    ranges.count()
    none.count()
    found = [
        ("", "", ["memset"]),
        ("attn", "F", ["add(int)", "triton_red"]),
        ("weights", "8 bits", ["memcpy"]),
    ]
    found += [("attn", "F", ["_Zwrong"]), ("", "", ["of7()"])]
    assert nodes.made_by(7, ranges) == found and nodes.made_by(7, none) == []


def test_tensors_may_move_before_the_capture_and_not_after_and_the_error_names_them(tmp_path):
    trainer = trainer_in(tmp_path, *UNREAD, *FULL)
    model, optimizer = trainer.model, trainer.optimizer
    norm, router = model.layers[1].attn.norm, model.routers()[0]
    gradient = vars(optimizer.gradient_of(norm.weight))

    moves = {
        "layers.1.attn.norm.weight": (norm._parameters, "weight", lambda old: nn.Parameter(old.clone())),
        r"layers\.1\..*selection_bias": (router._buffers, "selection_bias", torch.clone),
        "the gradient of layers.1.attn.norm.weight": (gradient, "total", torch.clone),
        "the optimizer's exp_avg_sq": (optimizer.families[0].moments, "exp_avg_sq", torch.clone),
        "the optimizer's applied": (vars(optimizer), "applied", torch.clone),
    }
    router.selection_bias = router.selection_bias.clone()
    for _ in range(3):
        trainer._train_step()
    for name, (holder, key, moved) in moves.items():
        old = holder[key]
        holder[key] = moved(old)
        with pytest.raises(RuntimeError, match=f"^{name} moved after graph.scope=full_iteration was"):
            trainer._train_step()
        holder[key] = old
        trainer._train_step()
    gradient["total"] = gradient["total"].clone()
    del optimizer.applied
    message = r"^the .* and 1 more moved .* change tensors in place, such as by copy_$"
    with pytest.raises(RuntimeError, match=message):
        trainer._train_step()
    trainer.loader.close()


def tokens(*values: int) -> list[torch.Tensor]:
    return [torch.full((2, 3), value) for value in values]


def captured(step, warmup_steps: int = 1) -> tuple[CapturedStep, Capture]:
    cpu = torch.device("cpu")
    capture = Capture("full_iteration", cpu, warmup_steps)
    return CapturedStep(step, cpu, capture), capture


def test_a_step_runs_on_static_buffers_and_its_result_stays_where_it_is():
    seen = []

    def step(batches):
        seen.append([batch.data_ptr() for batch in batches])
        return torch.stack([batch.sum() for batch in batches])

    run, capture = captured(step, warmup_steps=2)
    results = [run(tokens(number, 10 * number)) for number in range(1, 6)]
    assert all(pointers == seen[0] for pointers in seen) and len(seen) == 5
    assert results[0].tolist() == [6, 60] and results[1].tolist() == [12, 120]  # not replayed
    assert len({result.data_ptr() for result in results[2:]}) == 1
    assert results[-1].tolist() == [30, 300] and capture.report.sums()["graphs"] == 1
    for other in (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 3)):
        with pytest.raises(ValueError, match=r"micro-batch 0 are .* buffers are torch.int64 \[2, 3\]"):
            run([other, *tokens(1)])


def test_a_new_program_warms_up_and_ends_the_graph_before_it_and_one_without_graphs_ends_none(monkeypatch):
    dropped, run_by = [], []
    run, capture = captured(lambda batches: batches[0].sum())
    monkeypatch.setattr(capture.maker, "drop", lambda: dropped.append(capture.report.sums()["graphs"]))
    for number, program in enumerate((0, 0, None, 0, 0, 1, None, 1, 1)):
        assert capture.use(program) == (number == 5)
        assert run(tokens(number)).item() == 6 * number
        run_by.append((capture.ready, capture.report.sums()["graphs"]))
    assert [ready for ready, _ in run_by] == [*(False, True, False, True, True), *(False, False, True, True)]
    assert [graphs for _, graphs in run_by] == [0, 1, 1, 1, 1, 1, 1, 2, 2]
    assert dropped == [1] and len(capture.report.spans) == 1


def test_graphs_that_are_dropped_give_their_pools_back_and_later_ones_have_pools_of_their_own(monkeypatch):
    said, maker, handles = [], GraphMaker(torch.device("cuda")), iter("abc")

    @dataclass(eq=False)
    class Recorded:
        run: object
        pool: str

        def release(self) -> None:
            said.append(f"end a graph of {self.pool}")

    monkeypatch.setattr(graphs, "DeviceGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("give back"))
    made = [maker.make(tuple), maker.make(tuple)]
    maker.drop()
    assert said == ["wait", "give back", *["end a graph of a"] * 2, "wait", "give back"] and len(made) == 2
    assert maker.make(tuple).pool == "b" and maker.pool_bytes.__self__ is maker


def test_a_step_that_reads_what_it_was_given_and_not_the_buffers_is_found_out():
    held = []

    def step(batches):
        return torch.stack([given.max() for given in held])

    run, _ = captured(step)
    for number in (1, 2):
        held[:] = tokens(number)
        result = run(held)
    assert result.item() == torch.iinfo(torch.long).min  # 2 if nobody had noticed


def test_metrics_are_written_a_step_late_and_completely(tmp_path):
    trainer = trainer_in(tmp_path, *UNREAD[1:3], *FULL, "train.steps=7", "train.log_interval=2")
    for written in (0, 1, 2, 2, 4, 4, 7):  # the last step is written at once
        trainer._train_step()
        assert len(rows := metrics(tmp_path)) == written
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert all(row["tokens"] == 4 * 16 * row["step"] and row["step_s"] > 0 for row in rows)
    trainer.loader.close()


POISONED, STOPPED_AFTER = (4, 9), 5


def run_with_bad_steps(folder, monkeypatch, words, stop_after=None):
    """A trainer after a run in which the gradients of some steps are NaN."""
    with monkeypatch.context() as patch:
        trainer = trainer_in(folder, *words)
        spoil_steps(patch, trainer, POISONED)
        step, weights = trainer._train_step, trainer.optimizer.main

        def train_step() -> None:
            before = [weight.clone() for weight in weights]
            step()
            assert all(map(torch.equal, before, weights)) == (trainer.step in POISONED)
            if trainer.step == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)

        patch.setattr(trainer, "_train_step", train_step)
        assert trainer.run() == (stop_after is None)
    return trainer


@pytest.mark.parametrize("words", [FULL, LAYERS], ids=["step", "layers"])
def test_a_run_with_bad_steps_validations_and_a_signal_goes_on_as_if_nothing_was_captured(
    tmp_path, monkeypatch, words
):
    words = (*words, "train.steps=10", "optim.warmup_steps=3", "checkpoint.interval=4")
    run_with_bad_steps(tmp_path / "plain", monkeypatch, (*words, "graph.warmup_steps=10"))
    captured = (*words, "graph.warmup_steps=2")
    stopped = run_with_bad_steps(tmp_path / "captured", monkeypatch, captured, STOPPED_AFTER)
    assert (stopped.step, stopped.stopped_by, stopped.saves.store.latest()) == (5, "SIGTERM", [5, 4])
    ended = run_with_bad_steps(tmp_path / "captured", monkeypatch, captured)
    assert ended.execution.capture.ready and ended.optimizer.applied.item() == 8
    rows = metrics(tmp_path / "captured")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps if row["skipped"]] == list(POISONED)
    assert sorted(row["step"] for row in rows if "val_loss" in row) == [1, 3, 6, 9, 10]
    assert len({row["lr"] for row in steps}) == 8  # a skipped step does not advance the schedule
    assert numbers(tmp_path / "captured") == numbers(tmp_path / "plain")
    folders = [(tmp_path / name / "checkpoints", tmp_path / f"{name}_") for name in ("plain", "captured")]
    assert_same_state(*(final_state(*each, *words) for each in folders))
