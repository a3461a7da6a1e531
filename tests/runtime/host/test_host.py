"""Threads run near their GPU, as many as all ranks can have; garbage is collected at fixed steps."""

import gc
import os
import threading

import pytest
import torch

from graphmoe.config.schema import HostConfig, NumaBinding
from graphmoe.runtime.host import tuning
from graphmoe.runtime.host import tuning as host
from graphmoe.runtime.host.environment import HostLine
from graphmoe.runtime.host.tuning import (
    GarbageCollection,
    Unbound,
    bind_to_numa,
    cores_here,
    cpu_list,
    cpus_near,
    numa_node,
    set_threads,
    start_host,
)
from tests.runtime.host.machine import Machine

GPU = torch.device("cuda", 1)


@pytest.fixture
def collections(monkeypatch):
    """Collections that were asked for, counted."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    yield calls
    gc.enable()


def test_collections_happen_after_the_first_step_and_at_the_interval_only(collections):
    with GarbageCollection(HostConfig(gc_interval=3)) as garbage:
        assert not gc.isenabled() and collections == []
        due = []
        for step in range(4, 13):
            before = len(collections)
            garbage.after_step(step)
            if len(collections) > before:
                due.append(step)
    assert due == [4, 6, 9, 12] and gc.isenabled()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two NUMA nodes of two cores, a GPU on each, and a torch of four threads that is bound in words only."""
    machine = Machine(tmp_path, monkeypatch)
    machine.has_nodes({0: "0-1", 1: "2-3"})
    machine.has_gpus({0: 0, 1: 1})
    machine.allows({0, 1, 2, 3})
    monkeypatch.setattr(host, "bind_threads", machine.allows)
    monkeypatch.setattr(torch, "get_num_threads", lambda: machine.num_threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: setattr(machine, "num_threads", number))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine.num_threads = 4
    return machine


def test_a_worker_is_bound_to_the_cpus_near_its_gpu(machine):
    line = bind_to_numa(HostConfig(), GPU)
    assert line == HostLine("threads run on 2 CPUs of NUMA node 1, that of GPU 1")
    assert machine.allowed == {2, 3}


@pytest.mark.parametrize(
    ("config", "device", "reason"),
    [
        (HostConfig(numa=NumaBinding.none), GPU, "(host.numa=none)"),
        (HostConfig(), torch.device("cpu"), "the run has no GPU to be near to"),
        (HostConfig(), torch.device("cuda", 2), "the system does not say which NUMA node GPU 2"),
    ],
)
def test_what_cannot_be_bound_runs_anywhere_and_the_line_says_why(machine, config, device, reason):
    machine.has_gpus({0: 0, 1: 1, 2: -1})
    line = bind_to_numa(config, device)
    assert line.text.startswith("threads run on any CPU") and reason in line.text and not line.warns
    assert machine.allowed == {0, 1, 2, 3}


def test_a_torch_of_one_worker_keeps_its_threads_unless_it_is_bound_to_fewer_cores(machine):
    alone = [line.text for line in start_host(HostConfig(), torch.device("cpu"), 1, alone_in_the_job)]
    assert alone[1] == "4 threads for operations on the CPU (torch's own choice)" and machine.num_threads == 4
    start_host(HostConfig(), GPU, 1, alone_in_the_job)
    assert machine.num_threads == 2


@pytest.mark.parametrize(("workers", "threads"), [(2, 2), (3, 1), (8, 1)])
def test_workers_of_a_node_share_its_cores(machine, workers, threads):
    line = set_threads(HostConfig(), workers, 4, alone_in_the_job)
    assert machine.num_threads == threads
    words = "thread" if threads == 1 else "threads"
    assert line.text == f"{threads} {words} for operations on the CPU (4 cores, {workers} workers)"


def test_a_number_that_was_asked_for_is_taken(machine, monkeypatch):
    set_threads(HostConfig(threads=3), 2, 4, alone_in_the_job)
    assert machine.num_threads == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    set_threads(HostConfig(), 1, 4, alone_in_the_job)
    assert machine.num_threads == 1
    text = set_threads(HostConfig(threads=2), 2, 4, alone_in_the_job).text
    assert machine.num_threads == 2 and "host.threads=2" in text


def test_all_ranks_take_the_least_number(machine):
    line = set_threads(HostConfig(), 1, 4, lambda number: [number, 3])
    assert machine.num_threads == 3 and "the least of all ranks, 4 here" in line.text


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


def alone_in_the_job(number: int) -> list[int]:
    """Return the list that the only rank gathers."""
    return [number]


GPU = torch.device("cuda", 1)


@pytest.fixture
def bare_machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", set()), ("0", {0}), ("0-2,7", {0, 1, 2, 7}), ("4-5,0-1", {0, 1, 4, 5})],
)
def test_a_list_of_cpus_is_read(text, cpus):
    assert cpu_list(text) == cpus


def test_the_cpus_near_a_gpu_are_those_of_its_node(bare_machine):
    bare_machine.has_nodes({0: "0-3", 1: "4-7"})
    bare_machine.has_gpus({0: 0, 1: 1})
    assert cpus_near(GPU) == (1, {4, 5, 6, 7})
    assert cpus_near(torch.device("cuda", 0)) == (0, {0, 1, 2, 3})


def test_a_gpu_is_found_by_its_place_on_the_bus_not_by_its_number(bare_machine):
    bare_machine.has_nodes({0: "0-3", 1: "4-7"})
    bare_machine.has_gpus({0: 0, 1: 1})
    bare_machine.shows_only(1)  # as CUDA_VISIBLE_DEVICES=1 does
    assert cpus_near(torch.device("cuda", 0)) == (1, {4, 5, 6, 7})


def test_cpus_that_the_process_may_not_use_are_left_out(bare_machine):
    bare_machine.has_nodes({0: "0-3", 1: "4-7"})
    bare_machine.has_gpus({1: 1})
    bare_machine.allows({2, 3, 4, 5})
    assert cpus_near(GPU) == (1, {4, 5})
    bare_machine.allows({2, 3})
    with pytest.raises(Unbound, match="no CPU of NUMA node 1, that of GPU 1"):
        cpus_near(GPU)


def test_one_node_and_none_leave_nothing_to_choose(bare_machine):
    with pytest.raises(Unbound, match="shows no NUMA nodes"):
        cpus_near(GPU)
    bare_machine.has_nodes({0: "0-7"})
    with pytest.raises(Unbound, match="one NUMA node"):
        cpus_near(GPU)


def test_a_node_that_the_system_does_not_know_is_not_taken_for_the_first(bare_machine):
    bare_machine.has_nodes({0: "0-3", 1: "4-7"})
    bare_machine.has_gpus({0: -1, 1: 0})
    assert numa_node(torch.device("cuda", 0)) is None and numa_node(GPU) == 0
    with pytest.raises(Unbound, match="does not say which NUMA node GPU 0"):
        cpus_near(torch.device("cuda", 0))


def test_threads_of_one_core_count_once(bare_machine):
    bare_machine.allows({0, 1, 2, 3})
    for cpu in range(4):
        bare_machine.write(
            f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 2},{cpu % 2 + 2}"
        )
    assert cores_here() == 2


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1)])
def test_a_container_has_no_more_cores_than_its_quota(bare_machine, quota, cores):
    bare_machine.write("fs/cgroup/cpu.max", quota)
    assert cores_here() == cores


def test_the_cores_and_nodes_of_this_machine_can_be_read():
    assert cores_here() >= 1
    assert set().union(*tuning.cpus_of_nodes().values()) <= set(range(os.cpu_count() or 1))
