"""Threads run near their GPU, as many as all ranks can have; garbage is collected at fixed steps."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from graphmoe.config.schema import HostConfig, NumaBinding
from graphmoe.runtime.host import tuning as host
from graphmoe.runtime.host.environment import HostLine
from tests.runtime.host.machine import Machine

TWO, ALL = {0: "0-1", 1: "2-3,7"}, {0, 1, 2, 3}


def test_collections_happen_after_the_first_step_and_at_the_interval_only(monkeypatch):
    calls: list[int] = []
    with host.GarbageCollection(HostConfig(gc_interval=3)) as garbage:
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
    machine.allowed, machine.num_threads = ALL, 4
    monkeypatch.setattr(host, "bind_threads", lambda cpus: setattr(machine, "allowed", cpus))
    monkeypatch.setattr(torch, "get_num_threads", lambda: machine.num_threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: setattr(machine, "num_threads", number))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return machine


@pytest.mark.parametrize(
    ("nodes", "allowed", "shown", "device", "line"),
    [
        (TWO, ALL, 0, "cuda:1", "2 CPUs of NUMA node 1, that of GPU 1"),
        (TWO, ALL, 1, "cuda:0", "2 CPUs of NUMA node 1, that of GPU 0"),  # found by its place on the bus
        (TWO, {1, 2}, 0, "cuda:1", "1 CPUs of NUMA node 1, that of GPU 1"),
        (
            TWO,
            {1},
            0,
            "cuda:1",
            "any CPU: the process may not use any CPU of NUMA node 1, to which GPU 1 is attached",
        ),
        (TWO, ALL, 0, "cuda:2", "any CPU: the system does not say which NUMA node GPU 2 is attached to"),
        (TWO, ALL, 0, "cpu", "any CPU: the run uses no GPU"),
        ({0: "0-3"}, ALL, 0, "cuda:1", "any CPU: this machine has one NUMA node"),
        ({}, ALL, 0, "cuda:1", "any CPU: this machine shows no NUMA nodes"),
    ],
)
def test_a_worker_is_bound_to_the_cpus_near_its_gpu_or_the_line_says_why_not(
    machine, nodes, allowed, shown, device, line
):
    machine.has_nodes(nodes)
    machine.allowed, machine.first_shown = allowed, shown  # as CUDA_VISIBLE_DEVICES does
    found = host.bind_to_numa(HostConfig(numa=NumaBinding.none), torch.device(device))
    assert found == HostLine("threads run on any CPU (host.numa=none)") and machine.allowed == allowed
    assert host.bind_to_numa(HostConfig(), torch.device(device)) == HostLine(f"threads run on {line}")
    assert machine.allowed == (allowed if "any CPU" in line else allowed & {2, 3})


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
    line = host.set_threads(HostConfig(threads=asked), workers, 4, lambda number: [number, *others])
    assert machine.num_threads == threads and text in line.text


def test_a_worker_that_is_bound_to_fewer_cores_takes_fewer_threads(machine):
    host.start_host(HostConfig(), torch.device("cuda", 1), 1, lambda number: [number])
    assert machine.num_threads == 2


def test_threads_that_run_and_threads_to_come_are_bound():
    allowed = os.sched_getaffinity(0)
    cpu = {min(allowed)}
    with ThreadPoolExecutor(1) as early, ThreadPoolExecutor(1) as late:
        early.submit(int).result()
        try:
            host.bind_threads(cpu)
            found = [each.submit(os.sched_getaffinity, 0).result() for each in (early, late)]
        finally:
            host.bind_threads(allowed)
    assert found == [cpu, cpu] and os.sched_getaffinity(0) == allowed


def test_threads_of_one_core_count_once(machine):
    for cpu in range(4):
        siblings = f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        machine.write(siblings, f"{cpu % 2},{cpu % 2 + 2}")
    assert host.cores_here() == 2


@pytest.mark.parametrize(
    ("groups", "files", "threads"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 4),
        ("0::/", {"cpu.max": "350000 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/slurm/job_1/task_0", {"slurm/job_1/task_0/cpu.max": "150000 100000"}, 1),
        ("0::/pod/own", {"pod/cpu.max": "100000 100000", "pod/own/cpu.max": "300000 100000"}, 1),
        ("0::/docker/of_the_host", {"cpu.max": "100000 100000"}, 1),
        ("4:cpuacct,cpu:/a/b\n0::/", {"cpu/a/cpu.cfs_quota_us": "50", "cpu/a/cpu.cfs_period_us": "50"}, 1),
    ],
)
def test_one_worker_takes_the_threads_of_its_cpu_quota(machine, groups, files, threads):
    machine.write("proc/self/cgroup", f"{groups}\n")
    for name, text in files.items():
        machine.write(f"fs/cgroup/{name}", text)
    host.set_threads(HostConfig(), 1, host.cores_here(), lambda number: [number])
    assert machine.num_threads == threads == host.cores_here()
