"""Threads run near their GPU, as many as all ranks can have; garbage is collected at fixed steps."""

import gc
import os
import threading

import pytest
import torch

from graphmoe.config.schema import HostConfig, NumaBinding
from graphmoe.runtime.host import tuning as host
from graphmoe.runtime.host.environment import HostLine
from graphmoe.runtime.host.tuning import (
    GarbageCollection,
    bind_to_numa,
    cores_here,
    cpu_list,
    set_threads,
    start_host,
)
from tests.runtime.host.machine import Machine

GPU = torch.device("cuda", 1)
TWO, ALL = {0: "0-1", 1: "2-3"}, {0, 1, 2, 3}


def test_collections_happen_after_the_first_step_and_at_the_interval_only(monkeypatch):
    calls: list[int] = []
    with GarbageCollection(HostConfig(gc_interval=3)) as garbage:
        assert not gc.isenabled()
        for step in range(4, 13):
            monkeypatch.setattr(gc, "collect", lambda step=step: calls.append(step))
            garbage.after_step(step)
            assert gc.get_freeze_count() > 0  # what the first one left
    assert calls == [4, 6, 9, 12] and gc.isenabled() and gc.get_freeze_count() == 0


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two NUMA nodes of two cores, a GPU on each, one on none, and a torch that is bound in words only."""
    machine = Machine(tmp_path, monkeypatch)
    machine.has_nodes(TWO)
    machine.has_gpus({0: 0, 1: 1, 2: -1})
    machine.allows(ALL)
    monkeypatch.setattr(host, "bind_threads", machine.allows)
    monkeypatch.setattr(torch, "get_num_threads", lambda: machine.num_threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: setattr(machine, "num_threads", number))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine.num_threads = 4
    return machine


BOUND = "threads run on 2 CPUs of NUMA node 1, that of GPU {}"


@pytest.mark.parametrize(
    ("nodes", "allowed", "shown", "device", "line"),
    [
        (TWO, ALL, None, "cuda:1", BOUND.format(1)),
        (TWO, ALL, 1, "cuda:0", BOUND.format(0)),  # found by its place on the bus, not by its number
        (TWO, {1, 2}, None, "cuda:1", "threads run on 1 CPUs of NUMA node 1, that of GPU 1"),
        (TWO, {1}, None, "cuda:1", "any CPU: the process may use no CPU of NUMA node 1, that of GPU 1"),
        (TWO, ALL, None, "cuda:2", "any CPU: the system does not say which NUMA node GPU 2 is attached to"),
        (TWO, ALL, None, "cpu", "any CPU: the run has no GPU to be near to"),
        ({0: "0-3"}, ALL, None, "cuda:1", "any CPU: this machine has one NUMA node"),
        ({}, ALL, None, "cuda:1", "any CPU: this machine shows no NUMA nodes"),
    ],
)
def test_a_worker_is_bound_to_the_cpus_near_its_gpu_or_the_line_says_why_not(
    machine, nodes, allowed, shown, device, line
):
    machine.has_nodes(nodes)
    machine.allows(allowed)
    if shown is not None:
        machine.shows_only(shown)  # as CUDA_VISIBLE_DEVICES does
    found = bind_to_numa(HostConfig(), torch.device(device))
    assert found == HostLine(line if line.startswith("threads") else f"threads run on {line}")
    assert machine.allowed == (allowed if "any CPU" in line else allowed & {2, 3})


def test_nothing_is_bound_where_the_user_says_so(machine):
    line = bind_to_numa(HostConfig(numa=NumaBinding.none), GPU)
    assert line == HostLine("threads run on any CPU (host.numa=none)") and machine.allowed == ALL


@pytest.mark.parametrize(
    ("asked", "omp", "workers", "others", "threads", "text"),
    [
        (None, None, 1, [], 4, "4 threads for operations on the CPU (torch's own choice)"),
        (None, None, 2, [], 2, "2 threads for operations on the CPU (4 cores, 2 workers)"),
        (None, None, 3, [], 1, "1 thread for operations on the CPU (4 cores, 3 workers)"),
        (None, None, 8, [], 1, "1 thread for operations on the CPU (4 cores, 8 workers)"),
        (3, None, 2, [], 3, "host.threads=3"),
        (None, "1", 1, [], 1, "OMP_NUM_THREADS=1"),
        (2, "1", 2, [], 2, "host.threads=2"),
        (None, None, 1, [3], 3, "the least of all ranks, 4 here"),
    ],
)
def test_ranks_take_the_threads_that_were_asked_for_or_share_the_cores_and_all_the_least(
    machine, monkeypatch, asked, omp, workers, others, threads, text
):
    if omp:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
        torch.set_num_threads(int(omp))
    line = set_threads(HostConfig(threads=asked), workers, 4, lambda number: [number, *others])
    assert machine.num_threads == threads and text in line.text


def test_a_worker_that_is_bound_to_fewer_cores_takes_fewer_threads(machine):
    start_host(HostConfig(), GPU, 1, lambda number: [number])
    assert machine.num_threads == 2


def test_threads_that_run_and_threads_to_come_are_bound():
    allowed = os.sched_getaffinity(0)
    cpu, found, bound = {min(allowed)}, [], threading.Event()

    def look() -> None:
        bound.wait()
        found.append(os.sched_getaffinity(0))

    early, late = threading.Thread(target=look), threading.Thread(target=look)
    early.start()
    try:
        host.bind_threads(cpu)
        bound.set()
        late.start()
        early.join()
        late.join()
    finally:
        host.bind_threads(allowed)
    assert found == [cpu, cpu] and os.sched_getaffinity(0) == allowed


def test_a_list_of_cpus_is_read():
    lists = {"": set(), "0": {0}, "0-2,7": {0, 1, 2, 7}, "4-5,0-1": {0, 1, 4, 5}}
    assert {text: cpu_list(text) for text in lists} == lists


def test_threads_of_one_core_count_once_and_a_container_has_no_more_than_its_quota(machine):
    for quota, cores in (("max 100000", 4), ("350000 100000", 3), ("50000 100000", 1)):
        machine.write("fs/cgroup/cpu.max", quota)
        assert cores_here() == cores
    machine.write("fs/cgroup/cpu.max", "max 100000")
    for cpu in range(4):
        siblings = f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        machine.write(siblings, f"{cpu % 2},{cpu % 2 + 2}")
    assert cores_here() == 2


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/", {"cpu.max": "100000 100000"}),
        ("0::/slurm/job_1/task_0", {"slurm/job_1/task_0/cpu.max": "150000 100000"}),
        ("0::/pod/own", {"pod/cpu.max": "100000 100000", "pod/own/cpu.max": "300000 100000"}),
        ("0::/docker/of_the_host", {"cpu.max": "100000 100000"}),
        ("4:cpuacct,cpu:/a/b\n0::/", {"cpu/a/cpu.cfs_quota_us": "50", "cpu/a/cpu.cfs_period_us": "50"}),
    ],
)
def test_one_worker_takes_the_threads_of_its_cpu_quota(machine, groups, files):
    machine.write("proc/self/cgroup", f"{groups}\n")
    for name, text in files.items():
        machine.write(f"fs/cgroup/{name}", text)
    set_threads(HostConfig(), 1, cores_here(), lambda number: [number])
    assert machine.num_threads == 1


def test_the_cores_and_nodes_of_this_machine_can_be_read():
    assert cores_here() >= 1
    assert set().union(*host.cpus_of_nodes().values()) <= set(range(os.cpu_count() or 1))
