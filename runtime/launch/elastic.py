"""Start of this node's workers by torch elastic; signals are forwarded.

Elastic runs in a thread: in the main thread it would handle signals, and kill workers that need over 30 s to
save.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
from torch.distributed.launcher.api import elastic_launch

from graphmoe.config.schema import LaunchConfig
from graphmoe.runtime.host.files import temporary_folder
from graphmoe.runtime.host.logs import LogFile
from graphmoe.runtime.host.signals import StopSignal, awaited, say
from graphmoe.runtime.launch.failures import (
    RunFailed,
    attempt_of,
    error_file,
    first_failure,
    leave_failure,
    of_workers,
    silent_ranks,
)
from graphmoe.runtime.launch.hangs import HangWatch, watching
from graphmoe.runtime.launch.meeting import MEETING_S, store_of_nodes
from graphmoe.runtime.launch.nodes import Nodes, interface_of

log = logging.getLogger(__name__)

_POLL_S = 0.2
_IDLE_S = 2.0  # to wait for elastic after a signal if it has no workers, as before all nodes have joined
_OTHERS_S = 2.0  # to wait for errors of other nodes, which may have caused those here
# Restarted workers would read addresses of the previous attempt (pytorch #135712), and elastic listens on all
# interfaces for a shared store
_OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_SHOWN_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def launch(
    config: LaunchConfig,
    module: str,
    resolved: Path,
    environment: Mapping[str, str],
    log_dir: Path,
    *,
    nodes: Nodes,
    one_gpu_each: bool,
) -> str | None:
    """Run ``python -m <module> <resolved>`` on each rank of this node until all have ended.

    ``environment`` is added to the workers'. ``log_dir`` gets errors, and on the first node the output of
    local ranks above 0. With ``one_gpu_each`` a worker sees its GPU as cuda:0, so all ranks compile the same
    code. Returns the signal that stopped the run. *Raises* ConfigError or RunFailed with the first error.
    """
    began = time.time()
    log_dir.mkdir(parents=True, exist_ok=True)
    logs = RankLogs(log_dir, redirect=nodes.is_first)
    meeting = temporary_folder("graphmoe-meeting-") if nodes.count == 1 else store_of_nodes(nodes)
    with watching(config.hang_timeout_s) as (watch, told), _elastic_log(log_dir), meeting as folder:
        words = ("-m", module, str(resolved))
        agent = _Agent(_elastic_config(config, logs, nodes, folder, one_gpu_each), words)
        added = _added_to_environment(
            {**environment, **_OWN_STORES, **_interfaces(nodes), **told}, one_gpu_each
        )
        with added, _Forwarding(words) as forwarding:
            agent.start()
            idle_s = 0.0
            while agent.is_alive() and idle_s < _IDLE_S:
                agent.join(_POLL_S)
                if watch is not None:
                    watch.look(logs.attempt, log_dir)
                waits_in_vain = forwarding.received and not forwarding.to_new_workers()
                idle_s = idle_s + _POLL_S if waits_in_vain else 0.0
    if isinstance(agent.error, ChildFailedError):
        if nodes.count > 1:
            _tell_other_nodes(agent.error, logs, watch)
        first = first_failure(agent.error.failures, log_dir, logs.attempt)
        assert first is not None, "elastic names at least one"
        if not (forwarding.received and (first.was_stopped or first.was_killed)):
            raise first.raised(log_dir, began)
    elif isinstance(agent.error, RendezvousError):
        raise RunFailed(f"the {nodes.count} nodes did not all connect to {nodes.endpoint}: {agent.error}")
    elif nodes.count > 1 and isinstance(agent.error, DistError):
        why = str(agent.error).partition("\n")[0]
        raise RunFailed(f"the store of all nodes at {nodes.endpoint} is lost: {why}") from agent.error
    elif agent.error is not None:
        raise agent.error
    return forwarding.received


def _elastic_config(
    config: LaunchConfig, logs: RankLogs, nodes: Nodes, meeting: Path | None, one_gpu_each: bool
) -> ElasticConfig:
    meets: dict[str, Any] = {"timeout": MEETING_S, "read_timeout": MEETING_S}
    meets["keep_alive_interval"] = 5 + nodes.count // 4  # all nodes rewrite one entry, and retry if one did
    # a file in a private folder: no port, and no other user may write it
    meets |= {"store_type": "file"} if meeting else {"is_host": "false"}
    elastic = ElasticConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=config.nproc,
        logs_specs=logs,
        run_id=nodes.job,
        rdzv_backend="c10d",
        rdzv_endpoint=str(meeting / "nodes") if meeting else nodes.endpoint,
        rdzv_configs=meets,
        local_addr=nodes.address,
        max_restarts=config.max_restarts,
        virtual_local_rank=one_gpu_each,
    )
    elastic.numa_options = None  # each worker binds itself
    return elastic


def _interfaces(nodes: Nodes) -> dict[str, str]:
    interface = interface_of(nodes.address) if nodes.address else None
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if nodes.count == 1 else ("GLOO_SOCKET_IFNAME",)
    return {name: os.environ.get(name, interface) for name in names} if interface else {}


def _tell_other_nodes(error: ChildFailedError, logs: RankLogs, watch: HangWatch | None) -> None:
    log_dirs = {logs.log_dir, *([watch.log_dir] if watch and watch.log_dir else [])}
    for failure in of_workers(error.failures, logs.attempt):
        if not error_file(logs.log_dir, failure.rank).exists():
            leave_failure(failure, failure.message, log_dirs)
    time.sleep(_OTHERS_S)


class RankLogs(LogsSpecs):
    """Output and error files of each worker."""

    def __init__(self, log_dir: Path, *, redirect: bool) -> None:
        super().__init__(str(log_dir))
        self.log_dir, self.redirect = log_dir, redirect
        self.attempt = ""
        self._ranks: list[int] = []

    @property
    def root_log_dir(self) -> str:
        return str(self.log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return a new attempt's files; log a restart."""
        number = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        if number:
            self._say_restart(number, envs[0]["TORCHELASTIC_MAX_RESTARTS"])
        self.attempt = attempt_of(envs[0])
        self._ranks = [int(env["RANK"]) for env in envs.values()]
        files = LogsDest(stdouts=dict.fromkeys(envs, ""), stderrs=dict.fromkeys(envs, ""))
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            error = error_file(self.log_dir, rank)
            error.unlink(missing_ok=True)
            files.error_files[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = str(error)
            if local_rank > 0 and self.redirect:
                stem = f"rank{rank}.attempt{number}" if number else f"rank{rank}"
                files.stdouts[local_rank] = str(self.log_dir / f"{stem}.stdout.log")
                files.stderrs[local_rank] = str(self.log_dir / f"{stem}.stderr.log")
        return files

    def _say_restart(self, number: int, of: str) -> None:
        first = first_failure({}, self.log_dir, self.attempt)
        why = first.text.splitlines()[0] if first else "a worker was killed, here or on another node"
        if first is None or first.suffered or first.was_stopped:
            silent = silent_ranks(self._ranks, self.log_dir, self.attempt)
            if 0 < len(silent) < len(self._ranks):  # all: the others may have waited for it, and been killed
                named = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} on {platform.node()}"
                why = f"{named} ended without a word, as one that was killed does"
        log.warning("%s; all workers are restarted (%d of %s)", why, number, of)


