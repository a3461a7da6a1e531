"""Runs of training that the suites step, ladder and projection measure, each in a process of its own.

A process takes its memory and the caches of the device with it.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from graphmoe.bench.arguments import BenchArgs, compose_config
from graphmoe.bench.cases import FLOPS_PER_S, Row, chosen, one_by_one, reason, times_of
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.model.sizes import flops_per_token
from graphmoe.run.files import METRICS_FILE, SUMMARY_FILE
from graphmoe.runtime.host.signals import die_with_parent, end_with_parent

log = logging.getLogger(__name__)
Result = TypeVar("Result")
UNREAD = (
    "train.val_batches=0",
    "checkpoint=none",
    "checkpoint.interval=0",
    "log.tensorboard=false",
    "log.report=false",
    "log.progress=false",
)
"""Overrides of every run, so that only steps are timed."""
END_S = 10
"""Seconds that a process may take to end after it has given its result, and a job after each signal."""
SHOWN = 4000
"""Characters of a failed job's output that are logged, since its folder goes."""


class RunCase(NamedTuple):
    """One run: the row to fill, whose overrides are all that the run sets."""

    name: str
    row: Row


def run_cases(
    cases: Sequence[RunCase],
    args: BenchArgs,
    measure: Callable[[Row, RunConfig], Row],
    brief: Callable[[Row], str],
) -> list[Row]:
    """Rows of the chosen runs with the numbers that ``measure`` gives of a row and its configuration.

    A run that fails leaves the reason there. *Raises* ConfigError for a choice of none.
    """

    def run(case: RunCase) -> list[Row]:
        row = case.row | {"error": None}
        try:
            return [row | measure(row, compose_config(*row["overrides"]))]
        except (ConfigError, ProcessFailed, OSError) as error:
            return [row | {"error": " ".join(str(error).split())}]

    return one_by_one(chosen(cases, args.only), run, brief, args.out)


def steps_words(steps: int) -> list[str]:
    """Overrides of a run of so many steps, which the host waits for only at the end."""
    return [f"train.steps={steps}", f"train.log_interval={steps}"]


def rates_of_steps(config: RunConfig, ranks: int, samples_ms: Sequence[float]) -> Row:
    """Times of steps, and rates of one rank, against the model's FLOPs, evenly shared by the ranks."""
    assert config.data.seq_len is not None
    tokens = config.train.global_batch_size * config.data.seq_len
    flops = flops_per_token(config.model, config.data.seq_len).total * tokens
    floor_ms = flops / FLOPS_PER_S / ranks * 1e3
    times = times_of(samples_ms, floor_ms)
    rate = tokens / times["median_ms"] * 1e3 / ranks
    tflops = FLOPS_PER_S / 1e12 / times["time_over_floor"]
    return {"tokens": tokens, "floor_ms": floor_ms, **times, "tokens_per_s": rate, "tflops": tflops}


class ProcessFailed(Exception):
    """The reason why a process gave no result."""


def in_own_process(function: Callable[..., Result], *arguments: Any, limit_s: float) -> Result:
    """Return ``function(*arguments)``, all of which must be picklable. *Raises* ProcessFailed.

    The process is killed after ``limit_s`` seconds. Its stdout goes to stderr.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function, arguments))
    process.start()
    sender.close()
    patience_s = 0.0
    try:
        if not receiver.poll(limit_s):
            raise ProcessFailed(_late(limit_s))
        result, error = receiver.recv()
        patience_s = END_S
    except (EOFError, OSError):  # it died, perhaps while it sent
        process.join(END_S)
        code = process.exitcode or 0
        if code < 0:
            names = {each.value: each.name for each in signal.Signals}
            killed = f"its process was killed by {names.get(-code, f'signal {-code}')}"
            raise ProcessFailed(killed) from None
        raise ProcessFailed(f"its process ended with status {process.exitcode}") from None
    finally:
        process.join(patience_s)
        process.kill()
        process.join()
    if error is not None:
        raise ProcessFailed(error)
    return result


def _run(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Send (result, None) or (None, reason) from the process."""
    die_with_parent()  # so that the device is free where nobody waits any more
    os.dup2(2, 1)  # stdout of the tool holds its document alone
    try:
        sender.send((function(*arguments), None))
    except ConfigError as error:
        sender.send((None, str(error)))
    except Exception as error:
        traceback.print_exc()
        sender.send((None, reason(error)))


def train(overrides: Sequence[str], limit_s: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run a training job as a user starts it; return the rows of its steps and its summary.

    *Raises* ProcessFailed, and OSError where the job left no such files.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "run"
        _run_job([*overrides, f"hydra.run.dir={folder}"], Path(scratch) / "output", limit_s)
        lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        summary: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    return [row for row in map(json.loads, lines) if "loss" in row], summary


def _run_job(overrides: Sequence[str], printed: Path, limit_s: float) -> None:
    with printed.open("wb") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "graphmoe.train", *overrides],
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            status = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(_late(limit_s)) from None
        finally:
            _end(job)
    if status:
        text = printed.read_text(encoding="utf-8", errors="replace").strip()
        log.error("the end of what the job printed:\n%s", text[-SHOWN:])
        found = re.search(r"^error: (.*)\Z", text, re.MULTILINE | re.DOTALL)
        last = text.rpartition("\n")[2]
        raise ProcessFailed(found[1] if found else f"its process ended with status {status}: {last}")


def _end(job: subprocess.Popen[bytes]) -> None:
    """End a job that still runs; its workers die with the process that started them."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # after the second it saves nothing
        if job.poll() is None:
            os.killpg(job.pid, number)
            try:
                job.wait(END_S)
            except subprocess.TimeoutExpired:
                continue


def _late(limit_s: float) -> str:
    return f"not done after limit_s={limit_s:g} seconds, compilation included; use more"
