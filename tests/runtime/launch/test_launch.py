"""Workers in processes of their own: what they leave, signals, errors, orphans, and many nodes."""

import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from graphmoe.config.schema import ConfigError, LaunchConfig
from graphmoe.runtime.launch.elastic import RankLogs
from graphmoe.runtime.launch.failures import RunFailed, first_failure, write_failure
from graphmoe.runtime.launch.nodes import find_nodes, started_by
from graphmoe.train import counted
from tests.faults import HOLD, RAISE_AT, SIGNAL_AT, STEP_S
from tests.faults import WORDS as FAULTY
from tests.runs import ROOT, TINY, Command, command, config, metrics, numbers, summary

TWO = ("launch.nproc=2", "train.steps=8", "checkpoint.interval=2", "hydra.run.dir=run")
SLOW = {STEP_S: "0.15"}


def workers_of(run: Command) -> list[psutil.Process]:
    children = psutil.Process(run.pid).children()
    return [child for child in children if "graphmoe.worker" in child.cmdline()]


def assert_gone(workers: list[psutil.Process]) -> None:
    """The processes are no more, or dead and waiting for somebody to ask how they died."""
    end = time.monotonic() + 5
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in workers):
        assert time.monotonic() < end, workers
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Command:
    run = command(tmp_path_factory.mktemp("two"), *TINY, *TWO, *FAULTY)
    assert run.wait() == 0, run.err.read_text()
    return run


def test_two_ranks_leave_one_summary_and_a_log_each_and_the_command_reports(undisturbed):
    folder = undisturbed.out.parent / "run"
    assert summary(folder)["finished"] and summary(folder)["steps"] == 8
    assert undisturbed.out.read_text().endswith(" in 8 steps\nresults: run\n")
    assert [row["step"] for row in metrics(folder) if "loss" in row] == list(range(1, 9))
    for name in ("rank0.log", "rank1.log"):
        assert (folder / "logs" / name).read_text().count(" INFO step 8/8 ") == 2
    assert undisturbed.err.read_text().count("step 8/8 ") == 2  # rank 0 only, with the validation
    assert (folder / "logs" / "rank1.stderr.log").read_text() == ""
    assert not list(folder.glob("logs/*error*")) and not (folder / "logs" / "elastic.log").exists()


def test_under_torchrun_the_command_is_one_job_and_bitwise_the_same_run(tmp_path, undisturbed):
    words = ("--standalone", "--nproc-per-node=2", "-m", "graphmoe.train", *TINY, *TWO, *FAULTY)
    run = command(tmp_path, *words, module="torch.distributed.run")
    assert run.wait() == 0, run.err.read_text()
    assert run.out.read_text().endswith("results: run\n")
    assert [path.name for path in tmp_path.glob("run*/")] == ["run"]
    assert numbers(tmp_path / "run") == numbers(undisturbed.out.parent / "run")
    config = (tmp_path / "run" / "resolved.yaml").read_text()
    assert config == (undisturbed.out.parent / "run" / "resolved.yaml").read_text()


@pytest.mark.slow
def test_a_torchrun_of_ones_own_gives_bitwise_the_same_run(tmp_path, undisturbed):
    written = command(tmp_path, *TINY, *TWO, *FAULTY, "launch.write_only=true")
    torchrun, *words = written.out.read_text().split()
    assert torchrun == "torchrun" and "--nproc-per-node=2" in words
    run = command(tmp_path, *words, module="torch.distributed.run")
    assert run.wait() == 0, run.err.read_text()
    assert run.out.read_text().endswith("results: run\n")
    assert numbers(tmp_path / "run") == numbers(undisturbed.out.parent / "run")


OF_SRUN = {"SLURM_JOB_ID": "9", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_NODES": "1"}
OF_SRUN |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
OF_MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "a"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "common", "names"),
    [
        ("graphmoe.train", OF_SRUN, ("SLURM_PROCID", "SLURM_LOCALID")),
        ("graphmoe.train", OF_MPIRUN, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")),
        ("graphmoe.worker", OF_SRUN, ("SLURM_PROCID", "SLURM_LOCALID")),
    ],
    ids=["srun", "mpirun", "worker"],
)
def test_tasks_of_srun_and_mpirun_are_the_ranks_of_one_job(tmp_path, undisturbed, module, common, names):
    folder, of_two = tmp_path / "run", undisturbed.out.parent / "run"
    words = (*TINY, *TWO, *FAULTY, f"hydra.run.dir={folder}")
    if module == "graphmoe.worker":
        folder.mkdir()
        (folder / "resolved.yaml").write_bytes((of_two / "resolved.yaml").read_bytes())
        words = (str(folder / "resolved.yaml"), "tests.faults:nothing")
    (tmp_path / "second").mkdir()
    runs = [
        Command(place, words, module, environment={**common, **dict.fromkeys(names, str(rank))})
        for rank, place in enumerate((tmp_path, tmp_path / "second"))
    ]
    assert [run.wait() for run in runs] == [0, 0], [run.err.read_text() for run in runs]
    assert runs[1].out.read_text() == "" and "starting" not in runs[1].err.read_text()
    assert numbers(folder) == numbers(of_two)


