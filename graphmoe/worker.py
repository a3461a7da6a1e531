"""Run one rank of a composed configuration: python -m graphmoe.worker outputs/tiny/resolved.yaml

python -m graphmoe.train starts it on each rank. By hand it replays a past run, on one rank, or on as many
as a torchrun of your own starts:

torchrun --nproc-per-node 8 -m graphmoe.worker outputs/tiny/resolved.yaml

Code that the file names as package.module:NAME is imported only if the command line names it after the file;
keys that choose programs, folders of code, trackers or a mirror likewise.
Modules that import torch are imported inside functions: a worker first arranges to die with its launcher.
"""

from __future__ import annotations

if __name__ == "__main__":  # before imports that take a third of a second
    from graphmoe.runtime.host.signals import exit_at_signals

    exit_at_signals()

import atexit
import dataclasses
import faulthandler
import gc
import logging
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from graphmoe.command.hydra import PROGRAMS, load_config
from graphmoe.config.arguments import answer_version, emit, print_error, typed_as, wants_help
from graphmoe.config.masking import masked, to_plain
from graphmoe.config.ranges import OWN_CODE
from graphmoe.config.schema import ConfigError, DeviceChoice, RunConfig
from graphmoe.run.files import CONFIG_FILE, PROJECTION_FILE, display_path, write_json
from graphmoe.run.metrics_file import render
from graphmoe.runtime.host.logs import FILE_ONLY, keep_streams, start_logging
from graphmoe.runtime.host.signals import (
    ELASTIC,
    FOLDER_HELD,
    LAUNCHER_PID,
    SIGNALS,
    SWEEP_JOB,
    Interrupted,
    StopSignal,
    die_with_launcher,
    ends_at_signals,
    exit_at_signals,
)
from graphmoe.runtime.launch.failures import RunFailed, set_flight_recorder, write_failure
from graphmoe.runtime.launch.nodes import num_ranks, run_name, set_meeting_place, started_by
from graphmoe.runtime.launch.stamps import begin_stamps, name_log_dir

if TYPE_CHECKING:
    from graphmoe.plan.plan import Plan
    from graphmoe.run.folder import RunFolder
    from graphmoe.runtime.host.environment import HostLine
    from graphmoe.runtime.ranks import Ranks

log = logging.getLogger(__name__)

LOGS = "logs"
# behind a file that names it: code, or a key of `chosen_programs`
TRUSTED = re.compile(rf"{OWN_CODE.pattern}|host\.env\.\w+|{'|'.join(map(re.escape, PROGRAMS))}")


def main() -> None:
    start_rank()
    try:
        started_by()
        path = _path(sys.argv[1:])
        config = load_config(path, set_environment_of, None if LAUNCHER_PID in os.environ else sys.argv[2:])
    except BaseException as error:
        _end(error, None)
    own = Path("outputs", config.run.name).absolute()
    train_as_rank(config, path.parent if path.name == CONFIG_FILE else own)


def start_rank() -> None:
    """Prepare this process to be a rank that its launcher watches and ends."""
    keep_streams()
    gc.disable()  # imports and tracing make no garbage to speak of, and collecting takes a quarter of them
    die_with_launcher()
    exit_at_signals()
    faulthandler.enable()
    begin_stamps()


def train_as_rank(config: RunConfig, base: Path) -> NoReturn:
    """Train as the rank named by the environment, in the launcher's folder or a new one; then exit."""
    log_dir: Path | None = None
    try:
        if config.train.epochs is not None:
            from graphmoe.training.start_checks import with_epochs

            config = with_epochs(config)
        ranks = join(config)
        with ends_at_signals():
            config, folder, claimed = _agree(config, base, ranks)
            log_dir = folder / LOGS
            name_log_dir(log_dir)
            if _has_flight_recorder(config):
                set_flight_recorder(log_dir)
            _train(config, folder, claimed, ranks)
    except BaseException as error:
        _end(error, log_dir)
    _leave()


def _path(words: Sequence[str]) -> Path:
    usage = "<resolved.yaml of a run> [package.module:NAME to import, or host.env.CXX to set ...]"
    usage = f"usage: {typed_as('graphmoe.worker')} {usage}"
    if wants_help(words):
        print(usage)
        sys.exit(0)
    answer_version(words)
    if not words or words[0].startswith("-") or not all(map(TRUSTED.fullmatch, words[1:])):
        raise ConfigError(f"expected one path, not {' '.join(words) or 'nothing'}; {usage}")
    return Path(words[0]).absolute()


