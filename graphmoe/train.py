"""Train a model: python -m graphmoe.train model=tiny train.steps=20 optim.lr=1e-3

Results go to the run's folder (hydra.run.dir, by default outputs/<run.name>): resolved.yaml, env.json,
metrics.jsonl, summary.json, logs/, tensorboard/ and checkpoints/.

One worker trains in this process; several, and the jobs of a sweep, are processes of graphmoe.worker. If
torchrun, srun or mpirun started this process as one rank of many, it is that rank's worker.
Modules that import torch are imported inside functions, so that a misspelt key is answered at once.
"""

from __future__ import annotations

if __name__ == "__main__":  # before imports that take a third of a second
    from graphmoe.runtime.host.signals import exit_at_signals

    exit_at_signals()

import gc
import glob
import io
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from hydra.core.hydra_config import HydraConfig

from graphmoe import worker
from graphmoe.command.hydra import chosen_programs, hydra_app
from graphmoe.command.sweep.job import in_sweep, job_gpus, record_folder
from graphmoe.config.arguments import emit, print_error
from graphmoe.config.choices import CODE_FOLDERS
from graphmoe.config.masking import to_plain
from graphmoe.config.packages import missing_packages
from graphmoe.config.progress import starting
from graphmoe.config.ranges import own_code
from graphmoe.config.schema import ConfigError, DeviceChoice, RunConfig
from graphmoe.run.files import CONFIG_FILE, SUMMARY_FILE, display_path, write_json
from graphmoe.run.metrics_file import render, value_of
from graphmoe.runtime.host.files import temporary_folder
from graphmoe.runtime.host.logs import FILE_ONLY, keep_streams, start_logging
from graphmoe.runtime.host.signals import (
    FOLDER_HELD,
    LAUNCHED_AT,
    LAUNCHER_PID,
    SWEEP_JOB,
    Interrupted,
    ends_at_signals,
    exit_at_signals,
)
from graphmoe.runtime.launch.failures import RunFailed
from graphmoe.runtime.launch.nodes import Nodes, find_nodes, num_pods, started_by
from graphmoe.worker import LOGS, raise_if_stopped, set_environment_of, train_rank, with_decided_keys

if TYPE_CHECKING:
    from graphmoe.run.folder import RunFolder

log = logging.getLogger(__name__)

_FIRST_WORD_S = 10.0
"""Seconds that a node's other ranks wait at an error, so that its first says why before torchrun ends it."""
EXAMPLES = (
    "python -m graphmoe.train",
    "python -m graphmoe.train model=deepseek_v2_lite model.num_layers=4 data=synthetic train.steps=20",
    "python -m graphmoe.train -m optim.lr=1e-3,3e-3 train.steps=100",
)


def main() -> None:
    exit_at_signals()
    keep_streams()
    gc.disable()  # until training begins
    try:
        starter = started_by() if num_pods() is None else None  # a pod is a node, with workers of its own
    except ConfigError as error:
        print_error(error)
        sys.exit(2)
    speaking = ExitStack()  # closed once ranks speak for themselves
    if starter is not None:
        worker.start_rank()
        if os.environ["LOCAL_RANK"] != "0":  # one of each node words what is wrong with the command line
            speaking.enter_context(redirect_stdout(io.StringIO()))
            speaking.enter_context(redirect_stderr(io.StringIO()))
    try:
        hydra_app(
            train if starter is None else lambda config: _train_as_rank(config, speaking),
            prog="graphmoe.train",
            examples=EXAMPLES,
            makes_folder=True,
            known_errors=(RunFailed,),
            prepare=_prepare,
            complete=None if starter is None else lambda config: counted(config, starter),
        )
    except SystemExit as end:
        if end.code and starter is not None and os.environ["LOCAL_RANK"] != "0":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # without a word
            time.sleep(_FIRST_WORD_S)
        raise
    finally:
        gc.unfreeze()  # or triton 3.9 reports objects as leaks that the last collection cannot free


def _prepare(config: RunConfig) -> None:
    if problems := [*_not_here(config)]:
        raise ConfigError("\n  ".join(problems))
    starting("graphmoe.train")  # the next line imports torch
    set_environment_of(config)


def _not_here(config: RunConfig) -> Iterator[str]:
    from graphmoe.checkpoint import CHECKPOINTS, saved_steps
    from graphmoe.data.sources import missing_inputs
    from graphmoe.run.folder import missing_place
    from graphmoe.run.stored import missing_start

    if config.launch.write_only or config.launch.fake_world is not None:  # nothing is read here
        return
    yield from missing_packages(config)
    yield from missing_inputs(config.data, config.model.vocab_size)
    base = Path(HydraConfig.get().runtime.output_dir)
    yield from missing_place(base)
    # A run that resumes in its own folder does not read the folder to start from.
    own = [base, *base.parent.glob(f"{glob.escape(base.name)}-[0-9]*")]
    if not any(saved_steps(folder / CHECKPOINTS) for folder in own):
        yield from missing_start(config.checkpoint)