@pytest.mark.parametrize(
    ("variables", "starter", "rank"),
    [
        ({}, None, ()),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}, None, ()),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            "torchrun",
            (3, 4, 1, 2),
        ),
        (
            {
                **{"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2"},
                **{"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"},
            },
            "srun",
            (9, 16, 1, 8),
        ),
        ({**OF_MPIRUN, **{f"OMPI_COMM_WORLD_{n}RANK": "1" for n in ("", "LOCAL_")}}, "mpirun", (1, 2, 1, 2)),
    ],
)
def test_what_started_a_rank_is_known_by_its_variables(monkeypatch, variables, starter, rank):
    environment = dict(variables)
    monkeypatch.setattr("os.environ", environment)
    assert started_by() == starter
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert rank == tuple(int(environment[name]) for name in names if starter)


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (LaunchConfig(nproc=4), "launch.nproc=4, but torchrun started 2 ranks on each node; leave it out"),
        (
            LaunchConfig(max_restarts=1),
            "launch.max_restarts=1 is for workers that graphmoe starts, not torchrun",
        ),
        (LaunchConfig(write_only=True), "launch.write_only is for one process; start it without torchrun"),
        (LaunchConfig(fake_world=8), "launch.fake_world is for one process; start it without torchrun"),
    ],
)
def test_keys_that_start_processes_are_refused_under_torchrun(monkeypatch, launch, said):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=re.escape(said)):
        counted(replace(config(), launch=launch), "torchrun")
    assert counted(config("launch.nproc=auto"), "torchrun").launch.nproc == 2


def test_a_misspelt_key_under_torchrun_is_said_once(tmp_path):
    words = ("--standalone", "--nproc-per-node=2", "-m", "graphmoe.train", "model.num_layer=2")
    run = command(tmp_path, *words, module="torch.distributed.run")
    assert run.wait() == 1 and run.err.read_text().count("error: unknown key 'model.num_layer'") == 1


