"""CheckpointStore: saves a run's state by step and loads the newest intact checkpoint."""

from __future__ import annotations

import functools
import logging
import operator
import shutil
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from graphmoe.checkpoint import folders
from graphmoe.checkpoint.contents import Write, read_entries, value_names, write_entries, write_here
from graphmoe.checkpoint.entries import Entries, HostCopies, differences, flatten, merge, own_share
from graphmoe.checkpoint.folders import CheckpointError, MismatchError, damage, write_manifest
from graphmoe.checkpoint.metadata_file import read_metadata
from graphmoe.checkpoint.mirror import Mirror, Updates
from graphmoe.checkpoint.saver import Saver
from graphmoe.config.progress import working
from graphmoe.config.ranges import number_of, shown_size
from graphmoe.config.schema import CheckpointConfig
from graphmoe.runtime.host.files import FileSum
from graphmoe.runtime.ranks import Ranks

log = logging.getLogger(__name__)


class CheckpointStore:
    """Checkpoints in one folder.

    Collective: every rank builds a store and makes the same calls. A plain tensor or value with the same name
    on several ranks is saved once; values that differ by rank need the rank in their name. Only one job at a
    time may write to a folder. Call `close`, or the last save may be lost.
    """

    def __init__(self, folder: Path, config: CheckpointConfig | None, only: int | None = None) -> None:
        """Open a store. ``config=None`` makes it read-only; ``only``: the one step to read."""
        self.folder = Path(folder)
        self._config, self._only = config, only
        self._ranks = Ranks()  # its own group: the background writer communicates during training
        self._copies = HostCopies()
        self._saver: Saver | None = None
        self._mirror = self._updates = None
        if config is not None and config.mirror:
            self._mirror, self._updates = Mirror(config.mirror, folder), Updates(config, folder)
        self._damaged: set[int] = set()
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        if config is not None:
            # no other job writes here, so leftovers are of dead processes
            self._ranks.on_first(lambda: folders.clean_leftovers(self.folder))

    @classmethod
    def open_any(cls, path: Path | str) -> CheckpointStore:
        """Open a run's folder, its ``checkpoints`` or one checkpoint to read. *Raises* CheckpointError."""
        folder, only = folders.locate(Path(path))
        store = cls(folder, None, only)
        if not store.latest():
            raise CheckpointError(folders.why_none(Path(path)))
        return store

    def latest(self) -> list[int]:
        """Return the steps of the checkpoints, newest first. Waits for a running save."""
        self.wait()
        if self._only is not None:
            return [self._only]
        return self._ranks.on_first(lambda: folders.saved_steps(self.folder))

    def to_resume(self) -> list[int]:
        """Return the steps of the checkpoints here and in the mirror, newest first.

        *Raises* CheckpointError if there are none here and the mirror cannot be read.
        """
        own = self.latest()
        return sorted({*own, *self._ranks.on_first(lambda: self._mirrored(own))}, reverse=True)

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False, skipped: int = 0) -> None:
        """Save nested dicts and lists of tensors, FlatShards and plain values.

        With ``async_save`` it returns once tensors are copied to the host (one device sync), and a process
        writes them; else or with ``wait`` once the checkpoint is on disk. Waits for the previous save. If the
        last ``skipped`` updates were skipped, checkpoints from before them are kept.

        *Raises* CheckpointError if this save or the previous background save failed; earlier checkpoints
        stay.
        """
        assert self._config is not None, "this store was opened to read"
        self.wait()
        entries = own_share(flatten(state), self._ranks)
        if not self._config.async_save or wait:
            self._write(step, entries, {}, skipped, write_here)
            return
        copies = self._copies.copy(entries.tensors)
        what = (step, entries, copies, skipped, self._write_beside)
        # a daemon does not keep the process alive, so `close` waits for it
        self._writer = threading.Thread(target=self._write_in_background, args=what, daemon=True)
        self._writer.start()

    def wait(self) -> None:
        """Wait for the background save; raise its error."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the last save, raise its error, end the processes and free host memory."""
        succeeds = sys.exc_info()[0] is None  # other ranks wait for an error of this one
        try:
            self.wait()
        except BaseException:
            succeeds = False
            raise
        finally:
            if self._updates:
                self._updates.end(waits=succeeds)
            self._copies.close()
            if self._saver is not None:
                self._saver.close()
                self._saver = None

    def load(self, state: dict[str, Any], step: int | None = None, *, partial: bool = False) -> int | None:
        """Fill ``state`` in place; return the step loaded, None without a checkpoint.

        A damaged checkpoint is logged, and replaced by the mirror's or else, unless ``step`` is given, the
        previous one is used. ``partial`` reads only what ``state`` names and casts to its dtypes.

        *Raises* CheckpointError if all are damaged, if ``step`` is missing, or with a list of mismatched
        entries; ``state`` is unchanged then.
        """
        steps = self.to_resume()
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}; it has {steps or 'none'}")
        if step is not None:
            steps = [step]
        for candidate in steps:
            lines = self._damage(candidate)
            fetch = functools.partial(self._fetch, candidate)
            if lines and self._mirror is not None and self._ranks.on_first(fetch):
                lines = self._damage(candidate)
            if not lines:
                self._read(candidate, state, partial)
                return candidate
            self._damaged.add(candidate)
            log.warning("checkpoint %s is damaged and not used: %s", self._path(candidate), "; ".join(lines))
        if steps:
            raise CheckpointError(
                f"{self.folder}: the checkpoints of steps {steps} are damaged, as the lines above say; "
                f"restore one, or start anew in another folder (run.name=...)"
            )
        return None

    def _path(self, step: int) -> Path:
        return folders.folder_of(self.folder, step)

    def _damage(self, step: int) -> list[str]:
        own = damage(self._path(step), share=self._ranks.rank, shares=self._ranks.size)
        return [line for lines in self._ranks.gather(own) for line in lines]

    def _mirrored(self, own: list[int]) -> list[int]:
        if self._mirror is None or self._config is None or not self._config.resume:
            return []
        try:
            return self._mirror.steps()
        except Exception as error:  # each file system has its own
            said = f"checkpoint.mirror={self._config.mirror} cannot be read ({error})"
            if not own:
                raise CheckpointError(
                    f"{said}, and {self.folder} has no checkpoint, so nothing tells whether there is one to "
                    "continue; restore the mirror, or start with checkpoint.resume=false"
                ) from error
            log.warning("%s; checkpoints of %s are used", said, self.folder)
            return []

    def _fetch(self, step: int) -> bool:
        path = self._path(step)
        if self._mirror is None or step not in self._mirrored([step]):
            return False
        try:
            with working(f"fetching {path} from its mirror"):
                self._mirror.fetch(step, self.folder)
        except Exception as error:
            log.warning("%s cannot be fetched from its mirror: %s", path, error)
            return False
        log.warning("%s was missing or damaged, and is fetched from its mirror", path)
        return True

    def _read(self, step: int, state: dict[str, Any], partial: bool) -> None:
        started = time.perf_counter()
        path = self._path(step)
        # one rank parses what has an entry for each part of each rank, and its pickle goes to the others
        wanted, saved = flatten(state), self._ranks.on_first(lambda: read_metadata(path))
        found = sorted(saved.state_dict_metadata)  # a bit for each: names of all ranks would be long
        own_bits = sum(1 << i for i, name in enumerate(found) if name in wanted.names)
        bits = functools.reduce(operator.or_, self._ranks.gather(own_bits))
        own = differences(wanted, saved, {n for i, n in enumerate(found) if bits >> i & 1}, partial=partial)
        _require_none(path, [line for lines in self._ranks.gather(own) for line in lines])
        values = value_names(saved)
        with working(f"reading {path}"):
            names = values & wanted.names if partial else values
            self._ranks.on_each(lambda: merge(state, read_entries(path, saved, wanted, names)))
        log.info("read %s: %s in %.2f s", path, shown_size(wanted.num_bytes), time.perf_counter() - started)

    def _write_beside(self, path: Path, parts: Iterable[bytes | Tensor]) -> FileSum:
        if self._saver is None or not self._saver.is_alive:
            assert self._copies.file is not None
            self._saver = Saver(self._copies.file.fileno())
        places = [part if isinstance(part, bytes) else self._copies.place(part) for part in parts]
        return FileSum(*self._saver.write(path, places))

    def _write(
        self, step: int, entries: Entries, copies: dict[str, Tensor], skipped: int, write: Write
    ) -> None:
        assert self._config is not None
        started = time.perf_counter()
        temporary: Path | None = None
        try:
            temporary = self._ranks.on_first(lambda: folders.make_temporary(self.folder, step))
            sums = self._ranks.gather(write_entries(temporary, entries, copies, self._ranks, write))
            merged = {name: value for part in sums for name, value in part.items()}
            self._ranks.on_first(functools.partial(self._publish, temporary, step, merged))
        except BaseException as error:
            if temporary is not None and self._ranks.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, Exception):
                raise CheckpointError(self._explain(step, entries, error)) from error
            raise
        gone = self._ranks.on_first(lambda: self._prune(step, skipped))
        seconds = time.perf_counter() - started
        size = shown_size(sum(each.num_bytes for each in merged.values()))
        log.info("saved %s: %s in %.2f s, deleted steps: %s", self._path(step), size, seconds, gone or "none")

    def _publish(self, temporary: Path, step: int, sums: dict[str, FileSum]) -> None:
        write_manifest(temporary, step, sums)
        folders.publish(temporary, step)
        self._damaged.discard(step)

    def _prune(self, step: int, skipped: int) -> list[int]:
        assert self._config is not None
        keep_last, keep_every = self._config.keep_last, self._config.keep_every
        held = self._updates.copied if self._updates else None
        gone = folders.prune(self.folder, step, keep_last, keep_every, self._damaged, skipped, held)
        if self._updates:
            self._updates.begin(step, self._damaged, skipped)
        return gone

    def _explain(self, step: int, entries: Entries, error: Exception) -> str:
        existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.is_dir())
        free = shutil.disk_usage(existing).free
        intact = folders.saved_steps(self.folder)
        needed = f"{shown_size(entries.num_bytes)} ({entries.num_bytes} bytes)"
        return (
            f"the checkpoint of step {step} could not be written to {self.folder}: {error}; this rank's part "
            f"needs {needed}, {shown_size(free)} are free there; "
            f"earlier checkpoints are intact: {intact or 'there were none'}"
        )

    def _write_in_background(self, *what: Any) -> None:
        try:
            self._write(*what)
        except BaseException as error:  # raised by the next wait()
            self._error = error


