"""Stores of two runs at one port, places where nobody listens, and ranks or pods that a starter counts."""

import multiprocessing
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from graphmoe import worker
from graphmoe.config.schema import ConfigError, LaunchConfig
from graphmoe.runtime import ranks as places
from graphmoe.runtime.launch import meeting
from graphmoe.runtime.launch.failures import RunFailed
from graphmoe.runtime.launch.meeting import store_of_nodes, store_of_ranks
from graphmoe.runtime.launch.nodes import Nodes, find_nodes, is_first_node, num_nodes, num_pods, started_by
from tests.runs import config

FORK = multiprocessing.get_context("fork")
STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_NODES": "1"}
STEP |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23456"}


@pytest.fixture
def endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def place_of(endpoint: str) -> dict[str, str]:
    return dict(zip(("MASTER_ADDR", "MASTER_PORT"), endpoint.split(":"), strict=True))


def join(name: str, folder: Path, environment: dict[str, str]) -> None:
    """Join the run of the environment as a rank; leave the names of the ranks met, or the error, in files."""
    sys.stderr = (folder / f"{name}.err").open("w")
    os.environ.update(environment)
    place_here, host = places.place_here, environment.get("EMULATED_HOST", "")
    places.place_here = lambda: place_here()._replace(machine=host, host=host)
    try:
        started_by()
        (folder / name).write_text(" ".join(worker.join(config()).gather(name)))
        while not (folder / "end").exists():
            time.sleep(0.01)
    except Exception as error:
        worker._end(error, None)
    os._exit(0)


def results(folder: Path, ranks: dict[str, dict[str, str]]) -> dict[str, tuple[int, str]]:
    """Start ranks one after the other; return status and output of each: whom it met, else what it said."""
    processes = {name: FORK.Process(target=join, args=(name, folder, each)) for name, each in ranks.items()}
    for process in processes.values():
        process.daemon = True
        process.start()
        process.join(0.2)  # whoever hosts a store does before the next one looks for it
    end = time.monotonic() + 30
    while any(process.is_alive() and not (folder / name).exists() for name, process in processes.items()):
        assert time.monotonic() < end
        time.sleep(0.01)
    (folder / "end").touch()
    found = {}
    for name, process in processes.items():
        process.join(10)
        met, said = folder / name, folder / f"{name}.err"
        found[name] = process.exitcode, (met if met.exists() else said).read_text()
    return found


