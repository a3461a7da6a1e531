"""Records of a step: metrics.jsonl, the log, TensorBoard, the summary, and its time without pauses."""

import json
import math
import threading
import time
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from graphmoe.config.untrusted import FileError
from graphmoe.model.moe_segments import ROUTER_STATS
from graphmoe.model.sizes import flops_per_token
from graphmoe.plan.layout import Layout
from graphmoe.plan.plan import plan_of
from graphmoe.run import metrics_file
from graphmoe.run.files import EXPERT_LOADS_FILE, ExpertLoad, MetricsRow
from graphmoe.run.metrics_file import lines_of, read_lines, read_rows, render, summarise
from graphmoe.training import profile, step_rows
from graphmoe.training.log_lines import duration, experts_line, quantity, ranks_line, step_line
from graphmoe.training.metrics import MAX_LINES, ExpertLoads, MetricsWriter, Throughput, to_json
from graphmoe.training.step_rows import RECEIVED, REPLICATED, StepClock, StepRow, StepRows, device_row
from tests.damage import no_file_beyond
from tests.runs import config, metrics, train_in, trainer_in

VALUES = {
    "loss": 2.5, "mtp_loss": 3.25, "grad_norm": 0.75, "lr": 1e-3, "skipped": 0.0, "skipped_total": 2.0,
    "longest_skip": 1.0, "rank_load": 1.0, "balance_loss": 1.125, "z_loss": 0.5, "router_entropy": 1.75,
}  # fmt: skip
LOADS = [[1.5, 0.5, 1.0, 1.0], [0.25, 2.25, 1.25, 0.25]]
THROUGHPUT = Throughput(1000, 2e9, peak=100.0)


def row_of(step: int = 7, **values: float) -> dict:
    row = StepRow(step, 0.5, {**VALUES, **values}, torch.tensor(LOADS))
    return to_json(row, THROUGHPUT, tokens=7000, epoch=0.25, memory_gib=3.0)


def test_a_line_of_steps_has_the_values_of_the_last_and_the_rate_of_all_but_the_one_that_compiles():
    rows = [row_of(step) | {"step_s": seconds} for step, seconds in ((1, 99.0), (2, 0.75), (3, 0.5))]
    rows[0]["start_s"] = 100.0
    said = "step    3/1000  loss 2.5000  1,600 tokens/s  MFU 3.2%  3 GiB  2 skipped  ETA 1h 06m"
    assert step_line(rows, 1000, 4000.0) == said  # no room for mtp and grad
    row = row_of(mtp_loss=0.0, skipped_total=0.0) | {"mfu": None, "tokens_per_s": 12.34e6}
    said = "step  7/10  loss 2.5000  grad 0.75  12.3M tokens/s  4 TFLOP/s  3 GiB  ETA 1h 06m"
    assert step_line([row], 10, 4000.0) == said
    skipped = step_line([row_of(6, skipped=1.0, loss=math.nan), row_of(7)], 10, None)
    assert "SKIPPED 1: not finite" in skipped and "loss 2.5000" in skipped
    assert "overflows fp32" in step_line([row_of(skipped=1.0, grad_norm=1e25)], 10, None)


def test_lines_of_a_run_fit_a_hundred_columns_with_the_time_before_them():
    row = row_of(123456, loss=12.3456, grad_norm=1234.5, skipped_total=99.0, rank_load=3.25)
    row |= {"tokens_per_s": 123.4e6, "memory_gib": 178.25, "receive_load": 3.25}
    replicated = row | {"planned_rank_load": 1.25, "replicas": 1234.0, "replica_gb": 123.4}
    of_step = step_line([row], 200000, 1e6)
    of_experts = experts_line(row, torch.rand(60, 256) * 30, blocks=True)
    for line in (of_step, of_experts, str(ranks_line(replicated))):
        assert len(f"23:59:59 {line}") <= 100 and "left" not in line
    assert "loss 12.3456" in of_step


