"""Sweeps (``-m``): hooks around each job, and before and after all jobs.

``graphmoe.command.hydra`` runs each job through `run_job` and calls `end_sweep` when Hydra has returned;
``graphmoe.train`` calls `record_folder` and `job_gpus`. Hydra calls `SweepReport` in the process that
starts the sweep. Jobs may run in other processes, so they report to it by files
(``graphmoe.command.sweep``).
"""

import contextlib
import logging
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from graphmoe.command.sweep import Job, JobStatus, read_job
from graphmoe.command.sweep.process import STOP_FILE, RunningSweep, SweepError
from graphmoe.config.masking import MASK, masked, masked_line, masked_overrides
from graphmoe.config.schema import ConfigError, DeviceChoice, RunConfig
from graphmoe.runtime.host.files import FileLock, replace_text
from graphmoe.runtime.host.signals import end_with_parent
from graphmoe.runtime.launch.nodes import is_first_node

log = logging.getLogger(__name__)

_SIDE_BY_SIDE = {"JoblibLauncher": "joblib", "LocalLauncher": "submitit_local"}
"""Launchers that start several jobs on this machine at once, and their names in Hydra."""

_LAUNCHER_LOGS = (
    "hydra._internal.core_plugins.basic_launcher",
    "hydra_plugins.hydra_joblib_launcher._core",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher",
)
"""Loggers of Hydra's launchers, which list the words of each job."""

POLL_S = 0.5
_begun: RunningSweep | None = None
_run_folder: str | None = None


class SweepReport(Callback):
    """Hydra callback of ``graphmoe.train`` only: delays making run folders; begins (checks, locks) sweeps."""

    def __init__(self, tool: str) -> None:
        self.tool = tool

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Stop Hydra from making the run folder before all checks, unless Hydra itself writes there."""
        global _run_folder
        hydra, _run_folder = config.hydra, None
        uses_folder = hydra.output_subdir is not None or hydra.job.chdir or hydra.job_logging.get("root")
        if self.tool != "graphmoe.train" or uses_folder:
            return
        with contextlib.suppress(OmegaConfBaseException), flag_override(hydra, ["readonly", "struct"], False):
            _run_folder = os.path.abspath(str(hydra.run.dir))  # what does not resolve Hydra will say
            hydra.run.dir = "."

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        global _begun
        for name in _LAUNCHER_LOGS:
            logging.getLogger(name).addFilter(_mask_record)
        if self.tool == "graphmoe.train" and is_first_node():
            _begun = RunningSweep.begin(config)


def restore_run_folder() -> None:
    """Set HydraConfig's folder back to the run's folder, which `SweepReport` hid from Hydra."""
    if _run_folder is not None and not in_sweep():
        hydra: Any = HydraConfig.get()
        with flag_override(hydra, ["readonly", "struct"], False):
            hydra.run.dir = hydra.runtime.output_dir = _run_folder


def end_sweep() -> int:
    """End the sweep: print its table, write its page; return 0, 1 for failed jobs, 130 after a signal."""
    global _begun
    sweep, _begun = _begun, None
    return sweep.end() if sweep else 0


def in_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


def check_single(resume: str | None) -> None:
    if resume is not None:
        raise ConfigError(
            f"sweep.resume={resume} continues a sweep, but this command is one run; add -m and the sweep's "
            f"overrides"
        )


def has_unfinished_jobs() -> bool:
    return _begun is not None and any(job.status is not JobStatus.finished for job in _begun.jobs())


def run_job(job: Callable[[], float | None], known: tuple[type[Exception], ...]) -> float | None:
    """Run a job of a sweep, unless it is finished already; return its value, None if it failed.

    An error is logged and stored in job.json. *Raises* KeyboardInterrupt to end the sweep after a signal,
    SweepError if the folder has another job.
    """
    hydra = HydraConfig.get()
    words = masked_overrides(OmegaConf.to_container(hydra.overrides.task, resolve=False))  # type: ignore[arg-type]
    record = Job(hydra.job.num, words, Path(hydra.runtime.output_dir))
    _mask_file(Path(hydra.sweep.dir) / "multirun.yaml")
    earlier = read_job(Path(hydra.runtime.output_dir))
    if earlier is not None:
        SweepError.unless_same(earlier, words)
        earlier.settle(earlier.status)  # its process may have died before it could say so
        if earlier.status is JobStatus.finished:
            _note(earlier)
            log.info("job %d is finished already", record.number)
            return earlier.value
    record.status = JobStatus.running
    _note(record)
    if (Path(hydra.sweep.dir) / STOP_FILE).exists():  # read after the write: see RunningSweep._stop
        _end(record, JobStatus.waiting)
        return None
    own_process, parent = _launcher() == "joblib", os.getppid()
    try:
        with _signals_of_a_job() if own_process else contextlib.nullcontext():
            value = job()
    except KeyboardInterrupt:
        _end(record, JobStatus.interrupted)
        if not own_process:
            raise
        if os.getppid() != parent:  # nobody waits for this process any more
            os._exit(130)
        return None  # what is raised here would end the jobs beside this one at once
    except Exception as error:
        if not isinstance(error, known):
            log.error("unexpected error in a job:\n%s", traceback.format_exc())
        record.error = masked(str(error) if isinstance(error, known) else repr(error))
        _end(record, JobStatus.failed)
        log.error("job %d failed: %s", record.number, record.brief_error)
        return None
    _end(record, JobStatus.written)
    return value


def _mask_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = masked(masked_line(record.getMessage())), None
    return True


def _mask_file(path: Path) -> None:
    if not path.is_file() or not is_first_node():
        return
    config = OmegaConf.load(path)
    environment, words = OmegaConf.select(config, "host.env"), config.hydra.overrides.task
    shown = masked_overrides(OmegaConf.to_container(words, resolve=False))  # type: ignore[arg-type]
    if shown == words and all(value == MASK for value in (environment or {}).values()):
        return
    config.hydra.overrides.task, config.hydra.job.override_dirname = shown, ",".join(shown)
    for name in environment or {}:
        environment[name] = MASK
    replace_text(path, OmegaConf.to_yaml(config), durably=True)


def record_folder(folder: Path) -> None:
    """Record the run's folder in job.json; no effect outside a sweep."""
    if in_sweep() and (job := read_job(Path(HydraConfig.get().runtime.output_dir))) is not None:
        assert job.path is not None
        job.run_folder = os.path.relpath(folder, job.path)
        _note(job)