def test_killed_and_stopped_no_worker_stays_and_the_run_goes_on_bitwise(tmp_path, undisturbed):
    folder, words = tmp_path / "run", (*TINY, *TWO, *FAULTY)
    killed = Command(tmp_path, words, environment=SLOW)
    killed.wait_for_rows(folder, 3)
    workers = workers_of(killed)
    killed.kill(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL and len(workers) == 2
    assert_gone(workers)

    killed.err.unlink()
    stopped = Command(tmp_path, words, environment=SLOW)
    stopped.wait_until(lambda: stopped.err.exists() and "tokens/s" in stopped.err.read_text())
    workers = workers_of(stopped)
    stopped.kill(signal.SIGTERM)
    assert stopped.wait() == 128 + signal.SIGTERM, stopped.err.read_text()
    assert_gone(workers)
    step = summary(folder)["steps"]
    assert not summary(folder)["finished"] and summary(folder)["stopped_by"] == "SIGTERM" and step < 8
    assert (folder / "checkpoints" / f"step_{step:08d}" / "manifest.json").exists()
    assert "SIGTERM received: the workers stop after this step" in stopped.err.read_text()
    assert stopped.out.read_text().startswith(f"stopped after step {step},")

    again = command(tmp_path, *words)
    assert again.wait() == 0 and "(continued)" in again.err.read_text()
    assert numbers(folder) == numbers(undisturbed.out.parent / "run")


@pytest.mark.slow
def test_a_failed_worker_starts_all_again_and_the_first_error_is_what_the_user_reads(tmp_path):
    faults = {RAISE_AT: "1:0:4 1:3:8"}
    faults |= {SIGNAL_AT[signal.SIGSTOP]: "1:1:6", SIGNAL_AT[signal.SIGKILL]: "1:2:7"}
    words = (*TWO, "launch.max_restarts=3", "launch.hang_timeout_s=4")
    run = command(tmp_path, *TINY, *words, *FAULTY, environment=faults, seconds=180)
    assert run.wait() == 1
    host, log = socket.gethostname(), tmp_path / "run" / "logs" / "rank1.log"
    again = f"rank 1 on {host}: RuntimeError: the cause, before step 4; all workers start again (1 of 3)"
    said = run.err.read_text()
    assert said.count(again) == 1 and "continuing after step 2 of" in said
    line = next(line for line in said.splitlines() if line.endswith("all workers start again (2 of 3)"))
    assert f"rank 1 on {host}: no progress for " in line and "in step 5: its process is stopped" in line
    killed = f"rank 1 on {host} ended without a word, as one that was killed does"
    assert said.count(f"{killed}; all workers start again (3 of 3)") == 1
    end = f"error: rank 1 on {host}: RuntimeError: the cause, before step 8\n  log of rank 1: {log}\n"
    assert said.endswith(end) and "Traceback" not in said
    assert log.read_text().count("RuntimeError: the cause, before step 8") == 1
    assert "Traceback" in log.read_text() and run.out.read_text() == ""


@pytest.mark.slow
def test_a_worker_that_dies_is_named_and_not_the_one_that_lost_it(tmp_path):
    began = time.monotonic()
    faults = {SIGNAL_AT[signal.SIGKILL]: "1:0:4"}
    run = command(tmp_path, *TINY, *TWO, *FAULTY, environment=faults)
    assert run.wait() == 1 and time.monotonic() - began < 60
    said = run.err.read_text().partition("error: ")[2]
    host, log = socket.gethostname(), tmp_path / "run" / "logs" / "rank1.log"
    killed = "killed by SIGKILL, as a system does that is short of memory"
    assert said == f"rank 1 on {host}: {killed}\n  log of rank 1: {log}\n"


@pytest.mark.slow
def test_a_thread_that_is_inside_torch_at_the_end_does_not_abort_a_worker(tmp_path):
    run = command(tmp_path, *TINY, *TWO, *FAULTY, environment={HOLD: "1"}, seconds=180)
    assert run.wait() == 0, run.err.read_text()
    assert summary(tmp_path / "run")["finished"]


@pytest.mark.slow
def test_a_second_signal_kills_the_workers_at_once(tmp_path):
    run = Command(tmp_path, (*TINY, *TWO, *FAULTY), environment={STEP_S: "60"})
    run.wait_until(lambda: (tmp_path / "run" / "env.json").exists())
    workers = workers_of(run)
    run.kill(signal.SIGINT)
    run.wait_until(lambda: "SIGINT received" in run.err.read_text())
    run.kill(signal.SIGTERM)
    assert run.wait(10) == 128 + signal.SIGTERM
    assert_gone(workers)
    assert run.err.read_text().endswith("SIGTERM again: all workers are killed\n")


@pytest.mark.slow
@pytest.mark.parametrize("in_pods", [False, True], ids=["Slurm step", "PyTorchJob"])
def test_two_nodes_share_one_folder_and_one_report(tmp_path, undisturbed, in_pods):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    nodes = []
    for index in ("1", "0"):
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": index}
        folder = tmp_path / f"node{index}"
        folder.mkdir()
        words = (*TINY, *TWO, "launch.nproc=1", *FAULTY, f"hydra.run.dir={tmp_path}/run")
        pod = {"RANK": index, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        words += () if in_pods else (f"launch.endpoint=localhost:{port}",)
        nodes.append(Command(folder, words, environment=pod if in_pods else step))
    assert [node.wait(120) for node in nodes] == [0, 0], nodes[0].err.read_text()
    assert [node.out.read_text().count("results:") for node in nodes] == [0, 1]
    assert numbers(tmp_path / "run") == numbers(undisturbed.out.parent / "run")
    assert not (tmp_path / "run-2").exists()


def failed(rank: int, code: int, error_file: Path | str = "") -> ProcessFailure:
    return ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(error_file))


@pytest.fixture
def left(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")

    def leave(rank: int, error: BaseException, at: float, status: int = 1, attempt: int = 0) -> Path:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        monkeypatch.setattr("time.time", lambda: at)
        write_failure(error, status, tmp_path)
        return tmp_path / f"rank{rank}.error.json"

    return leave


def test_a_worker_that_died_without_a_word_is_the_cause_of_errors_of_that_second(tmp_path, left):
    file = left(0, RuntimeError("closed by peer"), 10.3)
    first = first_failure({0: failed(0, 1, file), 1: failed(1, -signal.SIGKILL)}, tmp_path, "job/0")
    assert (first.rank, first.message.split(",")[0]) == (1, "killed by SIGKILL")
    assert isinstance(first.raised(tmp_path, 0.0), RunFailed)
    assert first.was_killed and not first.was_stopped


SUFFERED = RuntimeError("connection reset by peer")


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ({0: (SUFFERED, 1)}, "rank 1 on {host} ended without a word, as one that was killed does"),
        (
            {0: (KeyboardInterrupt("SIGTERM"), 143)},
            "rank 1 on {host} ended without a word, as one that was killed does",
        ),
        ({0: (SUFFERED, 1), 1: (RuntimeError("the cause"), 1)}, "rank 1 on {host}: RuntimeError: the cause"),
        ({}, "a worker was killed, here or on another node"),
        ({0: (SUFFERED, 1), 1: (SUFFERED, 1)}, "rank 0 on {host}: RuntimeError: connection reset by peer"),
    ],
    ids=["others suffer", "others are stopped", "the cause", "none left an error", "on another node"],
)
def test_a_restart_says_what_is_known_of_its_cause(tmp_path, left, caplog, errors, said):
    logs = RankLogs(tmp_path, redirect=False)
    job = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "2"}

    def start(number: int) -> None:
        one = {**job, "TORCHELASTIC_RESTART_COUNT": str(number)}
        logs.reify({rank: {**one, "RANK": str(rank)} for rank in (0, 1)})

    start(0)
    for rank, (error, status) in errors.items():
        left(rank, error, 10.0 + rank, status)
    start(1)
    expected = said.format(host=platform.node())
    assert caplog.messages == [f"{expected}; all workers start again (1 of 2)"]