def test_the_line_of_experts_draws_the_fullest_layer():
    row, load_LE = row_of(z_loss=0.0), torch.tensor(LOADS)
    load_LE[1, 3] = 0.0
    said = "experts  load max 2.2 in layer 1  ▁█▅0  entropy 1.75  balance 1.125"
    assert experts_line(row, load_LE, blocks=True) == said
    assert "  .#+0  " in str(experts_line(row, load_LE, blocks=False))
    ranks = experts_line(row_of(rank_load=1.25) | {"receive_load": 2.0}, load_LE, blocks=True)
    assert ranks is not None and ranks.endswith("entropy 1.75  rank load 1.25  receive load 2.00")
    assert experts_line(row, load_LE[:0], blocks=True) is None


def test_a_line_of_ranks_says_what_replicas_leave_of_their_load():
    row = row_of(rank_load=1.28, receive_load=1.02)
    replicated = row | {"planned_rank_load": 1.0078, "replicas": 13.6, "replica_gb": 0.2468}
    said = "ranks    load 1.28 -> 1.01  14 replicas, 0.25 GB in a micro-batch"
    assert ranks_line(replicated) == said and ranks_line(row) is None
    lines = [str(experts_line(each, torch.tensor(LOADS), blocks=True)) for each in (row, replicated)]
    assert ["  rank load 1.28" in line for line in lines] == [True, False]
    assert all("receive load 1.02" in line for line in lines)


def test_times_and_quantities_are_short():
    times = {5: "0:05", 245: "4:05", 3600: "1h 00m", 100000: "27h 46m", 1e6: "11d 13h"}
    counts = {4096: "4,096", 12345: "12.3k", 4.2e6: "4.20M", 671e9: "671B", 14.8e12: "14.8T"}
    assert {s: duration(s) for s in times} == times and {n: quantity(n) for n in counts} == counts


def test_the_rows_of_a_run_agree_with_its_batch_and_peak(tmp_path):
    words = ("log.peak_tflops=0.5", "train.val_batches=1", "model.num_layers=3", "model.mtp_depth=1")
    train_in(tmp_path, *words)
    flops = flops_per_token(config(*words).model, 16)
    rows = metrics(tmp_path)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [row["tokens"] for row in steps] == [64 * step for step in range(1, 7)]
    for row in steps:
        rates = [64 / row["step_s"], row["tokens_per_s"] * flops / 1e12, row["tflops"] / 0.5]
        assert [row[name] for name in ("tokens_per_s", "tflops", "mfu")] == pytest.approx(rates)
        load = row["load_max_over_mean"]
        assert len(load) == 3 and 1 <= min(load) <= max(load) <= 4
        assert row["memory_gib"] > 0 and row["mtp_loss"] > 0 and row["balance_loss"] > 0
        assert 0 < row["router_entropy"] <= math.log(4)
        assert row["loss"] == pytest.approx(math.log(64), rel=0.1)  # without the auxiliary losses
    assert [set(row) for row in rows if "val_loss" in row] == [{"step", "val_loss"}] * 3
    assert sum(row["step_s"] for row in steps) < 60


