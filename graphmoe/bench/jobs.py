"""Training runs of the suites step, ladder and projection, each in a process that frees its memory."""

import functools
import json
import logging
import math
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphmoe.bench import OF_SUITES, BenchArgs, cases, ranks_of
from graphmoe.bench.cases import FLOPS_PER_S, CaseFailed, Row
from graphmoe.command.hydra import compose_config
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.model.sizes import flops_per_token
from graphmoe.run.files import CAPTURE_FILE, METRICS_FILE, PROFILE_FOLDER, SUMMARY_FILE, trace_file
from graphmoe.runtime.host.signals import end_with_parent
from graphmoe.trace.events import Trace, read_trace

log = logging.getLogger(__name__)
UNREAD = (
    "train.val_batches=0", "checkpoint=none", "checkpoint.interval=0", "log.tensorboard=false",
    "log.report=false", "log.progress=false", "log.sample_tokens=0",
)  # fmt: skip
DATA = ("data=synthetic", "optim.lr=1e-6")
TINY = ("model=tiny", "model.num_layers=2", *DATA)
LITE = ("model=deepseek_v2_lite", "model.num_layers=6", *DATA)
KEYS = {
    "graph": "scopes", "graph.scope": "scopes", "train.micro_batch_size": "micro_batch_sizes",
    "data.seq_len": "seq_lens", "train.steps": "repeats", "run.device": "device", "launch.nproc": "nproc",
}  # fmt: skip
"""Keys that a suite sets, with the argument to use instead."""
DEPENDENT = {"model": ("model.", "recompute."), "recompute": ("recompute.",)}
DEPENDENT |= dict.fromkeys(("compile", "compile.enabled"), ("recompute.ops",))
"""Default overrides to drop if the user sets the key, since they fit only its default value."""
WARM_UP_STEPS = 3  # before the timed ones, after those of graph.warmup_steps and the captured step
SHOWN = 4000  # characters of a failed job's output that are logged, since its folder goes


class RunCase(NamedTuple):
    name: str
    row: Row
    config: RunConfig | ConfigError  # without its number of steps; an error if it cannot be composed


class Trained(NamedTuple):
    """Parsed output of a training job. Profiled steps, if any, are the last; those before are timed."""

    steps: list[dict[str, Any]]
    summary: dict[str, Any]
    captured: dict[str, Any]  # the report of graphs, empty without any
    trace: Trace | None


def run_case(
    args: BenchArgs,
    device: str,
    ranks: int,
    name: str,
    row: Row,
    defaults: Sequence[str],
    fixed: Sequence[str] = (),
    num_recorded: int = 0,
) -> RunCase:
    """Return a case with overrides: ``defaults`` that the user does not set, the user's, then ``fixed``."""
    own = split_list(args.overrides or "")
    words = [*without(defaults, own), *own, *UNREAD, f"run.device={device}", f"launch.nproc={ranks}", *fixed]
    try:
        config = compose_config(*words)
    except ConfigError as error:
        return RunCase(name, row | {"overrides": words}, error)
    last = config.graph.warmup_steps + 1 + WARM_UP_STEPS + args.repeats
    total = last + num_recorded
    words += [f"profile.steps=[{last + 1},{total}]"] * (num_recorded > 0)
    words += [f"train.steps={total}", f"train.log_interval={total}"]  # the host waits only at the end
    return RunCase(name, row | {"overrides": words}, config)


def measure(
    cases_of: Callable[[BenchArgs, str, bool, int], list[RunCase]],
    numbers_of: Callable[[RunConfig, int, Trained, int], Row],
    args: BenchArgs,
    device: torch.device,
    full: bool,
    brief: str = "{median_ms:.2f} ms, {tokens_per_s:,.0f} tokens/s a GPU",
    earlier: Sequence[Row] = (),
    until: float = math.inf,
) -> cases.Measured:
    """Run the cases as training jobs; return rows by ``numbers_of``. *Raises* ConfigError if none can run."""
    ranks = ranks_of(args, torch.cuda.device_count() if device.type == "cuda" else 0)
    runs = cases_of(args, device.type, full, ranks)
    refused = [run.config for run in runs if isinstance(run.config, ConfigError)]
    if runs and len(refused) == len(runs):
        raise refused[0]

    def numbers(run: RunCase) -> list[Row]:
        if isinstance(run.config, ConfigError):
            raise run.config
        return [numbers_of(run.config, ranks, train(run.row["overrides"], args.limit_s), args.repeats)]

    made = [cases.Case(run.name, run.row, functools.partial(numbers, run)) for run in runs]
    rows = cases.run_cases(made, brief.format_map, args.out, args.only, earlier, until)
    warm_up = f"graph.warmup_steps + 1 + {WARM_UP_STEPS}"
    return rows, [], {"ranks": ranks, "warm_up_steps": warm_up, "max_s_per_row": args.limit_s}


