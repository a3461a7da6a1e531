"""Nodes of a run: their number, rendezvous endpoint, this node's address."""

import errno
import ipaddress
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import zlib
from dataclasses import dataclass
from typing import Any

import psutil

from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError, LaunchConfig
from graphmoe.runtime.host.signals import ELASTIC, LAUNCHER_PID
from graphmoe.runtime.launch.failures import attempt_of

log = logging.getLogger(__name__)

_FIRST_PORT, _PORTS = 20000, 10000
_LOOPBACK = "127.0.0.1"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_TORCHS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI_RUN = "PMIX_NAMESPACE"
_SLURMS = ("PROCID", "STEP_NUM_TASKS", "LOCALID", "STEP_TASKS_PER_NODE")
_OPEN_MPIS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")


@dataclass(frozen=True)
class Nodes:
    count: int
    is_first: bool  # this launcher claims the run's folder and reports its end
    endpoint: str  # host:port of the rendezvous
    job: str
    address: str | None  # address for other nodes; None if the endpoint's name does not tell


def find_nodes(launch: LaunchConfig) -> Nodes:
    """Return nodes of the config, or of this process's Slurm step or PyTorchJob. *Raises* ConfigError."""
    environ, in_step, pods = os.environ, _nodes_of_step(), num_pods()
    count = (pods or in_step) if launch.nodes == "auto" else launch.nodes
    if pods:
        _check_pods(count, pods, launch.nproc)
    if count == 1:
        return Nodes(1, True, f"{_LOOPBACK}:0", secrets.token_hex(4), _LOOPBACK)
    if in_step > 1 and not pods:
        if count != in_step:
            step = f"the Slurm step has {in_step} nodes"
            raise ConfigError(f"launch.nodes={count}, but {step}; use auto, or srun --nodes={count}")
        first, endpoint = _of_slurm("NODEID") == "0", launch.endpoint or _slurm_endpoint()
        return Nodes(count, first, endpoint, _step_name(), address_towards(endpoint))
    endpoint = launch.endpoint or (f"{environ['MASTER_ADDR']}:{_port()}" if pods else "")
    if not endpoint:
        raise ConfigError(
            f"launch.nodes={count} without a Slurm step of {count} nodes needs a rendezvous address; give "
            f"the first node and a free port, e.g. launch.endpoint=node0:29500, and start the command on each"
        )
    first = environ["RANK"] == "0" if pods else _is_this_machine(split_endpoint(endpoint)[0])
    return Nodes(count, first, endpoint, f"graphmoe-{endpoint}", address_towards(endpoint))


def num_pods() -> int | None:
    """Return the number of pods if WORLD_SIZE and RANK count pods; else None."""
    # Kubernetes' PyTorchJob sets both for one process per pod, without LOCAL_RANK. With nprocPerNode
    # WORLD_SIZE counts ranks, and PET_NNODES pods.
    of_pods = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in (*of_pods, "LOCAL_RANK", "LOCAL_WORLD_SIZE", ELASTIC) if os.environ.get(name)]
    if given != [*of_pods] or num_ranks() == 1 or _has_tasks_per_gpu():
        return None
    counted = os.environ.get("PET_NNODES", "")  # 1:4 in an elastic job
    return int(counted) if counted.isdecimal() else num_ranks()


def num_nodes() -> int:
    return num_pods() or _nodes_of_step()


def is_first_node() -> bool:
    number = os.environ.get("RANK" if num_pods() else "SLURM_NODEID")
    return num_nodes() == 1 or number == "0"


def num_ranks() -> int:
    """Return the number of ranks in torch's variable WORLD_SIZE. *Raises* ConfigError."""
    return _number("WORLD_SIZE", 1)


