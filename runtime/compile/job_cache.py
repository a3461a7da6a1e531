"""Compile cache of one job: opened before the first compilation, published afterwards."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphmoe.config.ranges import number_of
from graphmoe.plan.layout import Layout
from graphmoe.runtime.cache.entries import GRAPHS
from graphmoe.runtime.cache.folders import is_users
from graphmoe.runtime.cache.key import EXTRA_PASS, base_of, key_of
from graphmoe.runtime.cache.store import CompileCache, WorkFolder, point_torch_at
from graphmoe.runtime.compile.code import CompileTurns
from graphmoe.runtime.compile.report import UnitReport
from graphmoe.runtime.ranks import Ranks
from graphmoe.runtime.torch_compat import set_key_tag, use_torchs_ptxas

log = logging.getLogger(__name__)

TORCHS_OWN = "TORCHINDUCTOR_CACHE_DIR"
"""If the user sets it, only torch's caches are used."""


class JobCache:
    """A job's part of the compile cache; the ranks of a node share one work folder."""

    def __init__(
        self, cache: CompileCache, facts: Mapping[str, Any], ranks: Ranks, layout: Layout | None
    ) -> None:
        """Open the cache: a collective of all ranks. ``facts`` are those of ``key.facts_of``.

        Graphs depend on a rank's position in ``layout``; None stores none.
        """
        from graphmoe.runtime.torch_compat.tuned_kernels import tune_each_kernel_once  # imports Inductor

        # Inductor's key does not cover the source of an operation's gradient, so the tag has our sources.
        set_key_tag(base_of(facts) + _extra_passes(facts))
        tune_each_kernel_once()
        use_torchs_ptxas()
        self._cache, self._ranks = cache, ranks
        self._work: WorkFolder | None = None
        self.graphs: Path | None = None
        """Folder of this rank's traced graphs."""
        self.found = "torch's own caches"
        self.turns: CompileTurns | None = None  # None if the node has one rank
        if is_users(TORCHS_OWN):
            self.why = f"torch's own caches in {TORCHS_OWN}={os.environ[TORCHS_OWN]} lack them"
            return
        of_node = range(ranks.rank - ranks.local_index, ranks.rank - ranks.local_index + ranks.local_size)
        places = [key_of({**asdict(layout), "rank": rank}) for rank in of_node] if layout else []
        path, self.why, keeps_graphs, self.found = ranks.on_first_of_node(lambda: self._open(facts, places))
        if places and keeps_graphs:
            self.graphs = path / GRAPHS / places[ranks.local_index]
        if ranks.local_index > 0:
            point_torch_at(path)
        if ranks.local_size > 1:
            self.turns = CompileTurns(path / "turns")

    def _open(self, facts: Mapping[str, Any], places: Sequence[str]) -> tuple[Path, str, bool, str]:
        """Return folder, reason of misses, whether to store graphs, and the cache's state."""
        self._work = work = self._cache.open(facts, places)
        work.activate()
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
        """Store what this node's ranks have compiled; a collective of all ranks. None may be compiling."""
        try:
            if self._work is not None:
                # compilers write libraries in place, so all ranks must have met before
                self._work.publish(notes)
        finally:
            self._ranks.barrier()

    def lines(self, reports: Sequence[UnitReport]) -> list[str]:
        graphs, found = sum(r.graphs for r in reports), sum(r.from_cache for r in reports)
        missed: dict[str, int] = {}
        for report in reports:
            missed[report.unit] = missed.get(report.unit, 0) + report.graphs - report.from_cache
        listed = [f"{unit} ({count})" for unit, count in missed.items() if count]
        line = f"compile cache: {found} of {graphs} graphs found"
        return [f"{line}; compiled {', '.join(listed)}: {self.why}"] if listed else [line]


def _extra_passes(facts: Mapping[str, Any]) -> str:
    extra = {name: value for name, value in facts.items() if name.startswith(EXTRA_PASS)}
    return key_of(extra) if extra else ""


def _why_compiled(work: WorkFolder) -> str:
    if work.damaged:
        return f"set aside: {number_of(len(work.damaged), 'damaged file')}"
    if work.found:
        return "no earlier run of this configuration came to them"
    if work.differences:
        return "; ".join(work.differences)
    return "the cache has no code of these sources, versions and this device"
