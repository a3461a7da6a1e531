"""Read traces of profile.steps: time per segment, largest kernels, idle GPU, communication, launches.

python -m graphmoe.trace run=outputs/tiny
python -m graphmoe.trace run=outputs/before,outputs/after
python -m graphmoe.trace trace=a.trace.json.gz,b.trace.json.gz format=json
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from graphmoe.config.arguments import emit, parse_args, run_tool
from graphmoe.config.schema import ConfigError, OutputFormat
from graphmoe.run.files import PROFILE_FOLDER
from graphmoe.trace.events import rank_of, read_trace
from graphmoe.trace.summary import Summary, summarise
from graphmoe.trace.tables import Comparison, compare, comparison_text, summary_text

TRACELENS = "TraceLens_generate_perf_report_pytorch"
"""Command of github.com/AMD-AGI/TraceLens; PyPI's package ``tracelens`` is another project, never called."""
TRACELENS_S = 1800


@dataclass
class TraceArgs:
    """Arguments of the tool."""

    run: list[Path] | None = None
    """Folder of a run with profile.steps; two, by comma, are compared."""
    trace: list[Path] | None = None
    """The same for files, .json or .json.gz, in place of run."""
    rank: int | None = None
    """Rank of the run; default: the lowest that was recorded, of two runs by both."""
    kernels: int = 5
    """Largest kernels of each segment to show, > 0."""
    tracelens: bool = True
    """Call AMD's TraceLens too, if it is on PATH."""
    format: OutputFormat = OutputFormat.text
    """text, or json: one document on stdout and nothing else there."""


def main(argv: list[str]) -> None:
    """Show what is asked."""
    args = parse_args(TraceArgs, argv, prog="graphmoe.trace")
    if problems := [*_problems(args)]:
        raise ConfigError("; ".join(problems))
    paths = args.trace or traces_of(args.run or [], args.rank)
    compares = len(paths) == 2
    summaries = [summarise(read_trace(path), sys.maxsize if compares else args.kernels) for path in paths]
    if args.run and args.rank is None and not compares:
        summaries[0].notes += _other_ranks(args.run[0], paths[0])
    comparison = compare(summaries[0], summaries[1], args.kernels) if compares else None
    reports = [report for path in paths if args.tracelens and (report := tracelens_report(path))]
    shown = summary_text(summaries[0]) if comparison is None else comparison_text(comparison)
    emit(
        document(summaries, comparison, reports, args.kernels),
        Group(shown, *(Text(f"TraceLens: {path}") for path in reports)),
        args.format,
    )


def trace_of(run: Path, rank: int | None) -> Path:
    """The trace of a rank of a run, by default the lowest. *Raises* ConfigError where there is none."""
    return traces_of([run], rank)[0]


def traces_of(runs: Sequence[Path], rank: int | None) -> list[Path]:
    """The traces of one rank of each run, by default the lowest that all of them recorded.

    *Raises* ConfigError where there is none.
    """
    of_runs = [_recorded(run) for run in runs]
    if rank is None:
        common = set.intersection(*map(set, of_runs))
        if not common:
            pairs = zip(runs, of_runs, strict=True)
            there = ", ".join(f"{run} has rank {_listed(found)}" for run, found in pairs)
            raise ConfigError(
                f"no rank recorded in all: {there}; record the same profile.ranks, or use trace="
            )
        rank = min(common)
    for run, found in zip(runs, of_runs, strict=True):
        if rank not in found:
            raise ConfigError(
                f"rank={rank} has no trace in {run}; there are those of {_listed(found)} (profile.ranks)"
            )
    return [found[rank] for found in of_runs]


def _recorded(run: Path) -> dict[int, Path]:
    """The traces of a run by rank, one at least."""
    if not run.is_dir():
        raise ConfigError(f"run={run} is no folder; name that of a run, or use trace=<file>")
    files = (run / PROFILE_FOLDER).glob("*")
    found = {rank: path for path in files if (rank := rank_of(path.name)) is not None}
    if not found:
        raise ConfigError(f"{run} has no trace; a run with profile.steps=[10,12] writes one")
    return found


def _other_ranks(run: Path, read: Path) -> Iterator[str]:
    """Yield a note if there are traces of more ranks than the one that was read."""
    others = sorted(rank for rank, path in _recorded(run).items() if path != read)
    if others:
        yield f"there are traces of more ranks, {_listed(others)}; rank={others[0]} shows one of them"


def _listed(found: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(found)))


def document(
    summaries: list[Summary], comparison: Comparison | None, reports: list[Path], num_kernels: int
) -> dict[str, Any]:
    """One object for a trace; for two a list of such, ``traces``, and their ``comparison``."""
    entries = [dataclasses.asdict(summary) for summary in summaries]
    for entry in entries:
        for segment in entry["segments"]:
            del segment["kernels"][num_kernels:]
    shown: dict[str, Any] = entries[0]
    if comparison is not None:
        keys = ("figures", "segments", "kernels")
        rows = {key: [row._asdict() for row in getattr(comparison, key)] for key in keys}
        shown = {"traces": entries, "comparison": rows, "notes": comparison.notes}
    return {**shown, "tracelens": [str(path) for path in reports]} if reports else shown


def tracelens_report(trace: Path) -> Path | None:
    """Let TraceLens, if it is on PATH, write a workbook beside a trace; print why where it writes none."""
    command = shutil.which(TRACELENS)
    if command is None:
        return None
    report = trace.with_name(f"{trace.name.split('.')[0]}.tracelens.xlsx")
    words = [command, "--profile_json_path", str(trace), "--output_xlsx_path", str(report)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TRACELENS_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{TRACELENS} of {trace}: {error}", file=sys.stderr)
        return None
    if done.returncode == 0 and report.exists():
        return report
    last = " ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-1:])
    print(f"{TRACELENS} of {trace} ended with status {done.returncode}: {last}", file=sys.stderr)
    return None


def _problems(args: TraceArgs) -> Iterator[str]:
    paths = [*(args.run or ()), *(args.trace or ())]
    if not paths:
        yield "nothing to read; use run=outputs/tiny or trace=<file>"
    elif args.run and args.trace:
        yield "run=... and trace=... are two ways to name traces; use one of them"
    elif len(paths) > 2:
        yield f"{len(paths)} traces are given; one is shown, two are compared"
    if args.rank is not None and args.trace:
        yield f"rank={args.rank} is one of a run; trace=... names the file itself"
    if args.kernels < 1:
        yield f"kernels={args.kernels} must be 1 or more"


if __name__ == "__main__":
    run_tool(main)
