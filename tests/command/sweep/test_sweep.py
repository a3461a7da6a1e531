"""Sweeps: failed and interrupted jobs, the table, going on, other launchers and sweepers."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from graphmoe.command.sweep import Job, JobStatus, read_job
from graphmoe.runtime.host.files import FileLock
from tests.command.sweep.sweep_stub import CRASHES, ENDS_BY_SIGNAL, FAILS, GONE, STARTS_FILE
from tests.faults import STEP_S, WORDS
from tests.runs import ROOT, TINY, Command, command, metrics

STUB = "tests.command.sweep.sweep_stub"
DIR = "hydra.sweep.dir=sweep"


def stub(folder: Path, *words: str, status: int = 0) -> Command:
    run = command(folder, "-m", "run.device=cpu", *words, module=STUB)
    assert run.wait() == status, run.err.read_text()
    return run


def last_line(run: Command) -> str:
    return run.err.read_text().splitlines()[-1]


def states(sweep: Path) -> dict[int, str]:
    return {job["job"]: job["status"] for job in json.loads((sweep / "sweep.json").read_text())["jobs"]}


def numbers_of_table(run: Command) -> list[int]:
    lines = run.out.read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line.rstrip().endswith((*JobStatus,))]


def test_a_sweep_of_real_jobs_ends_with_table_page_and_errors(tmp_path):
    rest = ("train.steps=4", "train.max_nonfinite=2", "train.log_interval=1", "checkpoint.interval=0", DIR)
    run = command(tmp_path, "-m", *TINY, "optim.lr=1e38,1e-2", "model.top_k=99,2", *rest)
    sweep, table, errors = tmp_path / "sweep", " ".join(run.out.read_text().split()), run.err.read_text()
    assert run.wait() == 1, errors
    assert states(sweep) == {0: "failed", 1: "failed", 2: "failed", 3: "finished"}
    summary = json.loads((sweep / "3" / "summary.json").read_text())
    assert summary["finished"] and read_job(sweep / "3").value == summary["final_val_loss"]
    assert [row["step"] for row in metrics(sweep / "3") if "loss" in row] == [1, 2, 3, 4]

    assert numbers_of_table(run) == [3, 0, 1, 2] and "lr top_k" in table  # best first
    assert "job 0 failed: model.top_k=99 exceeds model.num_experts=4; use 1 to 4" in table
    assert "job 1 failed: rank 0 on" in table and "train.max_nonfinite=2" in table
    assert "error: job 0 (optim.lr=1e+38 model.top_k=99), job 2 (optim.lr=0.01 model.top_k=99): " in errors
    assert re.search(r"^[\d:]+ job 3: step 4/4  loss", errors, re.MULTILINE)
    assert "Traceback" not in errors and "error: job 1 (optim.lr=1e+38 model.top_k=2): rank 0" in errors

    assert (sweep / "sweep.html").stat().st_size > 500_000  # plotly's code is in it
    whole = json.loads((sweep / "sweep.json").read_text())
    assert whole["command"].startswith("python -m graphmoe.train -m ")
    assert "sweep.resume" not in whole["command"]
    assert whole["jobs"][3]["differs_by"] == ["optim.lr=0.01", "model.top_k=2"]
    assert whole["jobs"][3]["steps"] == 4 and "curves: sweep/sweep.html" in errors


def test_json_of_a_sweep_has_failed_jobs_in_it_and_an_unexpected_error_its_traceback(tmp_path):
    run = stub(tmp_path, f"optim.lr={CRASHES},0.1,{FAILS}", "format=json", DIR, status=1)
    assert states(tmp_path / "sweep") == {0: "failed", 1: "finished", 2: "failed"}
    _, good, bad = json.loads(run.out.read_text())
    assert (good["job"], good["status"], good["steps"], good["value"]) == (1, "finished", 2, 0.05)
    assert (bad["status"], bad["error"]) == ("failed", "the workers are gone\nsecond line")
    errors = run.err.read_text()
    assert "Traceback" in errors
    assert f"error: job 0 (optim.lr={CRASHES}): ZeroDivisionError('a mistake of ours')\n" in errors


def test_an_interrupted_sweep_goes_on_where_it_was_by_the_command_that_it_prints(tmp_path):
    run = stub(tmp_path, f"optim.lr=0.1,{FAILS},{ENDS_BY_SIGNAL},0.2", DIR, status=130)
    assert numbers_of_table(run) == [0, 1, 2, 3]
    assert states(tmp_path / "sweep") == {0: "finished", 1: "failed", 2: "interrupted", 3: "not started"}
    line = next(line for line in run.err.read_text().splitlines() if line.startswith("to go on"))
    words = shlex.split(line.partition(": ")[2])
    assert words[:4] == ["python", "-m", "graphmoe.train", "-m"] and words[-1] == "sweep.resume=sweep"

    (tmp_path / STARTS_FILE).unlink()
    (tmp_path / GONE).touch()
    again = stub(tmp_path, *words[5:])
    assert set(states(tmp_path / "sweep").values()) == {"finished"}
    assert (tmp_path / STARTS_FILE).read_text().split() == [str(FAILS), str(ENDS_BY_SIGNAL), "0.2"]
    assert "resume" not in again.out.read_text()
    assert numbers_of_table(again) == [0, 3, 1, 2] and "job 0 is finished already" in again.err.read_text()


@pytest.mark.slow
def test_a_job_killed_after_its_last_step_is_finished_and_other_words_start_nothing(tmp_path):
    stub(tmp_path, "optim.lr=0.1,0.2", DIR)
    job = read_job(tmp_path / "sweep" / "1")
    job.status, job.value = JobStatus.running, None
    job.write()
    stub(tmp_path, "optim.lr=0.1,0.2", "sweep.resume=sweep")
    assert read_job(tmp_path / "sweep" / "1").value == 0.1
    assert len((tmp_path / STARTS_FILE).read_text().split()) == 2
    run = stub(tmp_path, "optim.lr=0.1,0.3,0.2", "sweep.resume=sweep", status=2)
    said = "error: job 1 of this sweep was run with optim.lr=0.2, now it has optim.lr=0.3;"
    assert last_line(run).startswith(said)
    more = ("optim.lr=0.1,0.2,0.3", "sweep.resume=sweep", "format=json", "launch.gpus_per_job=1")
    found = json.loads(stub(tmp_path, *more).out.read_text())
    assert [job["value"] for job in found] == [0.05, 0.1, 0.15]
    assert (tmp_path / STARTS_FILE).read_text().split() == ["0.1", "0.2", "0.3"]


def test_a_sweep_of_the_same_second_takes_the_next_free_folder(tmp_path):
    Job(0, ["optim.lr=0.5"], tmp_path).write()
    for second in range(600):  # whenever it begins, another sweep has its folder
        taken = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(time.time() + second))
        folder = tmp_path / "multirun" / "mine" / taken / "0"
        folder.mkdir(parents=True)
        shutil.copy(tmp_path / "job.json", folder)
    stub(tmp_path, "optim.lr=0.1,0.2", "run.name=mine")
    (mine,) = (tmp_path / "multirun" / "mine").glob("*-2")
    assert states(mine) == {0: "finished", 1: "finished"} and (mine / "1" / "summary.json").exists()
    resume = json.loads((mine / "sweep.json").read_text())["resume"]
    assert f"sweep.resume=multirun/mine/{mine.name}" in resume


@pytest.mark.slow
def test_a_folder_that_cannot_be_gone_on_with_is_refused_with_the_reason(tmp_path):
    (tmp_path / "empty").mkdir()
    stub(tmp_path, "optim.lr=0.1", DIR)
    refused = {
        "sweep.resume=empty": "sweep.resume=empty is not a sweep's folder: it has no sweep.json; name ",
        DIR: "holds a sweep already; sweep.resume=sweep continues it",
        "hydra.sweep.dir=other sweep.resume=sweep": "leave hydra.sweep.dir out",
        "sweep.resume=sweep": "belongs to a sweep that is still running",
    }
    lock = FileLock.acquire(tmp_path / "sweep" / "sweep.lock")
    for words, said in refused.items():
        assert said in last_line(stub(tmp_path, "optim.lr=0.1", *words.split(), status=2))
    lock.release()
    assert not list((tmp_path / "empty").iterdir())
    single = command(tmp_path, "run.device=cpu", "sweep.resume=sweep", module=STUB)
    said = "sweep.resume=sweep continues a sweep, but this command is one run"
    assert single.wait() == 2 and said in last_line(single)


def test_other_tools_have_no_report_of_a_sweep(tmp_path):
    run = command(tmp_path, "-m", "model=tiny,tiny_gqa", module="graphmoe.info")
    assert run.wait() == 0 and run.out.read_text().count("Parameters") == 2
    assert not list(tmp_path.rglob("sweep.*"))


@pytest.mark.slow
def test_optuna_takes_the_value_of_a_job_and_survives_one_that_fails(tmp_path):
    optuna = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.sampler.seed=1")
    run = stub(tmp_path, *optuna, f"optim.lr=0.2,{FAILS},0.1", DIR, status=1)
    assert sorted(states(tmp_path / "sweep").values()) == ["failed", "finished", "finished"]
    best = OmegaConf.load(tmp_path / "sweep" / "optimization_results.yaml")
    assert best.best_value == 0.05 and best.best_params["optim.lr"] == 0.1
    assert "Traceback" not in run.err.read_text()


@pytest.mark.slow
def test_a_study_whose_trials_all_fail_ends_with_the_table_and_the_errors(tmp_path):
    words = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", f"optim.lr={FAILS},{CRASHES}")
    run = stub(tmp_path, *words, DIR, status=1)
    assert set(states(tmp_path / "sweep").values()) == {"failed"}
    assert last_line(run) == "error: No trials are completed yet."


@pytest.mark.slow
def test_a_signal_ends_the_whole_sweep_which_goes_on_from_a_checkpoint(tmp_path):
    words = ("-m", *TINY, *WORDS, "train.steps=12", "train.val_interval=0", "optim.lr=1e-2,2e-2", DIR)
    run = Command(tmp_path, words, environment={STEP_S: "0.2"})
    first = tmp_path / "sweep" / "0"
    run.wait_until(lambda: (first / "checkpoints" / "step_00000003" / "manifest.json").exists())
    run.kill(signal.SIGTERM)
    assert run.wait() == 130, run.err.read_text()
    assert states(tmp_path / "sweep") == {0: "interrupted", 1: "not started"}
    steps = json.loads((first / "summary.json").read_text())["steps"]
    assert 3 <= steps < 12 and not (tmp_path / "sweep" / "1").exists()

    again = command(tmp_path, *words[:-1], "sweep.resume=sweep")
    assert again.wait() == 0, again.err.read_text()
    assert set(states(tmp_path / "sweep").values()) == {"finished"}
    assert "run folder: sweep/0 (continued)" in again.err.read_text()
    for number in ("0", "1"):
        rows = metrics(tmp_path / "sweep" / number)
        assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))


def beside(folder: Path, module: str, *words: str) -> subprocess.Popen[bytes]:
    """A sweep with two jobs at a time; a daemon of multiprocessing, as Command is, would run one."""
    pair = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "run.device=cpu", DIR)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), STEP_S: "0.2"}
    arguments = [sys.executable, "-m", module, "-m", *pair, *words]
    with (folder / "stderr.txt").open("w") as err:
        return subprocess.Popen(arguments, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=err)


@pytest.mark.slow
def test_jobs_run_side_by_side_in_processes_of_joblib(tmp_path):
    run = beside(tmp_path, STUB, f"optim.lr=0.1,0.2,{FAILS}")
    assert run.wait(60) == 1
    assert states(tmp_path / "sweep") == {0: "finished", 1: "finished", 2: "failed"}
    jobs = [read_job(tmp_path / "sweep" / number) for number in "012"]
    assert run.pid not in {job.pid for job in jobs}
    assert f"error: job 2 (optim.lr={FAILS}): the workers are gone" in (tmp_path / "stderr.txt").read_text()


@pytest.mark.slow
def test_a_signal_lets_all_jobs_that_run_side_by_side_save_and_starts_no_more(tmp_path):
    rest = ("optim.lr=1e-2,2e-2,3e-2", "train.steps=500", "train.val_interval=0")
    run = beside(tmp_path, "graphmoe.train", *TINY, *WORDS, *rest)
    folders = [tmp_path / "sweep" / number for number in "01"]
    end = time.monotonic() + 60
    while len([*filter(Path.read_bytes, tmp_path.glob("sweep/*/metrics.jsonl"))]) < 2:  # empty until training
        assert run.poll() is None and time.monotonic() < end, (tmp_path / "stderr.txt").read_text()
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 130, (tmp_path / "stderr.txt").read_text()
    assert states(tmp_path / "sweep") == {0: "interrupted", 1: "interrupted", 2: "not started"}
    for folder in folders:
        steps = json.loads((folder / "summary.json").read_text())["steps"]
        assert (folder / "checkpoints" / f"step_{steps:08d}" / "manifest.json").exists()


def test_a_sweep_can_be_moved(tmp_path):
    (tmp_path / "a" / "0-2").mkdir(parents=True)
    (tmp_path / "a" / "0").mkdir()
    Job(0, ["x=1"], tmp_path / "a" / "0", run_folder="../0-2").write()
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert read_job(tmp_path / "b" / "0").folder == tmp_path / "b" / "0-2"
