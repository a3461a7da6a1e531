"""Second copies of a run's checkpoints, in a folder or at a URL of fsspec.

In a folder a step gets its name by a rename, as in the run's folder. At a URL its manifest is written last
and removed first, so a step without one is not there. Files are compared with their SHA-256 on the way.
"""

import hashlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import IO, Any

from graphmoe.checkpoint import folders
from graphmoe.checkpoint.folders import MANIFEST, CheckpointError, files_in, folder_of
from graphmoe.checkpoint.saver import BLOCK_BYTES, Program, Saver, write_file
from graphmoe.config.schema import CheckpointConfig, ConfigError
from graphmoe.config.untrusted import LARGEST_BYTES
from graphmoe.runtime.host.files import FileSum, replace_text

log = logging.getLogger(__name__)

_PATIENCE_S = 300.0  # without a copied block, at the end of a run


class Mirror:
    """Checkpoints of one run below ``place``, a folder or URL. Methods raise what its file system raises."""

    def __init__(self, place: str, checkpoints: Path) -> None:
        """Open the mirror of a folder of checkpoints. *Raises* ConfigError if a URL's package is missing."""
        try:
            import fsspec
            from fsspec.implementations.local import LocalFileSystem

            self._fs, root = fsspec.core.url_to_fs(place)
        except (ImportError, ValueError, OSError) as error:
            why = " ".join(str(error).split())
            raise ConfigError(
                f"checkpoint.mirror={place} cannot be used ({why}); give a folder, or a URL whose package is "
                "installed, such as s3://bucket/folder with s3fs"
            ) from error
        run = folders.run_of(checkpoints.absolute())
        inside = run.is_relative_to(Path.cwd())  # runs of one name in several folders have a mirror each
        self.folder = Path(root, run.relative_to(Path.cwd() if inside else "/"))
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, newest first; contents are not verified."""
        self._fs.invalidate_cache()
        if not self._fs.isdir(str(self.folder)):
            return []
        found = (folders.step_of(Path(path)) for path in self._fs.ls(str(self.folder), detail=False))
        return sorted((step for step in found if step is not None and self._manifest(step)), reverse=True)

    def fetch(self, step: int, folder: Path) -> None:
        """Copy a step into a run's folder of checkpoints, in the place of a damaged one.

        *Raises* CheckpointError if it is damaged here too.
        """
        temporary = folders.make_temporary(folder, step)
        try:
            replace_text(temporary / MANIFEST, self._manifest(step).decode(), durably=True)
            for name, expected in files_in(temporary).items():
                with self._open(folder_of(self.folder, step) / name, "rb") as source:
                    _copy(source, temporary / name, Path.open, expected, lambda: None)
            folders.publish(temporary, step)
        except BaseException:
            folders.removed(temporary)
            raise

    def fetch_file(self, name: str) -> bytes:
        """Return a file beside the steps; empty if there is none."""
        return self._read(self.folder / name)

    def put(self, path: Path, step: int, check: Callable[[], object]) -> None:
        """Copy a whole checkpoint here. *Raises* CheckpointError if it is damaged."""
        target = final = folder_of(self.folder, step)
        if self._is_local:
            folders.clean_leftovers(self.folder)
            target = folders.make_temporary(self.folder, step)
        else:
            if self._manifest(step):
                self._fs.rm(str(final / MANIFEST))
            self._fs.makedirs(str(final), exist_ok=True)
        manifest = (path / MANIFEST).read_bytes()
        sums = {**files_in(path), MANIFEST: FileSum(hashlib.sha256(manifest).hexdigest(), len(manifest))}
        for name, expected in sums.items():  # the manifest last
            with (path / name).open("rb") as source:
                _copy(source, target / name, self._open, expected, check)
        if self._is_local:
            folders.publish(target, step)

    def remove(self, step: int) -> None:
        path = folder_of(self.folder, step)
        if self._is_local:
            folders.removed(path)
            return
        self._fs.rm(str(path / MANIFEST))
        self._fs.rm(str(path), recursive=True)

    def holds(self, path: Path, step: int) -> bool:
        return self._manifest(step) == (path / MANIFEST).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """Write a file beside the steps, if it differs."""
        if self._read(self.folder / name) != content:
            self._fs.makedirs(str(self.folder), exist_ok=True)
            self._fs.pipe_file(str(self.folder / name), content)

    def _manifest(self, step: int) -> bytes:
        return self._read(folder_of(self.folder, step) / MANIFEST)

    def _read(self, path: Path) -> bytes:
        try:
            with self._open(path, "rb") as file:
                return file.read(LARGEST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def _open(self, path: Path, mode: str) -> IO[bytes]:
        opened: IO[bytes] = path.open(mode) if self._is_local else self._fs.open(str(path), mode)
        return opened


def update(
    place: str, folder: str, newest: int, keep: tuple[int, int], passed_over: Sequence[int], skipped: int,
    check: Callable[[], object],
) -> list[str]:  # fmt: skip
    """Copy steps up to ``newest`` that the mirror lacks, then delete as `folders.prune` does.

    ``keep``: ``keep_last`` and ``keep_every``; ``passed_over``: damaged steps. Returns what failed.
    """
    own, failed = Path(folder), list[str]()
    mirror = Mirror(place, own)
    config = folders.run_of(own) / folders.RUN_CONFIG
    if config.is_file():
        mirror.write(config.name, config.read_bytes())
    for step in folders.saved_steps(own):
        path = folder_of(own, step)
        if step > newest or step in passed_over:
            continue
        try:
            if not mirror.holds(path, step):
                mirror.put(path, step, check)
        except FileNotFoundError:
            if path.exists():  # else the run deleted it meanwhile
                raise
        except CheckpointError as error:
            failed.append(f"{path.name}: {error}")
    for step in folders.not_kept(mirror.steps(), newest, *keep, frozenset(), skipped):
        mirror.remove(step)
    return failed


class Updates:
    """Updates of a mirror in a process of their own, one at a time. Failures are logged."""

    def __init__(self, config: CheckpointConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._process: Saver | None = None
        self.copied: int | None = None  # newest step of the update that runs
        self._next: dict[str, Any] | None = None

    def begin(self, newest: int, passed_over: Set[int], skipped: int) -> None:
        """Begin an update, or leave it to the next call if one runs still."""
        keep = (self._config.keep_last, self._config.keep_every)
        self._next = {"newest": newest, "keep": keep, "passed_over": [*passed_over], "skipped": skipped}
        self._go_on(0.0)

    def end(self, *, waits: bool) -> None:
        """End the process; if it ``waits``, after its updates, for as long as they copy."""
        while waits and (self._next is not None or self.copied is not None):
            self._go_on(_PATIENCE_S)
        if self._process is not None:
            self._process.close()
            self._process = None

    def _go_on(self, patience_s: float) -> None:
        place = self._config.mirror
        try:
            if self.copied is not None and self._process is not None:
                if self._process.has_answer(patience_s):
                    self.copied = None
                    for line in self._process.answer():
                        log.warning("checkpoint.mirror=%s: not copied: %s", place, line)
                elif patience_s:
                    raise TimeoutError(f"nothing was copied for {patience_s:g} s")
            if self.copied is None and self._next is not None:
                asked, self._next = self._next, None
                if self._process is None or not self._process.is_alive:
                    self._process = Saver(program=__file__)
                folder = str(self._folder.absolute())
                self._process.ask("update", place=place, folder=folder, **asked)
                self.copied = asked["newest"]
        except OSError as error:
            log.warning("checkpoint.mirror=%s failed, and the next save tries again: %s", place, error)
            self.copied = None
            if isinstance(error, (ConnectionError, TimeoutError)) and self._process is not None:
                self._process.close()
                self._process = None


def _copy(
    source: IO[bytes], to: Path, opener: Callable[[Path, str], Any], expected: FileSum,
    check: Callable[[], object],
) -> None:  # fmt: skip
    def blocks() -> Iterator[bytes]:
        num_bytes = 0
        while num_bytes <= expected.num_bytes and (block := source.read(BLOCK_BYTES)):
            num_bytes += len(block)
            yield block

    if write_file(to, blocks(), check, opener) != (expected.sha256, expected.num_bytes):
        raise CheckpointError(f"{to.name} is damaged")


if __name__ == "__main__":
    Program(*map(int, sys.argv[1:])).run(update=update)