def numbers_of_run(config: RunConfig, ranks: int, timed: Sequence[Row], summary: Row) -> Row:
    """Return step times, rates of one rank with an equal share of the model's FLOPs, and peak memory."""
    assert config.data.seq_len is not None
    tokens = config.train.global_batch_size * config.data.seq_len
    floor_ms = flops_per_token(config.model, config.data.seq_len) * tokens / FLOPS_PER_S / ranks * 1e3
    times = cases.times_of([step["step_s"] * 1e3 for step in timed], floor_ms)
    return {
        "tokens": tokens,
        "floor_ms": floor_ms,
        **times,
        "tokens_per_s": tokens / times["median_ms"] * 1e3 / ranks,
        "tflops": FLOPS_PER_S / 1e12 / times["time_over_floor"],
        "peak_gib": summary["peak_memory_gib"],
        "device_gib": summary["device_memory_gib"],
    }


def split_list(text: str) -> list[str]:
    """Return a text's items, separated by commas outside brackets; brackets around all are optional."""
    items, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    if len(items) == 1 and re.fullmatch(r"\[.*\]", text):
        return split_list(text[1:-1])
    return [item.strip() for item in items if item.strip()]


def without(words: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return the overrides ``words`` except keys that ``own`` sets and keys that depend on those."""
    keys = {key_of(word) for word in own}
    gone = tuple(prefix for group in keys & DEPENDENT.keys() for prefix in DEPENDENT[group])
    return [word for word in words if key_of(word) not in keys and not word.startswith(gone)]


def refuse(args: BenchArgs, **instead: str) -> list[str]:
    """Return the user's overrides. *Raises* ConfigError for one that the suite sets, by key or section."""
    own, fixed = split_list(args.overrides or ""), {key_of(word) for word in UNREAD} | {"train.log_interval"}
    has = {key for key, name in KEYS.items() if args.suite in OF_SUITES.get(name, (args.suite,))}
    instead = {key: f"{KEYS[key]}=..." for key in has} | instead
    for word in own:
        key = key_of(word)
        if use := instead.get(key) or instead.get(key.partition(".")[0] + "."):
            raise ConfigError(f"overrides={word}: the suite sets {key}; use {use}")
        if key in fixed or key.startswith(("checkpoint.", "profile.")):
            raise ConfigError(f"overrides={word}: the suite sets {key}, so that only steps are timed")
    return own


def key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def train(overrides: Sequence[str], limit_s: float) -> Trained:
    """Run a training job; return its output. *Raises* CaseFailed, also if too slow; OSError if no metrics."""
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
    command = [sys.executable, "-m", "graphmoe.train", *words]
    with printed.open("wb") as out:
        try:  # what ends the job ends its workers, which die with the process that started them
            options: dict[str, Any] = {"start_new_session": True, "preexec_fn": end_with_parent}
            status = subprocess.run(command, stdout=out, stderr=out, timeout=limit_s, **options).returncode
        except subprocess.TimeoutExpired:
            late = f"not done after limit_s={limit_s:g} seconds, compilation included; use more"
            raise CaseFailed(late) from None
    if status:
        text = printed.read_text(encoding="utf-8", errors="replace").strip()
        log.error("the last lines of the job's output:\n%s", text[-SHOWN:])
        found = re.search(r"^error: (.*)\Z", text, re.MULTILINE | re.DOTALL)
        how = f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
        last = text.rpartition("\n")[2]
        raise CaseFailed(found[1] if found else f"the job's process {how}: {last}")
