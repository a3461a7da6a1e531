"""Compile cache of one job: opened before the first compilation, published afterwards."""

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphmoe.config.ranges import number_of
from graphmoe.plan.layout import Layout
from graphmoe.runtime.cache.entries import GRAPHS
from graphmoe.runtime.cache.folders import is_users, point_torch_at
from graphmoe.runtime.cache.key import EXTRA_PASS, base_of, key_of
from graphmoe.runtime.cache.store import CompileCache
from graphmoe.runtime.cache.work import WorkFolder
from graphmoe.runtime.compile.code import CompileTurns
from graphmoe.runtime.ranks import Ranks
from graphmoe.runtime.torch_compat import set_key_tag, tune_each_kernel_once, use_torchs_ptxas

log = logging.getLogger(__name__)

TORCHS_OWN = "TORCHINDUCTOR_CACHE_DIR"  # if the user sets it, only torch's caches are used


class JobCache:
    """A job's part of the compile cache; the ranks of a node share one work folder."""

    def __init__(
        self, cache: CompileCache, facts: Mapping[str, Any], ranks: Ranks, layout: Layout | None
    ) -> None:
        """Open the cache. Collective. Traced graphs are stored by rank in ``layout``; None: not stored."""
        # Inductor's key does not cover the source of an operation's gradient, so the tag has our sources
        extra = {name: value for name, value in facts.items() if name.startswith(EXTRA_PASS)}
        set_key_tag(base_of(facts) + (key_of(extra) if extra else ""))
        tune_each_kernel_once()
        use_torchs_ptxas()
        self._cache, self._ranks = cache, ranks
        self._work: WorkFolder | None = None
        self.graphs: Path | None = None  # folder of this rank's traced graphs
        self.found = "torch's own caches"
        self.turns: CompileTurns | None = None  # None if the node has one rank
        if is_users(TORCHS_OWN):
            self.why = f"torch's own caches in {TORCHS_OWN}={os.environ[TORCHS_OWN]} lack them"
            return
        of_node = range(ranks.rank - ranks.local_index, ranks.rank - ranks.local_index + ranks.local_size)
        places = [key_of({**dataclasses.asdict(layout), "rank": rank}) for rank in of_node] if layout else []
        path, self.why, keeps_graphs, self.found = ranks.on_first_of_node(lambda: self._open(facts, places))
        if places and keeps_graphs:
            self.graphs = path / GRAPHS / places[ranks.local_index]
        if ranks.local_index > 0:
            point_torch_at(path)
        if ranks.local_size > 1:
            self.turns = CompileTurns(path / "turns")

    def _open(self, facts: Mapping[str, Any], places: Sequence[str]) -> tuple[Path, str, bool, str]:
        # folder, reason of misses, whether to store graphs, and the cache's state
        self._work = work = self._cache.open(facts, places)
        point_torch_at(work.path)
        found = "no cache: compile.cache=false"
        if self._cache.folder:
            found = "cache miss"
        if work.num_files:
            entry = work.shared_from or work.key
            state = "cache hit" if work.found else "cache of another configuration"
            files = number_of(work.num_files, "file")
            found = f"{state} ({files}, {work.num_bytes / 1e6:.0f} MB of entry {entry})"
        why = _why_compiled(work) if self._cache.folder else "compile.cache=false"
        return work.path, why, work.keeps or work.found, found

    def publish(self, notes: Mapping[str, Any]) -> None:
        """Store what this node's ranks have compiled. Collective; no rank may be compiling."""
        try:
            if self._work is not None:
                self._work.publish(notes)
        finally:
            self._ranks.barrier()


def _why_compiled(work: WorkFolder) -> str:
    if work.damaged:
        return f"set aside: {number_of(len(work.damaged), 'damaged file')}"
    if work.found:
        return "no earlier run of this configuration compiled them"
    if work.differences:
        return "; ".join(work.differences)
    return "the cache has no code of these sources, versions and this device"
