"""suite=step of the benchmark tool: cases, processes of their own, what follows from a trace, rows."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from graphmoe.bench import __main__ as bench
from graphmoe.bench import step_suite
from graphmoe.bench.own_process import ProcessFailed, in_own_process
from graphmoe.bench.step_suite import step_cases
from graphmoe.bench.step_table import StepRow
from graphmoe.bench.step_times import (
    HOST_STEPS,
    PROFILED_STEPS,
    WARM_UP_STEPS,
    Activity,
    StepTimes,
    largest,
    union_us,
)
from graphmoe.bench.words import compose_config, words_of
from graphmoe.config.schema import ConfigError


def test_none_is_measured_first_and_last_at_each_shape():
    cases = step_cases(step_suite.FULL, "cpu", 20, scopes="[[attn,loss],none]")
    assert [case.name for case in cases] == [
        f"{shape}/{scope}"
        for shape in ("mbs1_s4096", "mbs4_s4096", "mbs1_s512")
        for scope in ("none", "attn+loss", "none_again")
    ]


def test_the_words_of_the_user_replace_those_of_the_suite():
    given = "model=tiny,train.global_batch_size=6,passes.disabled=[fuse_loss,fuse_router]"
    (case,) = step_cases(
        step_suite.FULL, "cpu", 20, overrides=given, scopes="layer", micro_batch_sizes="3", seq_lens="64"
    )
    assert case.name == "mbs3_s64/layer"
    config = compose_config(*case.words)
    assert (config.model.name, config.model.num_layers) == ("tiny", 4)  # not 6: another model's number
    assert (config.train.global_batch_size, config.train.micro_batch_size, config.data.seq_len) == (6, 3, 64)
    assert config.passes.disabled == ["fuse_loss", "fuse_router"]
    assert (config.optim.lr, config.graph.scope, config.checkpoint.enabled) == (1e-6, "layer", False)


def test_a_list_is_split_at_commas_outside_brackets():
    assert words_of("a, b=[c,d],") == words_of("[a,b=[c,d]]") == ["a", "b=[c,d]"]
    assert words_of("[[a,b]],c") == ["[[a,b]]", "c"]
    assert words_of("") == words_of("[]") == []


def test_steps_are_rows_of_their_own_processes_and_what_cannot_run_is_a_row_with_the_reason(caplog):
    caplog.set_level("INFO")
    words = [
        "suite=step", "device=cpu", "overrides=compile=none", "scopes=partial,full_iteration",
        "repeats=3", "seq_lens=16",
    ]  # fmt: skip
    document = bench.bench(bench.parse_args(bench.BenchArgs, words, prog="graphmoe.bench"), words)
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


def test_a_process_ends_with_the_one_that_started_it(tmp_path):
    path = tmp_path / "pid"
    code = (
        "import pathlib; from tests.test_bench_steps import in_own_process, tell_and_sleep; "
        f"in_own_process(tell_and_sleep, pathlib.Path({str(path)!r}), limit_s=60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1])
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


@pytest.mark.parametrize(
    "word",
    ["checkpoint.interval=5", "checkpoint.enabled=true", "train.val_batches=3", "train.log_interval=1"],
)
def test_what_would_be_timed_beside_the_steps_is_refused(word):
    with pytest.raises(ConfigError, match="the suite sets .* so that only steps are timed"):
        step_cases(step_suite.TINY, "cpu", 3, overrides=word, scopes="none")


def test_a_row_has_steps_enough_whatever_its_warm_up():
    (case,) = step_cases(step_suite.TINY, "cpu", 500, overrides="graph.warmup_steps=200", scopes="none")
    config = compose_config(*case.words)
    assert config.train.steps == config.train.log_interval > 700 + WARM_UP_STEPS + HOST_STEPS + PROFILED_STEPS
    assert config.checkpoint.interval == config.train.val_batches == 0


def test_time_in_which_kernels_overlap_counts_once():
    trace = [Activity("a", 0, 10), Activity("b", 5, 8), Activity("a", 9, 14), Activity("c", 20, 21)]
    assert union_us(trace) == 15 and union_us([]) == 0
    assert largest(trace, 2) == [
        {"name": "a", "calls": 1.0, "ms": 0.0075},
        {"name": "b", "calls": 0.5, "ms": 0.0015},
        {"name": "c", "calls": 0.5, "ms": 0.0005},
    ]


def test_a_row_has_both_floors_and_no_idle_time_below_zero():
    row = StepRow(case="mbs1_s4096", scope="layer", again=False, overrides=[])
    row.take_floors(compose_config(*step_suite.FULL.words, "train.global_batch_size=4"))
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