class _Agent(threading.Thread):
    def __init__(self, config: ElasticConfig, words: Sequence[str]) -> None:
        super().__init__(name="elastic", daemon=True)
        self.error: Exception | None = None
        self._config, self._words = config, words

    def run(self) -> None:
        try:
            elastic_launch(self._config, sys.executable)(*self._words)
        except Exception as error:
            self.error = error


class _Forwarding(StopSignal):
    def __init__(self, words: Sequence[str]) -> None:
        self._words = [*words]
        self._told: set[int] = set()
        self._awaited = [number for number in (signal.SIGUSR1, signal.SIGUSR2) if awaited(number)]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        # submitit waits for its notice too
        for number in self._awaited:
            if number in self._previous and self.received == signal.Signals(number).name:
                handler: Any = self._previous[number]
                handler(number, None)

    def to_new_workers(self) -> int:
        """Send SIGTERM to workers that have not got it yet; return the number of all workers."""
        pids = {*self._workers()}
        new, self._told = pids - self._told, self._told | pids
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return len(pids)

    def asked(self, name: str) -> None:
        say(f"{name} received: the workers stop after this step; a second kills them")
        self.to_new_workers()

    def ending(self, name: str) -> None:
        for pid in self._workers():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # elastic gives each worker a group of its own
        say(f"{name} again: all workers are killed")

    def _workers(self) -> list[int]:
        found = []
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.cmdline()[-len(self._words) :] == self._words:
                    found.append(child.pid)
        return found


@contextmanager
def _elastic_log(log_dir: Path) -> Iterator[None]:
    logger = logging.getLogger("torch.distributed.elastic")
    handler = LogFile(log_dir / "elastic.log")
    handler.addFilter(lambda record: "child thread" not in record.getMessage())  # we run it there on purpose
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
        handler.close()


@contextmanager
def _added_to_environment(variables: Mapping[str, str], one_gpu_each: bool) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in (*variables, *_SHOWN_GPUS)}
    os.environ.update(variables)
    if one_gpu_each and torch.version.hip and "HIP_VISIBLE_DEVICES" in os.environ:
        # elastic splits CUDA_VISIBLE_DEVICES only, which ROCm reads if HIP_VISIBLE_DEVICES is not set
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.pop("HIP_VISIBLE_DEVICES")
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
