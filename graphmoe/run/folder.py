"""Choice of a run's folder.

``claim`` locks a folder until the process ends, so two live runs never write to the same one.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import logging
import os
import reprlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from graphmoe.checkpoint import CHECKPOINTS, saved_steps
from graphmoe.checkpoint.mirror import Mirror
from graphmoe.config.masking import aligned, prints
from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError
from graphmoe.config.untrusted import FileError, load_yaml, read_text, read_yaml
from graphmoe.plan.experts import TRAINING_KEYS
from graphmoe.plan.rules.auto import SIZE
from graphmoe.run.files import CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, SUMMARY_FILE, display_path
from graphmoe.run.metrics_file import json_object
from graphmoe.run.stored import StoredRun, config_file
from graphmoe.runtime.host.files import FileLock, link_in, replace_text

log = logging.getLogger(__name__)

_LOCK_FILE = "run.lock"
_TRACES = (CONFIG_FILE, SUMMARY_FILE, METRICS_FILE, CHECKPOINTS)
_OF_TRAINING = (ENVIRONMENT_FILE, SUMMARY_FILE, METRICS_FILE, CHECKPOINTS)
# comment in resolved.yaml with a fingerprint of environment values, which it does not contain
_PRINTS = "# values from the environment: "
_MOST_LISTED, _MOST_KEYS = 3, 2  # unfinished runs named at start, and differing keys of each
_FREE_SECTIONS = ("format", "sweep")
# keys that may differ if a run is resumed
_FREE_KEYS = (
    *("checkpoint.mirror", "compile.cache", "compile.cache_dir", "compile.cache_shared", "data.cache_dir"),
    *("host.env", "host.gc_interval", "host.kernarg_pool_mb", "host.manual_gc", "host.max_hw_queues"),
    *("host.numa", "host.nvlink_multicast"),
    *("launch.endpoint", "launch.gpus_per_job", "launch.hang_timeout_s", "launch.max_restarts"),
    *("launch.write_only", "run.auto", "train.max_hours"),
)


@dataclass(frozen=True)
class RunFolder:
    """A folder locked by this process, and whether it continues a run."""

    path: Path
    base: Path
    resumed: bool
    _lock: FileLock
    _written: str | None = None
    """Text of the previous resolved.yaml, if nothing was trained with it."""

    def release(self) -> None:
        """Unlock the folder before the process ends."""
        self._lock.release()

    def abandon(self) -> None:
        """Unlock the folder; if nothing was trained, remove its resolved.yaml or restore the previous one."""
        if not self.resumed and not (self.path / ENVIRONMENT_FILE).exists():
            if self._written is None:
                (self.path / CONFIG_FILE).unlink(missing_ok=True)
            else:
                replace_text(self.path / CONFIG_FILE, self._written, durably=True)
        self.release()


def missing_place(base: Path) -> Iterator[str]:
    """Yield an error message if a run's folder cannot be created; checks its parents."""
    there = next(path for path in (base, *base.absolute().parents) if os.path.exists(path))
    if there != base and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        why = "cannot be written to" if there.is_dir() else "is not a folder"
        yield f"the run's folder {base} cannot be made ({there} {why}); use another hydra.run.dir=..."


def next_folder(base: Path, config: dict[str, Any], *, resume: bool) -> Path:
    """Return the folder that `claim` would lock, without locking it."""
    usable, ours = _usable(resume), _as_read(config)
    for path in _numbered(base):
        with contextlib.suppress(FileError, OSError):
            if _readable_state(path, ours) in usable:
                return path
    raise AssertionError("unreachable: _numbered never ends")


def claim(base: Path, config: dict[str, Any], *, resume: bool) -> RunFolder:
    """Lock the first of ``base``, ``base-2``, ... that is free, or that ``resume`` may continue.

    An unfinished run can be resumed if its configuration differs only in ``_FREE_KEYS``.
    """
    usable, ours = _usable(resume), _as_read(config)
    found = (_enter(path, base, config, ours, usable) for path in _numbered(base))
    return next(folder for folder in found if folder is not None)


def _usable(resume: bool) -> tuple[_State, ...]:
    return (_State.free, _State.unfinished) if resume else (_State.free,)


