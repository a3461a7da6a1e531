"""What the doctor says of the host."""

from __future__ import annotations

import pytest
import torch

from graphmoe.runtime.host import facts as doctor_host
from graphmoe.runtime.host.facts import environment, host, node_of_gpu
from tests.runtime.host.machine import Machine
from tests.test_doctor import shown


@pytest.fixture
def clean(monkeypatch):
    """No variable of those that are shown is set; torch is built for CUDA."""
    for name in list(doctor_host.os.environ):
        if doctor_host.SHOWN.match(name):
            monkeypatch.delenv(name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    return monkeypatch


def test_variables_that_a_run_would_set_stand_beside_those_that_are_set(clean):
    clean.setenv("NCCL_NVLS_ENABLE", "1")
    clean.setenv("NCCL_DEBUG", "INFO")
    clean.setenv("CUDA_VISIBLE_DEVICES", "")
    found = {row["name"]: row for row in environment()}
    assert list(found) == sorted(found) and len(found) == 5
    key = "host.nvlink_multicast=false"
    assert found["NCCL_NVLS_ENABLE"] == {
        "name": "NCCL_NVLS_ENABLE", "present": "1", "a_run_sets": None, "key": key,
    }  # fmt: skip
    assert (found["NVSHMEM_DISABLE_NVLS"]["present"], found["NVSHMEM_DISABLE_NVLS"]["a_run_sets"]) == (
        None,
        "1",
    )
    assert (found["NCCL_DEBUG"]["present"], found["NCCL_DEBUG"]["key"]) == ("INFO", None)
    assert found["CUDA_VISIBLE_DEVICES"]["present"] == ""


def test_on_rocm_the_pool_for_arguments_is_named(clean):
    clean.setattr(torch.version, "cuda", None)
    clean.setattr(torch.version, "hip", "7.0")
    assert [(row["name"], row["a_run_sets"]) for row in environment()] == [
        ("HSA_KERNARG_POOL_SIZE", "12582912")
    ]


def test_a_build_for_a_cpu_wants_nothing(clean):
    clean.setattr(torch.version, "cuda", None)
    assert environment() == []


def test_numa_nodes_of_the_host_and_of_gpus_are_found(tmp_path, monkeypatch):
    machine = Machine(tmp_path, monkeypatch)
    assert host()["numa_nodes"] is None and host()["physical_cores_for_a_run"] == 8
    machine.has_nodes({0: "0-3", 1: "4-7"})
    machine.has_gpus({0: 1, 1: -1})
    assert host()["numa_nodes"] == 2
    assert (node_of_gpu(0), node_of_gpu(1)) == (1, None)


def test_the_text_shows_the_environment(clean):
    clean.setenv("NCCL_DEBUG", "[x]")
    links = {"peer_access": [], "topology": None}
    empty = {"versions": {}, "host": {"numa_nodes": None}, "devices": [], "links": links}
    text = shown(empty | {"environment": environment(), "capabilities": [], "libraries": []})
    assert "NCCL_DEBUG" in text and "[x]" in text and "unknown" in text