@contextlib.contextmanager
def job_gpus(config: RunConfig) -> Iterator[dict[str, str]]:
    """Yield environment variables for a job's workers; waits for and leases ``launch.gpus_per_job`` GPUs.

    *Raises* ConfigError if parallel jobs would share GPUs.
    """
    count, workers = config.launch.gpus_per_job, config.launch.nproc
    shares = in_sweep() and config.run.device is DeviceChoice.cuda
    if shares and count is None and (launcher := _launcher()) is not None:
        raise ConfigError(
            f"hydra/launcher={launcher} runs jobs side by side, and each would take the same GPUs; "
            f"launch.gpus_per_job={workers} gives each job its own"
        )
    if not shares or count is None:
        yield {}
        return
    if workers > count:
        raise ConfigError(
            f"launch.nproc={workers} workers need a GPU each, and launch.gpus_per_job={count}; use "
            f"launch.gpus_per_job={workers} or launch.nproc={count}"
        )
    if workers < count:
        idle = f"launch.nproc={workers} leaves {count - workers} of the launch.gpus_per_job={count} GPUs"
        log.warning("%s of this job are idle; launch.nproc=auto uses all of them", idle)
    with lease_gpus(count) as environment:
        yield environment


@contextlib.contextmanager
def lease_gpus(count: int) -> Iterator[dict[str, str]]:
    """Yield environment variables that show ``count`` GPUs that no other job leases; waits for them.

    All processes must name GPUs alike, by number or UUID. *Raises* ConfigError if fewer are visible.
    """
    import torch

    visible = visible_gpus(os.environ, torch.cuda.device_count())
    if count > len(visible):
        valid = f"use at most {len(visible)}" if visible else "leave it out"
        raise ConfigError(
            f"launch.gpus_per_job={count} is more than the visible GPUs, {len(visible)}; {valid}"
        )
    # one folder of locks for each user and Slurm job, which may number GPUs from 0
    slurm = f"-slurm-{os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    leases = _wait_for(count, visible, Path(tempfile.gettempdir(), f"graphmoe-gpus-{os.getuid()}{slurm}"))
    try:
        chosen = ",".join(leases)
        log.info("this job has GPU %s", chosen)
        yield dict.fromkeys(_variables(), chosen)
    finally:
        for lock in leases.values():
            lock.release()


def visible_gpus(environment: Mapping[str, str], count: int) -> list[str]:
    """Return the GPUs that this process may use, by CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES."""
    for name in reversed(_variables()):
        if name in environment:
            named = [word.strip() for word in environment[name].split(",")]
            return [word for word in named if word][:count]
    return [str(index) for index in range(count)]


def _variables() -> list[str]:
    import torch

    return ["CUDA_VISIBLE_DEVICES", *(["HIP_VISIBLE_DEVICES"] if torch.version.hip else [])]


def _wait_for(count: int, visible: Sequence[str], folder: Path) -> dict[str, FileLock]:
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} is not this user's, and GPUs are leased there; remove it, or set TMPDIR")
    if (leases := _try_to_take(count, visible, folder)) is None:
        log.info("waiting until %d of the GPUs %s are free", count, ",".join(visible))
    while leases is None:
        time.sleep(POLL_S)
        leases = _try_to_take(count, visible, folder)
    return leases


def _try_to_take(count: int, visible: Sequence[str], folder: Path) -> dict[str, FileLock] | None:
    """Return locks of ``count`` GPUs, or None. Only one process tries at a time: two could each get half."""
    gate = FileLock.acquire(folder / "gate.lock", wait=True)
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


def _launcher() -> str | None:
    return _SIDE_BY_SIDE.get(HydraConfig.get().launcher._target_.rpartition(".")[2])


def _end(record: Job, status: JobStatus) -> None:
    assert record.path is not None
    job = read_job(record.path) or record  # with the folder that the run has noted there
    job.status, job.error = status, record.error
    if not record.error:
        job.settle(JobStatus.interrupted if status is JobStatus.written and job.summary else status)
    _note(job)


def _note(job: Job) -> None:
    if is_first_node():
        job.write()


@contextlib.contextmanager
def _signals_of_a_job() -> Iterator[None]:
    # Only SIGTERM stops a job beside others, from the sweep's process or, once that is gone, from the system;
    # Ctrl-C would reach all processes of the terminal's group at once, idle ones too.
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    previous = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, _end_with_parent),
    }
    end_with_parent(signal.SIGHUP)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_with_parent(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is sent for each thread of a parent that is gone
    os.kill(os.getpid(), signal.SIGTERM)