def earlier_values(base: Path, config: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return values of undecided ``keys`` in the run that ``config`` continues; empty without one.

    Of ``checkpoint.resume_from`` the size of micro-batches, else ``keys`` of the unfinished run that differs
    in nothing else.
    """
    ours, checkpoint = _as_read(config), config["checkpoint"]
    for path in itertools.takewhile(Path.exists, _numbered(base)) if checkpoint["resume"] else ():
        with contextlib.suppress(FileError, OSError):
            if _readable_state(path, ours) is _State.free:  # `claim` takes this one
                break
        theirs = _unfinished_config(path, ours)
        if theirs is not None and {key for key, *_ in _differences(theirs, ours)} <= {*keys}:
            places = {key: key.partition(".") for key in keys}
            return {key: theirs[section].get(name) for key, (section, _, name) in places.items()}
    source = config_file(Path(checkpoint["resume_from"])) if checkpoint["resume_from"] else None
    size = read_yaml(source, StoredRun).train.micro_batch_size if source and SIZE in keys else None
    return {SIZE: size} if size else {}


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write ``resolved.yaml`` for workers."""
    text, found = yaml.safe_dump(config, sort_keys=False), prints()
    replace_text(
        folder / CONFIG_FILE, text + (f"{_PRINTS}{json.dumps(found)}\n" if found else ""), durably=True
    )


def announce(folder: RunFolder, config: dict[str, Any]) -> None:
    """Log the chosen folder, and unfinished runs of other configurations.

    *Raises* ConfigError if its mirror is of another run.
    """
    _refuse_other_mirror(folder.path, config)
    has_run = folder.resumed and (folder.path / ENVIRONMENT_FILE).exists()
    saved = saved_steps(folder.path / CHECKPOINTS)
    how = " (continued)" if saved else " (again: it saved nothing)" if has_run else ""
    log.info("run folder: %s%s", display_path(folder.path), how)
    others, num_more = passed_over(folder.base, folder.path, config)
    for path, keys in others:
        more = [f"and {number_of(len(keys) - _MOST_KEYS, 'key')} more"] * (len(keys) > _MOST_KEYS)
        shown, differing = display_path(path), ", ".join([*keys[:_MOST_KEYS], *more])
        saved = saved_steps(path / CHECKPOINTS)
        how = _way_on(shown, keys) if saved else "it saved nothing"
        log.info("%s is an unfinished run of another configuration (%s); %s", shown, differing, how)
    if num_more:
        log.info("%s of this name are not listed", number_of(num_more, "older unfinished run"))


def _way_on(folder: str, differing: Sequence[str]) -> str:
    keys = {text.partition("=")[0] for text in differing} - {f"model.{key}" for key in TRAINING_KEYS}
    if any(key.startswith("model.") for key in keys):
        return "its weights are of another model"
    if keys & {"optim.name", "precision.compute"}:  # its checkpoints hold another state
        return f"checkpoint.init_from={folder} starts from its weights"
    return f"checkpoint.resume_from={folder} continues it"


def passed_over(base: Path, chosen: Path, config: dict[str, Any]) -> tuple[list[tuple[Path, list[str]]], int]:
    """Return the newest unfinished runs before ``chosen``, with their differing keys, and how many more."""
    ours = _as_read(config)
    before = list(itertools.takewhile(lambda path: path != chosen, _numbered(base)))[::-1]
    unfinished = [(path, theirs) for path in before if (theirs := _unfinished_config(path, ours)) is not None]
    found = []
    for path, theirs in unfinished[:_MOST_LISTED]:
        keys = [f"{key}={old}, here {new}" for key, old, new in _differences(theirs, ours)]
        if keys:  # none differ where the run is going on in another process
            found.append((path, keys))
    return found[::-1], len(unfinished[_MOST_LISTED:])


def _numbered(base: Path) -> Iterator[Path]:
    return itertools.chain([base], (base.with_name(f"{base.name}-{n}") for n in itertools.count(2)))


def _as_read(config: dict[str, Any]) -> Any:
    return load_yaml(yaml.safe_dump(config))


def _read_config(path: Path, ours: Any) -> dict[str, Any]:
    found = read_yaml(path, dict[str, Any])
    return aligned(found, ours, json_object(read_text(path).rpartition(_PRINTS)[2]) or {})


def _differences(theirs: Any, ours: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        if theirs != ours:
            yield key, _brief(theirs), _brief(ours)
        return
    for name in dict.fromkeys([*ours, *theirs]):
        inner = f"{key}.{name}" if key else str(name)
        if inner not in (*_FREE_SECTIONS, *_FREE_KEYS):
            yield from _differences(theirs.get(name), ours.get(name), inner)


def _brief(value: Any) -> str:
    text = reprlib.repr(value) if isinstance(value, dict | list) else str(value)
    return f"{text[:18]}...{text[-18:]}" if len(text) > 40 else text


def _enter(
    path: Path, base: Path, config: dict[str, Any], ours: Any, usable: tuple[_State, ...]
) -> RunFolder | None:
    """Lock and set up the folder if its state is ``usable``, else return None. *Raises* ConfigError."""
    if _state(path, ours) not in usable:
        return None
    is_new = not path.exists()
    _refuse_links(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock.acquire(path / _LOCK_FILE)
    except OSError as error:
        if is_new:
            why = error.strerror or error
            raise ConfigError(f"the run's folder {path} cannot be made ({why})") from error
        log.warning("%s cannot hold this run, so another folder is tried: %s", path, error)
        return None
    if lock is None:
        log.info("%s belongs to a run that is still running", path)
        return None
    state = _state(path, ours)  # again: it may have changed before we got the lock
    if state not in usable:
        lock.release()
        return None
    has_config = (path / CONFIG_FILE).exists()
    try:
        written = read_text(path / CONFIG_FILE) if state is _State.free and has_config else None
        write_config(path, config)  # of a resumed run too: its free keys may have changed
    except OSError as error:
        lock.release()
        raise ConfigError(f"{path / CONFIG_FILE} cannot be written ({error.strerror or error})") from error
    return RunFolder(path, base, state is _State.unfinished, lock, written)


def _refuse_links(folder: Path) -> None:
    """Raise ConfigError for a link in a run's folder, through which a run would write elsewhere."""
    # old checkpoints may be links, which are removed as links; W&B's own code writes the other folder
    if link := link_in(folder, (CHECKPOINTS, "wandb")):
        raise ConfigError(
            f"{link} is a link, and a run writes through none, as its folder may be a stranger's; "
            f"replace it, or make the whole folder {folder} a link"
        )


def _refuse_other_mirror(folder: Path, config: dict[str, Any]) -> None:
    checkpoint, saved = config["checkpoint"], folder / CHECKPOINTS
    if not checkpoint["mirror"]:
        return
    mirror, has_steps = Mirror(checkpoint["mirror"], saved), False
    differing = [f"it has no {CONFIG_FILE}"]
    with contextlib.suppress(Exception), tempfile.NamedTemporaryFile() as file:  # loading tells of others
        has_steps = bool(mirror.steps())
        file.write(mirror.fetch_file(CONFIG_FILE))
        file.flush()
        ours = _as_read(config)
        found = _differences(_read_config(Path(file.name), ours), ours)
        differing = [key for key, *_ in found if key != "checkpoint.resume"]
    if has_steps and (differing or not (checkpoint["resume"] or saved_steps(saved))):
        how = "another configuration" if differing else "an earlier run"
        how += f" ({', '.join(differing[:_MOST_KEYS])})" * bool(differing)
        raise ConfigError(
            f"checkpoint.mirror={checkpoint['mirror']} holds checkpoints of {how} in {mirror.folder}; remove "
            "that folder, or use another mirror or run.name"
        )


class _State(enum.Enum):
    free = "holds no run"
    unfinished = "holds an unfinished run of the same configuration"
    taken = "holds anything else"


def _state(path: Path, ours: Any) -> _State:
    try:
        return _readable_state(path, ours)
    except (FileError, OSError) as error:
        log.warning("%s counts as a run of another configuration: %s", path, error)
        return _State.taken


def _readable_state(path: Path, ours: Any) -> _State:
    if path.exists() and not path.is_dir():
        return _State.taken
    if not any((path / name).exists() for name in _TRACES):
        return _State.free
    for name in (ENVIRONMENT_FILE, METRICS_FILE):
        file = path / name
        if file.exists() and not (file.is_file() and os.access(file, os.R_OK)):
            raise FileError(f"{file} cannot be read")
    if _is_finished(path / SUMMARY_FILE) or not (path / CONFIG_FILE).exists():
        return _State.taken
    theirs = _read_config(path / CONFIG_FILE, ours)
    if _trains_nothing(path, theirs):
        return _State.free
    is_other = any(_differences(theirs, ours))
    return _State.taken if is_other else _State.unfinished


def _trains_nothing(path: Path, config: dict[str, Any]) -> bool:
    launch = config.get("launch")
    if not isinstance(launch, dict) or not (launch.get("write_only") or launch.get("fake_world")):
        return False
    return not any((path / name).exists() for name in _OF_TRAINING)


def _unfinished_config(path: Path, ours: Any) -> dict[str, Any] | None:
    with contextlib.suppress(FileError, OSError):
        if (path / CONFIG_FILE).is_file() and not _is_finished(path / SUMMARY_FILE):
            theirs = _read_config(path / CONFIG_FILE, ours)
            return None if _trains_nothing(path, theirs) else theirs
    return None


def _is_finished(summary: Path) -> bool:
    if not summary.exists():
        return False
    document = json_object(read_text(summary))
    if document is None:
        log.warning("%s is not a JSON object; its run counts as unfinished", summary)
        return False
    return document.get("finished") is True