def set_environment_of(config: RunConfig) -> None:
    from graphmoe.runtime.host.environment import set_environment

    set_environment(config.host, config.run.device)


def join(config: RunConfig) -> Ranks:
    """Return the ranks of this job, which the environment names. Collective. *Raises* RunFailed."""
    import torch
    import torch.distributed as dist

    from graphmoe.runtime.launch.meeting import store_of_ranks
    from graphmoe.runtime.ranks import COLLECTIVE_TIMEOUT, Ranks, backend_of, check_places, place_here

    if num_ranks() == 1:
        return Ranks()
    device = torch.device(config.run.device.value)
    if _has_flight_recorder(config):
        held = os.environ.get(FOLDER_HELD)
        set_flight_recorder(Path(held, LOGS) if held else None)
    backend, rank, size = backend_of(device), int(os.environ["RANK"]), num_ranks()
    if size > int(os.environ["LOCAL_WORLD_SIZE"]):
        # else each group of gloo connects each rank to all others, by n^2 operations of rank 0's store
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        with suppress(OSError, ValueError):  # the store has a connection to each rank
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    endpoint, instead = set_meeting_place(config.launch)
    try:
        if ELASTIC in os.environ and LAUNCHER_PID not in os.environ:  # torchrun has a store already
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        else:
            store = store_of_ranks(rank, size, endpoint, run_name(), instead)
            dist.init_process_group(
                backend, timeout=COLLECTIVE_TIMEOUT, store=store, rank=rank, world_size=size
            )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        why = str(error).partition("\n")[0]
        raise RunFailed(f"rank {rank} cannot connect to the others at {endpoint}: {why}") from error
    ranks = Ranks()
    check_places(ranks.gather(place_here()))
    return ranks


def _has_flight_recorder(config: RunConfig) -> bool:
    # gloo has no flight recorder
    return num_ranks() > 1 and config.run.device is DeviceChoice.cuda


def _agree(config: RunConfig, base: Path, ranks: Ranks) -> tuple[RunConfig, Path, RunFolder | None]:
    from graphmoe.run.folder import claim

    folders = ranks.gather(os.environ.get(FOLDER_HELD))
    if held := {rank: Path(folder) for rank, folder in enumerate(folders) if folder}:
        first, path = next(iter(held.items()))
        return ranks.on_first(lambda: config, first), path, None
    mine: list[RunFolder] = []

    def take() -> tuple[RunConfig, Path]:
        adapted = with_decided_keys(_adapted(config, ranks), base)
        mine.append(claim(base, to_plain(adapted), resume=adapted.checkpoint.resume))
        return adapted, mine[0].path

    agreed, folder = ranks.on_first(take)
    return agreed, folder, mine[0] if mine else None


def with_decided_keys(config: RunConfig, base: Path | None = None) -> RunConfig:
    """Return the configuration with automatic keys decided; a run that continues another keeps that one's."""
    from graphmoe.plan.rules.auto import undecided
    from graphmoe.run.folder import earlier_values
    from graphmoe.training.auto import decided

    keys = undecided(config)
    return decided(config, earlier=earlier_values(base, to_plain(config), keys) if base and keys else None)


def _adapted(config: RunConfig, ranks: Ranks) -> RunConfig:
    from graphmoe.plan.rules import check

    nodes = ranks.size // ranks.local_size
    launch = dataclasses.replace(config.launch, nproc=ranks.local_size, nodes=nodes)
    counted = dataclasses.replace(config, launch=launch)
    check(counted)
    if config.launch.nodes == "auto":
        launch.nodes = "auto"
    return counted


