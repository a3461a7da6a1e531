"""Queries of a run's device, its memory, and software versions (``env.json``)."""

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from graphmoe.config.masking import masked_overrides
from graphmoe.config.packages import VENDORS, version_of
from graphmoe.config.schema import ConfigError, DeviceChoice, HostConfig
from graphmoe.runtime.host.signals import ELASTIC, LAUNCHED_AT, LAUNCHER_PID
from graphmoe.runtime.host.tuning import control_groups, cores_here, read_system

PACKAGES = (
    *("torch", "triton", "hydra-core", "omegaconf", "numpy", "tokenizers", "safetensors"),
    *(package.module for package in VENDORS.values()),
)
V2 = "memory.max", "memory.current", "inactive_file"
# cgroup v1 files of limit and usage, and memory.stat's key of reclaimable bytes
V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
PER_CPU = 16  # most threads, and most processes, per CPU; tests run many on few


def open_device(choice: DeviceChoice) -> torch.device:
    if choice is DeviceChoice.cuda:
        if not torch.cuda.is_available():
            raise ConfigError("run.device=cuda, but torch sees no GPU; use run.device=cpu or auto")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def memory_of(device: torch.device) -> int:
    """Return a device's total bytes; on a CPU at most its cgroup limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _memory_limits())])


def free_memory_of(device: torch.device) -> int:
    """Return bytes available to this process, including what it holds on a GPU; page cache counts as free."""
    if device.type == "cuda":
        return reachable_bytes(device)
    machine = psutil.virtual_memory().available
    return max(min([machine, *(limit - used for limit, used in _memory_limits())]), 0)


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and used bytes, without page cache, of each control group."""
    for group, is_v1 in control_groups("memory"):
        limit, used, cache = V1 if is_v1 else V2
        most, now = read_system(group / limit), read_system(group / used)
        if most.isdigit() and now.isdigit():  # "max" has no limit
            stat = dict(line.split() for line in read_system(group / "memory.stat").splitlines())
            yield int(most), int(now) - int(stat.get(cache, 0))


def check_processes(host: HostConfig, nproc: int) -> None:
    """Raise ConfigError for more threads or processes than this machine can run."""
    most = PER_CPU * (os.cpu_count() or 1)
    for key, value in (("host.threads", host.threads or 1), ("launch.nproc", nproc)):
        if value > most:
            raise ConfigError(
                f"{key}={value} is more than {PER_CPU} for each CPU of this machine; use at most {most}"
            )


def describe(device: torch.device) -> dict[str, Any]:
    """Return versions, device, usable cores, source commit and command line."""
    return {
        "python": platform.python_version(),
        "packages": {package: version_of(package) for package in PACKAGES},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "device": device_name(device),
        "num_devices": torch.cuda.device_count(),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu_cores": psutil.cpu_count(logical=False),
        "usable_cores": cores_here(),
        "threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "git_commit": git_commit(),
        "command": masked_overrides(_command()),
    }


def _command() -> list[str]:
    own, launcher = sys.orig_argv, os.environ.get(LAUNCHER_PID)
    if launcher is None and ELASTIC not in os.environ:
        return own
    with suppress(psutil.Error):
        typed = psutil.Process(int(launcher or os.getppid())).cmdline()
        if launcher or typed[-1:] == own[-1:]:  # a torchrun may start a shell that starts this
            return typed
    return own


def device_name(device: torch.device) -> str:
    """Return a GPU's marketing name, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def place_of(device: torch.device) -> str:
    """Return this process's host, and its GPU by number on the host, name and UUID."""
    if device.type != "cuda":
        return platform.node()
    shown = dict(enumerate(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    index = torch.cuda.current_device() if device.index is None else device.index
    facts = torch.cuda.get_device_properties(device)
    uuid = getattr(facts, "uuid", "unknown")
    return f"{platform.node()}, GPU {shown.get(index) or index}, {facts.name}, UUID {uuid}"


def git_commit() -> str | None:
    """Return the source commit, with '-dirty' if changed; None outside a git checkout."""
    words = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def memory_gib(device: torch.device) -> float:
    """Return this process's peak memory in GiB: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def taken_gib(device: torch.device) -> float:
    """Return GiB of a GPU's memory that all processes use; on a CPU, this process's peak."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**30
    return memory_gib(device)


def reachable_bytes(device: torch.device) -> int:
    """Return GPU bytes that torch's allocator holds or can get."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def seconds_since_command(*, with_restarts: bool = False) -> float:
    """Return seconds since the command or sweep job began, imports included.

    After a restart since the worker's own start, unless ``with_restarts``.
    """
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    launched = os.environ.get(LAUNCHED_AT) if is_first or with_restarts else None
    return time.time() - (float(launched) if launched else psutil.Process().create_time())