def test_errors_that_say_only_that_a_connection_broke_are_not_the_first_if_there_is_another(tmp_path, left):
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:4321")
    wrapped = RunFailed("the checkpoint was not saved")
    wrapped.__cause__ = broken
    left(2, wrapped, 7.0)
    left(0, broken, 9.0)
    assert first_failure({3: failed(3, -signal.SIGABRT)}, tmp_path, "job/0").rank == 2
    left(1, ValueError("the cause"), 10.0)
    assert first_failure({3: failed(3, -signal.SIGABRT)}, tmp_path, "job/0").rank == 1


def test_an_error_of_another_node_that_came_first_is_found_in_the_runs_folder(tmp_path, left):
    left(1, RuntimeError("the cause"), 10.0)
    here = tmp_path / "temporary"
    here.mkdir()
    file = left(0, RuntimeError("closed by peer"), 10.2)
    assert first_failure({0: failed(0, 1, file)}, here, "job/0").rank == 1


@pytest.fixture
def step(monkeypatch):
    values = {"JOB_ID": 123456, "STEP_ID": 0, "STEP_NUM_NODES": 2, "STEP_NUM_TASKS": 2, "NODEID": 1}
    for name, value in {**values, "STEP_NODELIST": "gpu[07-08]", "JOB_NODELIST": "gpu[07-08]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setattr("shutil.which", lambda name: None)


def test_nodes_are_those_of_the_slurm_step_which_meet_at_its_first(step):
    pytest.importorskip("submitit")
    nodes = find_nodes(LaunchConfig())
    assert (nodes.count, nodes.is_first) == (2, False)
    assert (nodes.endpoint, nodes.job) == ("gpu07:23456", "123456.0")
    assert find_nodes(LaunchConfig(endpoint="gpu08:1")).endpoint == "gpu08:1"


def test_without_submitit_slurms_own_command_reads_the_nodes(step, tmp_path, monkeypatch):
    command_of_slurm = tmp_path / "scontrol"
    command_of_slurm.write_text("#!/bin/sh\necho $1 $2 $3 > $0.asked; echo gpu07; echo gpu08\n")
    command_of_slurm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("shutil.which", lambda name: str(command_of_slurm))
    assert find_nodes(LaunchConfig()).endpoint == "gpu07:23456"
    assert (tmp_path / "scontrol.asked").read_text() == "show hostnames gpu[07-08]\n"


def test_without_slurm_there_is_one_node_or_the_endpoint_says_which_is_first(monkeypatch):
    monkeypatch.delenv("SLURM_STEP_NUM_NODES", raising=False)
    assert find_nodes(LaunchConfig()).count == 1
    here = find_nodes(LaunchConfig(nodes=2, endpoint="127.0.0.1:29500"))
    away = find_nodes(LaunchConfig(nodes=2, endpoint="nowhere.invalid:29500"))
    assert (here.is_first, away.is_first) == (True, False) and here.job != away.job


def test_a_worker_whose_launcher_was_gone_before_it_could_ask_ends_at_once():
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "x", "GRAPHMOE_LAUNCHER_PID": "1"}
    script = "from graphmoe.runtime.host import signals as s; s.die_with_launcher(); print('alive')"
    line = [sys.executable, "-c", script]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
