"""Variables that ``host.*`` sets, and never takes from the user."""

import json
import os
import sys

import pytest
import torch

from graphmoe.config.schema import ConfigError, DeviceChoice, HostConfig
from graphmoe.runtime.host.environment import MARKER, MULTICAST, set_environment

AUTO, CPU, GPU = DeviceChoice.auto, DeviceChoice.cpu, DeviceChoice.cuda


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    fake = {"PATH": "/bin"}
    monkeypatch.setattr(os, "environ", fake)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return fake


@pytest.fixture
def build(monkeypatch):
    def choose(name: str) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0" if name == "cuda" else None)
        monkeypatch.setattr(torch.version, "hip", "7.0" if name == "rocm" else None)
        monkeypatch.delitem(sys.modules, "torch._inductor.runtime.benchmarking", raising=False)

    return choose


def texts(host: HostConfig, device: DeviceChoice = AUTO) -> list[str]:
    return [line.text for line in set_environment(host, device)]


def added(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables beside the marker, which is there only if others are."""
    found = {k: v for k, v in environment.items() if k not in ("PATH", "PYTEST_CURRENT_TEST")}
    marked = json.loads(found.pop(MARKER, "{}"))
    assert (MARKER in environment) == bool(marked) and marked.items() <= found.items()
    return found


KEY = "host.nvlink_multicast=false"
NVLS, SYMM, NVSHMEM = (f"{name}={value}" for name, value in MULTICAST.items())


def test_on_cuda_multicast_is_off_if_nobody_else_has_set_it(environment, build):
    build("cuda")
    assert texts(HostConfig()) == [f"{NVLS}, {SYMM}, {NVSHMEM} ({KEY})"] and added(environment) == MULTICAST
    users = {"NCCL_NVLS_ENABLE": "1", "NVSHMEM_DISABLE_NVLS": "0"}
    del environment[MARKER]
    environment |= users
    assert texts(HostConfig()) == [
        f"NCCL_NVLS_ENABLE=1 is set already and is kept ({KEY} would set 0)",
        f"{SYMM} is set already ({KEY} would do the same)",
        f"NVSHMEM_DISABLE_NVLS=0 is set already and is kept ({KEY} would set 1)",
    ]
    environment |= {"NCCL_NVLS_ENABLE": "0"}
    said = "host.nvlink_multicast=true has no effect on what is set already: "
    assert texts(HostConfig(nvlink_multicast=True)) == [f"{said}{NVLS}, {SYMM}"]
    assert added(environment) == {**MULTICAST, "NVSHMEM_DISABLE_NVLS": "0"}


def test_host_env_goes_before_the_other_keys(environment, build):
    build("cuda")
    env = {"NCCL_NVLS_ENABLE": "2", "NCCL_DEBUG": "INFO"}
    lines = ["NCCL_NVLS_ENABLE, NCCL_DEBUG (host.env)", f"{SYMM}, {NVSHMEM} ({KEY})"]
    assert texts(HostConfig(env=env)) == lines and added(environment) == MULTICAST | env


def test_on_rocm_pool_and_queues_are_set_anew_for_each_job(environment, build):
    build("rocm")
    texts(HostConfig(kernarg_pool_mb=24, max_hw_queues=4))
    assert texts(HostConfig(max_hw_queues=2)) == [
        "HSA_KERNARG_POOL_SIZE=12582912 (host.kernarg_pool_mb=12)",
        "GPU_MAX_HW_QUEUES=2 (host.max_hw_queues=2)",
    ]
    assert added(environment) == {"HSA_KERNARG_POOL_SIZE": "12582912", "GPU_MAX_HW_QUEUES": "2"}
    assert texts(HostConfig(kernarg_pool_mb=None)) == [] and added(environment) == {}


@pytest.mark.parametrize("name", ["cuda", "rocm", "cpu"])
def test_a_cpu_run_sets_nothing_and_takes_gpu_variables_back(environment, build, name):
    build(name)
    assert texts(HostConfig(), CPU) == [] and added(environment) == {}
    host = HostConfig(env={"A": "1"})
    texts(host)
    assert texts(host, CPU) == ["A (host.env)"] and added(environment) == {"A": "1"}


def test_a_changed_key_without_effect_warns_with_the_reason(build):
    no_rocm, no_cuda = (f"torch is not built for {name}" for name in ("ROCm", "CUDA"))
    for name, device, key, value, reason in (
        ("cuda", AUTO, "kernarg_pool_mb", 24, no_rocm),
        ("cuda", GPU, "max_hw_queues", 2, no_rocm),
        ("rocm", GPU, "nvlink_multicast", True, no_cuda),
        ("rocm", CPU, "max_hw_queues", 2, "the run is on a CPU"),
    ):
        build(name)
        warned = [line.text for line in set_environment(HostConfig(**{key: value}), device) if line.warns]
        assert f"host.{key}={str(value).lower()} has no effect: {reason}" in warned


@pytest.mark.parametrize("name", ["", "A=B", "MY-NAME", "1A"])
def test_a_name_that_no_variable_can_have_is_refused_before_anything_is_set(environment, build, name):
    build("cuda")
    with pytest.raises(ConfigError, match="host.env"):
        set_environment(HostConfig(env={"GOOD": "1", name: "1"}), AUTO)
    assert added(environment) == {}


def test_a_worker_says_the_same_as_the_process_that_started_it(environment, build):
    build("cuda")
    host = HostConfig(env={"NCCL_DEBUG": "INFO"})
    first, before = texts(host), dict(environment)
    assert texts(host, GPU) == first and environment == before


def test_a_masked_value_is_that_of_the_environment_and_never_set(environment, build):
    build("cuda")
    texts(HostConfig(env={"TOKEN": "hunter2"}), CPU)
    masked = HostConfig(env={"TOKEN": "***"})
    assert texts(masked, CPU) == ["TOKEN (host.env)"] and environment["TOKEN"] == "hunter2"
    del environment["TOKEN"], environment[MARKER]
    (line,) = set_environment(masked, CPU)
    assert line.warns and "set TOKEN yourself" in line.text and "TOKEN" not in environment
    environment["TOKEN"] = "theirs"
    assert texts(masked, CPU) == ["TOKEN is set already"]
    assert "hunter2" not in str(texts(HostConfig(env={"TOKEN": "hunter2"}), CPU))


def test_a_variable_that_someone_changed_after_us_stays(environment, build):
    build("cuda")
    texts(HostConfig())
    environment["NCCL_NVLS_ENABLE"] = "1"
    assert texts(HostConfig())[0].startswith("NCCL_NVLS_ENABLE=1 is set already and is kept")
    assert "NCCL_NVLS_ENABLE" not in json.loads(environment[MARKER])


def test_variables_changed_after_a_gpu_has_started_are_warned_of(environment, build, monkeypatch):
    build("cuda")
    texts(HostConfig())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "too late" not in str([texts(HostConfig(), device) for device in (GPU, CPU)])  # taking back
    (late,) = [line for line in set_environment(HostConfig(env={"A": "1"}), GPU) if line.warns]
    assert "too late" in late.text and environment["A"] == "1"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    build("rocm")
    assert "too late" not in str(texts(HostConfig()))
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime.benchmarking", object())
    assert "too late" in str(texts(HostConfig(kernarg_pool_mb=24)))