def run_name() -> str:
    """Return the name shared by exactly the ranks of this run; empty if unknown."""
    environ = os.environ
    if ELASTIC in environ or environ.get(_MPI_RUN):
        return attempt_of(environ) if ELASTIC in environ else environ[_MPI_RUN]
    # mpirun and others start one run's ranks from several steps
    pairs = zip(_SLURMS[:2], _TORCHS[:2], strict=True)
    is_task = all(environ.get(f"SLURM_{of_slurm}") == environ.get(of_torch) for of_slurm, of_torch in pairs)
    return _step_name() if is_task else ""


def started_by() -> str | None:
    """Return what started this rank (torchrun, srun, mpirun); set torch's variables. Raises ConfigError."""
    environ = os.environ
    if ELASTIC in environ or num_ranks() != 1:
        name, values = "torchrun", [environ.get(variable) for variable in _TORCHS]
        if num_pods() == num_ranks():
            values[2:] = "0", "1"
    elif _has_tasks_per_gpu():
        name, values = "srun", [environ.get(f"SLURM_{variable}") for variable in _SLURMS]
        values[3] = re.sub(r"\(x\d+\)$", "", values[3] or "")  # such as 8(x4); not 8,7
    elif _number("OMPI_COMM_WORLD_SIZE", 1) > 1:
        name, values = "mpirun", [environ.get(f"OMPI_COMM_WORLD_{variable}") for variable in _OPEN_MPIS]
    else:
        return None
    if not all(value is not None and value.isdecimal() for value in values):
        shown = ", ".join(f"{key}={value}" for key, value in zip(_TORCHS, values, strict=True))
        raise ConfigError(f"{name} started this process, but does not say which rank it is: {shown}")
    of_rank, of_all, local_rank, local_size = (int(value) for value in values if value is not None)
    if not local_size or of_all % local_size or of_rank >= of_all or local_rank >= local_size:
        raise ConfigError(
            f"{name} started {number_of(of_all, 'rank')}, {local_size} on this node; each node must have "
            "the same number"
        )
    environ.update({key: str(value) for key, value in zip(_TORCHS, values, strict=True)})
    return name


def set_meeting_place(launch: LaunchConfig) -> tuple[str, str]:
    """Set torch's rendezvous variables unless set; return host:port, and advice if it cannot be used."""
    environ = os.environ
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        again = "the port was free a moment ago, so start the same command again"
        instead = again if LAUNCHER_PID in environ else "set another MASTER_PORT"
        return f"{environ['MASTER_ADDR']}:{_port()}", instead
    one_node = environ["LOCAL_WORLD_SIZE"] == environ["WORLD_SIZE"]
    by_mpirun = bool(environ.get("OMPI_COMM_WORLD_SIZE"))  # processes of different steps in a Slurm job
    if launch.endpoint is not None:
        endpoint = launch.endpoint
    elif environ.get("SLURM_STEP_NODELIST") and not by_mpirun:
        endpoint = f"{_LOOPBACK}:{_slurm_port()}" if one_node else _slurm_endpoint()
    elif one_node:
        job = environ.get(_MPI_RUN) or str(os.getppid())  # the same for all, which mpirun started
        endpoint = f"{_LOOPBACK}:{_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS}"
    else:
        raise ConfigError(
            "ranks on several nodes need a rendezvous address; give the first node and a free port, e.g. "
            "launch.endpoint=node0:29500"
        )
    host, port = split_endpoint(endpoint)
    environ.update({"MASTER_ADDR": host, "MASTER_PORT": str(port)})
    return endpoint, "name another place, e.g. launch.endpoint=node0:29500"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of an endpoint; an IPv6 address without its brackets."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def interface_of(address: str) -> str | None:
    found = (name for name, places in psutil.net_if_addrs().items() if address in {p.address for p in places})
    return next(found, None)


def listen_at(endpoint: str) -> socket.socket:
    """Listen at the endpoint, on all interfaces if this node has no such address. *Raises* OSError."""
    for family, place in _places(endpoint):
        # some hosts resolve their own name to 127.0.1.1, which other nodes cannot reach
        if _is_usable(endpoint, place[0]):
            try:
                return socket.create_server(place[:2], family=family, backlog=2048)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    log.warning(
        "%s is not an address of this node, so its store listens on all interfaces; name an address of "
        "the cluster's own network",
        endpoint,
    )
    both, place = socket.has_dualstack_ipv6(), ("", split_endpoint(endpoint)[1])
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(place, family=family, backlog=2048, dualstack_ipv6=both)


