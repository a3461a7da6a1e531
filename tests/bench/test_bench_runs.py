"""suite=step, ladder and projection of the benchmark tool: cases, jobs of their own, rows, the chart."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from graphmoe.bench import __main__ as bench
from graphmoe.bench import jobs
from graphmoe.bench.arguments import BenchArgs, SuiteName
from graphmoe.bench.cases import CaseFailed
from graphmoe.bench.jobs import WARM_UP_STEPS, Trained, compose_config, key_of, train
from graphmoe.bench.runs import (
    RECORDED_STEPS,
    RUNGS,
    ladder_cases,
    projected_run,
    projection_cases,
    rung_numbers,
    step_cases,
    step_numbers,
    take_gains,
)
from graphmoe.config.schema import ConfigError
from graphmoe.plan.costs.hardware import H200
from graphmoe.project.memory import allocated_bytes
from graphmoe.trace.events import read_trace
from tests.bench.test_bench import documented
from tests.kineto import two_steps
from tests.runs import ROOT

EAGER = "overrides=compile=none,train.global_batch_size=8,data.seq_len=8"
SUMMARY = {"peak_memory_gib": 2.0, "device_memory_gib": 4.0, "time_to_first_step_s": 9.0}


def test_a_step_without_capture_is_measured_first_and_last_at_each_shape():
    cases = step_cases(BenchArgs(SuiteName.step, scopes="[[attn,loss],none]"), "cpu", full=True)
    assert [case.name for case in cases] == [
        f"{shape}/{scope}"
        for shape in ("mbs1_s4096", "mbs4_s4096", "mbs1_s512")
        for scope in ("none", "attn+loss", "none_again")
    ]


def test_the_words_of_the_user_replace_those_of_the_suite_and_steps_are_enough():
    given = (
        "model=tiny,train.global_batch_size=6,passes.disabled=[fuse_loss,fuse_router],graph.warmup_steps=200"
    )
    sizes = {"micro_batch_sizes": "3", "seq_lens": "64", "repeats": 500}
    (case,) = step_cases(
        BenchArgs(SuiteName.step, overrides=given, scopes="layer", **sizes), "cpu", full=True
    )
    assert case.name == "mbs3_s64/layer"
    config = compose_config(*case.row["overrides"])
    assert (config.model.name, config.model.num_layers) == ("tiny", 4)  # not 6: another model's number
    assert (config.train.global_batch_size, config.train.micro_batch_size, config.data.seq_len) == (6, 3, 64)
    assert config.passes.disabled == ["fuse_loss", "fuse_router"]
    assert (config.optim.lr, config.graph.scope, config.checkpoint.enabled) == (1e-6, "layer", False)
    timed = 200 + 1 + WARM_UP_STEPS + 500
    assert config.profile.steps == [timed + 1, timed + RECORDED_STEPS]
    assert config.train.steps == config.train.log_interval == timed + RECORDED_STEPS
    assert config.checkpoint.interval == config.train.val_batches == 0


@pytest.mark.slow
def test_steps_are_rows_of_their_own_processes_and_what_cannot_run_is_a_row_with_the_reason(caplog):
    caplog.set_level("INFO")
    document = documented(
        "suite=step", "device=cpu", "overrides=compile=none", "scopes=partial,full_iteration",
        "repeats=3", "seq_lens=16",
    )  # fmt: skip
    bad, good = document["rows"]
    assert bad["scope"] == "partial" and "graph.scope=partial captures compiled segments" in bad["error"]
    assert good["error"] is None and good["graphs"] == 1
    assert len(good["samples_ms"]) == 3 and good["tokens"] == 32
    assert good["tokens_per_s"] == pytest.approx(32e3 / good["median_ms"])
    assert good["host_ms"] > 0 and good["capture_s"] > 0 and good["idle_share"] is None
    assert "[2/2] mbs2_s16/full_iteration: " in caplog.text
    lines = [line for line in bench.render(document).splitlines() if line.startswith("|")]
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert "| mbs2_s16 | partial | failed: the configuration cannot run" in lines[2]


def wait_until(reached: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_row_has_both_floors_and_what_the_recorded_steps_say(tmp_path):
    config = compose_config("model=deepseek_v2_lite", "model.num_layers=6", "train.global_batch_size=4")
    seconds = [9.0, 0.1912, 0.1900, 0.1930, *[9.0] * RECORDED_STEPS]
    trace = read_trace(two_steps().write(tmp_path / "a.json"))  # 1400 of 1900 us are busy in two steps
    found = Trained([{"step_s": each} for each in seconds], SUMMARY, {"pool_bytes": 5}, trace)
    row = step_numbers(config, 1, found, repeats=3)
    assert row["tokens"] == 4 * 4096
    assert row["floor_ms"] == pytest.approx(95.6, abs=0.05)  # docs/benchmarks: 6 layers, 4 sequences
    assert row["floor_with_optimizer_ms"] == pytest.approx(122.7, abs=0.05)
    assert (row["median_ms"], row["peak_gib"], row["pool_bytes"], row["graphs"]) == (191.2, 2.0, 5, None)
    assert row["time_over_floor"] == pytest.approx(2.0, abs=0.001)
    assert row["tflops"] == pytest.approx(790 * row["share_of_floor_rate"]) == pytest.approx(395, abs=1)
    assert row["idle_share"] == pytest.approx(1 - 0.7 / 191.2) and row["host_ms"] > 0
    largest = row["kernels"][0]
    assert (largest["name"], largest["calls"]) == ("triton_poi_fused_adamw", pytest.approx(2 / 3))


def rungs(full=False, device="cpu", ranks=2, **given):
    return ladder_cases(BenchArgs(SuiteName.ladder, **given), device, full, ranks)


def test_every_rung_can_run_and_keeps_what_those_before_it_set():
    cases = rungs()
    assert [case.name for case in cases] == [*(rung.name for rung in RUNGS), "micro_batch_2"]
    before: dict[str, str] = {}
    for case, rung in zip(cases, RUNGS, strict=False):
        given = dict(word.split("=", 1) for word in case.row["overrides"])
        expected = before | {key_of(word): word.split("=", 1)[1] for word in rung.words}
        assert {key: given.get(key) for key in expected} == expected, case.name
        before = expected
    first, *_, last = (compose_config(*case.row["overrides"]) for case in cases)
    assert last.graph.scope == "full_iteration" and last.pipeline.ep_overlap and last.host.manual_gc
    assert (last.train.micro_batch_size, last.train.global_batch_size) == (2, 16)
    assert (first.moe.dispatcher, first.passes.disabled) == ("alltoall", ["fuse_loss"])
    assert (first.train.micro_batch_size, first.train.global_batch_size, first.parallel.ep) == (1, 8, 2)


@pytest.mark.slow
def test_a_ladder_has_rates_gains_a_chart_and_a_row_with_the_reason_of_what_cannot_run(tmp_path):
    out = tmp_path / "ladder.json"
    only = "only=baseline,symm,partial"
    with pytest.raises(SystemExit) as ended:
        bench.main(["suite=ladder", "device=cpu", "repeats=10", EAGER, only, f"out={out}"])
    assert ended.value.code == 1
    document = json.loads(out.read_text())
    baseline, symm, partial = document["rows"]
    for row in (baseline, symm):
        assert row["error"] is None and row["tokens"] == 64 and len(row["samples_ms"]) == 10
        assert row["tokens_per_s"] == pytest.approx(64 / 2 / row["median_ms"] * 1e3)
        assert 1 < row["rank_load"] <= 2 and row["device_gib"] == row["peak_gib"] > 0
    assert baseline["receive_load"] is None and 1 < symm["receive_load"] <= 2
    assert symm["gain"] == pytest.approx(symm["tokens_per_s"] / baseline["tokens_per_s"])
    assert symm["loss"] == pytest.approx(baseline["loss"], rel=1e-5)  # the same tokens, in the same order
    assert "graph.scope=partial captures compiled segments" in partial["error"]
    lines = [line for line in bench.render(document).splitlines() if line.startswith("|")]
    assert len(lines) == 5 and len({line.count("|") for line in lines}) == 1
    assert out.with_suffix(".png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_gains_pass_over_rungs_that_failed_and_a_ladder_of_failures_has_a_chart(tmp_path):
    steps = [{"step_s": 2.0, "rank_load": 1.5, "receive_load": load, "loss": 3.0} for load in (1.2, 1.7)]
    row = rung_numbers(compose_config("model=tiny"), 4, steps, SUMMARY)
    assert row["mfu"] == pytest.approx(row["tflops"] / 989) and row["receive_load"] == 1.7
    assert (row["first_step_s"], row["device_gib"], row["median_ms"]) == (9.0, 4.0, 2000.0)
    rows = [{"tokens_per_s": 10.0}, {"error": "no"}, {"tokens_per_s": 15.0}, {"tokens_per_s": 12.0}]
    take_gains(rows)
    assert [row["gain"] for row in rows] == [None, None, 1.5, 0.8]
    document = {"rows": [{"overrides": []}], "method": {"ranks": 2}, "environment": {"device": "cpu"}}
    bench.draw_ladder(document, tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").stat().st_size > 0


@pytest.mark.parametrize("words", ["model=mixtral_8x7b,model.num_layers=2", "recompute=all", "compile=none"])
def test_another_choice_takes_the_defaults_with_it_that_it_need_not_have(words):
    config = compose_config(*rungs(True, "cuda", 4, overrides=words)[0].row["overrides"])
    assert config.recompute.ops == [] and config.data.seq_len == 4096


def of_folder(folder: Path) -> list[psutil.Process]:
    """Processes of jobs whose run is in a folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or [])
    ]


