"""Environment variables of ``host.*`` keys, set before GPU runtimes and communication libraries read them."""

import json
import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from graphmoe.config.masking import MASK
from graphmoe.config.schema import ConfigError, DeviceChoice, HostConfig

# JSON of all variables that `set_environment` has set, for its next call here or in a child
MARKER = "GRAPHMOE_ENVIRONMENT"
# disable NVLink multicast in NCCL, torch's symmetric memory and NVSHMEM
MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class HostLine(NamedTuple):
    text: str
    warns: bool = False  # a requested setting has no effect


class Variable(NamedTuple):
    name: str
    value: str
    key: str


def set_environment(host: HostConfig, device: DeviceChoice) -> list[HostLine]:
    """Set the variables for this process and its children; return log lines.

    Call it before torch queries GPUs, and again in each worker with the resolved device. Variables set by
    others stay. *Raises* ConfigError for an invalid name.
    """
    wanted = variables(host, device)
    marked = json.loads(os.environ.get(MARKER, "{}"))  # by an earlier call
    ours = {name: value for name, value in marked.items() if os.environ.get(name) == value}
    before = dict(os.environ)
    for index, variable in enumerate(wanted):
        if variable.value == MASK and variable.name in ours:  # set by the process that started this one
            wanted[index] = Variable(variable.name, ours[variable.name], variable.key)
    for name in ours:
        del os.environ[name]
    lines = [HostLine(text, warns=True) for text in _without_effect(host, device)]
    taken: dict[str, list[Variable]] = {}
    for variable in wanted:
        present = os.environ.get(variable.name)
        if present is None and variable.value == MASK:
            name = variable.name
            text = f"host.env.{name}={MASK} stands for a value: set {name} yourself"
            lines.append(HostLine(text, warns=True))
        elif present is None:
            os.environ[variable.name] = variable.value
            taken.setdefault(variable.key, []).append(variable)
        else:
            lines.append(HostLine(_kept(variable, present)))
    for key, group in taken.items():
        shown = ", ".join(v.name if key == "host.env" else f"{v.name}={v.value}" for v in group)
        lines.append(HostLine(f"{shown} ({key})"))
    done = {variable.name: variable.value for group in taken.values() for variable in group}
    if done.items() - before.items() and _gpu_runtime_started():
        text = "these were set after the GPU's runtime had started, maybe too late"
        lines.append(HostLine(text, warns=True))
    os.environ.pop(MARKER, None)
    if done:
        os.environ[MARKER] = json.dumps(done)
    return lines


def variables(host: HostConfig, device: DeviceChoice) -> list[Variable]:
    """Return the variables that a configuration requests; host.env takes precedence."""
    found = [Variable(name, value, "host.env") for name, value in host.env.items()]
    for variable in found:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable.name) or "\0" in variable.value:
            raise ConfigError(f"host.env has {variable.name!r}, which is not a valid name of a variable")
    own = {variable.name for variable in found}
    return found + [v for v in _variables_of_keys(host, device) if v.name not in own]


def _variables_of_keys(host: HostConfig, device: DeviceChoice) -> Iterator[Variable]:
    if device is DeviceChoice.cpu:
        return
    for name, key, unit in (
        ("HSA_KERNARG_POOL_SIZE", "kernarg_pool_mb", 2**20),
        ("GPU_MAX_HW_QUEUES", "max_hw_queues", 1),
    ):
        if torch.version.hip and (value := getattr(host, key)) is not None:
            yield Variable(name, str(value * unit), f"host.{key}={value}")
    if torch.version.cuda and not host.nvlink_multicast:
        for name, value in MULTICAST.items():
            yield Variable(name, value, "host.nvlink_multicast=false")


def _without_effect(host: HostConfig, device: DeviceChoice) -> Iterator[str]:
    default = HostConfig()
    for name, platform, build in (
        ("kernarg_pool_mb", "ROCm", torch.version.hip),
        ("max_hw_queues", "ROCm", torch.version.hip),
        ("nvlink_multicast", "CUDA", torch.version.cuda),
    ):
        value = getattr(host, name)
        if value is None or value == getattr(default, name):
            continue
        if device is DeviceChoice.cpu or not build:
            on_cpu = device is DeviceChoice.cpu
            reason = "the run is on a CPU" if on_cpu else f"torch is not built for {platform}"
            yield f"host.{name}={str(value).lower()} has no effect: {reason}"
        elif name == "nvlink_multicast":
            kept = [f"{off}={value}" for off, value in MULTICAST.items() if os.environ.get(off) == value]
            if kept:
                yield f"host.{name}=true has no effect on what is set already: {', '.join(kept)}"


def _kept(variable: Variable, present: str) -> str:
    if variable.key == "host.env":
        stays = "" if variable.value in (present, MASK) else " and stays: host.env would set another value"
        return f"{variable.name} is set already{stays}"
    if present == variable.value:
        return f"{variable.name}={present} is set already ({variable.key} would do the same)"
    return f"{variable.name}={present} is set already and is kept ({variable.key} would set {variable.value})"


def _gpu_runtime_started() -> bool:
    # importing this module of Inductor queries GPUs, which starts ROCm
    asked = bool(torch.version.hip) and "torch._inductor.runtime.benchmarking" in sys.modules
    return asked or torch.cuda.is_initialized()