def check_fit(path: Path, state: dict[str, Any], *, partial: bool) -> None:
    """Raise the error that loading the newest checkpoint into ``state`` would raise; meta tensors suffice.

    Top-level keys that ``state`` lacks are ignored. No collective. *Raises* CheckpointError.
    """
    folder, only = folders.locate(path)
    steps = folders.saved_steps(folder) if only is None else [only]
    reasons = {each: damage(each, contents=False) for each in (folders.folder_of(folder, s) for s in steps)}
    if not reasons:
        raise CheckpointError(folders.why_none(path))
    whole = next((each for each, lines in reasons.items() if not lines), None)
    if whole is None:
        lines = "; ".join(line for lines in reasons.values() for line in lines)
        raise CheckpointError(f"{path} has damaged checkpoints only: {lines}")
    found = read_metadata(whole).state_dict_metadata
    sections = {name: entry for name, entry in found.items() if partial or name.partition(".")[0] in state}
    wanted = flatten(state)
    _require_none(whole, differences(wanted, Metadata(sections), wanted.names, partial=partial))


def _require_none(path: Path, differences: list[str]) -> None:
    if lines := list(dict.fromkeys(differences)):
        listed = folders.shortened(lines)
        raise MismatchError(f"{path} does not fit the state in {number_of(len(lines), 'entry')}:\n  {listed}")
