"""Files of a sweep: a job.json for each job, and sweep.json above them.

``<sweep>/sweep.json`` has the command and, once the sweep has ended, all of its jobs. The ``job.json`` in a
job's folder describes that job. Both files are replaced atomically.
"""

import enum
import json
import logging
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphmoe.config.untrusted import FileError, read_json
from graphmoe.run.files import SUMMARY_FILE, JobRecord, Summary
from graphmoe.run.metrics_file import value_of
from graphmoe.runtime.host.files import replace_text

log = logging.getLogger(__name__)

JOB_FILE = "job.json"
SWEEP_FILE = "sweep.json"
FREE_KEYS = ("format", "sweep.resume", "launch.gpus_per_job")
"""Keys that may differ between a sweep and its continuation."""


class JobStatus(enum.StrEnum):
    waiting = "not started"
    running = "running"  # if its process is gone, it was killed
    finished = "finished"
    failed = "failed"
    interrupted = "interrupted"  # by a signal
    written = "written"  # launch.write_only: nothing is trained


@dataclass
class Job:
    number: int
    overrides: list[str]
    path: Path | None = None  # None before it began
    status: JobStatus = JobStatus.waiting
    run_folder: str = "."
    value: float | None = None
    """Number that the sweep compares: the final validation loss, or without validation the final loss."""
    error: str | None = None
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)

    @property
    def folder(self) -> Path | None:
        return Path(os.path.normpath(self.path / self.run_folder)) if self.path else None

    @property
    def summary(self) -> dict[str, Any] | None:
        return read_object(self.folder / SUMMARY_FILE, Summary) if self.folder else None

    @property
    def brief_error(self) -> str:
        """First line of the error; if that is a heading, the second."""
        lines = [line.strip() for line in (self.error or "").splitlines() if line.strip()]
        if len(lines) > 1 and lines[0].endswith(":"):
            return lines[1]
        return lines[0] if lines else ""

    def settle(self, otherwise: JobStatus) -> None:
        """Set status and value from the summary if the run finished, else the status to ``otherwise``."""
        summary = self.summary or {}
        self.status = JobStatus.finished if summary.get("finished") else otherwise
        self.value = value_of(summary) if summary.get("finished") else self.value

    def write(self) -> None:
        assert self.path is not None
        kept = {name: value for name, value in vars(self).items() if name != "path"}
        replace_text(self.path / JOB_FILE, json.dumps(kept, indent=2) + "\n", durably=True)


def read_job(path: Path) -> Job | None:
    record = read_object(path / JOB_FILE, JobRecord)
    if record is None:
        return None
    try:
        return Job(**{**record, "path": path, "status": JobStatus(record["status"])})
    except ValueError as error:
        log.warning("%s: %s; the file is ignored", path / JOB_FILE, error)
        return None


def jobs_of(sweep: Path) -> list[Job]:
    found = [job for file in sweep.rglob(JOB_FILE) if (job := read_job(file.parent))]
    return sorted(found, key=lambda job: job.number)


def identity_of(overrides: Sequence[str]) -> set[str]:
    """Return the overrides by which a resumed sweep recognizes a job."""
    return {word for word in overrides if word.partition("=")[0].lstrip("+") not in FREE_KEYS}


def varying_overrides(jobs: Sequence[Job]) -> dict[int, list[str]]:
    """Return, by job number, the overrides that identify a job and that not all jobs share."""
    words = {job.number: identity_of(job.overrides) for job in jobs}
    common = set.intersection(*words.values()) if words else set()
    return {job.number: [w for w in job.overrides if w in words[job.number] - common] for job in jobs}


def ranked(jobs: Sequence[Job]) -> list[Job]:
    """Sort jobs: best value first, then finished without a value, failed, and unfinished ones."""
    order = [JobStatus.finished, JobStatus.written, JobStatus.failed]

    def place(job: Job) -> tuple[int, float, int]:
        group = order.index(job.status) if job.status in order else len(order)
        return group, job.value if job.value is not None else math.inf, job.number

    return sorted(jobs, key=place)


def read_object(path: Path, kind: type[Any]) -> dict[str, Any] | None:
    """Parse a JSON file as a ``TypedDict``; None if it is missing or, with a warning, invalid."""
    try:
        return read_json(path, kind) if path.exists() else None
    except FileError as error:
        log.warning("%s; the file is ignored", error)
        return None
