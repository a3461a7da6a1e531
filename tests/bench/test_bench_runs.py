"""suite=step, ladder and projection of the benchmark tool: cases, jobs of their own, rows, the chart."""

import json
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
from graphmoe.bench import ladder_suite, projection_suite, step_suite
from graphmoe.bench.arguments import BenchArgs, compose_config, key_of
from graphmoe.bench.cases import FLOPS_PER_S
from graphmoe.bench.jobs import JobFailed, run_cases, train
from graphmoe.bench.ladder_suite import RUNGS, draw_ladder, ladder_cases, take_gains
from graphmoe.bench.projection_suite import projected_run, projection_cases
from graphmoe.bench.step_suite import largest, step_cases, step_numbers
from graphmoe.config.schema import ConfigError
from graphmoe.model.sizes import flops_per_token
from graphmoe.plan.costs.hardware import H200
from graphmoe.project.memory import allocated_bytes
from tests.bench.test_bench import documented
from tests.runs import ROOT

EAGER = "overrides=compile=none,train.global_batch_size=8,data.seq_len=8"


def test_a_step_without_capture_is_measured_first_and_last_at_each_shape():
    cases = step_cases(step_suite.FULL, "cpu", BenchArgs(scopes="[[attn,loss],none]"))
    assert [case.name for case in cases] == [
        f"{shape}/{scope}"
        for shape in ("mbs1_s4096", "mbs4_s4096", "mbs1_s512")
        for scope in ("none", "attn+loss", "none_again")
    ]


def test_the_words_of_the_user_replace_those_of_the_suite_and_steps_are_enough():
    given = (
        "model=tiny,train.global_batch_size=6,passes.disabled=[fuse_loss,fuse_router],graph.warmup_steps=200"
    )
    args = BenchArgs(overrides=given, scopes="layer", micro_batch_sizes="3", seq_lens="64", repeats=500)
    (case,) = step_cases(step_suite.FULL, "cpu", args)
    assert case.name == "mbs3_s64/layer"
    config = compose_config(*case.row["overrides"])
    assert (config.model.name, config.model.num_layers) == ("tiny", 4)  # not 6: another model's number
    assert (config.train.global_batch_size, config.train.micro_batch_size, config.data.seq_len) == (6, 3, 64)
    assert config.passes.disabled == ["fuse_loss", "fuse_router"]
    assert (config.optim.lr, config.graph.scope, config.checkpoint.enabled) == (1e-6, "layer", False)
    others = step_suite.WARM_UP_STEPS + step_suite.HOST_STEPS + step_suite.PROFILED_STEPS
    assert config.train.steps == config.train.log_interval > 700 + others
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
    assert good["tokens_per_s_p10"] <= good["tokens_per_s"] <= good["tokens_per_s_p90"]
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


def test_kernels_with_the_most_time_have_calls_and_milliseconds_of_one_step():
    trace = [("a", 0, 10), ("b", 5, 8), ("a", 9, 14), ("c", 20, 21)]
    assert largest(trace, 2) == [
        {"name": "a", "calls": 1.0, "ms": 0.0075},
        {"name": "b", "calls": 0.5, "ms": 0.0015},
        {"name": "c", "calls": 0.5, "ms": 0.0005},
    ]


def test_a_row_has_both_floors_and_no_idle_time_below_zero():
    config = compose_config(*step_suite.FULL.words, "train.global_batch_size=4")
    measured = {"samples_ms": [191.2, 190.0, 193.0], "host_samples_ms": [5.0, 4.0, 9.0], "busy_ms": 143.4}
    row = step_numbers(config, measured)
    assert row["tokens"] == 4 * 4096
    assert row["floor_ms"] == pytest.approx(95.6, abs=0.05)  # docs/benchmarks: 6 layers, 4 sequences
    assert row["floor_with_optimizer_ms"] == pytest.approx(122.7, abs=0.05)
    assert (row["median_ms"], row["host_ms"]) == (191.2, 5.0)
    assert row["time_over_floor"] == pytest.approx(2.0, abs=0.001)
    assert row["tflops"] == pytest.approx(790 * row["share_of_floor_rate"]) == pytest.approx(395, abs=1)
    assert row["idle_share"] == row["idle_share_raw"] == pytest.approx(0.25)
    row = step_numbers(config, measured | {"busy_ms": 193.0})
    assert row["idle_share"] == 0 > row["idle_share_raw"]


def rungs(setting=ladder_suite.TINY, device="cpu", ranks=2, **given):
    return ladder_cases(setting, device, ranks, BenchArgs(**given))


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


def test_words_that_are_the_suites_own_are_refused():
    for word, said in {
        "moe.dispatcher=symm": "the rung symm sets moe.dispatcher; choose rungs by only=",
        "graph=layer": "sets graph; choose rungs by only=",
        "train.micro_batch_size=4": "use micro_batch_sizes=...",
        "train.val_batches=4": "the suite sets train.val_batches, so that only steps are timed",
        "checkpoint.interval=4": "the suite sets checkpoint.interval",
        "parallel.ep=2": "the suite sets parallel.ep; use nproc=...",
        "parallel.tp=2": "the suite has all GPUs of one node along parallel.ep",
        "model=no_such": "no_such",
    }.items():
        with pytest.raises(ConfigError, match=said):
            rungs(overrides=word)


