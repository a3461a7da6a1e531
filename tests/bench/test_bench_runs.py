"""suite=step, ladder and projection of the benchmark tool: cases, jobs of their own, rows, the chart."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from graphmoe.bench import __main__ as bench
from graphmoe.bench import runs
from graphmoe.bench.arguments import BenchArgs, compose_config, key_of
from graphmoe.bench.cases import FLOPS_PER_S
from graphmoe.bench.own_process import ProcessFailed, in_own_process, train
from graphmoe.bench.run_rows import LadderRow, StepRow, draw_ladder, projected, take_gains
from graphmoe.bench.runs import RUNGS, ladder_cases, projection_cases, step_cases
from graphmoe.bench.step_times import (
    HOST_STEPS,
    PROFILED_STEPS,
    WARM_UP_STEPS,
    Activity,
    StepTimes,
    largest,
)
from graphmoe.config.schema import ConfigError
from graphmoe.model.flops import flops_per_token
from graphmoe.plan.costs.hardware import H200
from graphmoe.project.memory import allocated_bytes
from tests.runs import ROOT

EAGER = "overrides=compile=none,train.global_batch_size=8,data.seq_len=8"


def documented(*words: str):
    return bench.bench(bench.parse_args(BenchArgs, words, prog="graphmoe.bench"), words)


def test_a_step_without_capture_is_measured_first_and_last_at_each_shape():
    cases = step_cases(runs.STEP_FULL, "cpu", BenchArgs(scopes="[[attn,loss],none]"))
    assert [case.name for case in cases] == [
        f"{shape}/{scope}"
        for shape in ("mbs1_s4096", "mbs4_s4096", "mbs1_s512")
        for scope in ("none", "attn+loss", "none_again")
    ]


def test_the_words_of_the_user_replace_those_of_the_suite():
    given = "model=tiny,train.global_batch_size=6,passes.disabled=[fuse_loss,fuse_router]"
    args = BenchArgs(overrides=given, scopes="layer", micro_batch_sizes="3", seq_lens="64")
    (case,) = step_cases(runs.STEP_FULL, "cpu", args)
    assert case.name == "mbs3_s64/layer"
    config = compose_config(*case.row.overrides)
    assert (config.model.name, config.model.num_layers) == ("tiny", 4)  # not 6: another model's number
    assert (config.train.global_batch_size, config.train.micro_batch_size, config.data.seq_len) == (6, 3, 64)
    assert config.passes.disabled == ["fuse_loss", "fuse_router"]
    assert (config.optim.lr, config.graph.scope, config.checkpoint.enabled) == (1e-6, "layer", False)


def test_a_row_has_steps_enough_whatever_its_warm_up():
    args = BenchArgs(repeats=500, overrides="graph.warmup_steps=200", scopes="none")
    (case,) = step_cases(runs.STEP_TINY, "cpu", args)
    config = compose_config(*case.row.overrides)
    assert config.train.steps == config.train.log_interval > 700 + WARM_UP_STEPS + HOST_STEPS + PROFILED_STEPS
    assert config.checkpoint.interval == config.train.val_batches == 0


@pytest.mark.slow
def test_steps_are_rows_of_their_own_processes_and_what_cannot_run_is_a_row_with_the_reason(caplog):
    caplog.set_level("INFO")
    words = [
        "suite=step", "device=cpu", "overrides=compile=none", "scopes=partial,full_iteration",
        "repeats=3", "seq_lens=16",
    ]  # fmt: skip
    document = documented(*words)
    bad, good = document["rows"]
    assert bad["scope"] == "partial" and "graph.scope=partial captures compiled segments" in bad["error"]
    assert good["error"] is None and good["graphs"] == 1
    assert len(good["samples_ms"]) == 3 and good["tokens"] == 32
    assert good["tokens_per_s"] == pytest.approx(32e3 / good["median_ms"])
    assert good["tokens_per_s_p10"] <= good["tokens_per_s"] <= good["tokens_per_s_p90"]
    assert good["host_ms"] > 0 and good["capture_s"] > 0 and good["idle_share"] is None
    assert "[2/2] mbs2_s16/full_iteration: " in caplog.text
    lines = [line for line in bench.render(document).splitlines() if line.startswith("|")]
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert "| mbs2_s16 | partial | failed: the configuration cannot run" in lines[2]


@pytest.mark.slow
def test_a_process_that_hangs_or_dies_is_told_and_leaves_nothing():
    with pytest.raises(ProcessFailed, match="not done after limit_s=0.5 seconds"):
        in_own_process(time.sleep, 60, limit_s=0.5)
    with pytest.raises(ProcessFailed, match="ended with status 7"):
        in_own_process(os._exit, 7, limit_s=60)
    with pytest.raises(ProcessFailed, match="ValueError: math domain error|ValueError: expected a nonneg"):
        in_own_process(math.sqrt, -1.0, limit_s=60)
    assert in_own_process(math.sqrt, 4.0, limit_s=60) == 2.0
    assert not multiprocessing.active_children()


def tell_and_sleep(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(60)


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_started_it(tmp_path):
    path = tmp_path / "pid"
    code = (
        "import pathlib; from tests.bench.test_bench_runs import in_own_process, tell_and_sleep; "
        f"in_own_process(tell_and_sleep, pathlib.Path({str(path)!r}), limit_s=60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_until(lambda: path.exists() and path.read_text() != "")
    parent.kill()
    parent.wait()
    stat = Path(f"/proc/{path.read_text()}/stat")
    wait_until(lambda: not stat.exists() or stat.read_text().split(")")[1].split()[0] == "Z")


def wait_until(reached: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_kernels_with_the_most_time_have_calls_and_milliseconds_of_one_step():
    trace = [Activity("a", 0, 10), Activity("b", 5, 8), Activity("a", 9, 14), Activity("c", 20, 21)]
    assert largest(trace, 2) == [
        {"name": "a", "calls": 1.0, "ms": 0.0075},
        {"name": "b", "calls": 0.5, "ms": 0.0015},
        {"name": "c", "calls": 0.5, "ms": 0.0005},
    ]


def test_a_row_has_both_floors_and_no_idle_time_below_zero():
    row = StepRow(case="mbs1_s4096", scope="layer", again=False, overrides=[])
    row.take_floor(compose_config(*runs.STEP_FULL.words, "train.global_batch_size=4"))
    assert row.tokens == 4 * 4096
    assert row.floor_ms == pytest.approx(95.6, abs=0.05)  # docs/benchmarks: 6 layers, 4 sequences
    assert row.floor_with_optimizer_ms == pytest.approx(122.7, abs=0.05)
    row.take(StepTimes([191.2, 190.0, 193.0], [5.0, 4.0, 9.0], busy_ms=143.4))
    assert (row.median_ms, row.host_ms) == (191.2, 5.0)
    assert row.time_over_floor == pytest.approx(2.0, abs=0.001)
    assert row.tflops == pytest.approx(790 * row.share_of_floor_rate) == pytest.approx(395, abs=1)
    assert row.idle_share == row.idle_share_raw == pytest.approx(0.25)
    row.take(StepTimes([100.0], [5.0], busy_ms=101.0))
    assert row.idle_share == 0 and row.idle_share_raw == pytest.approx(-0.01)


def rungs(setting=runs.LADDER_TINY, device="cpu", ranks=2, **given):
    return ladder_cases(setting, device, ranks, BenchArgs(**given))


def test_every_rung_can_run_and_keeps_what_those_before_it_set():
    cases = rungs()
    assert [case.name for case in cases] == [*(rung.name for rung in RUNGS), "micro_batch_2"]
    before: dict[str, str] = {}
    for case, rung in zip(cases, RUNGS, strict=False):
        given = dict(word.split("=", 1) for word in case.row.overrides)
        expected = before | {key_of(word): word.split("=", 1)[1] for word in rung.words}
        assert {key: given.get(key) for key in expected} == expected, case.name
        before = expected
    first, *_, last = (compose_config(*case.row.overrides) for case in cases)
    assert last.graph.scope == "full_iteration" and last.pipeline.ep_overlap and last.host.manual_gc
    assert (last.train.micro_batch_size, last.train.global_batch_size) == (2, 16)
    assert (first.moe.dispatcher.value, first.passes.disabled) == ("alltoall", ["fuse_loss"])
    assert (first.train.micro_batch_size, first.train.global_batch_size, first.parallel.ep) == (1, 8, 2)


def test_rungs_of_the_full_model_can_run():
    cases = rungs(runs.LADDER_FULL, "cuda", 8, micro_batch_sizes="4,6,8")
    assert [case.name for case in cases[-2:]] == ["micro_batch_6", "micro_batch_8"]
    *_, config = (compose_config(*case.row.overrides) for case in cases)
    sizes = config.model.num_layers, config.data.seq_len, config.train.global_batch_size
    assert sizes == (27, 4096, 256)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("moe.dispatcher=symm", "the rung symm sets moe.dispatcher; choose rungs by only="),
        ("graph=layer", "sets graph; choose rungs by only="),
        ("train.micro_batch_size=4", "use micro_batch_sizes=..."),
        ("train.steps=4", "the suite sets train.steps; use repeats=..."),
        ("train.val_batches=4", "the suite sets train.val_batches, so that only steps are timed"),
        ("checkpoint.interval=4", "the suite sets checkpoint.interval"),
        ("parallel.ep=2", "the suite sets parallel.ep; use nproc=..."),
        ("parallel.tp=2", "the suite has all GPUs of one node along parallel.ep"),
        ("launch.nodes=2", "the suite has all GPUs of one node along parallel.ep"),
        ("model=no_such", "no_such"),
    ],
)
def test_words_that_are_the_suites_own_are_refused(word, said):
    with pytest.raises(ConfigError, match=said):
        rungs(overrides=word)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The document of two rungs and one that cannot run, and its file."""
    out = tmp_path_factory.mktemp("ladder") / "ladder.json"
    only = "only=baseline,symm,partial"
    words = ["suite=ladder", "device=cpu", "repeats=10", EAGER, only, f"out={out}"]
    with pytest.raises(SystemExit) as ended:
        bench.main(words)
    assert ended.value.code == 1
    return json.loads(out.read_text()), out