def addresses_of(endpoint: str) -> list[str]:
    """Return the IP addresses of an endpoint; empty if its name does not resolve."""
    return [place[0] for _, place in _places(endpoint)]


def address_towards(endpoint: str) -> str | None:
    """Return this node's address: of gloo's or NCCL's interface, else of the route to the endpoint."""
    interfaces = psutil.net_if_addrs()
    for variable in _INTERFACES:
        for place in interfaces.get(os.environ.get(variable, ""), ()):
            if place.family in (socket.AF_INET, socket.AF_INET6):
                return place.address
    for family, place in _places(endpoint):
        with socket.socket(family, socket.SOCK_DGRAM) as way:  # connecting UDP sends nothing
            try:
                way.connect(place)
            except OSError:
                continue
            own: str = way.getsockname()[0]
            if _is_usable(endpoint, own):
                return own
    return None


def _places(endpoint: str) -> list[tuple[socket.AddressFamily, Any]]:
    try:
        found = socket.getaddrinfo(*split_endpoint(endpoint), type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [(family, place) for family, _, _, _, place in found]


def _is_usable(endpoint: str, address: str) -> bool:
    host, _ = split_endpoint(endpoint)
    return not ipaddress.ip_address(address).is_loopback or host == "localhost" or host == address


def _check_pods(count: int, pods: int, nproc: int) -> None:
    if count != pods:
        raise ConfigError(f"launch.nodes={count}, but the job has {pods} pods; leave launch.nodes out")
    if num_ranks() not in (pods, pods * nproc):
        said = f"launch.nproc={nproc} on {pods} pods, but WORLD_SIZE={num_ranks()}"
        raise ConfigError(f"{said}; use launch.nproc={num_ranks() // pods}")


def _number(variable: str, default: int, least: int = 1, most: int = 2**32 - 1) -> int:
    value = os.environ.get(variable) or str(default)
    if not (re.fullmatch("[0-9]{1,12}", value) and least <= int(value) <= most):
        said = f"{variable}={value} in the environment must be a number from {least} to {most}"
        raise ConfigError(f"{said}; correct or unset it")
    return int(value)


def _port() -> int:
    return _number("MASTER_PORT", 0, most=65_535)


def _nodes_of_step() -> int:
    return _number("SLURM_STEP_NUM_NODES", 1)


def _has_tasks_per_gpu() -> bool:
    return _number("SLURM_STEP_NUM_TASKS", 1) > _nodes_of_step()


def _step_name() -> str:
    return f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"


def _of_slurm(name: str) -> str:
    if not (value := os.environ.get(f"SLURM_{name}")):
        raise ConfigError(f"this process is in a Slurm step, but SLURM_{name} is not set; start it with srun")
    return value


def _slurm_endpoint() -> str:
    return f"{_slurm_hosts(_of_slurm('STEP_NODELIST'))[0]}:{_slurm_port()}"


def _slurm_port() -> int:
    job, step = (_number(f"SLURM_{name}_ID", 0, least=0) for name in ("JOB", "STEP"))
    return _FIRST_PORT + (job + 101 * step) % _PORTS


def _slurm_hosts(nodes: str) -> list[str]:
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    try:
        from submitit.slurm.slurm import SlurmJobEnvironment
    except ImportError:
        raise ConfigError(
            f"neither the command scontrol nor the package submitit is installed to expand {nodes}; "
            f"give a rendezvous address, e.g. launch.endpoint=node0:29500"
        ) from None
    return SlurmJobEnvironment().hostnames


def _is_this_machine(host: str) -> bool:
    names = ("localhost", socket.gethostname(), socket.getfqdn())
    return host in names or any(map(interface_of, addresses_of(f"{host}:0")))
