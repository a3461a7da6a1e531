"""Workers in processes of their own: what they leave, signals, errors, orphans, and many nodes."""

import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from graphmoe.config.schema import ConfigError, LaunchConfig
from graphmoe.runtime.launch.elastic import RankLogs
from graphmoe.runtime.launch.failures import DeviceFault, RunFailed, first_failure, write_failure
from graphmoe.runtime.launch.nodes import find_nodes, started_by
from graphmoe.train import counted
from tests.faults import HOLD, RAISE_AT, SIGNAL_AT, STEP_S
from tests.faults import WORDS as FAULTY
from tests.runs import ROOT, TINY, Command, command, config, metrics, numbers, slow_but, summary

RUN = (*TINY, *FAULTY, "launch.nproc=2", "train.steps=8", "checkpoint.interval=2", "hydra.run.dir=run")
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
def undisturbed(tmp_path_factory) -> Path:
    run = command(tmp_path_factory.mktemp("two"), *RUN)
    assert run.wait() == 0, run.err.read_text()
    return run.out.with_name("run")


def test_two_ranks_leave_one_summary_and_a_log_each_and_the_command_reports(undisturbed):
    assert summary(undisturbed)["finished"] and summary(undisturbed)["steps"] == 8
    assert undisturbed.with_name("stdout.txt").read_text().endswith(" in 8 steps\nresults: run\n")
    assert [row["step"] for row in metrics(undisturbed) if "loss" in row] == list(range(1, 9))
    logs, said = undisturbed / "logs", undisturbed.with_name("stderr.txt").read_text()
    assert [(logs / f"rank{rank}.log").read_text().count(" INFO step 8/8 ") for rank in (0, 1)] == [2, 2]
    assert said.count("step 8/8 ") == 2  # rank 0 only, with the validation
    assert (logs / "rank1.stderr.log").read_text() == ""
    assert not list(logs.glob("*error*")) and not (logs / "elastic.log").exists()


@pytest.mark.parametrize("words", slow_but({"command": RUN, "printed": ()}, "command"))
def test_under_torchrun_the_command_is_one_job_and_bitwise_the_same_run(tmp_path, undisturbed, words):
    words = ("torchrun", "--standalone", "--nproc-per-node=2", "-m", "graphmoe.train", *words)
    if not words[5:]:
        words = command(tmp_path, *RUN, "launch.write_only=true").out.read_text().split()
    assert words[0] == "torchrun" and "--nproc-per-node=2" in words
    run = command(tmp_path, *words[1:], module="torch.distributed.run")
    assert run.wait() == 0, run.err.read_text()
    assert run.out.read_text().endswith("results: run\n")
    assert [path.name for path in tmp_path.glob("run*/")] == ["run"]
    assert numbers(tmp_path / "run") == numbers(undisturbed)
    config = (tmp_path / "run" / "resolved.yaml").read_text()
    config = config.replace("write_only: true", "write_only: false")  # of the printed command
    assert config == (undisturbed / "resolved.yaml").read_text()


def slurm(**values: object) -> dict[str, str]:
    return {f"SLURM_{name}": str(value) for name, value in values.items()}


