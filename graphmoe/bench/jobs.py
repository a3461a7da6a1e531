"""Runs of training that the suites step, ladder and projection measure, each in a process of its own.

A process takes its memory and the caches of the device with it.
"""

import functools
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

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from graphmoe.bench.arguments import OF_SUITES, BenchArgs
from graphmoe.bench.cases import FLOPS_PER_S, Case, CaseFailed, Cell, Measured, Row, run_cases, times_of
from graphmoe.command.errors import explain
from graphmoe.command.hydra import to_config
from graphmoe.command.words import composed
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.model.sizes import flops_per_token
from graphmoe.run.files import CAPTURE_FILE, METRICS_FILE, PROFILE_FOLDER, SUMMARY_FILE, trace_file
from graphmoe.runtime.host.signals import end_with_parent
from graphmoe.trace.events import Trace, read_trace

log = logging.getLogger(__name__)
UNREAD = (
    "train.val_batches=0",
    "checkpoint=none",
    "checkpoint.interval=0",
    "log.tensorboard=false",
    "log.report=false",
    "log.progress=false",
    "log.sample_tokens=0",
)
"""Overrides of every run, so that only steps are timed."""
KEYS = {
    "graph": "scopes",
    "graph.scope": "scopes",
    "train.micro_batch_size": "micro_batch_sizes",
    "data.seq_len": "seq_lens",
    "train.steps": "repeats",
    "run.device": "device",
    "launch.nproc": "nproc",
}
"""Keys that a suite sets which has the argument beside them."""
DEPENDENT = {
    "model": ("model.", "recompute."),
    "compile": ("recompute.ops",),
    "compile.enabled": ("recompute.ops",),
    "recompute": ("recompute.",),
}
"""Keys below or beside a choice that another choice need not have."""
DATA = ("data=synthetic", "optim.lr=1e-6")
TINY = ("model=tiny", "model.num_layers=2", *DATA)
LITE = ("model=deepseek_v2_lite", "model.num_layers=6", *DATA)
COLUMNS: dict[str, Cell] = {
    "tokens/s/GPU": "{tokens_per_s:,.0f}",
    "step ms": "{median_ms:.2f}",
    "p10 to p90": "{p10_ms:.2f} to {p90_ms:.2f}",
    "step / floor": "{time_over_floor:.2f}",
    "peak GiB": "{peak_gib:.2f}",
    "GPU GiB": "{device_gib:.2f}",
}
MEMORY = (
    "Memory: most that tensors take at a time in torch's allocator, of the worst rank; GPU GiB is all that "
    "is taken of a GPU at the end, with graphs."
)
WARM_UP_STEPS = 3
"""Steps before the timed ones, after those of graph.warmup_steps and the step that is captured."""
END_S = 10
"""Seconds that a job may take to end after each signal."""
SHOWN = 4000
"""Characters of a failed job's output that are logged, since its folder goes."""


class RunCase(NamedTuple):
    """One run: the facts of its row, whose overrides are all that the run sets."""

    name: str
    row: Row
    config: RunConfig | ConfigError
    """The configuration but for its number of steps, or the reason why there is none."""


class Trained(NamedTuple):
    """Files that a job left; the last timed step is that before the recorded ones."""

    steps: list[dict[str, Any]]
    summary: dict[str, Any]
    captured: dict[str, Any]
    """The report of graphs, empty without any."""
    trace: Trace | None


def run_case(
    args: BenchArgs,
    name: str,
    row: Row,
    defaults: Sequence[str],
    fixed: Sequence[str],
    num_recorded: int = 0,
) -> RunCase:
    """Return a case: the defaults that the user's words do not replace, these words, then the fixed ones.

    After the timed steps ``num_recorded`` are recorded by ``profile.steps``.
    """
    own = split_list(args.overrides or "")
    words = [*without(defaults, own), *own, *UNREAD, *fixed]
    try:
        config: RunConfig | ConfigError = compose_config(*words)
    except ConfigError as error:
        return RunCase(name, row | {"overrides": words}, error)
    assert isinstance(config, RunConfig)
    last = config.graph.warmup_steps + 1 + WARM_UP_STEPS + args.repeats
    if num_recorded:
        words.append(f"profile.steps=[{last + 1},{last + num_recorded}]")
    total = last + num_recorded
    words += [f"train.steps={total}", f"train.log_interval={total}"]  # the host waits only at the end
    return RunCase(name, row | {"overrides": words}, config)


def measure(
    args: BenchArgs,
    cases: Sequence[RunCase],
    ranks: int,
    numbers_of: Callable[[RunConfig, Trained], Row],
    brief: str = "{median_ms:.2f} ms, {tokens_per_s:,.0f} tokens/s a GPU",
    **method: Any,
) -> Measured:
    """Rows of the chosen runs with the numbers of what they left. *Raises* ConfigError if none can run."""
    if isinstance(cases[0].config, ConfigError) and all(isinstance(c.config, ConfigError) for c in cases):
        raise cases[0].config

    def run(case: RunCase) -> list[Row]:
        if isinstance(case.config, ConfigError):
            raise case.config
        return [numbers_of(case.config, train(case.row["overrides"], args.limit_s))]

    made = [Case(case.name, case.row, functools.partial(run, case)) for case in cases]
    rows = run_cases(made, brief.format_map, args.out, args.only)
    warm_up = f"graph.warmup_steps + 1 + {WARM_UP_STEPS}"
    return rows, [], {"ranks": ranks, "warm_up_steps": warm_up, "max_s_per_row": args.limit_s, **method}