@pytest.mark.parametrize("at_one_port", [False, True])
def test_two_steps_of_a_job_never_exchange_ranks(tmp_path, endpoint, at_one_port):
    common = STEP | (place_of(endpoint) if at_one_port else {})
    ranks = {
        f"{step}.{rank}": common | {"SLURM_STEP_ID": step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        for step, rank in ("00", "11", "01", "10")
    }
    taken = f"error: rank 0 cannot listen at {endpoint} (Address already in use); set another MASTER_PORT\n"
    foreign = (
        f"error: rank 1: another run uses {endpoint}: 4711.0 of 2 ranks, but this is 4711.1 of 2 ranks; "
        "set another MASTER_PORT\n"
    )
    assert results(tmp_path, ranks) == {
        **dict.fromkeys(("0.0", "0.1"), (0, "0.0 0.1")),
        "1.0": (1, taken) if at_one_port else (0, "1.0 1.1"),
        "1.1": (1, foreign) if at_one_port else (0, "1.0 1.1"),
    }


def test_ranks_dealt_to_nodes_in_turn_are_refused_once(tmp_path, endpoint):
    common = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", **place_of(endpoint)}
    ranks = {
        f"{rank}": common | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank // 2}", "EMULATED_HOST": f"n{rank % 2}"}
        for rank in range(4)
    }
    status, said = zip(*results(tmp_path, ranks).values(), strict=True)
    assert status == (2,) * 4 and said[1:] == ("",) * 3
    assert said[0].startswith("error: rank 1 is local rank 0 of n1, and must be local rank 1 of n0")
    assert "use srun --distribution=block" in said[0] and said[0].count("\n") == 1


def test_a_store_of_others_or_none_is_one_line(endpoint, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with ThreadPoolExecutor() as pool:
        stores = [*pool.map(lambda rank: store_of_ranks(rank, 2, endpoint, "", "go elsewhere"), range(2))]
    assert {store.get("graphmoe/run") for store in stores} == {b"without a name of 2 ranks"}
    another = f"another run uses {endpoint}: without a name of 2 ranks, but this is"
    for size, run, said in (
        (2, "", f"two processes claim to be rank 1 of the run at {endpoint}; go elsewhere"),
        (3, "", f"{another} without a name of 3 ranks"),
        (2, "b", f"{another} b of 2 ranks; go elsewhere"),
    ):
        with pytest.raises(RunFailed, match=f"^{said}"):
            store_of_ranks(1, size, endpoint, run, "go elsewhere")
    for limit in ("_ANSWER_S", "_SILENT_S"):
        monkeypatch.setattr(meeting, limit, 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RunFailed, match=f"the server at {at} is not the store of a run .*; elsewhere"):
            store_of_ranks(1, 2, at, "", "elsewhere")


def test_nodes_and_ranks_say_within_seconds_what_they_wait_for(endpoint, monkeypatch, caplog):
    monkeypatch.setattr(meeting, "MEETING_S", 0.4)
    monkeypatch.setattr(meeting, "_SILENT_S", 0.1)
    node, ranks = Nodes(2, False, endpoint, "job", "10.9.9.9"), f"all ranks to connect to {endpoint}"
    with pytest.raises(RunFailed, match=f"^waited .* in vain for the first node to listen at {endpoint} "):
        store_of_nodes(node).__enter__()
    with pytest.raises(RunFailed, match=f"in vain for {ranks}: rank 1 of 3 has not$"):
        store_of_ranks(0, 3, endpoint, "", "elsewhere")
    assert caplog.messages == [
        f"waiting for the first node to listen at {endpoint} (127.0.0.1), an address of its node; this node "
        "is 10.9.9.9: Connection refused",
        f"waiting for {ranks}: rank 1 of 3 has not",
    ]
    with store_of_nodes(replace(node, is_first=True)), store_of_nodes(node):
        other = store_of_nodes(replace(node, job="other"))
        with pytest.raises(RunFailed, match="job of 2 nodes, but this is other of 2 nodes; use a port"):
            other.__enter__()


ALONE = {"WORLD_SIZE": ""}
OF_STEP = {**ALONE, "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("variables", "launch", "found"),
    [
        ({}, LaunchConfig(), (2, False, "127.0.0.1:23456")),
        ({"RANK": "0"}, LaunchConfig(nproc=8, endpoint="localhost:1"), (2, True, "localhost:1")),
        ({"RANK": "1", "WORLD_SIZE": "16", "PET_NNODES": "2"}, LaunchConfig(nproc=8), (2, False, "127.")),
        ({"SLURM_STEP_NUM_NODES": ""}, LaunchConfig(nodes=2), (2, False, "127.0.0.1:23456")),
        ({"WORLD_SIZE": "1", "RANK": "0"}, LaunchConfig(nproc=8), (1, True, "127.0.0.1:0")),
        ({**ALONE, "SLURM_STEP_NUM_NODES": ""}, LaunchConfig(), (1, True, "127.0.0.1:0")),
        (ALONE, LaunchConfig(nodes=2, endpoint="127.0.0.1:1"), (2, True, "127.0.0.1:1")),
        (ALONE, LaunchConfig(nodes=2, endpoint="nowhere.invalid:1"), (2, False, "nowhere.invalid:1")),
        ({**OF_STEP, "SLURM_NODEID": "0"}, LaunchConfig(endpoint="localhost:1"), (2, True, "localhost:1")),
        ({**OF_STEP, "SLURM_NODEID": "1"}, LaunchConfig(endpoint="localhost:1"), (2, False, "localhost:1")),
        ({"WORLD_SIZE": "16", "PET_NNODES": "2"}, LaunchConfig(), "on 2 pods, .*; use launch.nproc=8"),
        ({}, LaunchConfig(nodes=4), "launch.nodes=4, but the job has 2 pods"),
        ({"WORLD_SIZE": "two"}, LaunchConfig(), "WORLD_SIZE=two in the environment must be a number"),
        ({"WORLD_SIZE": "9" * 99}, LaunchConfig(), "WORLD_SIZE=9+ in the environment must be a number"),
        ({"MASTER_PORT": "99999"}, LaunchConfig(), "MASTER_PORT=99999 .* from 1 to 65535; correct or"),
        (OF_STEP, LaunchConfig(), "SLURM_NODEID is not set"),
        (OF_STEP, LaunchConfig(nodes=4), "the Slurm step has 2"),
    ],
)
def test_nodes_are_those_of_a_slurm_step_or_pods(monkeypatch, variables, launch, found):
    monkeypatch.setattr("os.environ", POD | variables)
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            find_nodes(launch)
        return
    nodes = find_nodes(launch)
    assert (nodes.count, nodes.is_first) == found[:2] and nodes.endpoint.startswith(found[2])
    assert launch.nodes != "auto" or (num_nodes(), is_first_node()) == found[:2]
    assert nodes.count == 1 or "SLURM_NODEID" in variables or nodes.job == f"graphmoe-{nodes.endpoint}"


def test_a_node_without_ranks_is_refused(monkeypatch):
    monkeypatch.setattr("os.environ", POD | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"})
    with pytest.raises(ConfigError, match="torchrun started 2 ranks, 0 on this node"):
        started_by()


def test_a_worker_of_a_pod_is_its_only_rank(monkeypatch):
    monkeypatch.setattr("os.environ", environment := dict(POD))
    assert num_pods() == 2 and started_by() == "torchrun"
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert num_pods() is None  # it counts ranks from now on
    step = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "3,2"}
    for variables, missing in ((step | POD, "LOCAL_RANK=None"), (step, "LOCAL_WORLD_SIZE=3,2")):
        monkeypatch.setattr("os.environ", variables)
        with pytest.raises(ConfigError, match=f"does not say which rank it is: .*{missing}"):
            started_by()
