"""The process that starts a sweep: its checks, its signals, and its summary at the end."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.text import Text

from graphmoe.command.sweep import (
    SWEEP_FILE,
    Job,
    JobStatus,
    identity_of,
    jobs_of,
    ranked,
    read_object,
    varying_overrides,
)
from graphmoe.command.sweep.page import Words, split_word, write_sweep_page
from graphmoe.config.arguments import emit, text_table
from graphmoe.config.masking import masked_overrides
from graphmoe.config.schema import OutputFormat
from graphmoe.run.files import SweepRecord, display_path, hydra_value, write_json
from graphmoe.runtime.host.files import FileLock
from graphmoe.runtime.host.signals import NOTICES, ends_at_signals, heard, say
from graphmoe.runtime.launch.nodes import num_nodes

PAGE_FILE = "sweep.html"
STOP_FILE = "sweep.stop"
_LOCK_FILE = "sweep.lock"


class SweepError(BaseException):
    """Error that ends the whole sweep; after an Exception in one job, Hydra would start the next."""

    @classmethod
    def unless_same(cls, earlier: Job, now: Sequence[str]) -> None:
        was, is_now = identity_of(earlier.overrides), identity_of(now)
        old, new = (" ".join(sorted(words)) or "no such word" for words in (was - is_now, is_now - was))
        if was != is_now:
            raise cls(
                f"job {earlier.number} of this sweep was run with {old}, now it has {new}; repeat the "
                f"sweep's overrides, or start another sweep without sweep.resume"
            )


@dataclass
class RunningSweep:
    """A sweep that this process has started, and whose folder it has locked."""

    folder: Path
    format: OutputFormat
    planned: list[list[str]]
    _lock: FileLock
    _stopping: bool = False
    _signals: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @classmethod
    def begin(cls, config: DictConfig) -> RunningSweep:
        """Lock the sweep's folder, return the sweep. *Raises* SweepError if the folder is another sweep's."""
        resume, planned = config.sweep.resume, _planned_jobs(config)
        folder, lock = _take_folder(config, planned)
        (folder / STOP_FILE).unlink(missing_ok=True)
        if resume is None:
            write_json(folder / SWEEP_FILE, {"command": _command(), "jobs": []})
        sweep = cls(folder, config.format, planned, lock)
        if config.hydra.launcher._target_.endswith(".JoblibLauncher"):
            for number in heard():
                sweep._signals.callback(signal.signal, number, signal.signal(number, sweep._stop))
        else:
            sweep._signals.enter_context(ends_at_signals())
        return sweep

    def jobs(self) -> list[Job]:
        begun = {job.number: job for job in jobs_of(self.folder)}
        waiting = {n: Job(n, words) for n, words in enumerate(self.planned) if n not in begun}
        return [job for _, job in sorted({**begun, **waiting}.items())]

    def end(self) -> int:
        self._signals.close()
        jobs = self.jobs()
        for job in jobs:
            gone = job.pid == os.getpid() or not psutil.pid_exists(job.pid)
            if job.status is JobStatus.running and job.host == socket.gethostname() and gone:
                job.settle(JobStatus.interrupted)
                job.write()
        if any(job.path for job in jobs):
            self._report(jobs)
        else:  # refused before the first job
            (self.folder / SWEEP_FILE).unlink(missing_ok=True)
        (self.folder / STOP_FILE).unlink(missing_ok=True)
        self._lock.release()
        if self._stopping:
            return 130
        return 0 if all(job.status in (JobStatus.finished, JobStatus.written) for job in jobs) else 1

    def _report(self, jobs: list[Job]) -> None:
        words = varying_overrides(jobs)
        command = _command(resume=self.folder)
        documents = [_document(job, words[job.number]) for job in jobs]
        begun = read_object(self.folder / SWEEP_FILE, SweepRecord) or {}
        whole = {"command": begun.get("command"), "resume": command, "jobs": documents}
        write_json(self.folder / SWEEP_FILE, whole)
        emit(documents, sweep_table(ranked(jobs), words), self.format)
        write_sweep_page(self.folder / PAGE_FILE, str(begun.get("command")), ranked(jobs), words)
        print(f"curves: {display_path(self.folder / PAGE_FILE)}", file=sys.stderr)
        if any(job.status is not JobStatus.finished for job in jobs):
            print(f"to go on with what is not finished: {command}", file=sys.stderr)
        for text in dict.fromkeys(job.error for job in jobs if job.error):
            failed = [(job.number, " ".join(words[job.number])) for job in jobs if job.error == text]
            names = ", ".join(f"job {number} ({own})" if own else f"job {number}" for number, own in failed)
            print(f"error: {names}: {text}", file=sys.stderr)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the jobs that run in parallel, and start no others.

        A job records that it runs before it looks for the stop file, so none is missed.
        """
        if self._stopping and number in NOTICES:
            return
        if self._stopping:
            raise KeyboardInterrupt
        self._stopping = True
        (self.folder / STOP_FILE).touch()
        running = {job.pid for job in jobs_of(self.folder) if job.status is JobStatus.running}
        for child in psutil.Process().children():
            if child.pid in running:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.terminate()
        name = signal.Signals(number).name
        say(f"{name}: ending when the running jobs have saved; again ends them at once")


