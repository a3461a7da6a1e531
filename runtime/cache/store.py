"""Compile cache: output of torch and Triton, stored by content for later jobs (docs/compile.md).

Each job compiles in its own work folder, which starts with verified files of earlier jobs. Nothing is locked
during compilation, and a process may die at any time.
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphmoe.runtime.cache.blobs import Blobs, make_folder, read_document, write_whole
from graphmoe.runtime.cache.entries import Entries, Entry
from graphmoe.runtime.cache.folders import TEMPORARY, make_cache, point_torch_at
from graphmoe.runtime.cache.key import Facts, differences, key_of, may_share
from graphmoe.runtime.cache.work import WorkFolder
from graphmoe.runtime.host.files import make_process_folder, make_temporary_folder, remove_dead

__all__ = ["CompileCache", "WorkFolder", "point_torch_at"]

log = logging.getLogger(__name__)


class CompileCache:
    """Cache in one folder; processes may share it."""

    def __init__(self, folder: Path | None, *, shared: bool = False) -> None:
        """Without a folder nothing is stored or found. ``shared``: a new folder is group-writable."""
        self._shared = shared
        self.folder = folder.absolute() if folder is not None else None
        nowhere = self.folder or Path(os.devnull)  # below which there are no files
        self.blobs, self.entries = Blobs(nowhere), Entries(nowhere)

    def open(self, facts: Facts, places: Sequence[str] = ()) -> WorkFolder:
        """Return a work folder with the verified files of these facts, else of the nearest with the same
        base.

        Torch uses files of equal graphs. ``places``: folders of traced graphs, only from an entry of these
        facts. If the cache is damaged, read-only or full, the work folder is temporary. *Raises* OSError if
        that fails too.
        """
        ours: dict[str, Any] = json.loads(json.dumps(dict(facts)))  # as in a document
        entry = self.entries.read(key_of(ours))
        others = [] if entry else [other for other in self.entries if other.files]
        source = entry or _nearest(ours, [other for other in others if may_share(ours, other.facts)])
        work = self._filled(ours, source, places if entry else None)
        near = _nearest(ours, others)
        work.differences = differences(ours, near.facts) if near else []
        if entry:
            self.entries.touch(entry.key)
        return work

    def remember(self, name: str, facts: Facts, answer: Any) -> Any:
        """Store a small plain value; return the first one stored."""
        if self.folder is None:
            return answer
        path, document = self._answer(name, facts), {"name": name, "facts": dict(facts), "answer": answer}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(document, indent=1).encode(), first=True)
        except OSError as error:
            log.warning("compile cache: the answer for %s cannot be kept: %s", name, error)
        holds = self.recall(name, facts)
        return answer if holds is None else holds

    def recall(self, name: str, facts: Facts) -> Any | None:
        path = self._answer(name, facts)
        return read_document(path, lambda found: found["answer"], path.parent.with_name("damaged"))

    def _answer(self, name: str, facts: Facts) -> Path:
        key = key_of({"name": name, "facts": dict(facts)})
        return (self.folder or Path(os.devnull)) / "choices" / f"{key}.json"

    def _filled(
        self, facts: dict[str, Any], source: Entry | None, places: Sequence[str] | None
    ) -> WorkFolder:
        if self.folder is not None:
            try:
                return self._filled_in(self.folder, facts, source, places)
            except OSError as error:
                problem = f"{self.folder} cannot be written ({error.strerror or error})"
                log.warning("compile cache: %s; what is compiled is not kept", problem)
        place = make_temporary_folder(TEMPORARY)
        work = WorkFolder(self.blobs, self.entries, key_of(facts), facts, *place, keeps=False)
        try:
            work.fill(source, places)
        except OSError as error:
            log.warning("compile cache: nothing can be taken from it: %s", error)
            work.clear()
        return work

    def _filled_in(
        self, folder: Path, facts: dict[str, Any], source: Entry | None, places: Sequence[str] | None
    ) -> WorkFolder:
        make_cache(folder, shared=self._shared)
        remove_dead(folder / "work")
        make_folder(folder / "work")
        place = make_process_folder(folder / "work")
        work = WorkFolder(self.blobs, self.entries, key_of(facts), facts, *place, keeps=True)
        try:
            work.fill(source, places)
        except OSError:
            work.close()
            raise
        return work


def _nearest(facts: Facts, entries: Sequence[Entry]) -> Entry | None:
    def distance(entry: Entry) -> tuple[int, float]:
        return len(differences(facts, entry.facts)), -entry.last_used

    return min(entries, key=distance, default=None)
