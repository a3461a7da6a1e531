"""NUMA nodes and cores of this machine, as its system shows them, and which are near a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

SYS = Path("/sys")


class Unbound(Exception):
    """Why a process cannot run near its GPU."""


def cpus_near(device: torch.device) -> tuple[int, set[int]]:
    """The NUMA node of a GPU, and the CPUs there that this process may use. Starts CUDA.

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
    """The NUMA node that a GPU is attached to; None where the system does not say. Starts CUDA."""
    at: Any = torch.cuda.get_device_properties(device)  # torch's stubs leave its place on the bus out
    address = f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"
    node = int(_read(SYS / "bus/pci/devices" / address / "numa_node") or -1)
    return node if node >= 0 else None


def cpus_of_nodes() -> dict[int, set[int]]:
    """The CPUs of each NUMA node that has any; empty where the system shows none."""
    nodes = SYS / "devices/system/node"
    with_cpus = sorted(cpu_list(_read(nodes / "has_cpu")))
    return {node: cpu_list(_read(nodes / f"node{node}" / "cpulist")) for node in with_cpus}


def cpus_here() -> set[int]:
    """CPUs that this thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cores_here() -> int:
    """Physical cores that this thread may run on, no more than a container's quota allows; at least 1."""
    siblings = "devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = len({_read(SYS / siblings.format(cpu)) or str(cpu) for cpu in cpus_here()})
    quota, _, period = _read(SYS / "fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, int(quota) // int(period))
    return max(cores, 1)


def cpu_list(text: str) -> set[int]:
    """The numbers of a list such as '0-2,7'."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def _read(path: Path) -> str:
    """What a file of the system says; empty where there is none."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
