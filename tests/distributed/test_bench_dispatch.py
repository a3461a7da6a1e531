"""suite=dispatch of the benchmark tool: rows of all ways, bytes, and errors that name their rank."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys

import pytest
import torch

from graphmoe.bench import __main__ as bench
from graphmoe.bench import dispatch_suite
from graphmoe.bench.dispatch_suite import FULL, TINY, dispatch_cases, vendors_of
from graphmoe.bench.dispatch_ways import ALL_FOUR, EXCHANGES, LINK_BYTES_PER_S, rows_of, traffic
from graphmoe.config.arguments import run_tool
from tests.distributed.bench_ranks import (
    Suite,
    one_rank_fails,
    others_wait_for_the_one_that_fails,
    too_few_experts,
)
from tests.distributed.ranks import Job, run_ranks
from tests.runs import ROOT

WAYS = ("alltoall", "pull", "copy_engine_0.8", "deepep")
BROKEN = {"by_symm": ["pull", "copy_engine_0.8"], "by_buffer": ["deepep"]}
"""Ways that a function makes."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each case returned, by rank."""
    cases = {
        "suite": Suite(),
        **{name: Suite(("v2_lite/natural",), broken=name) for name in BROKEN},
        "one fails": one_rank_fails,
        "too few experts": too_few_experts,
    }
    return run_ranks(tmp_path_factory.mktemp("ranks"), cases)


def test_every_way_has_a_row_of_numbers_for_each_exchange_and_for_all(found):
    rows, of_other_rank = found["suite"]
    assert [vars(row) for row in rows] == [vars(row) for row in of_other_rank]
    places = [(f"v2_lite/{routing}", way) for routing in ("natural", "balanced") for way in WAYS]
    assert [(row.case, row.way, row.exchange) for row in rows] == [
        (*place, exchange) for place in places for exchange in (*EXCHANGES, ALL_FOUR)
    ]
    for row in rows:
        assert row.error is None and not row.captured
        assert len(row.samples_ms) == len(row.products_samples_ms) == len(row.both_samples_ms) == 2
        assert row.bytes_per_s == pytest.approx(row.out_bytes / row.median_ms * 1e3)
        assert row.time_over_floor == pytest.approx(row.median_ms / row.floor_ms) and row.floor_ms > 0
        assert row.hidden == pytest.approx(1 - (row.both_ms - row.products_ms) / row.median_ms)
        baseline = next(r for r in rows if (r.case, r.exchange) == (row.case, row.exchange))
        assert baseline.way == "alltoall"
        assert row.time_over_alltoall == pytest.approx(row.median_ms / baseline.median_ms)
        assert (row.block is not None) == (row.way == "copy_engine_0.8")


def test_a_balanced_routing_sends_half_of_the_tokens_to_each_of_two_ranks(found):
    """Round robin: the two experts of a token are neighbours."""
    shape = TINY["v2_lite"]
    rows = {row.exchange: row for row in found["suite"][0] if row.case == "v2_lite/balanced"}
    remote = shape.T // 2
    assert rows["combine"].out_bytes == remote * 2 * shape.D
    assert rows["dispatch"].out_bytes == remote * (2 * shape.D + 8 * shape.K)


def test_bytes_are_those_of_rows_that_leave_or_enter_the_rank_with_most():
    shape = FULL["v2_lite"]
    sent = [[9, 1, 2], [4, 9, 0], [8, 3, 9]]
    out, floor_ms = traffic(shape, sent, "dispatch")
    assert out == 11 * (2 * 2048 + 48)  # of rank 2
    assert floor_ms == pytest.approx(12 * (2 * 2048 + 48) / LINK_BYTES_PER_S * 1e3)  # into rank 0
    out, floor_ms = traffic(shape, sent, "dispatch_grad")
    assert out == 12 * (2 * 2048 + 24)
    assert floor_ms == pytest.approx(out / LINK_BYTES_PER_S * 1e3)
    alone = [traffic(shape, sent, exchange)[0] for exchange in EXCHANGES]
    assert max(alone) < traffic(shape, sent, ALL_FOUR)[0] < sum(alone)


def test_there_is_room_for_blocks_that_are_not_full():
    assert rows_of([[10, 0], [10, 0]], mean=5.0, block=0) == 20
    assert rows_of([[10, 0], [10, 0]], mean=5.0, block=8) == 2 * 8 + 4
    assert rows_of([[30, 0], [0, 10]], mean=10.0, block=8) == 2 * 8 + 22
    assert rows_of([[10, 10], [10, 10]], mean=10.0, block=2) == 30


@pytest.mark.parametrize("maker", BROKEN)
def test_what_alltoall_does_not_give_is_not_timed(found, maker):
    rows, _ = found[maker]
    failed = {row.way: row.error for row in rows if row.error}
    assert failed == dict.fromkeys(BROKEN[maker], "rank 1: RuntimeError: not what alltoall gives: dh")
    assert {row.way for row in rows if row.median_ms} == set(WAYS) - set(BROKEN[maker])


def test_an_error_on_one_rank_is_heard_by_all_with_its_rank_and_they_go_on(found):
    told = "rank 1: ValueError: no such expert"
    assert found["one fails"] == [(told, 5), (told, 6)]


def test_a_rank_that_fails_while_others_wait_for_it_says_so_and_ends(tmp_path):
    job = Job(tmp_path, {"waits": others_wait_for_the_one_that_fails})
    with pytest.raises(AssertionError, match=r"ended: ranks \[1\]"):
        job.wait_until(lambda: False)
    (log,) = tmp_path.glob("ranks_*/1.log")
    text = log.read_text()
    assert "rank 1 of 2 failed" in text and "ValueError: no such expert" in text
    assert "rank 1 of 2 ends: the ranks did not come together" in text


def test_experts_that_do_not_go_into_the_ranks_are_a_row_with_the_reason(found):
    for rows in found["too few experts"]:
        assert [row.error for row in rows] == ["2 experts and top-2 do not go into 2 ranks"]


def test_blocks_are_cases_of_their_own():
    names = [case.name for case in dispatch_cases(TINY, "0.5,2")]
    assert names[:4] == [f"v2_lite/natural/{way}" for way in (*WAYS[:2], "copy_engine_0.5", "copy_engine_2")]


@pytest.mark.parametrize("hip, choice", [(None, "deepep"), ("6.4", "turbo")])
def test_a_package_that_cannot_run_is_left_out_with_what_to_do(monkeypatch, hip, choice):
    monkeypatch.setattr(torch.version, "hip", hip)

    def missing(shapes, installed):
        monkeypatch.setattr(dispatch_suite, "is_installed", lambda package: installed)
        ((found, why),) = vendors_of(torch.device("cuda"), shapes).items()
        assert found.value == choice
        return why

    assert vendors_of(torch.device("cpu"), FULL) == {}
    assert "is not installed; install it with: pip install" in missing(FULL, installed=False)
    assert missing(FULL, installed=True) is None
    odd = {"odd": dataclasses.replace(FULL["v2_lite"], D=2052)}
    step = {"deepep": 256, "turbo": 8}[choice]
    assert missing(odd, installed=True) == f"it moves rows of a multiple of {step} numbers; use shapes=full"


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
