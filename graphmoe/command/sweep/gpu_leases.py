"""GPUs for jobs that run in parallel: each job leases some of this machine's GPUs for itself.

A GPU is leased by a lock on a file in a folder that all processes of the user share. The kernel unlocks it
when the process ends.
"""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from graphmoe.config.schema import ConfigError
from graphmoe.runtime.host.files import FileLock

log = logging.getLogger(__name__)

POLL_S = 0.5
_GATE = "gate.lock"


@contextlib.contextmanager
def lease_gpus(count: int) -> Iterator[dict[str, str]]:
    """Yield environment variables that show ``count`` GPUs that no other job leases; waits for them.

    All processes must name GPUs alike, by number or UUID. *Raises* ConfigError if fewer are visible.
    """
    visible = visible_gpus(os.environ, torch.cuda.device_count())
    if count > len(visible):
        valid = f"use at most {len(visible)}" if visible else "leave it out"
        raise ConfigError(
            f"launch.gpus_per_job={count} is more than the visible GPUs, {len(visible)}; {valid}"
        )
    leases = _wait_for(count, visible, lease_folder(os.environ))
    try:
        chosen = ",".join(leases)
        log.info("this job has GPU %s", chosen)
        yield dict.fromkeys(_variables(), chosen)
    finally:
        for lock in leases.values():
            lock.release()


def visible_gpus(environment: Mapping[str, str], count: int) -> list[str]:
    """Return the GPUs that this process may use, by CUDA_VISIBLE_DEVICES or a like variable."""
    for name in reversed(_variables()):
        if name in environment:
            named = [word.strip() for word in environment[name].split(",")]
            return [word for word in named if word][:count]
    return [str(index) for index in range(count)]


def lease_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the locks: one for each user and Slurm job, which may number GPUs from 0."""
    slurm = f"-slurm-{environment['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in environment else ""
    return Path(tempfile.gettempdir(), f"graphmoe-gpus-{os.getuid()}{slurm}")


def _variables() -> list[str]:
    return ["CUDA_VISIBLE_DEVICES", *(["HIP_VISIBLE_DEVICES"] if torch.version.hip else [])]


def _wait_for(count: int, visible: Sequence[str], folder: Path) -> dict[str, FileLock]:
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} is not this user's, and GPUs are leased there; remove it, or set TMPDIR")
    waited = False
    while (leases := _try_to_take(count, visible, folder)) is None:
        if not waited:
            log.info("waiting until %d of the GPUs %s are free", count, ",".join(visible))
        waited = True
        time.sleep(POLL_S)
    return leases


def _try_to_take(count: int, visible: Sequence[str], folder: Path) -> dict[str, FileLock] | None:
    """Return all locks or None. Only one process tries at a time: two could each get half and fail."""
    gate = FileLock.acquire(folder / _GATE, wait=True)
    assert gate is not None
    try:
        leases: dict[str, FileLock] = {}
        for gpu in visible:
            if len(leases) < count and (lock := FileLock.acquire(folder / f"{gpu.replace('/', '-')}.lock")):
                leases[gpu] = lock
        if len(leases) == count:
            return leases
        for lock in leases.values():
            lock.release()
        return None
    finally:
        gate.release()
