"""Tuning of a worker's process: CPUs and number of its threads, and the times of garbage collection."""

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
    """Bind a worker's threads near its GPU and choose their number; what was done, and what not and why.

    For each worker, once, before it touches the device and before anything is compiled. ``num_workers``
    are those of this node, ``gather`` gives every rank's number to every rank.
    """
    cores = cores_here()
    lines = [bind_to_numa(host, device), set_threads(host, num_workers, cores, gather)]
    when = f"every {host.gc_interval} steps" if host.manual_gc else "whenever Python pleases"
    return [*lines, HostLine(f"garbage is collected {when} (host.manual_gc={str(host.manual_gc).lower()})")]


def bind_to_numa(host: HostConfig, device: torch.device) -> HostLine:
    """Bind all threads of this process, and those to come, to the CPUs of its GPU's NUMA node.

    Asking for the node starts CUDA, in this process only and without memory of the GPU; the threads that
    CUDA has by then are bound too. Never raises: what cannot be bound runs where it would have.
    """
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
    """Set the number of threads of torch's operations on the CPU, the same on all ranks.

    Compiled code for a CPU has the number in it, so the least of all ranks is taken. ``cores`` are those
    that the process had before it was bound.
    """
    wanted, why = _threads(host, num_workers, cores)
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
        hint = (
            "; torchrun sets 1 where nothing is set, host.threads goes before it" if num_workers > 1 else ""
        )
        return number, f"OMP_NUM_THREADS={given}{hint}"
    bound = cores_here()
    if num_workers > 1:
        return max(min(cores // num_workers, bound), 1), f"{number_of(cores, 'core')}, {num_workers} workers"
    if bound < torch.get_num_threads():
        return bound, "cores allowed by binding and CPU quota"
    return torch.get_num_threads(), "torch's own choice"


def log_host(lines: Sequence[HostLine]) -> None:
    """Log the results of the host's settings."""
    for line in lines:
        if line.warns:
            log.warning("host: %s", line.text)
        else:
            log.info("host: %s", line.text, extra=FILE_ONLY)


class GarbageCollection:
    """Garbage collection at fixed steps instead of whenever Python pleases, inside a ``with`` block.

    A collection in the middle of a step delays its kernel launches; at a fixed step every rank pays at the
    same time. None happens before the first step has ended: a quarter of the start would go into it.
    """

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        self._began = False

    def __enter__(self) -> GarbageCollection:
        gc.disable()
        return self

    def after_step(self, step: int) -> None:
        """Collect if this step is due, or is the first one here."""
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
    """A process cannot run near its GPU; the message has the reason."""


def cpus_near(device: torch.device) -> tuple[int, set[int]]:
    """Return the NUMA node of a GPU, and the CPUs there that this process may use. Starts CUDA.

    CUDA counts its GPUs as this process sees them, so the bus address that it gives is the right one
    whatever the process is shown. No memory of the GPU is needed. *Raises* Unbound where there is nothing
    to choose from, or the node is not known.
    """
    if device.type != "cuda":
        raise Unbound("the run has no GPU to be near to")
    nodes = cpus_of_nodes()
    if len(nodes) < 2:
        raise Unbound("this machine has one NUMA node" if nodes else "this machine shows no NUMA nodes")
    node, gpu = numa_node(device), f"GPU {device.index or 0}"
    if node is None:
        raise Unbound(f"the system does not say which NUMA node {gpu} is attached to")
    near = nodes.get(node, set()) & cpus_here()
    if not near:
        raise Unbound(f"the process may use no CPU of NUMA node {node}, that of {gpu}")
    return node, near


def numa_node(device: torch.device) -> int | None:
    """Return the NUMA node that a GPU is attached to; None where the system names none. Starts CUDA."""
    at: Any = torch.cuda.get_device_properties(device)  # torch's stubs leave its place on the bus out
    address = f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"
    node = int(read_system(SYS / "bus/pci/devices" / address / "numa_node") or -1)
    return node if node >= 0 else None


def cpus_of_nodes() -> dict[int, set[int]]:
    """Return the CPUs of each NUMA node that has any; empty where the system shows none."""
    nodes = SYS / "devices/system/node"
    with_cpus = sorted(cpu_list(read_system(nodes / "has_cpu")))
    return {node: cpu_list(read_system(nodes / f"node{node}" / "cpulist")) for node in with_cpus}


def cpus_here() -> set[int]:
    """Return the CPUs that this thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cores_here() -> int:
    """Physical cores that this thread may run on, no more than its control groups allow; at least 1."""
    siblings = "devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = len({read_system(SYS / siblings.format(cpu)) or str(cpu) for cpu in cpus_here()})
    return max(min([cores, *_quotas()]), 1)


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the control groups of this process, and whether each is of v1.

    Groups above its own count too. The root alone exists in a container whose /proc has the host's paths.
    """
    for line in read_system(PROC / "self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = SYS / "fs/cgroup" / (controller if controllers else "")
            for folder in (PurePosixPath(group), *PurePosixPath(group).parents):
                yield root / folder.relative_to("/"), bool(controllers)


def _quotas() -> Iterator[int]:
    for group, is_v1 in control_groups("cpu"):
        of_v1 = [read_system(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = of_v1 if is_v1 else (read_system(group / "cpu.max").split() or ("", ""))
        if quota.isdigit() and period.isdigit():
            yield int(quota) // int(period)


def cpu_list(text: str) -> set[int]:
    """Return the numbers of a list such as '0-2,7'."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def read_system(path: Path) -> str:
    """Return the text of a file of the system; empty if it cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
