"""Commands whose workers share out layers: what they record, leave, and say when one fails."""

import json
import socket
import time
from pathlib import Path

import pytest
import torch

from graphmoe.pipeline_view import __main__ as pipeline_view
from graphmoe.run.weights import read_run
from graphmoe.runtime.pipeline.recorder import FILE_NAME, read_timelines
from graphmoe.trace import __main__ as trace
from tests.faults import IN_STAGE
from tests.faults import WORDS as FAULTY
from tests.runs import TINY, Command, command, metrics, slow_but

STAGES = (
    "launch.nproc=2", "parallel.pp=2", "pipeline.schedule=zb1p", "hydra.run.dir=run", "train.steps=7",
    "train.val_batches=1", "train.val_interval=7", "train.log_interval=3", "checkpoint.interval=2",
    "profile.pipeline=true",
)  # fmt: skip
RECORDED = (
    "profile.steps=[3,4]", "profile.ranks=[0,1]", "log.sample_tokens=8",
    "train.micro_batch_size=256", "train.global_batch_size=512",  # stages outlast pauses of a busy host
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, text_words: tuple[str, ...]) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    run = command(folder, *TINY, *text_words, *STAGES, *RECORDED, seconds=180)
    assert run.wait() == 0, run.err.read_text()
    return folder / "run"


def test_the_steps_that_are_logged_are_recorded_whole(recorded):
    timelines = read_timelines(recorded / FILE_NAME)
    assert [*timelines] == [3, 6, 7]
    overtakes = []
    for timeline in timelines.values():
        table = timeline.table
        assert (table.schedule, table.num_micro_batches, timeline.peak_bytes) == ("zb1p", 2, None)
        done = sorted(str(span.step) for span in timeline.spans if span.track == "compute")
        assert done == sorted(f"{stage}{kind}{n}" for stage in range(2) for kind in "FIW" for n in range(2))
        at = {(span.track, str(span.step)): span for span in timeline.spans}
        pairs = [(f"0F{n}", f"1F{n}") for n in range(2)] + [(f"1I{n}", f"0I{n}") for n in range(2)]
        for sender, reader in pairs:
            assert at["compute", sender].start < at["comm", reader].end <= at["compute", reader].start
        overtakes.append(any(at["compute", one].end > at["compute", other].end for one, other in pairs))
    assert not all(overtakes)  # the host may stop a rank after it has sent, though not in each step


def test_the_recording_is_shown_and_drawn(recorded, tmp_path, capsys):
    pipeline_view.main([f"run={recorded}", f"out={tmp_path}", "format=json"])
    shown = json.loads(capsys.readouterr().out)
    assert [each["schedule"] for each in shown["schedules"]] == ["zb1p", "zb1p"]
    assert shown["schedules"][0]["title"] == "zb1p, step 7 as recorded"
    assert "zb1p, step 7 as recorded" in (tmp_path / "pipeline.html").read_text()


def test_each_rank_that_is_asked_leaves_a_trace_of_its_stages(recorded, capsys):
    for rank, own, other in ((0, "embed", "loss"), (1, "loss", "embed")):
        trace.main([f"run={recorded}", f"rank={rank}", "format=json"])
        shown = json.loads(capsys.readouterr().out)
        assert (shown["facts"]["rank"], shown["facts"]["num_ranks"], shown["num_steps"]) == (rank, 2, 2)
        segments = {each["segment"] for each in shown["segments"]}
        assert {own, "optimizer"} <= segments and other not in segments
    said = (recorded / "logs" / "rank0.log").read_text()
    assert f"steps 3 to 4 are in {recorded / 'profile'}: rank0.trace.json.gz, rank1.trace.json.gz\n" in said


def test_the_run_reports_what_a_run_of_one_rank_does(recorded):
    steps = [row for row in metrics(recorded) if "loss" in row]
    summary = json.loads((recorded / "summary.json").read_text())
    assert summary["finished"] and summary["final_loss"] == steps[-1]["loss"] > 1
    assert summary["final_val_loss"] and summary["sample"] is None
    said = (recorded / "logs" / "rank0.log").read_text()
    assert "no sample of text: no rank has all weights; graphmoe.generate reads them" in said


@pytest.mark.parametrize("fault", slow_but([*IN_STAGE], "SIGKILL"))
def test_a_fault_of_a_stage_inside_a_step_ends_all_ranks_and_is_named(tmp_path, fault):
    """Rank 1 fails in step 6; there is a checkpoint of step 4."""
    words, run_folder = (*TINY, *STAGES, *FAULTY, "checkpoint.async_save=false"), tmp_path / "run"
    run = Command(tmp_path, words, environment={IN_STAGE[fault]: "1:0:6"})
    run.wait_until((run_folder / "checkpoints/step_00000004").exists, 180)
    began = time.monotonic()
    assert run.wait() == 1 and time.monotonic() - began < 60
    _, weights, step = read_run(run_folder, None)
    assert step == 4 and all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    assert [*read_timelines(run_folder / FILE_NAME)] == [3]
    said = run.err.read_text().partition("error: ")[2].partition(f"rank 1 on {socket.gethostname()}: ")
    log = f"  log of rank 1: {run_folder / 'logs' / 'rank1.log'}\n"
    assert not said[0] and said[1]
    assert said[2].startswith("killed by SIGKILL, as a system does") == (fault == "SIGKILL")
    assert (said[2] == f"RuntimeError: the cause, in a stage\n{log}") == (fault == "RAISE")
