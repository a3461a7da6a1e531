"""Most likely cause of a slow run, from times that every run measures; no trace is needed."""

import shlex
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from graphmoe.report.run_data import RunData
from graphmoe.run.metrics_file import timed

MANY = 0.1
"""Share of a run, or of a step, from which on a loss of time is named."""
MOST = 0.5
"""Share of a run from which on its start is named."""


class Cause(NamedTuple):
    """Loss of time."""

    share: float
    """Share of the run's time, at most, that would not pass without it."""
    short: str
    said: str
    """Sentence with what was measured, and the keys to try."""


def causes(run: RunData) -> list[Cause]:
    """Losses of time that the run's numbers show, the largest first."""
    return sorted((each for each in _causes(run) if each.share > MANY), reverse=True)


def likely(run: RunData) -> Cause:
    """Return the largest loss of time or, where nothing stands out, what the steps themselves run on."""
    if found := causes(run):
        return found[0]
    mfu = run.median("mfu")
    floor = f": a step takes {1 / mfu:,.1f} times the floor" if mfu else ""
    if run.of("run.device") == "cpu":
        threads = threads_of(run)
        said = f"The steps compute on a CPU{f', with {threads}' if threads else ''}{floor}."
        return Cause(
            0.0, "the CPU's arithmetic", f"{said} A smaller `model` or `data.seq_len` has less of it."
        )
    if run.of("compile.enabled") is False:
        return Cause(0.0, "nothing is compiled", f"The steps are eager{floor}; `compile.enabled=true`.")
    said = f"Nothing that a run always measures stands out{floor}."
    return Cause(0.0, "the steps themselves", f"{said} Only a trace tells kernels and launches apart.")


def shares(run: RunData) -> Iterator[str]:
    """Yield sentences on the run's starts and steps, and on the shares of what is beside the steps."""
    steps = [row["step_s"] for row in timed(run.steps) if row.get("step_s")]
    starts, whose = run.starts, "the run"
    if starts and None not in starts and len(run.steps) > len(starts):
        others = f"{len(run.steps) - len(starts):,} more took {duration(sum(steps))}"
        after = [duration(seconds) for seconds in starts if seconds is not None]
        if len(starts) == 1:
            yield f"The run had its first step after {after[0]}; {others}."
        else:
            many = f"{len(starts)} starts, whose first ones came after {_listed(after)}"
            yield f"Its steps are of {many}; {others}."
    if len(starts) > 1:
        whose = "the last start"
    total, start = run.summary.get("run_s"), run.summary.get("time_to_first_step_s")
    if total and start:
        names = {"validation_s": "validation", "checkpoint_s": "checkpoints", "data_s": "waiting for data"}
        parts = [f"{(run.summary.get(key) or 0.0) / total:.0%} {name}" for key, name in names.items()]
        if seconds := run.captured.get("seconds"):
            parts.append(f"{seconds / total:.0%} capture")
        begin = f"{start / total:.0%} up to its first step{_made(run)}"
        yield f"Of the {duration(total)} of {whose}: {begin}, {', '.join(parts)}."