def endless() -> list[str]:
    given = rungs(overrides="compile=none")[0].row["overrides"]
    return [*(word for word in given if key_of(word) != "train.steps"), "train.steps=100000"]


@pytest.mark.slow
def test_a_job_that_is_late_is_ended_with_its_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CaseFailed, match="not done after limit_s=15 seconds, compilation included"):
        train(endless(), 15)
    wait_until(lambda: not of_folder(tmp_path), 30)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_killed_leaves_no_job(tmp_path, number):
    code = (
        "import sys, tempfile; from graphmoe.bench.jobs import train;"
        "tempfile.tempdir = sys.argv[1]; train(sys.argv[2:], 300)"
    )
    bench_process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *endless()], cwd=ROOT)
    wait_until(lambda: len(of_folder(tmp_path)) >= 2 or bench_process.poll() is not None)
    bench_process.send_signal(number)
    assert bench_process.wait(30) == -number
    wait_until(lambda: not of_folder(tmp_path), 30)


@pytest.mark.slow
def test_every_run_of_the_projection_suite_can_be_projected():
    cases = projection_cases(BenchArgs(SuiteName.projection), "cuda", full=True)
    assert len(cases) >= 6
    for case in cases:
        places, step = projected_run(compose_config(*case.row["overrides"]), H200, None, 1)
        assert 0 < allocated_bytes(places[0]) < 141e9 and step["step_time_s"] > 0, case.name
    of_eight = projection_cases(BenchArgs(SuiteName.projection, nproc=8), "cpu", full=False)
    config = compose_config(*of_eight[-1].row["overrides"])
    assert config.train.global_batch_size == 8 * config.train.micro_batch_size