def _take_folder(config: DictConfig, planned: Sequence[Sequence[str]]) -> tuple[Path, FileLock]:
    hydra: Any = config.hydra
    folder = Path(hydra.sweep.dir).absolute()
    is_given = config.sweep.resume or any(w.startswith("hydra.sweep.dir=") for w in hydra.overrides.hydra)
    # On several nodes each names the folder for itself, so none can take another.
    is_fixed = is_given or num_nodes() > 1
    for number in itertools.count(1):
        found = folder.with_name(f"{folder.name}-{number}") if number > 1 else folder
        try:
            _check_folder(found, config.sweep.resume, planned)
            found.mkdir(parents=True, exist_ok=True)
            if lock := FileLock.acquire(found / _LOCK_FILE):
                break
            raise SweepError(f"{found} belongs to a sweep that is still running")
        except SweepError:
            if is_fixed:
                raise
    if number > 1:  # jobs compose their configuration from the overrides
        with flag_override(hydra, ["readonly", "struct"], False):
            hydra.sweep.dir = str(found)
            hydra.overrides.hydra.append(f"hydra.sweep.dir={hydra_value(str(found))}")
    assert lock is not None
    return found, lock


def _check_folder(folder: Path, resume: str | None, planned: Sequence[Sequence[str]]) -> None:
    earlier = jobs_of(folder) if folder.is_dir() else []
    if resume is None:
        if earlier:
            raise SweepError(
                f"hydra.sweep.dir={folder} holds a sweep already; {_resume(folder)} continues it, another "
                f"folder starts a new one"
            )
        return
    if Path(resume).expanduser().absolute() != folder:
        raise SweepError(f"sweep.resume={resume} is not hydra.sweep.dir={folder}; leave hydra.sweep.dir out")
    if read_object(folder / SWEEP_FILE, SweepRecord) is None:
        raise SweepError(
            f"sweep.resume={resume} is not a sweep's folder: it has no {SWEEP_FILE}; name one that a command "
            f"with -m has made, multirun/<run.name>/<time> by default"
        )
    for job in earlier:
        if job.number < len(planned):
            SweepError.unless_same(job, planned[job.number])


def _planned_jobs(config: DictConfig) -> list[list[str]]:
    if not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
        return []
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    try:
        words: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        overrides = parser.parse_overrides([*params, *words])
        return [masked_overrides(job) for job in BasicSweeper.split_arguments(overrides, None)[0]]
    except HydraException:  # the sweeper will say it
        return []


def _command(resume: Path | None = None) -> str:
    words = [word for word in masked_overrides(sys.argv[1:]) if not word.startswith("sweep.resume=")]
    words += [_resume(resume)] if resume else []
    return shlex.join(["python", "-m", "graphmoe.train", *words])


def _resume(folder: Path) -> str:
    return f"sweep.resume={hydra_value(display_path(folder))}"


def _document(job: Job, words: Sequence[str]) -> dict[str, Any]:
    return {
        "job": job.number,
        "status": job.status.value,
        "overrides": job.overrides,
        "differs_by": list(words),
        "value": job.value,
        "error": job.error,
        **(job.summary or {}),
    }


_NUMBERS: dict[str, tuple[str, str]] = {
    "val loss": ("final_val_loss", ".4f"),
    "loss": ("final_loss", ".4f"),
    "tokens/s": ("median_tokens_per_s", ",.0f"),
    "steps": ("steps", "d"),
}


def sweep_table(jobs: Sequence[Job], words: Words) -> Group:
    rows, keys = list[dict[str, str]](), dict[str, None]()
    for job in jobs:
        found, own = job.summary or {}, dict(map(split_word, words[job.number]))
        known = ((name, found.get(key), form) for name, (key, form) in _NUMBERS.items())
        numbers = {name: format(value, form) for name, value, form in known if value is not None}
        rows.append({"job": str(job.number), **own, **numbers, "state": job.status.value})
        keys |= dict.fromkeys(own)
    heads = ["job", *keys, *(name for name in _NUMBERS if any(name in row for row in rows)), "state"]
    short = [name.rpartition(".")[2] for name in heads]  # lr for optim.lr, if no other key ends so
    shown = [s if short.count(s) == 1 else name for s, name in zip(short, heads, strict=True)]
    cells = [[row.get(name, "") for name in heads] for row in rows]
    styles = ["red" if job.status is JobStatus.failed else None for job in jobs]
    table = text_table(shown, cells, names=range(len(heads) - 1), styles=styles, box=SIMPLE_HEAD)
    errors = [Text(f"job {job.number} failed: {job.brief_error}", "red") for job in jobs if job.error]
    return Group(table, *errors)