def train(config: RunConfig) -> float | None:
    """Train to the end, or to a signal; return the final validation loss, which sweeps minimise."""
    from graphmoe.plan.rules import check
    from graphmoe.run.folder import next_folder

    if config.launch.fake_world is not None:
        _dry_run(with_decided_keys(config))
        return None
    if config.train.epochs is not None:
        from graphmoe.training.start_checks import with_epochs

        start_logging(None, "launch", on_console=True)
        config = with_epochs(config)
    if config.launch.write_only:  # its workers decide automatic keys, on their machine
        _write_only(config)
        return None
    config = with_decided_keys(config, Path(HydraConfig.get().runtime.output_dir))
    nodes, sweeps = find_nodes(config.launch), in_sweep()
    check(replace(config, launch=replace(config.launch, nodes=nodes.count)))
    checkpoint = config.checkpoint
    if (checkpoint.resume_from or checkpoint.init_from or checkpoint.export) and nodes.is_first:
        from graphmoe.training.start_checks import check_start  # imports the model, else not needed here

        base, resume = Path(HydraConfig.get().runtime.output_dir), checkpoint.resume
        check_start(config, next_folder(base, to_plain(config), resume=resume))
    alone = nodes.count == config.launch.nproc == 1 and not config.launch.max_restarts
    summary = _train_here(config) if alone and not sweeps else _train_in_workers(config, nodes)
    if summary is None:
        return None
    if not sweeps:
        emit(summary, render(summary), config.format)
        raise_if_stopped(summary)
    elif summary["stopped_by"] in signal.Signals.__members__:  # not train.max_hours of one job
        raise KeyboardInterrupt
    return value_of(summary)