@pytest.mark.slow
def test_a_row_has_the_rates_of_one_gpu_and_its_gain(measured):
    baseline, symm, _ = measured[0]["rows"]
    config = compose_config(*baseline["overrides"])
    flops = flops_per_token(config.model, 8).total * 64
    for row in (baseline, symm):
        assert row["error"] is None and row["tokens"] == 64 and len(row["samples_ms"]) == 10
        assert row["floor_ms"] == pytest.approx(flops / FLOPS_PER_S / 2 * 1e3)
        assert row["tokens_per_s"] == pytest.approx(64 / 2 / row["median_ms"] * 1e3)
        assert row["tflops"] == pytest.approx(row["tokens_per_s"] * flops / 64 / 1e12)
        assert row["mfu"] == pytest.approx(row["tflops"] / 989)
        assert row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert 1 < row["rank_load"] <= 2 and row["device_gib"] == row["peak_gib"] > 0
        assert row["first_step_s"] > 0
    assert baseline["receive_load"] is None and 1 < symm["receive_load"] <= 2
    assert baseline["gain"] is None
    assert symm["gain"] == pytest.approx(symm["tokens_per_s"] / baseline["tokens_per_s"])
    assert symm["loss"] == pytest.approx(baseline["loss"], rel=1e-5)  # the same tokens, in the same order


