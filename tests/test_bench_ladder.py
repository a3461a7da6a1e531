"""suite=ladder of the benchmark tool: rungs, jobs of their own, what their rows say, the chart."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from graphmoe.bench import __main__ as bench
from graphmoe.bench import ladder_suite
from graphmoe.bench.cases import FLOPS_PER_S
from graphmoe.bench.ladder_suite import RUNGS, LadderCase, ladder_cases, run_rung
from graphmoe.bench.ladder_table import LadderRow, draw_ladder, take_gains
from graphmoe.bench.words import compose_config, key_of
from graphmoe.config.schema import ConfigError
from graphmoe.model.flops import flops_per_token
from tests.runs import ROOT

EAGER = "overrides=compile=none,train.global_batch_size=8,data.seq_len=8"


def cases_of(**arguments: str) -> list[LadderCase]:
    return ladder_cases(ladder_suite.TINY, "cpu", 2, 10, **arguments)


def test_every_rung_can_run_and_keeps_what_those_before_it_set():
    cases = cases_of()
    assert [case.name for case in cases] == [*(rung.name for rung in RUNGS), "micro_batch_2"]
    before: dict[str, str] = {}
    for case, rung in zip(cases, RUNGS, strict=False):
        given = dict(word.split("=", 1) for word in case.words)
        expected = before | {key_of(word): word.split("=", 1)[1] for word in rung.words}
        assert {key: given.get(key) for key in expected} == expected, case.name
        before = expected
    *_, last = (compose_config(*case.words) for case in cases)
    assert (last.graph.scope, last.moe.sync_free_stage) == ("full_iteration", 3)
    assert last.pipeline.ep_overlap and last.host.manual_gc
    assert (last.train.micro_batch_size, last.train.global_batch_size) == (2, 16)
    first = compose_config(*cases[0].words)
    assert (first.moe.dispatcher.value, first.passes.disabled) == ("alltoall", ["fuse_loss"])
    assert (first.train.micro_batch_size, first.train.global_batch_size, first.parallel.ep) == (1, 8, 2)


@pytest.mark.parametrize("ranks", [4, 8])
def test_rungs_of_the_full_model_can_run(ranks):
    cases = ladder_cases(ladder_suite.FULL, "cuda", ranks, 20, micro_batch_sizes="4,6,8")
    assert [case.name for case in cases[-2:]] == ["micro_batch_6", "micro_batch_8"]
    *_, config = (compose_config(*case.words) for case in cases)
    assert (config.model.num_layers, config.data.seq_len, config.train.global_batch_size) == (
        27, 4096, 32 * ranks
    )  # fmt: skip


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
        cases_of(overrides=word)


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


def test_a_rung_that_cannot_run_is_a_row_with_the_reason_and_the_table_is_whole(measured):
    document, _ = measured
    assert "graph.scope=partial captures compiled segments" in document["rows"][2]["error"]
    lines = [line for line in bench.render(document).splitlines() if line.startswith("|")]
    assert len(lines) == 5 and len({line.count("|") for line in lines}) == 1
    best = max(row["tokens_per_s"] for row in document["rows"][:2])
    assert f"| {best:,.0f} |" in "".join(lines) and "| 1.000 |" in "".join(lines)


def test_the_chart_lies_beside_the_document(measured, tmp_path):
    picture = measured[1].with_suffix(".png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and width > 800 and height > 200
    failed = {**measured[0], "rows": [{**row, "tokens_per_s": None} for row in measured[0]["rows"]]}
    draw_ladder(failed, tmp_path / "nothing.png")  # a table of failures has a chart too
    assert (tmp_path / "nothing.png").stat().st_size > 0


def test_gains_pass_over_rungs_that_failed():
    rows = [LadderRow(name, "", 2, []) for name in "abcd"]
    for row, rate in zip(rows, (10.0, None, 15.0, 12.0), strict=True):
        row.tokens_per_s = rate
    take_gains(rows)
    assert [row.gain for row in rows] == [None, None, 1.5, 0.8]


@pytest.mark.parametrize("words", ["model=mixtral_8x7b,model.num_layers=2", "recompute=all", "compile=none"])
def test_another_choice_takes_the_defaults_with_it_that_it_need_not_have(words):
    first = ladder_cases(ladder_suite.FULL, "cuda", 4, 20, overrides=words)[0]
    config = compose_config(*first.words)
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


def endless(steps: int = 100_000) -> tuple[str, ...]:
    given = cases_of(overrides="compile=none")[0].words
    return (*(word for word in given if key_of(word) != "train.steps"), f"train.steps={steps}")


def test_a_job_that_is_late_is_ended_with_its_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    row = run_rung(LadderCase("baseline", "", endless()), 2, 10, limit_s=15)
    assert row.error == "not done after limit_s=15 seconds, compilation included; use more"
    assert_gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_killed_leaves_no_job(tmp_path, number):
    code = (
        "import sys, tempfile; from graphmoe.bench.ladder_suite import LadderCase, run_rung;"
        "tempfile.tempdir = sys.argv[1]; run_rung(LadderCase('a', '', tuple(sys.argv[2:])), 2, 10, 300)"
    )
    bench_process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *endless()], cwd=ROOT)
    end = time.monotonic() + 60
    while len(of_folder(tmp_path)) < 2:
        assert time.monotonic() < end and bench_process.poll() is None
        time.sleep(0.1)
    bench_process.send_signal(number)
    assert bench_process.wait(30) == -number
    assert_gone(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nproc=1"], "nproc=1: the rungs of suite=ladder share experts between GPUs; use nproc=2 or more"),
        (["blocks=1"], "blocks=1 has no effect with suite=ladder; use suite=dispatch"),
        (["micro_batch_sizes=1,x"], "'x' is no number above 0"),
        (["only=top"], "only=top: no case starts with that; cases are baseline, loss_fusion"),
    ],
)
def test_arguments_that_cannot_be_are_named(words, said):
    given = ["suite=ladder", "device=cpu", *words]
    with pytest.raises(ConfigError, match=said):
        bench.bench(bench.parse_args(bench.BenchArgs, given, prog="graphmoe.bench"), given)


def test_an_argument_of_two_suites_names_both():
    given = ["suite=ops", "device=cpu", "limit_s=9"]
    with pytest.raises(
        ConfigError, match="limit_s=9 has no effect with suite=ops; use suite=step or suite=ladder"
    ):
        bench.bench(bench.parse_args(bench.BenchArgs, given, prog="graphmoe.bench"), given)
