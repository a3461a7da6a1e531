"""Small answers that processes must agree on, such as the fastest kernel: the first that is kept holds."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from graphmoe.runtime.cache.blobs import read_document
from graphmoe.runtime.cache.entries import process_name
from graphmoe.runtime.cache.key import Facts, key_of

log = logging.getLogger(__name__)


class Choices:
    """``choices/<hash>.json`` in the folder of a cache."""

    def __init__(self, cache: Path) -> None:
        self._folder, self._damaged = cache / "choices", cache / "damaged"

    def recall(self, name: str, facts: Facts) -> Any | None:
        """The answer, or None."""
        return read_document(self._path(name, facts), lambda found: found["answer"], self._damaged)

    def remember(self, name: str, facts: Facts, answer: Any) -> Any:
        """Keep an answer that is not None, unless there is one; returns the one that holds."""
        document = {"name": name, "facts": dict(facts), "answer": answer}
        try:
            self._write_first(self._path(name, facts), json.dumps(document, indent=1))
        except OSError as error:
            log.warning("compile cache: the answer for %s cannot be kept: %s", name, error)
        holds = self.recall(name, facts)
        return answer if holds is None else holds

    def _path(self, name: str, facts: Facts) -> Path:
        return self._folder / f"{key_of({'name': name, 'facts': dict(facts)})}.json"

    def _write_first(self, path: Path, text: str) -> None:
        """Write the file as a whole unless it is there. *Raises* OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f"{process_name()}.draft"
        try:
            draft.write_text(text, encoding="utf-8")
            _link(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def _link(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links: of two at the same moment the last one holds
        if not path.exists():
            draft.replace(path)
