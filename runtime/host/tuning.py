"""Worker tuning: CPU affinity, number of threads, schedule of garbage collection."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from graphmoe.config.ranges import number_of
from graphmoe.config.schema import HostConfig, NumaBinding
from graphmoe.runtime.host.environment import HostLine
from graphmoe.runtime.host.logs import FILE_ONLY
from graphmoe.runtime.torch_compat import bind_threads

log = logging.getLogger(__name__)


def start_host(
    host: HostConfig, device: torch.device, num_workers: int, gather: Callable[[int], list[int]]
) -> list[HostLine]:
    """Bind a worker's threads near its GPU and set their number.

    Call it once per worker, before device use and compilation. ``num_workers`` counts this node's workers;
    ``gather`` all-gathers a number over ranks.
    """
    cores = cores_here()
    lines = [bind_to_numa(host, device), set_threads(host, num_workers, cores, gather)]
    when = f"every {host.gc_interval} steps" if host.manual_gc else "whenever Python pleases"
    return [*lines, HostLine(f"garbage is collected {when} (host.manual_gc={str(host.manual_gc).lower()})")]


def bind_to_numa(host: HostConfig, device: torch.device) -> HostLine:
    """Bind current and future threads to the CPUs of the GPU's NUMA node. Starts CUDA. Never raises."""
    if host.numa is NumaBinding.none:
        return HostLine("threads run on any CPU (host.numa=none)")
    try:
        node, near = cpus_near(device)
        bind_threads(near)
    except Unbound as reason:
        return HostLine(f"threads run on any CPU: {reason}")
    except (OSError, RuntimeError, ValueError, AssertionError) as error:  # of the system, and of CUDA
        return HostLine(f"threads run on any CPU, since binding them failed: {error}", warns=True)
    return HostLine(f"threads run on {len(near)} CPUs of NUMA node {node}, that of GPU {device.index or 0}")


def set_threads(
    host: HostConfig, num_workers: int, cores: int, gather: Callable[[int], list[int]]
) -> HostLine:
    """Set the number of CPU threads, the same on all ranks. ``cores`` counts those before binding."""
    wanted, why = _threads(host, num_workers, cores)
    # compiled CPU code contains the number, so ranks must agree
    number = min(gather(wanted))
    if number != torch.get_num_threads():
        torch.set_num_threads(number)
    least = f"; the least of all ranks, {wanted} here" if number < wanted else ""
    return HostLine(f"{number_of(number, 'thread')} for operations on the CPU ({why}{least})")


def _threads(host: HostConfig, num_workers: int, cores: int) -> tuple[int, str]:
    if host.threads is not None:
        return host.threads, f"host.threads={host.threads}"
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given:
        number = int(given) if given.isdigit() and int(given) else torch.get_num_threads()
        hint = "; torchrun sets 1 if it is unset, host.threads overrides it" if num_workers > 1 else ""
        return number, f"OMP_NUM_THREADS={given}{hint}"
    bound = cores_here()
    if num_workers > 1:
        return max(min(cores // num_workers, bound), 1), f"{number_of(cores, 'core')}, {num_workers} workers"
    if bound < torch.get_num_threads():
        return bound, "cores allowed by binding and CPU quota"
    return torch.get_num_threads(), "torch's own choice"


def log_host(lines: Sequence[HostLine]) -> None:
    for line in lines:
        if line.warns:
            log.warning("host: %s", line.text)
        else:
            log.info("host: %s", line.text, extra=FILE_ONLY)


class GarbageCollection:
    """Context in which garbage is collected at fixed steps only, if host.manual_gc."""

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        self._began = False

    def __enter__(self) -> GarbageCollection:
        gc.disable()  # a collection inside a step delays its kernel launches
        return self

    def after_step(self, step: int) -> None:
        if not self.config.manual_gc:
            gc.enable()
        elif not self._began or step % self.config.gc_interval == 0:
            gc.collect()
            if not self._began:
                gc.freeze()
        self._began = True

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        gc.enable()


SYS, PROC = Path("/sys"), Path("/proc")


class Unbound(Exception):
    """Raised with the reason why a process cannot run near its GPU."""


def cpus_near(device: torch.device) -> tuple[int, set[int]]:
    """Return a GPU's NUMA node and that node's usable CPUs. Starts CUDA. *Raises* Unbound."""
    if device.type != "cuda":
        raise Unbound("the run uses no GPU")
    nodes = cpus_of_nodes()
    if len(nodes) < 2:
        raise Unbound("this machine has one NUMA node" if nodes else "this machine shows no NUMA nodes")
    node, gpu = numa_node(device), f"GPU {device.index or 0}"
    if node is None:
        raise Unbound(f"the system does not say which NUMA node {gpu} is attached to")
    near = nodes.get(node, set()) & cpus_here()
    if not near:
        raise Unbound(f"the process may not use any CPU of NUMA node {node}, to which {gpu} is attached")
    return node, near


def numa_node(device: torch.device) -> int | None:
    """Return the NUMA node of a GPU; None if the system does not report it. Starts CUDA."""
    # CUDA's bus address is right whatever subset of GPUs the process sees; torch's stubs lack it
    at: Any = torch.cuda.get_device_properties(device)
    address = f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"
    node = int(read_system(SYS / "bus/pci/devices" / address / "numa_node") or -1)
    return node if node >= 0 else None


def cpus_of_nodes() -> dict[int, set[int]]:
    """Return the CPUs of each NUMA node that has any."""
    nodes = SYS / "devices/system/node"
    with_cpus = sorted(cpu_list(read_system(nodes / "has_cpu")))
    return {node: cpu_list(read_system(nodes / f"node{node}" / "cpulist")) for node in with_cpus}


def cpus_here() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cores_here() -> int:
    """Return the number of physical cores that affinity and control groups allow."""
    siblings = "devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = len({read_system(SYS / siblings.format(cpu)) or str(cpu) for cpu in cpus_here()})
    return max(min([cores, *_quotas()]), 1)


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield this process's control groups and their ancestors, each with whether it is v1."""
    for line in read_system(PROC / "self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = SYS / "fs/cgroup" / (controller if controllers else "")
            # in a container whose /proc shows the host's paths only the root exists
            for folder in (PurePosixPath(group), *PurePosixPath(group).parents):
                yield root / folder.relative_to("/"), bool(controllers)


def _quotas() -> Iterator[int]:
    for group, is_v1 in control_groups("cpu"):
        of_v1 = [read_system(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = of_v1 if is_v1 else (read_system(group / "cpu.max").split() or ("", ""))
        if quota.isdigit() and period.isdigit():
            yield int(quota) // int(period)


def cpu_list(text: str) -> set[int]:
    """Parse a CPU list such as '0-2,7'."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def read_system(path: Path) -> str:
    """Text of a system file; empty if unreadable."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
