"""Checksums of token files, verified on opening or during training.

Each process checks files up to ``SMALL_BYTES`` on opening; a thread of one process per node checks larger
ones, so training does not wait.
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError
from graphmoe.config.untrusted import FileError, read_text
from graphmoe.data.cache import META, SMALL_BYTES, sums_of
from graphmoe.data.errors import DataError
from graphmoe.data.indexed import TokenFile, pair, read_token_file
from graphmoe.runtime.host.files import sha256_of

log = logging.getLogger(__name__)

SUMS = ".sha256"  # suffix of checksum files, in sha256sum's format
BLOCK_BYTES = 64 << 10
MAX_BLOCKS = 1024  # most blocks hashed of a corpus without checksums: 64 MiB; smaller ones are hashed whole
_SUM = re.compile(r"\\?([0-9a-f]{64}) [ *](.+)")


class ContentCheck:
    """Thread that checks files against their checksums; ``close`` ends it."""

    def __init__(self, files: Iterable[TokenFile] = ()) -> None:
        self._files = {path: file for file in files if not file.compared for path in pair(file.path)}
        self._found: DataError | None = None
        self._raised = self._done = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graphmoe-contents", daemon=True)
        if self._files:
            self._thread.start()

    def raise_damage(self) -> None:
        """Raise DataError if a damaged file was found so far."""
        if self._found is not None:
            self._raised = True
            raise self._found

    def close(self) -> None:
        """Stop the thread; log a warning about unchecked or damaged files."""
        if not self._files:
            return
        self._closed.set()
        self._thread.join()
        if self._found is not None and not self._raised:
            log.warning("%s", self._found)
        elif self._found is None and not self._done:
            log.warning("%s: not all of it was compared with its sha256", next(iter(self._files)))

    def _run(self) -> None:
        for path, file in self._files.items():
            assert file.sums is not None
            try:
                found = _sha256_of(path, self._closed.is_set)
            except DataError as error:
                self._found = error
                return
            if self._closed.is_set():
                return
            if found != file.sums[path.name]:
                what = "its sha256 differs from when it was written (steps of this run may have read it)"
                self._found = damaged(file, f"{path}: {what}")
                return
        self._done = True
        log.info("data: sha256 verified of %s", number_of(len(self._files), "file"))


def read_entry_file(entry: Path, name: str) -> TokenFile:
    """Open a cache entry's token file. *Raises* DataError; the next start rebuilds a damaged entry."""
    sums = sums_of(entry)
    with entry_damage(entry):
        if missing := {path.name for path in pair(entry / name)} - sums.keys():
            raise DataError(f"{entry / META} does not name {min(missing)}")
        file = read_token_file(entry / name, sums=sums, entry=entry)
        compared = all(path.stat().st_size <= SMALL_BYTES for path in pair(entry / name))
        return dataclasses.replace(file, compared=compared)


def read_summed_file(prefix: Path, *, compare: bool) -> TokenFile:
    """Open a token file; with ``compare``, check it against its checksum file, if any. *Raises* DataError."""
    sums_path = pair(prefix)[0].with_suffix(SUMS)
    if not os.path.lexists(sums_path):
        return read_token_file(prefix)
    sums = _read_sums(sums_path)
    for path in pair(prefix):
        if path.name not in sums:
            raise DataError(f"{sums_path} has no checksum of {path.name}; write it again, or remove it")
    file = dataclasses.replace(read_token_file(prefix, sums=sums), compared=compare)
    for path in pair(prefix) if compare else ():
        if _sha256_of(path) != sums[path.name]:
            raise DataError(f"{path}: its sha256 differs from that in {sums_path.name}; restore the file")
    return file


def _sha256_of(path: Path, stops: Callable[[], bool] = lambda: False) -> str:
    try:
        return sha256_of(path, stops)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error


def write_sums(prefix: Path) -> None:
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in pair(prefix)]
    pair(prefix)[0].with_suffix(SUMS).write_text("".join(lines), encoding="utf-8")


def contents_of(files: Sequence[TokenFile]) -> str:
    """Return a hash of the files' tokens: of their checksums if all have them, else of sampled blocks."""
    digest = hashlib.blake2b(digest_size=16)
    summed = all(file.sums for file in files)
    for file in files:
        digest.update(f"{file.tokens_T.dtype.str}:{len(file.tokens_T)}:".encode())
        if summed:
            assert file.sums is not None
            digest.update(file.sums[file.path.name].encode())
            continue
        file.require_whole()
        raw = file.tokens_T.view(np.uint8)
        blocks = max(1, MAX_BLOCKS // len(files))
        if len(raw) <= blocks * BLOCK_BYTES:
            digest.update(raw.data)
            continue
        # evenly spaced: detects another file, not every flipped bit
        for start in np.linspace(0, len(raw) - BLOCK_BYTES, blocks, dtype=np.int64):
            digest.update(raw[start : start + BLOCK_BYTES].data)
    return f"{'sha256' if summed else 'blocks'}:{digest.hexdigest()}"


def damaged(file: TokenFile, what: str) -> DataError:
    return DataError(f"{what}; restore the file") if file.entry is None else damaged_entry(file.entry, what)


def damaged_entry(entry: Path, what: str) -> DataError:
    with contextlib.suppress(OSError):
        (entry / META).unlink(missing_ok=True)
        return DataError(f"{what}: it is damaged; run the same command again to rebuild it")
    return DataError(f"{what}: it is damaged; remove {entry} and start again")


@contextlib.contextmanager
def entry_damage(entry: Path) -> Iterator[None]:
    try:
        yield
    except (DataError, ConfigError) as error:
        raise damaged_entry(entry, str(error)) from error


def _read_sums(path: Path) -> dict[str, str]:
    try:
        lines = read_text(path).splitlines()
    except FileError as error:
        raise DataError(str(error)) from error
    found = [_SUM.fullmatch(line) for line in lines]
    if None in found:
        number = found.index(None)
        raise DataError(f"{path}:{number + 1}: {lines[number][:80]!r} is not a line of sha256sum")
    return {Path(match[2]).name: match[1] for match in found if match}