def test_rows_say_how_far_a_projection_is_from_what_the_job_wrote_and_which_words_a_run_refuses(monkeypatch):
    case, _ = projection_cases(BenchArgs(SuiteName.projection, repeats=2), "cpu", full=False)
    places, step = projected_run(compose_config(*case.row["overrides"]), H200, None, 1)
    gib, step_s = allocated_bytes(places[0]) / 2**30, step["step_time_s"]

    def fake_train(overrides, limit_s):
        if "recompute.all=true" in overrides:
            raise CaseFailed("no memory")
        rows = [{"loss": 1, "step_s": seconds} for seconds in (9, 9, step_s / 1.05, step_s / 1.05)]
        return Trained(rows, {"peak_memory_gib": gib / 1.2, "device_memory_gib": 2 * gib}, {}, None)

    monkeypatch.setattr(jobs, "train", fake_train)
    document = documented("suite=projection", "device=cpu", "repeats=2")
    row, failed = document["rows"]
    assert (row["memory_error"], row["time_error"]) == (pytest.approx(0.2), pytest.approx(0.05, rel=1e-2))
    assert row["misses"] == ["memory"] and failed["error"] == "no memory"
    text = bench.render(document)
    assert "+20.0% miss" in text and "| recompute | failed: no memory" in text
    assert "Misses, memory beyond 5% or time beyond 10%: plain." in text
    args = BenchArgs(SuiteName.projection, overrides="parallel.ep=2,moe.dispatcher=alltoall", nproc=2)
    refused = [
        case for case in projection_cases(args, "cuda", full=True) if isinstance(case.config, ConfigError)
    ]
    assert "graph.scope=layer captures moe_dispatch" in str(refused[0].config) and len(refused) < 9
