"""Most likely cause of a slow run, from times that every run measures; no trace is needed."""

import shlex
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from graphmoe.report.run_data import RunData
from graphmoe.run.metrics_file import timed

MANY = 0.1
"""Share of a run, or of a step, from which a loss of time is named."""
MOST = 0.25
"""Share of a run from which its start is named as the only cause."""
START = "its start"
EAGER = "Nothing is compiled: `compile.enabled=true` fuses and rewrites the segments."


class Cause(NamedTuple):
    """A cause of lost time."""

    share: float
    """Share of the run's time that the cause costs at most."""
    short: str
    said: str
    """Sentence with measurements, and keys to try."""


def causes(run: RunData) -> list[Cause]:
    """Return the causes of lost time, the largest first."""
    found = sorted((each for each in _causes(run) if each.share > MANY), reverse=True)
    is_start = len(found) == 1 and found[0].short == START
    return [] if is_start and found[0].share <= MOST else found


def likely(run: RunData) -> Cause:
    """Return the largest cause of lost time, else what the steps' time is spent on."""
    if found := causes(run):
        return found[0]
    if run.of("run.device") == "cpu":
        threads = threads_of(run)
        said = f"The steps compute on a CPU{f', with {threads}' if threads else ''}."
        return Cause(
            0.0, "the CPU's arithmetic", f"{said} A smaller `model` or `data.seq_len` has less of it."
        )
    if run.of("compile.enabled") is False:
        return Cause(0.0, "nothing is compiled", EAGER)
    return Cause(0.0, "the steps themselves", "Nothing that a run always measures stands out.")


def shares(run: RunData) -> Iterator[str]:
    """Yield a sentence on the shares of time for starts, steps, validation and checkpoints."""
    num_starts, (start, steps, total) = len(run.starts), _seconds(run)
    if not steps or None in run.starts:
        return

    def part(name: str, seconds: float | None) -> list[str]:
        return [] if seconds is None else [f"{seconds / total:.0%} {name}"]

    first, capture = f"its first step{_made(run)}", run.captured.get("seconds")
    if num_starts > 1:  # the files on compilation and capture are of the last one
        first, capture = f"the first steps of its {num_starts} starts", None
    within = ", ".join([*part("waiting for data", run.summary.get("data_s")), *part("capture", capture)])
    parts = [
        *part(f"up to {first}", start),
        *part(f"in {len(run.steps) - num_starts:,} more{f' ({within})' if within else ''}", steps),
        *part("validation", run.summary.get("validation_s")),
        *part("checkpoints", run.summary.get("checkpoint_s")),
    ]
    yield f"Of the {duration(total)} of the run: {', '.join(parts)}."


def more(run: RunData) -> str:
    """Return a sentence with the command that records a trace."""
    command = run.environment.get("command") or []
    done = run.steps[0]["step"] - 1 if run.steps else 0  # of a run that began from another's checkpoint
    last = min(done + 12, run.of("train.steps") or done + 12)
    word = f"profile.steps=[{min(last, max(done + 2, last - 2))},{last}]"  # the first step may compile
    said = "Which segments it is in, a trace of steps shows"
    if not {"graphmoe.train", "train"} & {*command}:  # a worker's
        return f"{said}: `{word}` in the command or configuration that starts it."
    command = [each for each in command if not each.lstrip("+-").startswith("profile.steps=")]
    return f"{said}: `{shlex.join([*command, word])}`."


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def share_of_steps(run: RunData) -> float:
    _, steps, total = _seconds(run)
    return steps / total if total else 0.0


def _seconds(run: RunData) -> tuple[float, float, float]:
    start = sum(seconds for seconds in run.starts if seconds is not None)
    steps = 0.0
    if len(run.steps) > len(run.starts):
        steps = sum(row["step_s"] for row in timed(run.steps) if row.get("step_s"))
    beside = sum(run.summary.get(name) or 0.0 for name in ("validation_s", "checkpoint_s"))
    return start, steps, start + steps + beside


