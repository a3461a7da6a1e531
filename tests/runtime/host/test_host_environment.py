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
    """Return the variables beside the marker, which is there only where others are."""
    found = {k: v for k, v in environment.items() if k not in ("PATH", "PYTEST_CURRENT_TEST")}
    marked = json.loads(found.pop(MARKER, "{}"))
    assert (MARKER in environment) == bool(marked) and marked.items() <= found.items()
    return found


def test_on_cuda_multicast_is_off(environment, build):
    build("cuda")
    assert texts(HostConfig()) == [
        "NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1, NVSHMEM_DISABLE_NVLS=1 "
        "(host.nvlink_multicast=false)"
    ]
    assert added(environment) == MULTICAST


def test_on_rocm_the_pool_and_the_queues_are_set_and_nothing_of_nvlink(environment, build):
    build("rocm")
    assert texts(HostConfig(max_hw_queues=2)) == [
        "HSA_KERNARG_POOL_SIZE=12582912 (host.kernarg_pool_mb=12)",
        "GPU_MAX_HW_QUEUES=2 (host.max_hw_queues=2)",
    ]
    assert added(environment) == {"HSA_KERNARG_POOL_SIZE": "12582912", "GPU_MAX_HW_QUEUES": "2"}
    assert texts(HostConfig(kernarg_pool_mb=None)) == [] and added(environment) == {}


@pytest.mark.parametrize("name", ["cuda", "rocm", "cpu"])
def test_a_run_on_a_cpu_sets_nothing_by_default_and_says_nothing(environment, build, name):
    build(name)
    assert texts(HostConfig(), CPU) == [] and added(environment) == {}


def test_a_variable_that_is_set_stays_and_the_line_says_so(environment, build):
    build("cuda")
    environment |= {"NCCL_NVLS_ENABLE": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    lines = texts(HostConfig(env={"NCCL_DEBUG": "INFO"}))
    assert "NCCL_NVLS_ENABLE=1 is set already and stays (host.nvlink_multicast=false would set 0)" in lines
    assert "NVSHMEM_DISABLE_NVLS=1 is set already (host.nvlink_multicast=false would do the same)" in lines
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 (host.nvlink_multicast=false)" in lines
    assert environment["NCCL_NVLS_ENABLE"] == "1" and environment["NCCL_DEBUG"] == "INFO"


NO_ROCM, NO_CUDA = "torch is not built for ROCm", "torch is not built for CUDA"


@pytest.mark.parametrize(
    ("build_name", "device", "key", "value", "reason"),
    [
        ("cuda", AUTO, "kernarg_pool_mb", 24, NO_ROCM),
        ("cuda", GPU, "max_hw_queues", 2, NO_ROCM),
        ("rocm", GPU, "nvlink_multicast", True, NO_CUDA),
        ("rocm", CPU, "max_hw_queues", 2, "the run is on a CPU"),
    ],
)
def test_a_changed_key_without_effect_warns_with_the_reason(build, build_name, device, key, value, reason):
    build(build_name)
    warned = [line.text for line in set_environment(HostConfig(**{key: value}), device) if line.warns]
    assert f"host.{key}={str(value).lower()} has no effect: {reason}" in warned


def test_multicast_cannot_be_had_against_variables_that_are_set(environment, build):
    build("cuda")
    environment |= {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "0"}
    assert texts(HostConfig(nvlink_multicast=True)) == [
        "host.nvlink_multicast=true has no effect on what is set already: NCCL_NVLS_ENABLE=0"
    ]


def test_host_env_goes_before_the_other_keys(environment, build):
    build("cuda")
    lines = texts(HostConfig(env={"NCCL_NVLS_ENABLE": "2", "NCCL_DEBUG": "INFO"}))
    assert lines[0] == "NCCL_NVLS_ENABLE, NCCL_DEBUG (host.env)"
    assert environment["NCCL_NVLS_ENABLE"] == "2" and environment["NVSHMEM_DISABLE_NVLS"] == "1"


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


def test_a_worker_on_a_cpu_takes_the_variables_of_gpus_back(environment, build):
    build("cuda")
    host = HostConfig(env={"A": "1"})
    texts(host)
    assert texts(host, CPU) == ["A (host.env)"] and added(environment) == {"A": "1"}


def test_the_next_job_of_a_sweep_has_values_of_its_own(environment, build):
    build("rocm")
    texts(HostConfig(kernarg_pool_mb=24, max_hw_queues=4))
    assert texts(HostConfig(max_hw_queues=2))[1] == "GPU_MAX_HW_QUEUES=2 (host.max_hw_queues=2)"
    assert added(environment) == {"HSA_KERNARG_POOL_SIZE": str(12 * 2**20), "GPU_MAX_HW_QUEUES": "2"}


def test_a_variable_that_someone_changed_after_us_stays(environment, build):
    build("cuda")
    texts(HostConfig())
    environment["NCCL_NVLS_ENABLE"] = "1"
    assert texts(HostConfig())[0].startswith("NCCL_NVLS_ENABLE=1 is set already and stays")
    assert "NCCL_NVLS_ENABLE" not in json.loads(environment[MARKER])


def test_variables_that_change_after_cuda_has_started_are_warned_about(environment, build, monkeypatch):
    build("cuda")
    texts(HostConfig())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not any("too late" in line for line in texts(HostConfig(), GPU))
    assert not any("too late" in line for line in texts(HostConfig(), CPU)), "taking back does no harm"
    (late,) = [line for line in set_environment(HostConfig(env={"A": "1"}), GPU) if line.warns]
    assert "too late" in late.text and environment["A"] == "1"


def test_variables_set_after_inductor_has_asked_rocm_for_gpus_are_warned_about(build, monkeypatch):
    build("rocm")
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime.benchmarking", object())
    assert any("too late" in line for line in texts(HostConfig()))