OF_SRUN = slurm(JOB_ID=9, STEP_NODELIST="127.0.0.1", STEP_NUM_NODES=1, STEP_NUM_TASKS=2)
OF_SRUN |= slurm(STEP_TASKS_PER_NODE=2)
OF_MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "a"}
TASK, OF_MPI = ("SLURM_PROCID", "SLURM_LOCALID"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
TORCHS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "common", "names"),
    [("train", OF_SRUN, TASK), ("train", OF_MPIRUN, OF_MPI), ("worker", OF_SRUN, TASK)],
    ids=["srun", "mpirun", "worker"],
)
def test_tasks_of_srun_and_mpirun_are_the_ranks_of_one_job(tmp_path, undisturbed, module, common, names):
    folder = tmp_path / "run"
    words = (*RUN, f"hydra.run.dir={folder}")
    for made in (folder, tmp_path / "second"):
        made.mkdir()
    if module == "worker":
        (folder / "resolved.yaml").write_bytes((undisturbed / "resolved.yaml").read_bytes())
        words = (str(folder / "resolved.yaml"), "tests.faults:nothing")
    runs = [
        Command(place, words, f"graphmoe.{module}", environment={**common, **dict.fromkeys(names, rank)})
        for rank, place in {"0": tmp_path, "1": tmp_path / "second"}.items()
    ]
    assert [run.wait() for run in runs] == [0, 0], [run.err.read_text() for run in runs]
    assert runs[1].out.read_text() == "" and "starting" not in runs[1].err.read_text()
    assert numbers(folder) == numbers(undisturbed)


@pytest.mark.parametrize(
    ("variables", "starter", "rank"),
    [
        ({}, None, ""),
        (slurm(PROCID=3, STEP_NUM_TASKS=2, STEP_NUM_NODES=2), None, ""),
        (dict(zip(TORCHS, "3412", strict=True)), "torchrun", "3 4 1 2"),
        (
            slurm(PROCID=9, STEP_NUM_TASKS=16, STEP_NUM_NODES=2, LOCALID=1, STEP_TASKS_PER_NODE="8(x2)"),
            *("srun", "9 16 1 8"),
        ),
        ({**OF_MPIRUN, **dict.fromkeys(OF_MPI, "1")}, "mpirun", "1 2 1 2"),
    ],
)
def test_what_started_a_rank_is_known_by_its_variables(monkeypatch, variables, starter, rank):
    monkeypatch.setattr("os.environ", environment := dict(variables))
    assert started_by() == starter
    assert [environment.get(name) for name in TORCHS if starter] == rank.split()


