"""The nodes of a run: how many, which one this is, and where they meet."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from dataclasses import dataclass

import psutil

from graphmoe.config import ConfigError, LaunchConfig

_FIRST_PORT, _PORTS = 20000, 10000


@dataclass(frozen=True)
class Nodes:
    """What the launching process of one node knows of all of them."""

    count: int
    is_first: bool
    """Whether this node's launching process claims the run's folder and reports its end."""
    endpoint: str
    """host:port where they meet."""
    job: str
    """A name that is the same on all of them."""


def find_nodes(launch: LaunchConfig) -> Nodes:
    """The nodes that the configuration, or the Slurm step that this process is a task of, stands for."""
    in_step = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    count = in_step if launch.nodes == "auto" else launch.nodes
    if count == 1:
        return Nodes(1, True, "localhost:0", secrets.token_hex(4))
    if in_step > 1:
        _check_step(count, in_step)
        first, endpoint = os.environ["SLURM_NODEID"] == "0", launch.endpoint or _slurm_endpoint()
        return Nodes(count, first, endpoint, f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}")
    if launch.endpoint is None:
        raise ConfigError(
            f"launch.nodes={count} without a Slurm step of {count} nodes needs a place to meet; give the "
            f"first node and a free port, e.g. launch.endpoint=node0:29500, and start the command on each"
        )
    host, _, _ = launch.endpoint.rpartition(":")
    return Nodes(count, _is_this_machine(host), launch.endpoint, f"graphmoe-{launch.endpoint}")


def _check_step(count: int, in_step: int) -> None:
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", in_step))
    if count != in_step:
        raise ConfigError(
            f"launch.nodes={count}, but the Slurm step has {in_step} nodes; use auto, or srun --nodes={count}"
        )
    if tasks != in_step:
        raise ConfigError(
            f"the Slurm step has {tasks} tasks on {in_step} nodes, and each would start launch.nproc "
            f"workers; use srun --ntasks-per-node=1"
        )


def _slurm_endpoint() -> str:
    """The first host of the step, and a port that follows from the number of the job."""
    port = _FIRST_PORT + int(os.environ["SLURM_JOB_ID"]) % _PORTS
    return f"{_slurm_hosts(os.environ['SLURM_STEP_NODELIST'])[0]}:{port}"


def _slurm_hosts(nodes: str) -> list[str]:
    """The hosts that Slurm's short form, such as 'n[1-3,7]', stands for: as Slurm says, or submitit."""
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    try:
        from submitit.slurm.slurm import SlurmJobEnvironment
    except ImportError:
        raise ConfigError(
            f"neither the command scontrol nor the package submitit is here to read the nodes {nodes}; say "
            f"where they meet, e.g. launch.endpoint=node0:29500"
        ) from None
    return SlurmJobEnvironment().hostnames


def _is_this_machine(host: str) -> bool:
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        theirs = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(address.address in theirs for each in psutil.net_if_addrs().values() for address in each)
