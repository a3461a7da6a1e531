"""Runs of training that the suites step, ladder and projection measure, each in a process of its own.

A process takes its memory and the caches of the device with it.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from graphmoe.bench.arguments import BenchArgs, compose_config
from graphmoe.bench.cases import FLOPS_PER_S, Row, chosen, one_by_one, times_of
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.model.sizes import flops_per_token
from graphmoe.run.files import METRICS_FILE, SUMMARY_FILE
from graphmoe.runtime.host.signals import end_with_parent

log = logging.getLogger(__name__)
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
"""Seconds that a job may take to end after each signal."""
SHOWN = 4000
"""Characters of a failed job's output that are logged, since its folder goes."""


class Setting(NamedTuple):
    """Overrides of all runs of a suite, and what sets its runs apart."""

    words: tuple[str, ...]
    runs: Any


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
        except (ConfigError, JobFailed, OSError) as error:
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


class JobFailed(Exception):
    """The reason why a job gave no result."""


def train(overrides: Sequence[str], limit_s: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run a training job as a user starts it; return the rows of its steps and its summary.

    *Raises* JobFailed, and OSError where the job left no such files.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "run"
        run_job("graphmoe.train", [*overrides, f"hydra.run.dir={folder}"], limit_s, Path(scratch) / "output")
        lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        summary: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    return [row for row in map(json.loads, lines) if "loss" in row], summary


def run_job(module: str, words: Sequence[str], limit_s: float, printed: Path) -> None:
    """Run a module, with its output in a file. *Raises* JobFailed, also where it has not ended in time."""
    with printed.open("wb") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            status = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = f"not done after limit_s={limit_s:g} seconds, compilation included; use more"
            raise JobFailed(late) from None
        finally:
            _end(job)
    if status:
        text = printed.read_text(encoding="utf-8", errors="replace").strip()
        log.error("the end of what the job printed:\n%s", text[-SHOWN:])
        found = re.search(r"^error: (.*)\Z", text, re.MULTILINE | re.DOTALL)
        last = text.rpartition("\n")[2]
        how = f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
        raise JobFailed(found[1] if found else f"its process {how}: {last}")


def _end(job: subprocess.Popen[bytes]) -> None:
    """End a job that still runs; its workers die with the process that started them."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # after the second it saves nothing
        if job.poll() is None:
            os.killpg(job.pid, number)
            try:
                job.wait(END_S)
            except subprocess.TimeoutExpired:
                continue
