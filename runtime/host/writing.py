"""Files of a run on a disk that may be full: what is lost there is told, and the run goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


class LineFile:
    """Whole lines at the end of a file; those that its disk does not take are lost, which it tells."""

    def __init__(self, path: Path, tell: Callable[[str], object] = log.warning) -> None:
        self._path, self._tell = path, tell
        self._descriptor: int | None = None
        self._lost = 0

    def append(self, lines: Sequence[str]) -> None:
        """Hand lines to the operating system, so that a kill loses none."""
        try:
            self._write("".join(f"{line}\n" for line in lines).encode("utf-8", errors="backslashreplace"))
        except OSError as error:
            if not self._lost:
                why = error.strerror or error
                self._tell(f"{self._path} takes no more lines ({why}): they are lost, and the run goes on")
            self._lost += len(lines)
            return
        lost, self._lost = self._lost, 0
        if lost:
            self._tell(f"{self._path} takes lines again; lost are {lost}")

    def close(self) -> None:
        """Close the file, and tell how many lines its end lacks."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        lost, self._lost = self._lost, 0
        if lost:
            self._tell(f"{self._path} lacks the last lines, {lost} of them")

    def _write(self, content: bytes) -> None:
        """Write all of it or, as far as the disk lets us, nothing: half a line would spoil the next one."""
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        if end and os.pread(self._descriptor, 1, end - 1) != b"\n":
            content = b"\n" + content
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError:
            os.ftruncate(self._descriptor, end)
            raise


def replace_text(path: Path, text: str) -> None:
    """Replace a file, whole at any moment; an error leaves nothing that takes room."""
    draft = path.with_suffix(".tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def dispensable(file: Path | str) -> Iterator[None]:
    """Let the block write a file; where the disk does not take it, the log says so and the run goes on."""
    try:
        yield
    except OSError as error:
        log.warning("%s is not written (%s); the run goes on", file, error.strerror or error)
