"""NUMA nodes and cores, read from a system's files that a test has written."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from graphmoe.runtime.host import tuning
from graphmoe.runtime.host.tuning import Unbound, cores_here, cpu_list, cpus_near, numa_node
from tests.runtime.host.machine import Machine

GPU = torch.device("cuda", 1)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", set()), ("0", {0}), ("0-2,7", {0, 1, 2, 7}), ("4-5,0-1", {0, 1, 4, 5})],
)
def test_a_list_of_cpus_is_read(text, cpus):
    assert cpu_list(text) == cpus


def test_the_cpus_near_a_gpu_are_those_of_its_node(machine):
    machine.has_nodes({0: "0-3", 1: "4-7"})
    machine.has_gpus({0: 0, 1: 1})
    assert cpus_near(GPU) == (1, {4, 5, 6, 7})
    assert cpus_near(torch.device("cuda", 0)) == (0, {0, 1, 2, 3})


def test_a_gpu_is_found_by_its_place_on_the_bus_not_by_its_number(machine):
    machine.has_nodes({0: "0-3", 1: "4-7"})
    machine.has_gpus({0: 0, 1: 1})
    machine.shows_only(1)  # as CUDA_VISIBLE_DEVICES=1 does
    assert cpus_near(torch.device("cuda", 0)) == (1, {4, 5, 6, 7})


def test_cpus_that_the_process_may_not_use_are_left_out(machine):
    machine.has_nodes({0: "0-3", 1: "4-7"})
    machine.has_gpus({1: 1})
    machine.allows({2, 3, 4, 5})
    assert cpus_near(GPU) == (1, {4, 5})
    machine.allows({2, 3})
    with pytest.raises(Unbound, match="no CPU of NUMA node 1, that of GPU 1"):
        cpus_near(GPU)


def test_one_node_and_none_leave_nothing_to_choose(machine):
    with pytest.raises(Unbound, match="shows no NUMA nodes"):
        cpus_near(GPU)
    machine.has_nodes({0: "0-7"})
    with pytest.raises(Unbound, match="one NUMA node"):
        cpus_near(GPU)


def test_a_node_without_cpus_is_no_choice(machine):
    machine.has_nodes({0: "0-7"})
    machine.write("devices/system/node/node1/cpulist", "\n")
    with pytest.raises(Unbound, match="one NUMA node"):
        cpus_near(GPU)


def test_a_node_that_the_system_does_not_know_is_not_taken_for_the_first(machine):
    machine.has_nodes({0: "0-3", 1: "4-7"})
    machine.has_gpus({0: -1, 1: 0})
    assert numa_node(torch.device("cuda", 0)) is None and numa_node(GPU) == 0
    with pytest.raises(Unbound, match="does not say which NUMA node GPU 0"):
        cpus_near(torch.device("cuda", 0))


def test_a_gpu_that_the_system_does_not_show_has_no_node(machine, monkeypatch):
    place = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xAF, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    assert numa_node(GPU) is None
    machine.write("bus/pci/devices/0001:af:00.0/numa_node", "3\n")
    assert numa_node(GPU) == 3


def test_threads_of_one_core_count_once(machine):
    machine.allows({0, 1, 2, 3})
    for cpu in range(4):
        machine.write(
            f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 2},{cpu % 2 + 2}"
        )
    assert cores_here() == 2


def test_cpus_of_unknown_cores_count_each(machine):
    machine.allows({0, 1, 2})
    assert cores_here() == 3


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1)])
def test_a_container_has_no_more_cores_than_its_quota(machine, quota, cores):
    machine.write("fs/cgroup/cpu.max", quota)
    assert cores_here() == cores


def test_this_machine_can_be_read():
    assert cores_here() >= 1
    assert set().union(*tuning.cpus_of_nodes().values()) <= set(range(os.cpu_count() or 1))
