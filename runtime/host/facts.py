"""What the doctor says of the host: cores, NUMA nodes, and variables that change how a GPU is used."""

from __future__ import annotations

import os
import platform
import re
from typing import Any

import torch

from graphmoe.config.schema import DeviceChoice, HostConfig
from graphmoe.runtime.host.environment import variables
from graphmoe.runtime.host.tuning import cores_here, cpus_of_nodes, numa_node

SHOWN = re.compile(
    r"(NCCL|RCCL|NVSHMEM|HSA|TORCH_NCCL|TORCH_SYMM_MEM|GLOO)_|"
    r"(GPU_MAX_HW_QUEUES|OMP_NUM_THREADS|(CUDA|HIP|ROCR)_VISIBLE_DEVICES)$"
)
"""Variables that are shown where they are set."""


def host() -> dict[str, Any]:
    """System, cores, NUMA nodes and memory of the host."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "physical_cores_for_a_run": cores_here(),
        "numa_nodes": len(cpus_of_nodes()) or None,
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(memory_bytes / 2**30, 1),
    }


def node_of_gpu(index: int) -> int | None:
    """The NUMA node that a GPU is attached to; None where the system does not say."""
    try:
        return numa_node(torch.device("cuda", index))
    except (OSError, RuntimeError, ValueError):
        return None


def environment() -> list[dict[str, str | None]]:
    """Variables that a run on a GPU sets by default, and others of their kind that are set here."""
    wanted = {variable.name: variable for variable in variables(HostConfig(), DeviceChoice.cuda)}
    there = {name for name in os.environ if SHOWN.match(name)}
    return [
        {
            "name": name,
            "present": os.environ.get(name),
            "a_run_sets": wanted[name].value if name in wanted and name not in os.environ else None,
            "key": wanted[name].key if name in wanted else None,
        }
        for name in sorted(wanted.keys() | there)
    ]