def test_own_rows_have_no_limit_of_size_and_wrong_ones_take_no_memory(tmp_path, monkeypatch, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.5}\n' + b'{"step": "x"}\n' * 200_000 + b'{"step": 2, "lo')
    tracemalloc.start()
    assert [row["loss"] for row in read_rows(path)] == [2.5]
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    assert "200000 of 200002 lines" in caplog.text and "the first: line 2: step: expected int" in caplog.text
    monkeypatch.setattr(metrics_file, "LARGEST_BYTES", 1000)
    assert summarise(lines_of(path, MetricsRow))["final_loss"] == 2.5
    with pytest.raises(FileError, match="at most 1,000 are read"):
        read_lines(path, MetricsRow)


def test_the_summary_has_final_losses_and_medians_without_the_first_step(tmp_path):
    rows = [{**row_of(step, loss=10.0 - step), "step_s": 9.0 if step == 1 else step} for step in (1, 2, 3, 4)]
    validations = [{"step": step, "val_loss": loss} for step, loss in ((1, 4.0), (2, 1.0), (4, 2.0))]
    path = tmp_path / "metrics.jsonl"

    def found(*rows: dict) -> dict:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return summarise(read_rows(path))

    whole = found(validations[0], *rows, *validations[1:])
    names = ("final_loss", "median_step_s", "median_mfu", "skipped_steps")
    assert [whole[name] for name in names] == [6.0, 3, 0.04, 2]
    slow = summarise([rows[0], {**rows[1], "step_s": 50.0, "start_s": 60.0}, *rows[2:]])
    assert slow["median_step_s"] == 3.5  # without that of a second start
    interrupted = found(*validations[:2], *rows)
    for of, losses in ((whole, [4.0, 2.0, 1.0]), (interrupted, [4.0, None, 1.0])):
        assert [of[f"{name}_val_loss"] for name in ("first", "final", "best")] == losses


def test_a_run_that_began_elsewhere_says_of_which_steps_its_validations_are(tmp_path):
    def said(*validations: tuple[int, float]) -> str:
        *rows, last = ({"step": step, "val_loss": loss} for step, loss in validations)
        rest = {"sample": None, "finished": True, "steps": 9, "folder": str(tmp_path)}
        return render({**summarise([*rows, row_of(9), last]), **rest}).splitlines()[0]

    assert said((1, 8.5), (9, 5.25)) == "validation loss 8.500 -> 5.250 in 9 steps"
    assert said((6, 5.5), (9, 5.25)) == "validation loss 5.500 at step 6 -> 5.250 at step 9"
    assert said((9, 5.791)) == "validation loss 5.791 after step 9"


def writer(folder, done: int, **log) -> MetricsWriter:
    folder.mkdir(parents=True, exist_ok=True)
    words = (f"log.{key}={value}" for key, value in {"tensorboard": True, **log}.items())
    return MetricsWriter(folder, plan_of(config("train.steps=6", *words), 1), done)


def written(folder, done: int, *rows: dict, **log) -> None:
    """Let a start of a run that goes on after step ``done`` write its rows."""
    sink = writer(folder, done, **log)
    sink.write(rows)
    assert metrics(folder)[-len(rows) :]  # readable before the file is closed
    sink.close()


def test_values_that_are_not_finite_are_written_as_null(tmp_path):
    rows = row_of(1, loss=math.nan, grad_norm=math.inf), {"step": 1, "val_loss": -math.inf}
    written(tmp_path, 0, *rows, tensorboard=False)
    step, validation = metrics(tmp_path)
    assert (step["loss"], step["grad_norm"], step["lr"]) == (None, None, 1e-3)
    assert validation == {"step": 1, "val_loss": None}


def test_tensorboard_has_each_step_once_also_after_a_resume(tmp_path):
    for done, steps in ((0, (0, 1, 2, 3, 4)), (2, (3, 4, 5))):
        written(tmp_path, done, *(row_of(step, loss=10.0 * done + step) for step in steps))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(0, 0), (1, 1), (2, 2), (3, 23), (4, 24), (5, 25)]
    assert {"val_loss", "mfu"} & set(events.Tags()["scalars"]) == {"mfu"}
    assert events.Scalars("load_max_over_mean/moe_layer_1")[0].value == 2.25


def test_a_full_disk_costs_rows_and_is_named_once_for_each_file(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda error: None)  # TensorBoard's thread ends
    sink, end = writer(tmp_path, 0), time.monotonic() + 20
    read = StepRow(1, 0.5, VALUES, torch.tensor(LOADS))
    sink.write([row_of(1)], [read])
    with no_file_beyond(40):
        sink.write([row_of(2)], [read._replace(step=2)])
        while "TensorBoard" not in caplog.text:  # whose thread is late
            sink.write([row_of(3)])
            assert time.monotonic() < end
    sink.write([row_of(4)], [read._replace(step=4)])
    sink.close()
    for name in ("metrics.jsonl", EXPERT_LOADS_FILE):
        assert [row["step"] for row in read_rows(tmp_path / name)] == [1, 4]
        assert [caplog.text.count(f"{name} takes {what}") for what in ("no more lines", "lines")] == [1, 1]
    assert caplog.text.count("TensorBoard receives no more rows (File too large)") == 1