def more(run: RunData) -> str:
    """Return a sentence with the command that records a trace."""
    last, command = min(12, run.of("train.steps") or 12), run.environment.get("command") or []
    word = f"profile.steps=[{max(1, last - 2)},{last}]"
    said = "Which segments it is in, a trace of steps shows"
    if not any(each.rpartition(".")[2] == "train" for each in command[:4]):  # of a worker
        return f"{said}: `{word}` beside the other words of its command."
    command = [each for each in command if not each.startswith("profile.steps=")]
    return f"{said}: `{shlex.join([*command, word])}`."


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _causes(run: RunData) -> Iterator[Cause]:
    summary = run.summary
    steps_s = sum(row["step_s"] for row in timed(run.steps) if row.get("step_s"))
    start = sum(seconds for seconds in run.starts if seconds is not None)
    total = start + steps_s  # of a run that was killed
    if summary.get("run_s"):
        start, total = summary.get("time_to_first_step_s") or 0.0, summary["run_s"]
    if not total:
        return
    if (share := start / total) > MOST:  # a longer run has less of it
        key = "a longer run has it once"
        if run.of("compile.enabled"):
            later = "" if run.of("compile.cache") else " with `compile.cache=true`"
            key = f"`compile.enabled=false` starts sooner; the next start{later} finds its code in the cache"
        said = f"The first step came after {duration(start)}, {share:.0%} of the time{_made(run)}: {key}."
        yield Cause(share, "its start", said)
    if share := (summary.get("data_s") or 0.0) / total:
        key = "`data.prefetch` reads further ahead"
        if run.of("data.source") == "hf":
            key = "tokens that `python -m graphmoe.prepare` has written (`data=memmap`) need no tokenising"
        yield Cause(
            share, "waiting for data", f"For {share:.0%} of the time the host waited for data: {key}."
        )
    if share := (summary.get("validation_s") or 0.0) / total:
        interval, batches = (run.of(f"train.val_{key}") for key in ("interval", "batches"))
        keys = f"more than `train.val_interval={interval}`, or less than `train.val_batches={batches}`"
        yield Cause(share, "validation", f"Validation took {share:.0%} of the time: {keys}.")
    if share := (summary.get("checkpoint_s") or 0.0) / total:
        key = "" if run.of("checkpoint.async_save") else ", or `checkpoint.async_save=true`"
        said = f"Checkpoints took {share:.0%} of the time: a larger `checkpoint.interval`{key}."
        yield Cause(share, "checkpoints", said)
    of_steps = min(1.0, steps_s / total)
    yield from _of_cores(run, of_steps)
    yield from _of_ranks(run, of_steps)
    yield from _uneven(run, of_steps)


def _of_cores(run: RunData, of_steps: float) -> Iterator[Cause]:
    """Threads of a CPU run beside its cores."""
    threads, cores = run.environment.get("threads"), run.environment.get("usable_cores")
    if run.of("run.device") != "cpu" or not threads or not cores:
        return
    workers = run.environment.get("workers_of_node") or 1
    used, each = threads * workers, max(1, cores // workers)
    if used < cores:
        said = f"It computes on a CPU with {threads_of(run)}: `host.threads={each}` uses all of them."
        yield Cause(of_steps * (1 - used / cores), "cores without work", said)
    elif used > cores:
        said = (
            f"It computes on a CPU with {threads_of(run)}, which wait for each other: `host.threads={each}`."
        )
        yield Cause(of_steps * (1 - cores / used), "more threads than cores", said)


def _of_ranks(run: RunData, of_steps: float) -> Iterator[Cause]:
    last = run.steps[-max(1, len(run.steps) // 4) :]
    loads = [row["rank_load"] for row in last if row.get("rank_load")]
    if loads and (load := statistics.fmean(loads)) > 1 + MANY:
        said = (
            f"The rank with the most tokens has {load:.2f} times the mean, and the others wait for it: see "
            f"the load of experts, and `model.aux_loss_coef`."
        )
        yield Cause(of_steps * (1 - 1 / load), "an overfull rank", said)


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
    """Threads, cores and workers in words; empty where they are not recorded."""
    facts = run.environment
    threads, cores, workers = (facts.get(key) for key in ("threads", "usable_cores", "workers_of_node"))
    if not threads or not cores:
        return ""
    each = f"{threads} thread{'s' * (threads > 1)}"
    words = f"{workers} workers of {each}" if (workers or 1) > 1 else each
    given = run.of("host.threads") is None and facts.get("OMP_NUM_THREADS")
    return f"{words} on {cores} core{'s' * (cores > 1)}" + (f" (OMP_NUM_THREADS={given})" if given else "")


def _listed(parts: list[str]) -> str:
    """Parts in a row, of many the first and the last ones."""
    shown = parts if len(parts) < 6 else [*parts[:2], "...", *parts[-2:]]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _made(run: RunData) -> str:
    """Seconds of compilation, as an addition to a sentence on the start."""
    seconds = run.compiled.get("seconds")
    return f" (compilation {duration(seconds)})" if seconds else ""
