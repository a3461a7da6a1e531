"""Turns of a node's ranks at equal graphs: one compiles, the others wait and use torch's caches."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch import fx

log = logging.getLogger(__name__)

PATIENCE_S = 1800.0
"""Seconds after which a rank compiles what it waits for."""
_COMPILED = "compiled"


@dataclass
class Turn:
    """A rank's turn at one graph."""

    elsewhere: bool = False
    """True where another rank has compiled the graph for this job."""
    compiles: bool = True
    """False where this rank begins the graph and has found it compiled."""


class CompileTurns:
    """One file for each graph in a folder of this job and node, which its first rank there makes.

    Ranks that compile different graphs, as in a pipeline or for a device of another number, do not wait.
    """

    def __init__(self, folder: Path, patience_s: float = PATIENCE_S) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._patience_s = folder, patience_s

    @contextmanager
    def turn(self, graph: fx.GraphModule) -> Iterator[Turn]:
        """Compile the graph inside: at once if no rank has begun it, else when that rank is done."""
        begun = self._folder / fingerprint(graph)
        done, draft = begun.with_suffix(".done"), begun.with_suffix(".draft")
        try:
            os.close(os.open(begun, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            yield Turn(elsewhere=self._wait_for(done))
            return
        turn = Turn()
        try:
            yield turn
        finally:
            with suppress(OSError):  # what is raised inside says more
                draft.write_text(_COMPILED if turn.compiles else "found")
                draft.replace(done)

    def _wait_for(self, done: Path) -> bool:
        """Wait, and tell whether the rank that began the graph has compiled it."""
        end = time.monotonic() + self._patience_s
        while not done.exists():
            if time.monotonic() > end:
                log.warning("waited %.0f s for another rank's code; compiling it here", self._patience_s)
                return False
            time.sleep(0.01)
        return done.read_text() == _COMPILED


def fingerprint(graph: fx.GraphModule) -> str:
    """Return a hash of operations and incoming tensors, equal on ranks whose code is equal."""
    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    tensors = [(tuple(v.shape), v.stride(), str(v.dtype), str(v.device)) for v in values]
    return hashlib.sha256(f"{graph.graph}\n{tensors}".encode()).hexdigest()[:24]
