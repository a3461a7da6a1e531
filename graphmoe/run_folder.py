"""The folder of a run: which one a start may use, and its metrics after a resume.

``claim`` hands out a folder and holds its lock until the process ends, so that two live runs never
write to the same one.
"""

from __future__ import annotations

import enum
import itertools
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from graphmoe.checkpoint import CHECKPOINTS, saved_steps
from graphmoe.checkpoint.durable import write_durably
from graphmoe.file_lock import FileLock
from graphmoe.summary import shown

log = logging.getLogger(__name__)

CONFIG_FILE = "resolved.yaml"
SUMMARY_FILE = "summary.json"
ENVIRONMENT_FILE = "env.json"
"""Written when training begins."""
_LOCK_FILE = "run.lock"
_TRACES = (CONFIG_FILE, SUMMARY_FILE, "metrics.jsonl", "checkpoints")
_FREE_SECTIONS = ("format", "sweep")
_FREE_KEYS = (
    "compile.cache",
    "compile.cache_dir",
    "host.env",
    "host.gc_interval",
    "host.kernarg_pool_mb",
    "host.manual_gc",
    "host.max_hw_queues",
    "host.numa",
    "host.nvlink_multicast",
    "launch.endpoint",
    "launch.gpus_per_job",
    "launch.hang_timeout_s",
    "launch.max_restarts",
    "launch.write_only",
)
"""What makes no difference to which run a configuration stands for."""


@dataclass(frozen=True)
class RunFolder:
    """A folder that this process alone may write to, and whether it continues a run there."""

    path: Path
    base: Path
    """Where the search for a folder began."""
    resumed: bool
    _lock: FileLock

    def release(self) -> None:
        """Let another run claim the folder; without a call the end of the process does."""
        self._lock.release()

    def abandon(self) -> None:
        """Release the folder; a new one in which training has not begun is free again, with its log."""
        if not self.resumed and not (self.path / ENVIRONMENT_FILE).exists():
            (self.path / CONFIG_FILE).unlink(missing_ok=True)
        self.release()


def claim(base: Path, config: dict[str, Any], *, resume: bool) -> RunFolder:
    """The first of ``base``, ``base-2``, ``base-3``, ... that this run may use, locked.

    It may use one that holds no run, which then gets ``resolved.yaml``, and with ``resume`` one that
    holds an unfinished run of the same configuration. The format of the output, the folder of compiled
    code and the like make no difference to the configuration.
    """
    usable = (_State.free, _State.unfinished) if resume else (_State.free,)
    numbered = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    paths = itertools.chain([base], numbered)
    return next(folder for path in paths if (folder := _enter(path, base, config, usable)) is not None)


def is_free(path: Path) -> bool:
    """Whether a folder holds nothing of a run."""
    return not any((path / name).exists() for name in _TRACES)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write ``resolved.yaml``, which workers read."""
    write_durably(folder / CONFIG_FILE, yaml.safe_dump(config, sort_keys=False))


def announce(folder: RunFolder, config: dict[str, Any]) -> None:
    """Log which folder the run has, and which unfinished runs of other configurations it passed over."""
    has_run = folder.resumed and (folder.path / ENVIRONMENT_FILE).exists()
    saved = saved_steps(folder.path / CHECKPOINTS)
    how = " (continued)" if saved else " (again: it saved nothing)" if has_run else ""
    log.info("run folder: %s%s", shown(folder.path), how)
    for path, keys in passed_over(folder.base, folder.path, config):
        saved = saved_steps(path / CHECKPOINTS)
        how = f"checkpoint.resume_from={shown(path)} continues it" if saved else "it saved nothing"
        differences = ", ".join(keys)
        log.info("%s is an unfinished run of another configuration (%s); %s", shown(path), differences, how)


def passed_over(base: Path, chosen: Path, config: dict[str, Any]) -> list[tuple[Path, list[str]]]:
    """Unfinished runs of other configurations that ``claim`` passed over, and how they differ.

    Each difference reads 'key=theirs, here ours'.
    """
    found: list[tuple[Path, list[str]]] = []
    ours = _identity(yaml.safe_load(yaml.safe_dump(config)))
    for number in itertools.count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if path == chosen:
            return found
        if not (path / CONFIG_FILE).is_file() or _is_finished(path / SUMMARY_FILE):
            continue
        theirs = _identity(yaml.safe_load((path / CONFIG_FILE).read_text(encoding="utf-8")))
        keys = [key for key in ours if theirs.get(key) != ours[key]]
        if keys:  # none differ where the run is going on in another process
            found.append((path, [f"{key}={theirs.get(key)}, here {ours[key]}" for key in keys]))
    raise AssertionError("count has no end")


def _identity(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and values that tell one run from another."""
    if not isinstance(config, dict):
        return {prefix.removesuffix("."): config}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if f"{prefix}{key}" not in (*_FREE_SECTIONS, *_FREE_KEYS):
            flat |= _identity(value, f"{prefix}{key}.")
    return flat


def cut_metrics(path: Path, step: int) -> int:
    """Drop the rows after ``step`` and unreadable ones from a metrics.jsonl; how many went.

    The file is replaced atomically. A torn last line is what a kill leaves; other lines that are
    no JSON object are reported.
    """
    if not path.exists():
        return 0
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = text.removesuffix("\n").split("\n") if text else []
    kept, unreadable = [], []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is None:
            unreadable.append(number)
        elif row.get("step", step) <= step:
            kept.append(line)
    if unreadable and unreadable != [len(lines)]:
        log.warning("%s: dropped lines that are no JSON object: %s", path, unreadable)
    if len(kept) < len(lines) or not text.endswith("\n"):
        write_durably(path, "".join(f"{line}\n" for line in kept))
    return len(lines) - len(kept)


def _enter(path: Path, base: Path, config: dict[str, Any], usable: tuple[_State, ...]) -> RunFolder | None:
    """Lock a folder that is in a usable state and make it a run's; None for any other."""
    if _state(path, config) not in usable:
        return None
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock.take(path / _LOCK_FILE)
    if lock is None:
        log.info("%s belongs to a run that is going on", path)
        return None
    state = _state(path, config)  # again: it may have changed until the lock was ours
    if state not in usable:
        lock.release()
        return None
    write_config(path, config)  # of a resumed run too: what tells no run from another may have changed
    return RunFolder(path, base, state is _State.unfinished, lock)


class _State(enum.Enum):
    """What a folder means to a run that looks for one."""

    free = "holds no run"
    unfinished = "holds an unfinished run of the same configuration"
    taken = "holds anything else"


def _state(path: Path, config: dict[str, Any]) -> _State:
    if path.exists() and not path.is_dir():
        return _State.taken
    if is_free(path):
        return _State.free
    if _is_finished(path / SUMMARY_FILE) or not (path / CONFIG_FILE).is_file():
        return _State.taken
    return _State.unfinished if _same(path / CONFIG_FILE, config) else _State.taken


def _is_finished(summary: Path) -> bool:
    if not summary.is_file():
        return False
    document = _row(summary.read_text(encoding="utf-8"))
    if document is None:
        log.warning("%s is no JSON object; its run counts as unfinished", summary)
        return False
    return document.get("finished") is True


def _same(path: Path, config: dict[str, Any]) -> bool:
    try:
        theirs = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        log.warning("%s is no YAML and counts as another configuration: %s", path, error)
        return False
    ours = yaml.safe_load(yaml.safe_dump(config))  # as it looks after the same way through a file
    return isinstance(theirs, dict) and _identity(theirs) == _identity(ours)


def _row(text: str) -> dict[str, Any] | None:
    try:
        row = json.loads(text)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
