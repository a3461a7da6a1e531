"""Ports of a run and the machines that reach them: other machines are a network namespace of their own."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from graphmoe.config.schema import LaunchConfig
from graphmoe.runtime.launch import nodes
from tests.faults import STEP_S
from tests.faults import WORDS as FAULTY
from tests.runs import ROOT, TINY, summary

WORDS = (*TINY, *FAULTY, "train.steps=400", "launch.nproc=2", "hydra.run.dir=run")
PORT = 29517
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


class Network:
    """A wire to a namespace: this side has the first addresses of two networks, the other the second ones."""

    def __init__(self) -> None:
        self.name = f"gm{secrets.token_hex(3)}"
        third = 16 + secrets.randbelow(200)
        self.here, self.beside = f"10.201.{third}.1", f"10.202.{third}.1"
        self.there = f"10.201.{third}.2"
        ip(f"netns add {self.name}")
        ip(f"link add {self.name}a type veth peer name {self.name}b netns {self.name}")
        for network in ("201", "202"):
            ip(f"address add 10.{network}.{third}.1/24 dev {self.name}a")
            ip(f"-n {self.name} address add 10.{network}.{third}.2/24 dev {self.name}b")
        ip(f"link set {self.name}a up")
        ip(f"-n {self.name} link set {self.name}b up")
        ip(f"-n {self.name} link set lo up")

    def inside(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def reaches(self, host: str, port: int) -> bool:
        command = self.inside(sys.executable, "-c", CONNECT, host, str(port))
        return subprocess.run(command, capture_output=True).returncode == 0


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    yield made
    ip(f"netns delete {made.name}")


@pytest.fixture
def start(tmp_path) -> Iterator:
    started: list[subprocess.Popen] = []

    def begin(*words: str, prefix: Sequence[str] = ()) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), STEP_S: "0.05"}
        line, pipe = [*prefix, sys.executable, "-m", "graphmoe.train", *WORDS, *words], subprocess.PIPE
        started.append(subprocess.Popen(line, cwd=tmp_path, env=environment, stderr=pipe, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.terminate()  # nothing if it has ended
        process.wait(60)


def wait_for_two_rows(folder: Path, *processes: subprocess.Popen) -> None:
    path, end = folder / "run" / "metrics.jsonl", time.monotonic() + 90
    while not path.exists() or path.read_bytes().count(b"\n") < 2:
        ended = [process for process in processes if process.poll() is not None]
        assert not ended and time.monotonic() < end, [process.communicate()[1] for process in ended]
        time.sleep(0.05)


def ports_of(process: subprocess.Popen) -> set[tuple[str, int]]:
    own = psutil.Process(process.pid)
    found = [each.net_connections() for each in (own, *own.children(recursive=True))]
    return {tuple(c.laddr) for all_of in found for c in all_of if c.status == psutil.CONN_LISTEN}


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_nobody_outside_reaches_a_run_on_one_node(tmp_path, network, start, restarts):
    run = start(f"launch.max_restarts={restarts}")
    wait_for_two_rows(tmp_path, run)
    listening = ports_of(run)
    assert listening and {host for host, _ in listening} == {"127.0.0.1"}
    for _, port in listening:
        assert not network.reaches(network.here, port)
        socket.create_connection(("127.0.0.1", port), 2).close()


@pytest.mark.slow
def test_two_nodes_listen_at_the_address_that_is_named_only(tmp_path, network, start):
    words = ("launch.nodes=2", f"launch.endpoint={network.here}:{PORT}", "train.global_batch_size=8")
    first, second = nodes = start(*words), start(*words, prefix=network.inside())
    wait_for_two_rows(tmp_path, *nodes)
    listening = ports_of(first)
    assert (network.here, PORT) in listening and {host for host, _ in listening} == {network.here}
    assert network.reaches(network.here, PORT)
    assert not any(network.reaches(network.beside, port) for _, port in listening)
    for node in nodes:
        node.terminate()
    said = [node.communicate(timeout=60)[1] for node in nodes]
    assert (first.returncode, second.returncode) == (128 + signal.SIGTERM, 0), said
    assert summary(tmp_path / "run")["stopped_by"] == "SIGTERM"


def nodes_at(endpoint: str):
    return nodes.find_nodes(LaunchConfig(nodes=2, endpoint=endpoint))


def test_a_node_is_reached_at_its_address_on_the_way_to_the_endpoint(network, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    there = nodes_at(f"{network.there}:{PORT}")
    assert (there.address, there.is_first) == (network.here, False)
    assert nodes.interface_of(network.here) == f"{network.name}a"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", f"{network.name}a")
    assert nodes_at(f"127.0.0.1:{PORT}").address == network.here
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert nodes_at(f"{network.there}:{PORT}").address == "127.0.0.1"


def test_a_name_that_stands_for_loopback_on_its_own_machine_names_no_address(monkeypatch, caplog):
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **named: real("127.0.1.1", *rest, **named))
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    here = nodes_at("node0:0")
    assert (here.address, here.is_first) == (None, True)
    with nodes.listen_at("node0:0") as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")
    assert "node0:0 is not an address of this node" in caplog.text
    with nodes.listen_at("localhost:0") as listener:
        assert listener.getsockname()[0] == "127.0.1.1"


def test_empty_variables_of_starters_count_as_not_set(monkeypatch):
    ranks = dict.fromkeys(("LOCAL_WORLD_SIZE", "WORLD_SIZE"), "2")
    places = []
    for empty in ((), ("SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE")):
        monkeypatch.setattr("os.environ", {**ranks, **dict.fromkeys(empty, "")})
        places.append((nodes.set_meeting_place(LaunchConfig()), nodes.run_name()))
    assert places[0] == places[1]