def counted(config: RunConfig, starter: str) -> RunConfig:
    """Return the configuration with the launcher's rank count. *Raises* ConfigError if another is set."""
    launch, local_size = config.launch, int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // local_size
    wrong = [
        f"launch.{key}={value}, but {starter} started {there} {what}; leave it out"
        for key, value, there, what, free in (
            ("nproc", launch.nproc, local_size, "ranks on each node", (1, "auto")),
            ("nodes", launch.nodes, nodes, "nodes", ("auto",)),
        )
        if value not in (there, *free)
    ]
    if launch.max_restarts:
        wrong.append(
            f"launch.max_restarts={launch.max_restarts} is for workers that graphmoe starts, not {starter}"
        )
    alone = {"write_only": launch.write_only, "fake_world": launch.fake_world is not None, "-m": in_sweep()}
    wrong += [
        f"{key if key == '-m' else f'launch.{key}'} runs in one process; start it without {starter}"
        for key, given in alone.items()
        if given
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return replace(config, launch=replace(launch, nproc=local_size))


def _train_as_rank(config: RunConfig, speaking: ExitStack) -> None:
    speaking.close()
    worker.train_as_rank(config, Path(HydraConfig.get().runtime.output_dir))


def _write_only(config: RunConfig) -> None:
    with _claimed(config, "launch") as run_folder:
        resolved = display_path(run_folder.path / CONFIG_FILE)
        named = any(word.startswith("run.device=") for word in HydraConfig.get().overrides.task)
        if config.run.device is DeviceChoice.cpu and not named:
            log.warning(
                "%s has run.device=cpu and precision.compute=%s, chosen for this machine without a GPU; to "
                "train on GPUs, add run.device=cuda",
                resolved,
                config.precision.compute.value,
            )
    launch = config.launch
    nodes = 1 if launch.nodes == "auto" else launch.nodes
    meeting = ["--standalone"]
    if nodes > 1:
        endpoint = launch.endpoint or "<first node>:29500"
        meeting = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    words = ["torchrun", *meeting, f"--nproc-per-node={launch.nproc}", "-m", worker.__name__, resolved]
    words += chosen_programs(config)
    if names := dict.fromkeys(name for _, name in own_code(config)):
        words += names
        if folders := os.environ.get(CODE_FOLDERS):
            words = ["env", f"PYTHONPATH={folders}", *words]
    document = {"folder": str(run_folder.path), "command": words}
    emit(document, shlex.join(words), config.format)


def _dry_run(config: RunConfig) -> None:
    from graphmoe.training.dry_run import dry_run
    from graphmoe.training.dry_run.report import FILE, render

    if in_sweep():
        raise ConfigError(
            "launch.fake_world is a dry run, which has no result that a sweep could compare; start one "
            "command for each layout, without -m"
        )
    with _claimed(config, "dry_run") as run_folder:
        document = {**dry_run(config), "folder": str(run_folder.path)}
        write_json(run_folder.path / FILE, document)
        run_folder.abandon()  # it stays free for a run
    emit(document, render(document), config.format)


def _train_here(config: RunConfig) -> dict[str, Any]:
    from graphmoe.runtime.ranks import Ranks
    from graphmoe.training.run import open_worker

    ranks = Ranks()
    plan, lines = open_worker(config, ranks)  # its errors come before a folder is made
    with _claimed(config, "rank0") as run_folder:
        return train_rank(plan, run_folder.path, ranks, lines)


def _train_in_workers(config: RunConfig, nodes: Nodes) -> dict[str, Any] | None:
    from graphmoe.plan.experts import experts_of
    from graphmoe.run.folder import write_config
    from graphmoe.run.machine import check_processes
    from graphmoe.runtime.dispatch import check_package
    from graphmoe.runtime.launch.elastic import launch

    # The workers would say it too, in a folder made for them.
    check_package(config.moe.dispatcher, config.run.device.value)
    assert isinstance(config.launch.nproc, int)
    check_processes(config.host, config.launch.nproc)
    gc.enable()
    launched_at = time.time() if in_sweep() else psutil.Process().create_time()
    environment = {LAUNCHER_PID: str(os.getpid()), LAUNCHED_AT: str(launched_at)}
    if (job := _sweep_job()) is not None:
        environment[SWEEP_JOB] = job
    on_gpu = config.run.device is DeviceChoice.cuda
    parallel = config.parallel
    reads_peers = experts_of(config).reads_peers or parallel.tp > 1 or parallel.cp > 1
    one_gpu_each = on_gpu and not reads_peers
    with ExitStack() as stack:
        environment |= stack.enter_context(job_gpus(config))
        _check_gpus(config, environment)
        if nodes.is_first:
            folder = stack.enter_context(_claimed(config, "launch")).path
            environment[FOLDER_HELD] = str(folder)
        else:
            folder = stack.enter_context(temporary_folder("graphmoe-node-"))
            write_config(folder, to_plain(config))
            start_logging(None, "launch", on_console=True)
        before = _written(folder / SUMMARY_FILE)
        stopped = launch(
            config.launch,
            worker.__name__,
            folder / CONFIG_FILE,
            environment,
            folder / LOGS,
            nodes=nodes,
            one_gpu_each=one_gpu_each,
        )
        return _new_summary(folder / SUMMARY_FILE, before, stopped) if nodes.is_first else None


def _new_summary(path: Path, before: int | None, stopped: str | None) -> dict[str, Any]:
    if _written(path) == before and stopped:
        log.warning("the workers got %s and ended before the first step", stopped)
        raise Interrupted(signal.Signals[stopped])
    if _written(path) == before:
        raise RunFailed(f"the workers ended without {path}; do all nodes share the folder?")
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary | {"stopped_by": summary["stopped_by"] or stopped}  # after the last step, of the sweep


def _check_gpus(config: RunConfig, environment: Mapping[str, str]) -> None:
    import torch  # which counts GPUs without a context on them

    if config.run.device is not DeviceChoice.cuda:
        return
    leased = environment.get("CUDA_VISIBLE_DEVICES")
    count = len(leased.split(",")) if leased else torch.cuda.device_count()
    if config.launch.nproc > count:
        raise ConfigError(
            f"launch.nproc={config.launch.nproc} workers need a GPU each, and {count} are visible; use "
            f"launch.nproc={max(count, 1)} or auto"
        )


@contextmanager
def _claimed(config: RunConfig, log_name: str) -> Iterator[RunFolder]:
    """Claim the run's folder and log there; if an error precedes training, another run may use the folder."""
    from graphmoe.run.folder import announce, claim

    base, plain = Path(HydraConfig.get().runtime.output_dir), to_plain(config)
    run_folder = claim(base, plain, resume=config.checkpoint.resume)
    try:
        start_logging(run_folder.path / LOGS, log_name, on_console=True, job=_sweep_job())
        announce(run_folder, plain)
        record_folder(run_folder.path)
        with ends_at_signals():
            yield run_folder
    except BaseException as error:
        known = isinstance(error, (ConfigError, RunFailed, KeyboardInterrupt))
        log.error("%s", error, exc_info=not known, extra=FILE_ONLY)  # nobody may read the console
        run_folder.abandon()
        raise
    run_folder.release()


def _sweep_job() -> str | None:
    return str(HydraConfig.get().job.num) if in_sweep() else None


def _written(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


if __name__ == "__main__":
    main()