@pytest.mark.slow
def test_a_ladder_has_rates_gains_a_chart_and_a_row_with_the_reason_of_what_cannot_run(tmp_path):
    out = tmp_path / "ladder.json"
    only = "only=baseline,symm,partial"
    with pytest.raises(SystemExit) as ended:
        bench.main(["suite=ladder", "device=cpu", "repeats=10", EAGER, only, f"out={out}"])
    assert ended.value.code == 1
    document = json.loads(out.read_text())
    baseline, symm, partial = document["rows"]
    flops = flops_per_token(compose_config(*baseline["overrides"]).model, 8).total * 64
    for row in (baseline, symm):
        assert row["error"] is None and row["tokens"] == 64 and len(row["samples_ms"]) == 10
        assert row["floor_ms"] == pytest.approx(flops / FLOPS_PER_S / 2 * 1e3)
        assert row["tokens_per_s"] == pytest.approx(64 / 2 / row["median_ms"] * 1e3)
        assert row["tflops"] == pytest.approx(row["tokens_per_s"] * flops / 64 / 1e12)
        assert row["mfu"] == pytest.approx(row["tflops"] / 989)
        assert 1 < row["rank_load"] <= 2 and row["device_gib"] == row["peak_gib"] > 0
        assert row["first_step_s"] > 0
    assert baseline["receive_load"] is None and 1 < symm["receive_load"] <= 2
    assert baseline["gain"] is None
    assert symm["gain"] == pytest.approx(symm["tokens_per_s"] / baseline["tokens_per_s"])
    assert symm["loss"] == pytest.approx(baseline["loss"], rel=1e-5)  # the same tokens, in the same order
    assert "graph.scope=partial captures compiled segments" in partial["error"]
    lines = [line for line in bench.render(document).splitlines() if line.startswith("|")]
    assert len(lines) == 5 and len({line.count("|") for line in lines}) == 1
    best = max(baseline["tokens_per_s"], symm["tokens_per_s"])
    assert f"| {best:,.0f} |" in "".join(lines) and "| 1.000 |" in "".join(lines)
    picture = out.with_suffix(".png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and width > 800 and height > 200
    draw_ladder({**document, "rows": [partial]}, tmp_path / "nothing.png")  # failures have a chart too
    assert (tmp_path / "nothing.png").stat().st_size > 0


def test_gains_pass_over_rungs_that_failed():
    rows = [{"tokens_per_s": 10.0}, {"error": "no"}, {"tokens_per_s": 15.0}, {"tokens_per_s": 12.0}]
    take_gains(rows)
    assert [row["gain"] for row in rows] == [None, None, 1.5, 0.8]


@pytest.mark.parametrize("words", ["model=mixtral_8x7b,model.num_layers=2", "recompute=all", "compile=none"])
def test_another_choice_takes_the_defaults_with_it_that_it_need_not_have(words):
    first = rungs(ladder_suite.FULL, "cuda", 4, overrides=words)[0]
    config = compose_config(*first.row["overrides"])
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
    with pytest.raises(JobFailed, match="not done after limit_s=15 seconds, compilation included"):
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
    cases = projection_cases(projection_suite.FULL, "cuda", 1, BenchArgs())
    assert len(cases) >= 6
    for case in cases:
        places, step = projected_run(compose_config(*case.row["overrides"]), H200, None, 1)
        assert 0 < allocated_bytes(places[0]) < 141e9 and step["step_time_s"] > 0, case.name
    _, of_eight = projection_cases(projection_suite.TINY, "cpu", 8, BenchArgs())
    config = compose_config(*of_eight.row["overrides"])
    assert config.train.global_batch_size == 8 * config.train.micro_batch_size


def test_rows_say_how_far_a_projection_is_from_what_the_job_wrote(monkeypatch):
    (case, _) = projection_cases(projection_suite.TINY, "cpu", 1, BenchArgs(repeats=2))
    places, step = projected_run(compose_config(*case.row["overrides"]), H200, None, 1)
    gib, step_s = allocated_bytes(places[0]) / 2**30, step["step_time_s"]

    def fake_train(overrides, limit_s):
        if "recompute.all=true" in overrides:
            raise JobFailed("no memory")
        rows = [{"loss": 1, "step_s": seconds} for seconds in (9, 9, step_s / 1.05, step_s / 1.05)]
        return rows, {"peak_memory_gib": gib / 1.2, "device_memory_gib": 2 * gib}

    monkeypatch.setattr(projection_suite, "train", fake_train)
    document = documented("suite=projection", "device=cpu", "repeats=2")
    row, failed = document["rows"]
    assert (row["memory_error"], row["time_error"]) == (pytest.approx(0.2), pytest.approx(0.05, rel=1e-2))
    assert row["misses"] == ["memory"] and failed["error"] == "no memory"
    text = bench.render(document)
    assert "+20.0% miss" in text and "| recompute | failed: no memory" in text
    assert "Misses, memory beyond 5% or time beyond 10%: plain." in text


@pytest.mark.slow
def test_words_that_one_run_refuses_leave_the_others():
    args = BenchArgs(overrides="parallel.ep=2,moe.dispatcher=alltoall", only=["lite_mbs1"])
    cases = projection_cases(projection_suite.FULL, "cuda", 2, args)
    assert {case.name for case in cases} == projection_suite.FULL.runs.keys()
    plain, layer = run_cases(cases, args, lambda row, config: {}, str)
    assert plain["error"] is None and "graph.scope=layer captures moe_dispatch" in layer["error"]
    for wrong, said in {"model.top_k=999": "model.top_k=999", "launch.nproc=2": "use nproc="}.items():
        with pytest.raises(ConfigError, match=said):
            projection_cases(projection_suite.FULL, "cuda", 2, BenchArgs(overrides=wrong))