def numbers_of_run(config: RunConfig, ranks: int, timed: Sequence[Row], summary: Row) -> Row:
    """Times of steps, rates of one rank against the model's FLOPs, evenly shared, and memory."""
    assert config.data.seq_len is not None
    tokens = config.train.global_batch_size * config.data.seq_len
    flops = flops_per_token(config.model, config.data.seq_len) * tokens
    floor_ms = flops / FLOPS_PER_S / ranks * 1e3
    times = times_of([step["step_s"] * 1e3 for step in timed], floor_ms)
    return {
        "tokens": tokens,
        "floor_ms": floor_ms,
        **times,
        "tokens_per_s": tokens / times["median_ms"] * 1e3 / ranks,
        "tflops": FLOPS_PER_S / 1e12 / times["time_over_floor"],
        "peak_gib": summary["peak_memory_gib"],
        "device_gib": summary["device_memory_gib"],
    }


def compose_config(*words: str) -> RunConfig:
    """The configuration of a run with these overrides. *Raises* ConfigError."""
    try:
        return to_config(composed(words))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"overrides: {explain(error, words)}") from error


def split_list(text: str) -> list[str]:
    """The items of a list, which commas outside brackets separate; brackets around all may be left out."""
    items, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    whole = len(items) == 1 and text.startswith("[") and text.endswith("]")
    return split_list(text[1:-1]) if whole else [item.strip() for item in items if item.strip()]


def without(words: Sequence[str], own: Sequence[str]) -> list[str]:
    """The words whose key the user does not set; another model has its own number of layers."""
    keys = {key_of(word) for word in own}
    gone = tuple(prefix for group in keys & DEPENDENT.keys() for prefix in DEPENDENT[group])
    return [word for word in words if key_of(word) not in keys and not word.startswith(gone)]


def refuse(args: BenchArgs) -> list[str]:
    """Return the user's overrides. *Raises* ConfigError for one that the suite sets."""
    own = split_list(args.overrides or "")
    fixed = {key_of(word) for word in UNREAD} | {"train.log_interval"}
    for word in own:
        key = key_of(word)
        if key in KEYS and args.suite in OF_SUITES.get(KEYS[key], (args.suite,)):
            raise ConfigError(f"overrides={word}: the suite sets {key}; use {KEYS[key]}=...")
        if key in fixed or key.startswith(("checkpoint.", "profile.")):
            raise ConfigError(f"overrides={word}: the suite sets {key}, so that only steps are timed")
    return own


def key_of(word: str) -> str:
    """The key that an override sets."""
    return word.partition("=")[0].lstrip("+~")


def numbers(key: str, text: str | None) -> list[int]:
    """The numbers of a list, all above 0. *Raises* ConfigError, which names the argument ``key``."""
    words = split_list(text or "")
    for word in words:
        if not re.fullmatch(r"[1-9]\d*", word):
            raise ConfigError(f"{key}={text}: '{word}' is no number above 0; use such as {key}=1,4")
    return [int(word) for word in words]


def train(overrides: Sequence[str], limit_s: float) -> Trained:
    """Run a training job as a user starts it.

    *Raises* CaseFailed, also where it has not ended in time, and OSError where it left no rows or summary.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch, "run")
        _run_job([*overrides, f"hydra.run.dir={folder}"], limit_s, Path(scratch, "output"))
        rows = map(json.loads, (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines())
        report, trace = folder / CAPTURE_FILE, folder / PROFILE_FOLDER / trace_file(0)
        return Trained(
            [row for row in rows if "loss" in row],
            json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8")),
            json.loads(report.read_text(encoding="utf-8")) if report.exists() else {},
            read_trace(trace) if trace.exists() else None,
        )


def _run_job(words: Sequence[str], limit_s: float, printed: Path) -> None:
    with printed.open("wb") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "graphmoe.train", *words],
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            status = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = f"not done after limit_s={limit_s:g} seconds, compilation included; use more"
            raise CaseFailed(late) from None
        finally:
            _end(job)
    if status:
        text = printed.read_text(encoding="utf-8", errors="replace").strip()
        log.error("the end of what the job printed:\n%s", text[-SHOWN:])
        found = re.search(r"^error: (.*)\Z", text, re.MULTILINE | re.DOTALL)
        last = text.rpartition("\n")[2]
        how = f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
        raise CaseFailed(found[1] if found else f"its process {how}: {last}")


def _end(job: subprocess.Popen[bytes]) -> None:
    """End a job that still runs; its workers die with the process that started them."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # after the second it saves nothing
        if job.poll() is None:
            os.killpg(job.pid, number)
            try:
                job.wait(END_S)
            except subprocess.TimeoutExpired:
                continue