@pytest.mark.slow
def test_a_rung_that_cannot_run_is_a_row_with_the_reason_and_the_table_is_whole(measured):
    document, _ = measured
    assert "graph.scope=partial captures compiled segments" in document["rows"][2]["error"]
    lines = [line for line in bench.render(document).splitlines() if line.startswith("|")]
    assert len(lines) == 5 and len({line.count("|") for line in lines}) == 1
    best = max(row["tokens_per_s"] for row in document["rows"][:2])
    assert f"| {best:,.0f} |" in "".join(lines) and "| 1.000 |" in "".join(lines)


@pytest.mark.slow
def test_the_chart_lies_beside_the_document(measured, tmp_path):
    picture = measured[1].with_suffix(".png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and width > 800 and height > 200
    failed = {**measured[0], "rows": [{**row, "tokens_per_s": None} for row in measured[0]["rows"]]}
    draw_ladder(failed, tmp_path / "nothing.png")  # a table of failures has a chart too
    assert (tmp_path / "nothing.png").stat().st_size > 0


def test_gains_pass_over_rungs_that_failed():
    rows = [LadderRow(rung=name, what="", ranks=2, overrides=[]) for name in "abcd"]
    for row, rate in zip(rows, (10.0, None, 15.0, 12.0), strict=True):
        row.tokens_per_s = rate
    take_gains(rows)
    assert [row.gain for row in rows] == [None, None, 1.5, 0.8]


@pytest.mark.parametrize("words", ["model=mixtral_8x7b,model.num_layers=2", "recompute=all", "compile=none"])
def test_another_choice_takes_the_defaults_with_it_that_it_need_not_have(words):
    first = rungs(runs.LADDER_FULL, "cuda", 4, overrides=words)[0]
    config = compose_config(*first.row.overrides)
    assert config.recompute.ops == [] and config.data.seq_len == 4096


def of_folder(folder: Path) -> list[psutil.Process]:
    """Processes of jobs whose run is in a folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or []):
            found.append(process)
    return found


def assert_gone(folder: Path) -> None:
    end = time.monotonic() + 30
    while left := of_folder(folder):
        assert time.monotonic() < end, left
        time.sleep(0.1)


def endless() -> list[str]:
    given = rungs(overrides="compile=none")[0].row.overrides
    return [*(word for word in given if key_of(word) != "train.steps"), "train.steps=100000"]


@pytest.mark.slow
def test_a_job_that_is_late_is_ended_with_its_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(
        ProcessFailed, match="not done after limit_s=15 seconds, compilation included; use more"
    ):
        train(endless(), 15)
    assert_gone(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_killed_leaves_no_job(tmp_path, number):
    code = (
        "import sys, tempfile; from graphmoe.bench.own_process import train;"
        "tempfile.tempdir = sys.argv[1]; train(sys.argv[2:], 300)"
    )
    bench_process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *endless()], cwd=ROOT)
    end = time.monotonic() + 60
    while len(of_folder(tmp_path)) < 2:
        assert time.monotonic() < end and bench_process.poll() is None
        time.sleep(0.1)
    bench_process.send_signal(number)
    assert bench_process.wait(30) == -number
    assert_gone(tmp_path)


@pytest.mark.slow
def test_every_run_of_the_projection_suite_can_be_projected():
    cases = projection_cases(runs.PROJECTION_FULL, "cuda", 1, BenchArgs())
    assert len(cases) >= 6
    for case in cases:
        places, step = projected(compose_config(*case.row.overrides), H200, None, 1)
        assert 0 < allocated_bytes(places[0]) < 141e9 and step.step_s > 0, case.name
    _, of_eight = projection_cases(runs.PROJECTION_TINY, "cpu", 8, BenchArgs())
    config = compose_config(*of_eight.row.overrides)
    assert config.train.global_batch_size == 8 * config.train.micro_batch_size


def test_rows_say_how_far_a_projection_is_from_what_the_job_wrote(monkeypatch):
    (case, _) = projection_cases(runs.PROJECTION_TINY, "cpu", 1, BenchArgs(repeats=2))
    places, step = projected(compose_config(*case.row.overrides), H200, None, 1)
    gib, step_s = allocated_bytes(places[0]) / 2**30, step.step_s

    def fake_train(overrides, limit_s):
        if "recompute.all=true" in overrides:
            raise ProcessFailed("no memory")
        rows = [{"loss": 1, "step_s": seconds} for seconds in (9, 9, step_s / 1.05, step_s / 1.05)]
        return rows, {"peak_memory_gib": gib / 1.2, "device_memory_gib": 2 * gib}

    monkeypatch.setattr(runs, "train", fake_train)
    document = documented("suite=projection", "device=cpu", "repeats=2")
    row, failed = document["rows"]
    assert (row["memory_error"], row["time_error"]) == (pytest.approx(0.2), pytest.approx(0.05, rel=1e-2))
    assert row["misses"] == ["memory"] and failed["error"] == "no memory"
    text = bench.render(document)
    assert "+20.0% miss" in text and "| recompute | failed: no memory" in text
    assert "Misses, memory beyond 5% or time beyond 10%: plain." in text


@pytest.mark.slow
def test_words_that_one_run_refuses_leave_the_others():
    args = BenchArgs(overrides="parallel.ep=2,moe.dispatcher=alltoall")
    cases = {case.name: case for case in projection_cases(runs.PROJECTION_FULL, "cuda", 2, args)}
    assert cases.keys() == runs.PROJECTION_FULL.runs.keys()
    (row,) = runs.run_case(cases["lite_mbs1_layer"], lambda row, config: None)
    assert row.error is not None and "graph.scope=layer captures moe_dispatch" in row.error
    compose_config(*cases["lite_mbs1_none"].row.overrides)
    for wrong, said in {"model.top_k=999": "model.top_k=999", "launch.nproc=2": "use nproc="}.items():
        with pytest.raises(ConfigError, match=said):
            projection_cases(runs.PROJECTION_FULL, "cuda", 2, BenchArgs(overrides=wrong))
