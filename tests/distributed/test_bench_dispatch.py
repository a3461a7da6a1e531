"""suite=dispatch of the benchmark tool: rows of all ways, bytes, and errors that name their rank."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

from graphmoe.bench import __main__ as bench
from graphmoe.bench.dispatch_ways import ALL_FOUR, EXCHANGES
from graphmoe.config.arguments import run_tool
from tests.distributed.bench_ranks import (
    Suite,
    one_rank_fails,
    too_few_experts,
)
from tests.distributed.ranks import run_ranks
from tests.runs import ROOT

WAYS = ("alltoall", "pull", "copy_engine_0.8", "deepep")
BROKEN = {"by_symm": ["pull", "copy_engine_0.8"], "by_buffer": ["deepep"]}
"""Ways that a function makes."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of each case, by rank."""
    cases = {
        "suite": Suite(),
        **{name: Suite(("v2_lite/natural",), broken=name) for name in BROKEN},
        "one fails": one_rank_fails,
        "too few experts": too_few_experts,
    }
    return run_ranks(tmp_path_factory.mktemp("ranks"), cases)


def test_every_way_has_a_row_of_numbers_for_each_exchange_and_for_all(found):
    rows, of_other_rank = found["suite"]
    assert rows == of_other_rank
    places = [(f"v2_lite/{routing}", way) for routing in ("natural", "balanced") for way in WAYS]
    assert [(row["case"], row["way"], row["exchange"]) for row in rows] == [
        (*place, exchange) for place in places for exchange in (*EXCHANGES, ALL_FOUR)
    ]
    for row in rows:
        assert row["error"] is None and not row["captured"]
        assert len(row["samples_ms"]) == len(row["products_samples_ms"]) == len(row["both_samples_ms"]) == 2
        assert row["bytes_per_s"] == pytest.approx(row["out_bytes"] / row["median_ms"] * 1e3)
        assert (
            row["time_over_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"])
            and row["floor_ms"] > 0
        )
        assert row["hidden"] == pytest.approx(1 - (row["both_ms"] - row["products_ms"]) / row["median_ms"])
        baseline = next(r for r in rows if (r["case"], r["exchange"]) == (row["case"], row["exchange"]))
        assert baseline["way"] == "alltoall"
        assert row["time_over_alltoall"] == pytest.approx(row["median_ms"] / baseline["median_ms"])
        assert (row["block"] is not None) == (row["way"] == "copy_engine_0.8")


@pytest.mark.parametrize("maker", BROKEN)
def test_a_way_whose_results_are_not_those_of_alltoall_is_not_timed(found, maker):
    rows, _ = found[maker]
    failed = {row["way"]: row["error"] for row in rows if row["error"]}
    assert failed == dict.fromkeys(BROKEN[maker], "rank 1: RuntimeError: not what alltoall gives: dh")
    assert {row["way"] for row in rows if not row["error"]} == set(WAYS) - set(BROKEN[maker])


def test_an_error_on_one_rank_is_heard_by_all_with_its_rank_and_they_go_on(found):
    told = "rank 1: ValueError: no such expert"
    assert found["one fails"] == [(told, 5), (told, 6)]


def test_experts_that_do_not_go_into_the_ranks_are_a_row_with_the_reason(found):
    for rows in found["too few experts"]:
        assert [row["error"] for row in rows] == ["2 experts and top-2 do not go into 2 ranks"]


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_the_first_prints_and_writes(tmp_path):
    words = ["suite=dispatch", "device=cpu", "only=v2_lite/balanced/pull", "repeats=1", "out=d.json"]
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*line, "-m", "graphmoe.bench", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    document = json.loads((tmp_path / "d.json").read_text())
    assert document["method"]["ranks"] == 2 and document["method"]["experts"] == "torch,torch,torch"
    assert len(document["rows"]) == 5 and all(row["time_over_alltoall"] is None for row in document["rows"])
    assert all(math.isfinite(row["hidden"]) for row in document["rows"])
    lines = [line for line in run.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 5 and len({line.count("|") for line in lines}) == 1
    assert "2 ranks." in run.stdout and run.stderr.count("[1/1] v2_lite/balanced/pull") == 1


@pytest.mark.parametrize(
    ("words", "ranks", "parts"),
    [
        (["suite=dispatch"], None, ["here is one", "torchrun --nproc-per-node=4 -m graphmoe.bench"]),
        (["suite=ops"], (2, 2), ["suite=ops is for one process"]),
        (["suite=dispatch"], (4, 2), ["of one node", "--nnodes=1"]),
        (["suite=dispatch", "blocks=0.5,x"], (2, 2), ["blocks=0.5,x", "blocks=0.5,0.8"]),
        (["suite=dispatch", "blocks=0"], (2, 2), ["blocks=0:", "above 0"]),
        (["suite=dispatch", "scopes=layer"], (2, 2), ["scopes=layer has no effect", "suite=step"]),
        (["suite=ops", "blocks=1"], None, ["blocks=1 has no effect with suite=ops", "suite=dispatch"]),
    ],
)
def test_a_bad_argument_or_number_of_processes_says_what_to_type(words, ranks, parts, monkeypatch, capsys):
    for name, value in zip(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ranks or (), strict=False):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as exit_info:
        run_tool(bench.main, [*words, "device=cpu"])
    streams = capsys.readouterr()
    assert exit_info.value.code == 2 and streams.out == ""
    for part in parts:
        assert part in streams.err