def test_the_load_of_ranks_is_the_mean_of_layers_of_the_most_over_the_mean():
    counts_LE = torch.tensor([[3, 1, 2, 2], [0, 6, 1, 1]], dtype=torch.int32)
    scalars = dict.fromkeys(step_rows.OF_STEP[:-1] + ROUTER_STATS, torch.tensor(0.5))
    place = step_rows.SCALARS.index("rank_load")
    of_two, of_four = (device_row(scalars, counts_LE, ep)[place].item() for ep in (2, 4))
    assert of_two == (1.0 + 1.5) / 2 and of_four == (1.5 + 3.0) / 2
    assert device_row(scalars, counts_LE[:0], 2)[place].item() == 1.0  # no MoE layer


def test_only_rows_of_runs_with_replicas_have_them():
    names, counts_LE = (*step_rows.SCALARS, *RECEIVED, *REPLICATED), torch.tensor([[3, 1]], dtype=torch.int32)
    values = dict(zip(names, torch.arange(1.0, len(names) + 1).unbind(), strict=True))
    rows = StepRows(1, (1, 2), torch.device("cpu"), planned=True, replicated=True)
    rows.append(1, device_row(values, counts_LE, received_L2=torch.tensor([[5, 7]])))
    assert rows.received(1)[1] == [(5, 7)]
    (row,) = rows.read()
    assert row.values == {name: value.item() for name, value in values.items()} | {"rank_load": 1.0}
    assert row.load_LE.tolist() == [[1.5, 0.5]]
    written = to_json(row, THROUGHPUT, tokens=7000, epoch=0.25, memory_gib=3.0)
    assert {name: written[name] for name in REPLICATED} == {name: values[name].item() for name in REPLICATED}
    assert not {*REPLICATED} & row_of(receive_load=1.0).keys()


def test_loads_of_experts_are_means_up_to_multiples_of_as_many_steps_as_keep_the_file_short(tmp_path):
    def rows(*steps: int) -> list[StepRow]:
        return [StepRow(n, 1.0, {}, torch.tensor([[float(n), 2.0], [1.0, 0.0004]])) for n in steps]

    def lines() -> list[tuple[int, int]]:
        return [(row["step"], row["steps"]) for row in read_lines(tmp_path / EXPERT_LOADS_FILE, ExpertLoad)]

    total = 2 * MAX_LINES
    loads = ExpertLoads(tmp_path, 0, total)
    for steps in ((1,), (2, 3), (4, 5), (6,), (total,)):
        loads.write(rows(*steps))
    assert lines() == [(3, 3), (5, 2), (6, 1), (total, 1)]
    assert read_lines(tmp_path / EXPERT_LOADS_FILE, ExpertLoad)[0]["load"] == [[2.0, 2.0], [1.0, 0.0]]
    stopped = ExpertLoads(tmp_path, 4, total)
    stopped.write(rows(5))
    stopped.close()
    ExpertLoads(tmp_path, 5, total).write(rows(6))
    assert lines() == [(3, 3), (5, 1), (6, 1)]
    (tmp_path / EXPERT_LOADS_FILE).unlink()
    ExpertLoads(tmp_path, 0, 4).write([StepRow(1, 1.0, {}, torch.zeros(0, 8))])  # a model without experts
    assert not (tmp_path / EXPERT_LOADS_FILE).exists()