def test_keys_that_start_processes_are_refused_under_torchrun(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    for word, said in {
        "launch.nproc=4": "launch.nproc=4, but torchrun started 2 ranks on each node; leave it out",
        "launch.max_restarts=1": "launch.max_restarts=1 is for workers that graphmoe starts, not torchrun",
        "launch.write_only=true": "launch.write_only runs in one process; start it without torchrun",
        "launch.fake_world=8": "launch.fake_world runs in one process; start it without torchrun",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            counted(config(word, "train.global_batch_size=64"), "torchrun")
    assert counted(config("launch.nproc=auto"), "torchrun").launch.nproc == 2


def test_a_misspelt_key_under_torchrun_is_said_once(tmp_path):
    words = ("--standalone", "--nproc-per-node=2", "-m", "graphmoe.train", "model.num_layer=2")
    run = command(tmp_path, *words, module="torch.distributed.run")
    assert run.wait() == 1 and run.err.read_text().count("error: unknown key 'model.num_layer'") == 1


def test_killed_and_stopped_no_worker_stays_and_the_run_goes_on_bitwise(tmp_path, undisturbed):
    folder = tmp_path / "run"
    killed = Command(tmp_path, RUN, environment=SLOW)
    killed.wait_for_rows(folder, 3)
    workers = workers_of(killed)
    killed.kill(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL and len(workers) == 2
    assert_gone(workers)

    killed.err.unlink()
    stopped = Command(tmp_path, RUN, environment=SLOW)
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

    again = command(tmp_path, *RUN)
    assert again.wait() == 0 and "(continued)" in again.err.read_text()
    assert numbers(folder) == numbers(undisturbed)


@pytest.mark.slow
def test_a_failed_worker_starts_all_again_and_the_first_error_is_what_the_user_reads(tmp_path):
    faults = {RAISE_AT: "1:0:4 1:3:8"}
    faults |= {SIGNAL_AT[signal.SIGSTOP]: "1:1:6", SIGNAL_AT[signal.SIGKILL]: "1:2:7"}
    words = (*RUN, "launch.max_restarts=3", "launch.hang_timeout_s=4")
    run = command(tmp_path, *words, environment=faults, seconds=180)
    assert run.wait() == 1
    rank, log = f"rank 1 on {socket.gethostname()}", tmp_path / "run" / "logs" / "rank1.log"
    said = run.err.read_text()
    one, two, three = [line for line in said.splitlines() if "; all workers are restarted (" in line]
    assert f"{rank}: RuntimeError: the cause, before step 4; all workers are restarted (1 of 3)" in one
    assert "continuing after step 2 of" in said and two.endswith("all workers are restarted (2 of 3)")
    assert f"{rank}: no progress for " in two and "in step 5: its process is stopped" in two
    killed = f"{rank} ended without a word, as one that was killed does"
    assert three.endswith(f"{killed}; all workers are restarted (3 of 3)")
    end = f"error: {rank}: RuntimeError: the cause, before step 8\n  log of rank 1: {log}\n"
    assert said.endswith(end) and "Traceback" not in said
    assert log.read_text().count("RuntimeError: the cause, before step 8") == 1
    assert "Traceback" in log.read_text() and run.out.read_text() == ""


@pytest.mark.slow
def test_a_thread_that_is_inside_torch_at_the_end_does_not_abort_a_worker(tmp_path):
    run = command(tmp_path, *RUN, environment={HOLD: "1"}, seconds=180)
    assert run.wait() == 0, run.err.read_text()
    assert summary(tmp_path / "run")["finished"]


@pytest.mark.slow
def test_a_second_signal_kills_the_workers_at_once(tmp_path):
    run = Command(tmp_path, RUN, environment={STEP_S: "60"})
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
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    nodes = []
    for index in ("1", "0"):
        (folder := tmp_path / f"node{index}").mkdir()
        words = (*RUN, "launch.nproc=1", f"hydra.run.dir={tmp_path}/run")
        environment = {"RANK": index, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        if not in_pods:
            words += (f"launch.endpoint=localhost:{port}",)
            environment = slurm(JOB_ID=7, STEP_ID=0, STEP_NUM_NODES=2, NODEID=index)
        nodes.append(Command(folder, words, environment=environment))
    assert [node.wait(120) for node in nodes] == [0, 0], nodes[0].err.read_text()
    assert [node.out.read_text().count("results:") for node in nodes] == [0, 1]
    assert numbers(tmp_path / "run") == numbers(undisturbed)
    assert not (tmp_path / "run-2").exists()


def failed(rank: int, code: int, error_file: Path | str = "") -> dict[int, ProcessFailure]:
    return {rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(error_file))}


@pytest.fixture
def left(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")

    def leave(rank: int, error: BaseException, at: float, status: int = 1) -> Path:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr("time.time", lambda: at)
        write_failure(error, status, tmp_path)
        return tmp_path / f"rank{rank}.error.json"

    return leave


def test_a_worker_that_died_without_a_word_is_the_cause_of_errors_of_that_second(tmp_path, left):
    file = left(0, RuntimeError("closed by peer"), 10.3)
    first = first_failure(failed(0, 1, file) | failed(1, -signal.SIGKILL), tmp_path, "job/0")
    killed = "killed by SIGKILL, as a system does that is short of memory"
    assert (first.rank, first.message) == (1, killed)
    assert isinstance(first.raised(tmp_path, 0.0), RunFailed)
    assert first.was_killed and not first.was_stopped


SUFFERED = RuntimeError("connection reset by peer")
WITHOUT_A_WORD = "rank 1 on {host} ended without a word, as one that was killed does"


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ({0: (SUFFERED, 1)}, WITHOUT_A_WORD),
        ({0: (KeyboardInterrupt("SIGTERM"), 143)}, WITHOUT_A_WORD),
        ({0: (SUFFERED, 1), 1: (RuntimeError("the cause"), 1)}, "rank 1 on {host}: RuntimeError: the cause"),
        ({}, "a worker was killed, here or on another node"),
        ({0: (SUFFERED, 1), 1: (SUFFERED, 1)}, "rank 0 on {host}: RuntimeError: connection reset by peer"),
    ],
    ids=["others suffer", "others are stopped", "the cause", "none left an error", "on another node"],
)
def test_a_restart_says_what_is_known_of_its_cause(tmp_path, left, caplog, errors, said):
    logs = RankLogs(tmp_path, redirect=False)

    def start(number: int) -> None:
        job = {"RUN_ID": "job", "MAX_RESTARTS": "2", "RESTART_COUNT": str(number)}
        of_job = {f"TORCHELASTIC_{name}": value for name, value in job.items()}
        logs.reify({rank: {**of_job, "RANK": str(rank)} for rank in (0, 1)})

    start(0)
    for rank, (error, status) in errors.items():
        left(rank, error, 10.0 + rank, status)
    start(1)
    assert caplog.messages == [f"{said.format(host=platform.node())}; all workers are restarted (1 of 2)"]


def test_errors_that_say_only_that_a_connection_broke_are_not_the_first_if_there_is_another(tmp_path, left):
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:4321")
    wrapped = RunFailed("the checkpoint was not saved")
    wrapped.__cause__ = broken
    left(2, wrapped, 7.0)
    left(0, broken, 9.0)
    assert first_failure(failed(3, -signal.SIGABRT), tmp_path, "job/0").rank == 2
    left(1, ValueError("the cause"), 10.0)
    assert first_failure(failed(3, -signal.SIGABRT), tmp_path, "job/0").rank == 1


def test_a_faulty_device_is_the_error_of_its_rank_with_a_status_of_its_own(tmp_path, left):
    file = left(0, DeviceFault("rank 1 is wrong", here=False), 9.0, DeviceFault.status)
    left(1, DeviceFault("rank 1 is wrong"), 10.0, DeviceFault.status)
    first = first_failure(failed(0, 3, file), tmp_path, "job/0")
    raised = first.raised(tmp_path, 0.0)
    assert first.rank == 1 and isinstance(raised, DeviceFault) and raised.status == first.status == 3


def test_an_error_of_another_node_that_came_first_is_found_in_the_runs_folder(tmp_path, left):
    left(1, RuntimeError("the cause"), 10.0)
    (here := tmp_path / "temporary").mkdir()
    file = left(0, RuntimeError("closed by peer"), 10.2)
    assert first_failure(failed(0, 1, file), here, "job/0").rank == 1


def test_nodes_of_a_slurm_step_meet_at_its_first(tmp_path, monkeypatch):
    step = slurm(JOB_ID=123456, STEP_ID=0, STEP_NUM_NODES=2, STEP_NUM_TASKS=2, NODEID=1)
    for name, value in {**step, **slurm(STEP_NODELIST="gpu[07-08]", JOB_NODELIST="gpu[07-08]")}.items():
        monkeypatch.setenv(name, value)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho $1 $2 $3 > $0.asked; echo gpu07; echo gpu08\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = find_nodes(LaunchConfig())
    assert (found.count, found.is_first) == (2, False)
    assert (found.endpoint, found.job) == ("gpu07:23456", "123456.0")
    assert (tmp_path / "scontrol.asked").read_text() == "show hostnames gpu[07-08]\n"
    assert find_nodes(LaunchConfig(endpoint="gpu08:1")).endpoint == "gpu08:1"
    monkeypatch.setattr("shutil.which", lambda name: None)
    pytest.importorskip("submitit")
    assert find_nodes(LaunchConfig()) == found


def test_a_worker_whose_launcher_was_gone_before_it_could_ask_ends_at_once():
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "x", "GRAPHMOE_LAUNCHER_PID": "1"}
    script = "from graphmoe.runtime.host import signals as s; s.die_with_launcher(); print('alive')"
    line = [sys.executable, "-c", script]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
