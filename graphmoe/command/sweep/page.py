"""Jobs of a sweep as a table for the terminal, and as a page that compares their curves."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from graphmoe.command.sweep.folder import Job, JobStatus
from graphmoe.config.schema import ConfigError
from graphmoe.report.comparison import RunCurves, curves_of_runs, run_curves
from graphmoe.report.run_data import read_run
from graphmoe.web_page.page import paragraph, table
from graphmoe.web_page.page import write_page as write_whole

Words = Mapping[int, Sequence[str]]
"""Overrides that set a job apart, by its number."""

_NUMBERS: dict[str, tuple[str, str]] = {
    "val loss": ("final_val_loss", ".4f"),
    "loss": ("final_loss", ".4f"),
    "tokens/s": ("median_tokens_per_s", ",.0f"),
    "steps": ("steps", "d"),
    "first step s": ("time_to_first_step_s", ".1f"),
}
"""Keys of a run's summary that are shown, with their format."""


def sweep_table(jobs: Sequence[Job], words: Words) -> Group:
    """Return the jobs in the order given, then the errors of those that failed, a line for each."""
    headings, rows = _cells(jobs, words, list(_NUMBERS)[:4])
    short = [name.rpartition(".")[2] for name in headings]  # lr for optim.lr, where no other key ends so
    headings = [s if short.count(s) == 1 else name for s, name in zip(short, headings, strict=True)]
    table = Table(*(Column(name, overflow="fold") for name in headings), box=SIMPLE_HEAD)
    table.columns[-1].no_wrap = True
    for cells, job in zip(rows, jobs, strict=True):
        table.add_row(*map(Text, cells), style="red" if job.status is JobStatus.failed else "")
    errors = [Text(f"job {job.number} failed: {job.brief_error}", "red") for job in jobs if job.error]
    return Group(table, *errors)


def write_page(path: Path, command: str, jobs: Sequence[Job], words: Words) -> None:
    """Write a page that needs no network: the curves of all jobs that have any, and the table."""
    curves = [each for job in jobs if (each := job_curves(job, words[job.number])) is not None]
    headings, rows = _cells(jobs, words, list(_NUMBERS))
    rows = [[*row, job.brief_error] for row, job in zip(rows, jobs, strict=True)]
    content = curves_of_runs(curves) + table([*headings, ""], rows)
    write_whole(path, "graphmoe: sweep", paragraph(f"`{command}`"), [("", content)])


def job_curves(job: Job, words: Sequence[str]) -> RunCurves | None:
    """Return the curves of a job's run, None where it has no folder of a run yet."""
    if job.folder is None:
        return None
    try:
        run = read_run(job.folder)
    except ConfigError:
        return None
    short = ("=".join(_split(word)) for word in words)
    return run_curves(run, " ".join([str(job.number), *short]), [f"job {job.number}", *words])


def _cells(jobs: Sequence[Job], words: Words, wanted: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: a column for each key that differs, and each wanted number that is known."""
    settings = {job.number: dict(_split(word) for word in words[job.number]) for job in jobs}
    keys = list(dict.fromkeys(key for job in jobs for key in settings[job.number]))
    summaries = {job.number: job.summary or {} for job in jobs}
    numbers = [
        (name, *_NUMBERS[name])
        for name in wanted
        if any(summary.get(_NUMBERS[name][0]) is not None for summary in summaries.values())
    ]
    rows = []
    for job in jobs:
        mine = summaries[job.number]
        known = [format(mine[key], form) if mine.get(key) is not None else "" for _, key, form in numbers]
        own = [settings[job.number].get(key, "") for key in keys]
        rows.append([str(job.number), *own, *known, job.status.value])
    return ["job", *keys, *(name for name, _, _ in numbers), "state"], rows


def _split(word: str) -> tuple[str, str]:
    """Key and value of an override; long fractions, as an optimiser chooses them, with five digits."""
    key, _, value = word.partition("=")
    with contextlib.suppress(ValueError):
        value = format(float(value), ".5g") if len(value) > 8 else value
    return key, value