def _causes(run: RunData) -> Iterator[Cause]:
    start, steps_s, total = _seconds(run)
    if not total:
        return
    seconds = [start, *(run.summary.get(name) or 0.0 for name in ("data_s", "validation_s", "checkpoint_s"))]
    of_start, of_data, of_validation, of_checkpoints = (each / total for each in seconds)
    key = "a longer run has it once"
    if run.of("compile.enabled"):
        later = "" if run.of("compile.cache") else " with `compile.cache=true`"
        key = f"`compile.enabled=false` starts sooner; the next start{later} finds its code in the cache"
    first, many = f"The first step came after {duration(start)}", len(run.starts)
    if many > 1:
        first = f"Its {many} starts took {duration(start)} up to their first steps"
    yield Cause(of_start, START, f"{first}, {of_start:.0%} of the time{_made(run)}: {key}.")
    key = "`data.prefetch` reads further ahead"
    if run.of("data.source") == "hf":
        key = "tokens that `python -m graphmoe.prepare` has written (`data=memmap`) need no tokenising"
    said = f"For {of_data:.0%} of the time the host waited for data: {key}."
    yield Cause(of_data, "waiting for data", said)
    interval, batches = (run.of(f"train.val_{key}") for key in ("interval", "batches"))
    keys = f"more than `train.val_interval={interval}`, or less than `train.val_batches={batches}`"
    yield Cause(of_validation, "validation", f"Validation took {of_validation:.0%} of the time: {keys}.")
    key = "" if run.of("checkpoint.async_save") else ", or `checkpoint.async_save=true`"
    said = f"Checkpoints took {of_checkpoints:.0%} of the time: a larger `checkpoint.interval`{key}."
    yield Cause(of_checkpoints, "checkpoints", said)
    for find in (_of_cores, _of_ranks, _uneven):
        yield from find(run, steps_s / total)


def _of_cores(run: RunData, of_steps: float) -> Iterator[Cause]:
    threads, cores = run.environment.get("threads"), run.environment.get("usable_cores")
    if run.of("run.device") != "cpu" or not threads or not cores:
        return
    workers = run.environment.get("workers_of_node") or 1
    used, key = threads * workers, f"`host.threads={max(1, cores // workers)}`"
    said = f"It computes on a CPU with {threads_of(run)}"
    if used < cores:
        said += f": {key} uses all of them, if no other program does."
        yield Cause(of_steps * (1 - used / cores), "cores without work", said)
    elif used > cores:
        said += f", which wait for each other: {key}."
        yield Cause(of_steps * (1 - cores / used), "more threads than cores", said)


def _of_ranks(run: RunData, of_steps: float) -> Iterator[Cause]:
    last = run.steps[-max(1, len(run.steps) // 4) :]
    found = [row.get("planned_rank_load") or row.get("rank_load") for row in last]
    if (loads := [load for load in found if load]) and (load := statistics.fmean(loads)) > 1 + MANY:
        said = (
            f"The rank with the most tokens has {load:.2f} times the mean, and the others wait for it: "
            f"{_balance(run)}see the load of experts, and `model.aux_loss_coef`."
        )
        yield Cause(of_steps * (1 - 1 / load), "an overfull rank", said)


def _balance(run: RunData) -> str:
    # names what gives all ranks as many rows, if it can; ends with a comma
    ep, of_node = run.of("parallel.ep") or 1, run.environment.get("workers_of_node") or 1
    has_symm = run.of("moe.dispatcher") == "symm"
    if run.of("moe.balance") == "replicas":
        return "more `moe.replica_slots` even it out, "
    if run.of("moe.balance") is None or run.of("parallel.etp") != 1 or not (has_symm or ep <= of_node):
        return ""
    words = "" if has_symm else " with `moe.dispatcher=symm`"
    return f"`moe.balance=replicas`{words} gives all of them as many, "


def _uneven(run: RunData, of_steps: float) -> Iterator[Cause]:
    steps = sorted(row["step_s"] for row in timed(run.steps) if row.get("step_s"))
    if len(steps) < 20:
        return
    median, late = statistics.median(steps), steps[int(0.95 * len(steps))]
    over = sum(max(0.0, each - median) for each in steps) / sum(steps)
    if late > 1.5 * median:
        said = (
            f"One step in twenty takes over {late:.3g} s, the median {median:.3g} s: another process on the "
            f"machine, or data that come late (`data.prefetch`)."
        )
        yield Cause(of_steps * over, "uneven steps", said)


def threads_of(run: RunData) -> str:
    """Return threads, cores and workers in words; empty if not recorded."""
    facts = run.environment
    threads, cores, workers = (facts.get(key) for key in ("threads", "usable_cores", "workers_of_node"))
    if not threads or not cores:
        return ""
    each = f"{threads} thread{'s' * (threads > 1)}"
    words = f"{workers} workers of {each}" if (workers or 1) > 1 else each
    given = run.of("host.threads") is None and facts.get("OMP_NUM_THREADS")
    return f"{words} on {cores} core{'s' * (cores > 1)}" + (f" (OMP_NUM_THREADS={given})" if given else "")


def _made(run: RunData) -> str:
    seconds = run.compiled.get("seconds")
    return f" (compilation {duration(seconds)})" if seconds and len(run.starts) < 2 else ""
