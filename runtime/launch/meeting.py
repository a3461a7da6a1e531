"""Rendezvous stores of a run's nodes and ranks."""

import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from graphmoe.runtime.host.signals import LAUNCHER_PID
from graphmoe.runtime.launch.failures import RunFailed
from graphmoe.runtime.launch.nodes import Nodes, address_towards, addresses_of, listen_at, split_endpoint
from graphmoe.runtime.ranks import COLLECTIVE_TIMEOUT

log = logging.getLogger(__name__)

MEETING_S = 900  # that nodes, and ranks, wait for each other
_ANSWER_S = 30.0  # for a store to answer and name its run, which its host writes at once
_SILENT_S = 5.0
_TRY_S, _TURN_S = 0.1, 0.02
_RUN = "graphmoe/run"


@contextmanager
def store_of_nodes(nodes: Nodes) -> Iterator[None]:
    """Host the nodes' rendezvous store on the first node; connect to it from others. *Raises* RunFailed."""
    endpoint, run, instead = nodes.endpoint, f"{nodes.job} of {nodes.count} nodes", "use a port that is free"
    # elastic's own store would listen on all interfaces
    if nodes.is_first:
        store = _host(endpoint, run, f"launch.endpoint={endpoint}: this node cannot listen there", instead)
    else:
        _await_host(endpoint, "the first node", nodes.address, says=True)
        store = _join(endpoint, run, instead)
    time.sleep(_TURN_S * store.add(f"{_RUN}/nodes", 1))  # elastic's nodes overwrite one entry, and retry
    yield
    del store


def store_of_ranks(rank: int, size: int, endpoint: str, run: str, instead: str) -> TCPStore:
    """Return the ranks' store, without a password; rank 0 hosts it and waits for all. *Raises* RunFailed."""
    run, is_alone = f"{run or 'without a name'} of {size} ranks", LAUNCHER_PID not in os.environ
    if rank == 0:
        store = _host(endpoint, run, f"rank 0 cannot listen at {endpoint}", instead)
    else:
        says = is_alone and os.environ["LOCAL_RANK"] == "0"
        _await_host(endpoint, "rank 0", address_towards(endpoint), says=says)
        store = _join(endpoint, run, instead)
    store.set_timeout(COLLECTIVE_TIMEOUT)
    if store.add(f"{_RUN}/{rank}", 1) > 1:  # two runs without names, which `_join` cannot tell apart
        raise RunFailed(f"two processes claim to be rank {rank} of the run at {endpoint}; {instead}")
    missing = [*range(size if rank == 0 else 0)][::-1]

    def late() -> str:
        while missing and store.check([f"{_RUN}/{missing[-1]}"]):
            missing.pop()
        return f"rank {missing[-1]} of {size} has not" if missing else ""

    _wait(late, f"all ranks to connect to {endpoint}", says=is_alone)
    return store


def _host(endpoint: str, run: str, failed: str, instead: str) -> TCPStore:
    try:
        listener = listen_at(endpoint)
    except OSError as error:
        raise RunFailed(f"{failed} ({os.strerror(error.errno or 0)}); {instead}") from error
    host, port = listener.getsockname()[:2]
    host, listening = "localhost" if host in ("0.0.0.0", "::") else host, listener.detach()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
    store.set(_RUN, run)
    return store


def _await_host(endpoint: str, who: str, own: str | None, *, says: bool) -> None:
    place = ", ".join(dict.fromkeys(addresses_of(endpoint))) or "a name without an address"
    event = f"{who} to listen at {endpoint} ({place}), an address of its node; this node is"
    _wait(lambda: _refusal(endpoint), f"{event} {own or platform.node()}", says=says)


def _wait(problem: Callable[[], str], event: str, *, says: bool) -> None:
    began = time.monotonic()
    while why := problem():
        waited = time.monotonic() - began
        if waited > MEETING_S:
            raise RunFailed(f"waited {MEETING_S / 60:.0f} minutes in vain for {event}: {why}")
        if says and waited > _SILENT_S:
            says = False
            log.warning("waiting for %s: %s", event, why)
        # signals interrupt this wait, and not torch's own
        time.sleep(_TRY_S)


def _refusal(endpoint: str) -> str:
    try:
        with socket.create_connection(split_endpoint(endpoint), timeout=_SILENT_S / 2) as peer:
            peer.settimeout(_TRY_S)
            with suppress(TimeoutError):  # a store waits for a request; proxies disconnect
                peer.recv(1)
                return "the server there closes the connection"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _join(endpoint: str, run: str, instead: str) -> TCPStore:
    found: list[tuple[TCPStore | None, str]] = []
    (host, port), patience = split_endpoint(endpoint), timedelta(seconds=_ANSWER_S)

    def ask() -> None:
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
            found.append((store, store.get(_RUN).decode(errors="replace")))
        except DistError as error:
            found.append((None, str(error).partition("\n")[0]))

    # in a thread: torch has no timeout for a peer that is not a store
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SILENT_S)
    if asking.is_alive():
        own = address_towards(endpoint) or platform.node()
        log.warning("waiting for the server at %s to answer as a store; this node is %s", endpoint, own)
    asking.join(_ANSWER_S)
    store, said = found[0] if found else (None, "no answer")
    if store is None:
        raise RunFailed(f"the server at {endpoint} is not the store of a run ({said}); {instead}")
    if said != run:
        raise RunFailed(f"another run uses {endpoint}: {said}, but this is {run}; {instead}")
    return store