def _train(config: RunConfig, folder: Path, claimed: RunFolder | None, ranks: Ranks) -> None:
    import torch.distributed as dist

    from graphmoe.run.folder import announce
    from graphmoe.training.run import open_worker

    job = os.environ.get(SWEEP_JOB)
    start_logging(folder / LOGS, f"rank{ranks.rank}", on_console=ranks.is_first, job=job)
    try:
        plan, lines = open_worker(config, ranks)
        if claimed:
            announce(claimed, to_plain(config))
        summary = train_rank(plan, folder, ranks, lines)
        if claimed and LAUNCHER_PID not in os.environ:
            emit(summary, render(summary), config.format)
            if ranks.size == 1 and ELASTIC not in os.environ:  # launchers take a status for an error
                raise_if_stopped(summary)
    except BaseException:
        if claimed:
            claimed.abandon()
        raise
    if ranks.size > 1:
        ranks.barrier()
        dist.destroy_process_group()


def train_rank(plan: Plan, folder: Path, ranks: Ranks, host_lines: Sequence[HostLine] = ()) -> dict[str, Any]:
    """Train, and on rank 0 write projected memory before and the run's page after; return the summary."""
    from graphmoe.training.run import run_worker

    if ranks.is_first:
        write_projected_memory(folder, plan)
    summary = run_worker(plan, folder, ranks, host_lines)
    if summary and plan.log.report:
        with StopSignal():  # a signal is for what comes after this run
            leave_report(folder)
    return summary


def write_projected_memory(folder: Path, plan: Plan) -> None:
    """Write the projected memory to a run's folder; no error of a projection ends the run."""
    try:
        write_json(folder / PROJECTION_FILE, projected_memory(plan))
    except Exception as error:
        log.warning("no projected memory in the report: %s: %s", type(error).__name__, error)


def projected_memory(plan: Plan) -> dict[str, Any]:
    """Return GiB by kind for each pipeline position as ``places``, or the reason for none as ``why_not``."""
    import torch

    from graphmoe.plan.costs.sizes import refuse_unknown
    from graphmoe.training.memory import OUTSIDE_ALLOCATOR, memory_of_places

    try:
        refuse_unknown(plan.config)
        places = memory_of_places(plan.with_its_transport(), on_nvidia=torch.version.hip is None)
    except ConfigError as error:
        return {"why_not": masked(str(error))}
    return {"places": [place.kinds(2**30, OUTSIDE_ALLOCATOR) for place in places]}


def raise_if_stopped(summary: dict[str, Any]) -> None:
    """Raise Interrupted if SIGINT or SIGTERM ended a run early; a preemption notice is no error."""
    stopped = summary["stopped_by"]
    if not summary["finished"] and stopped in {number.name for number in SIGNALS}:
        raise Interrupted(signal.Signals[stopped])


def leave_report(folder: Path) -> None:
    """Write the run's page; log an error there with the command that makes the page later."""
    from graphmoe.report.page import MAX_TRACE_BYTES, write_report

    try:
        write_report(folder, max_trace_bytes=MAX_TRACE_BYTES)
    except Exception as error:
        log.warning("no report: %r. python -m graphmoe.report run=%s makes it", error, display_path(folder))


def _end(error: BaseException, log_dir: Path | None) -> NoReturn:
    if isinstance(error, SystemExit):
        raise error
    status = 2 if isinstance(error, ConfigError) else error.status if isinstance(error, RunFailed) else 1
    if isinstance(error, KeyboardInterrupt):
        status = error.status if isinstance(error, Interrupted) else 130
    known = isinstance(error, (ConfigError, RunFailed, KeyboardInterrupt))
    launched = LAUNCHER_PID in os.environ
    if not known:
        text = "".join(traceback.format_exception(error)).rstrip()
        if log_dir is not None:
            log.error("unexpected error:\n%s", text, extra=FILE_ONLY)
        if log_dir is None or not launched:
            print(text, file=sys.stderr)
    elif not launched and not isinstance(error, KeyboardInterrupt):
        rank = int(os.environ.get("RANK", "0"))
        if rank == 0 or not isinstance(error, ConfigError):  # which all ranks have alike
            print_error(f"rank {rank}: {error}" if rank else error)
    if os.environ.get("WORLD_SIZE", "1") in ("", "1") and ELASTIC not in os.environ:
        gc.unfreeze()  # as graphmoe.train does
        sys.exit(status)
    try:
        write_failure(error, status, log_dir)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)  # an orderly exit may wait for ranks that are gone


def _leave() -> NoReturn:
    # A thread of gloo may hold a tensor of the last collective: Python's own end then aborts the process
    # (pytorch issue 190489, open with torch 2.13).
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