def test_rows_of_void_steps_are_forgotten_and_their_time_is_that_of_the_next(monkeypatch):
    now = iter([0.0, 0.0, 1.0, 2.0, 3.0, 5.0, 9.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    rows = StepRows(4, (1, 2), torch.device("cpu"), planned=True)
    rows.clock.restart()
    counts = torch.tensor([[3, 1]], dtype=torch.int32)

    def append(step: int, value: float) -> None:
        scalars = dict.fromkeys((*step_rows.SCALARS, *RECEIVED), torch.tensor(value))
        rows.append(step, device_row(scalars, counts, received_L2=torch.tensor([[step, 2 * step]])))

    for step in (1, 2, 3):
        append(step, 10.0 * step)
    assert rows.received(2) == (True, [(2, 4)])
    rows.drop(2)
    for step in (2, 3):
        append(step, 100.0 * step)
    read = [(row.step, row.values["loss"], row.seconds) for row in rows.read(2)]
    assert read == [(1, 10.0, 1.0), (2, 200.0, 4.0)]
    assert len(rows) == 1 and rows.received(3) == (True, [(3, 6)])
    assert [(row.step, row.seconds, row.load) for row in rows.read()] == [(3, 4.0, [1.5])]


class Time:
    """Clock of the host and of an instant device: it advances only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr("graphmoe.ops.timing.time", clock)
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        self._monkeypatch = monkeypatch

    def takes(self, owner: object, name: str, seconds: float) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def slow(*arguments: Any, **named: Any) -> Any:
            self.now += seconds
            return function(*arguments, **named)

        self._monkeypatch.setattr(owner, name, slow)

    def _event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(elapsed_time=lambda end: (end.at - event.at) * 1e3)
        event.record = lambda: setattr(event, "at", self.now)
        return event


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_pause_is_in_no_interval_and_those_before_it_stay(fake_time, device):
    clock = StepClock(torch.device(device))
    for step_s in (1.0, 2.0):
        fake_time.now += step_s
        clock.mark()
    for pause_s in (100.0, 200.0):
        fake_time.now += 0.25
        with clock.paused():
            fake_time.now += pause_s
    fake_time.now += 0.5
    clock.mark()
    fake_time.now += 8.0
    clock.mark()
    assert [step_rows.seconds(interval) for interval in clock.hand_over(4)] == [1.0, 2.0, 1.0, 8.0]


def test_the_profiler_and_the_report_of_the_first_step_are_in_the_time_of_no_step(fake_time, tmp_path):
    words = ("train.steps=7", "train.log_interval=7", "train.val_batches=0", "checkpoint.enabled=false")
    trainer = trainer_in(tmp_path, *words, "profile.steps=[3,4]")
    fake_time.takes(trainer.steps, "run", 1.0)
    for name in ("_started", "_write"):
        fake_time.takes(trainer.trace, name, 1000.0)
    for name in ("report", "keep_code"):
        fake_time.takes(trainer.execution, name, 100.0)
    fake_time.takes(trainer.ranks, "gather", 10.0)  # other ranks start and write
    assert trainer.run()
    assert [row["step_s"] for row in metrics(tmp_path)] == [1.0] * 7
    assert fake_time.now >= 7 + 2 * (1000 + 100 + 10)


def test_bringing_a_recorded_pipeline_together_is_in_the_time_of_no_step(fake_time, tmp_path, monkeypatch):
    monkeypatch.setattr(profile.dist, "new_subgroups_by_enumeration", lambda *a, **k: (None, []))
    layout = Layout(dp=1, cp=1, tp=1, pp=2, ep=1, etp=1)
    mesh = SimpleNamespace(rank=0, layout=layout, index=lambda axis: 0)
    clock = StepClock(torch.device("cpu"))
    run = config("train.steps=4", "train.log_interval=2")
    plan = SimpleNamespace(train=run.train, pipeline=SimpleNamespace(table=None))
    pipeline = profile.PipelineProfile(plan, SimpleNamespace(), torch.device("cpu"), mesh, clock, tmp_path, 0)
    kept: list[int] = []
    monkeypatch.setattr(pipeline, "_keep", lambda number, part: kept.append(number))
    for owner, name, seconds_taken in ((pipeline._recorder, "spans", 100.0), (pipeline, "_keep", 1000.0)):
        fake_time.takes(owner, name, seconds_taken)
    for number in range(1, 5):
        with pipeline.step(number):
            fake_time.now += 1.0
            clock.mark()
    assert kept == [2, 4] and [step_rows.seconds(interval) for interval in clock.hand_over(4)] == [1.0] * 4
