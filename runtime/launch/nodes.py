"""Nodes of a run: their number, this one's place, their endpoint, and the address of this one."""

import errno
import ipaddress
import logging
import os
import secrets
import shutil
import socket
import subprocess
import zlib
from dataclasses import dataclass
from typing import Any

import psutil

from graphmoe.config.schema import ConfigError, LaunchConfig
from graphmoe.runtime.host.signals import ELASTIC

log = logging.getLogger(__name__)

_FIRST_PORT, _PORTS = 20000, 10000
_LOOPBACK = "127.0.0.1"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_TORCHS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPIS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")


@dataclass(frozen=True)
class Nodes:
    """Facts of all nodes that the launching process of one has."""

    count: int
    is_first: bool
    """True where this node's launching process claims the run's folder and reports its end."""
    endpoint: str
    """host:port where they meet."""
    job: str
    """A name that is the same on all of them."""
    address: str | None
    """IP address at which the others reach this node; None where the endpoint's name does not tell it."""


def find_nodes(launch: LaunchConfig) -> Nodes:
    """Return the nodes of the configuration, or of the Slurm step that this process is a task of."""
    in_step = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    count = in_step if launch.nodes == "auto" else launch.nodes
    if count == 1:
        return Nodes(1, True, f"{_LOOPBACK}:0", secrets.token_hex(4), _LOOPBACK)
    if in_step > 1:
        _check_step(count, in_step)
        first, endpoint = os.environ["SLURM_NODEID"] == "0", launch.endpoint or _slurm_endpoint()
        job = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
        return Nodes(count, first, endpoint, job, _address_towards(endpoint))
    if launch.endpoint is None:
        raise ConfigError(
            f"launch.nodes={count} without a Slurm step of {count} nodes needs a place to meet; give the "
            f"first node and a free port, e.g. launch.endpoint=node0:29500, and start the command on each"
        )
    endpoint = launch.endpoint
    host, _, _ = endpoint.rpartition(":")
    job = f"graphmoe-{endpoint}"
    return Nodes(count, _is_this_machine(host.strip("[]")), endpoint, job, _address_towards(endpoint))


def started_by() -> str | None:
    """Name what started this process as one rank of many: torchrun, srun or mpirun; None for none of them.

    Fills in torch's variables of the rank where srun or Open MPI's mpirun has variables of its own.
    *Raises* ConfigError where they do not say how many ranks each node has.
    """
    environ = os.environ
    if ELASTIC in environ or environ.get("WORLD_SIZE", "1") != "1":
        name, values = "torchrun", [environ.get(variable) for variable in _TORCHS]
    elif int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > int(environ.get("SLURM_STEP_NUM_NODES", "1")):
        each = environ.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0]  # such as 8(x4)
        size = environ["SLURM_STEP_NUM_TASKS"]
        name, values = "srun", [environ["SLURM_PROCID"], size, environ["SLURM_LOCALID"], each]
    elif int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        name, values = "mpirun", [environ.get(f"OMPI_COMM_WORLD_{variable}") for variable in _OPEN_MPIS]
    else:
        return None
    if not all(value is not None and value.isdecimal() for value in values):
        shown = ", ".join(f"{key}={value}" for key, value in zip(_TORCHS, values, strict=True))
        raise ConfigError(f"{name} started this process, but does not say which rank it is: {shown}")
    of_rank, of_all, local_rank, local_size = (int(value) for value in values if value is not None)
    if of_all % local_size or of_rank >= of_all or local_rank >= local_size:
        raise ConfigError(
            f"{name} started {of_all} ranks, and {local_size} of them on this node; each node must have "
            "equally many"
        )
    environ.update({key: str(value) for key, value in zip(_TORCHS, values, strict=True)})
    return name


def set_meeting_place(launch: LaunchConfig) -> None:
    """Set torch's variables of the place where ranks meet, unless their starter or the user has."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return
    if launch.endpoint is not None:
        endpoint = launch.endpoint
    elif "SLURM_STEP_NODELIST" in os.environ:
        endpoint = _slurm_endpoint()
    elif os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        job = os.environ.get("PMIX_NAMESPACE", str(os.getppid()))  # the same for all, which mpirun started
        endpoint = f"{_LOOPBACK}:{_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS}"
    else:
        raise ConfigError(
            "ranks on several nodes need a place to meet; give the first node and a free port, e.g. "
            "launch.endpoint=node0:29500"
        )
    host, _, port = endpoint.rpartition(":")
    os.environ |= {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}


def interface_of(address: str) -> str | None:
    """Name of the network interface of this node that has the address."""
    found = (name for name, places in psutil.net_if_addrs().items() if address in {p.address for p in places})
    return next(found, None)


def listen_at(endpoint: str) -> socket.socket:
    """Listen at the endpoint's own address; on all interfaces, with a warning, where its name tells none.

    So it is with a name that stands for 127.0.1.1 on its own machine. *Raises* OSError where the port is not
    free.
    """
    for family, place in _places(endpoint):
        if _is_usable(endpoint, place[0]):
            try:
                return socket.create_server(place[:2], family=family, backlog=2048)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    log.warning(
        "launch.endpoint=%s stands for no address of this node, so its stores listen on all interfaces; name "
        "an address of the cluster's own network",
        endpoint,
    )
    return socket.create_server(("", int(endpoint.rpartition(":")[2])), backlog=2048)


def _address_towards(endpoint: str) -> str | None:
    """Return the address of the interface that a variable names, else of the one towards the endpoint."""
    interfaces = psutil.net_if_addrs()
    for variable in _INTERFACES:
        for place in interfaces.get(os.environ.get(variable, ""), ()):
            if place.family in (socket.AF_INET, socket.AF_INET6):
                return place.address
    for family, place in _places(endpoint):
        with socket.socket(family, socket.SOCK_DGRAM) as way:  # which sends nothing
            try:
                way.connect(place)
            except OSError:
                continue
            own: str = way.getsockname()[0]
            if _is_usable(endpoint, own):
                return own
    return None


def _places(endpoint: str) -> list[tuple[socket.AddressFamily, Any]]:
    host, _, port = endpoint.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [(family, place) for family, _, _, _, place in found]


def _is_usable(endpoint: str, address: str) -> bool:
    """Tell whether other nodes reach an address: a loopback one only where the endpoint is one."""
    host = endpoint.rpartition(":")[0].strip("[]")
    return not ipaddress.ip_address(address).is_loopback or host == "localhost" or host == address


def _check_step(count: int, in_step: int) -> None:
    if count != in_step:
        raise ConfigError(
            f"launch.nodes={count}, but the Slurm step has {in_step} nodes; use auto, or srun --nodes={count}"
        )


def _slurm_endpoint() -> str:
    """Return the first host of the step, and a port that follows from the number of the job."""
    port = _FIRST_PORT + int(os.environ["SLURM_JOB_ID"]) % _PORTS
    return f"{_slurm_hosts(os.environ['SLURM_STEP_NODELIST'])[0]}:{port}"


def _slurm_hosts(nodes: str) -> list[str]:
    """Expand Slurm's short form of hosts, such as 'n[1-3,7]', by Slurm itself or by submitit."""
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
