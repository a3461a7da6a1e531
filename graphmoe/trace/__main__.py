"""Read traces of profile.steps: time per segment, largest kernels, idle GPU, communication, launches.

python -m graphmoe.trace run=outputs/tiny
python -m graphmoe.trace run=outputs/before,outputs/after
python -m graphmoe.trace trace=a.trace.json.gz,b.trace.json.gz format=json
"""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphmoe.config.arguments import emit, parse_args, run_tool, text_table
from graphmoe.config.schema import ConfigError, OutputFormat
from graphmoe.trace.events import listed, read_trace, recorded, traces_of
from graphmoe.trace.summary import Summary, summarise

SHOWN_NAME = 64
"""Characters of a kernel's name in a table; format=json has more."""
TRACELENS = "TraceLens_generate_perf_report_pytorch"
"""Command of github.com/AMD-AGI/TraceLens; PyPI's package ``tracelens`` is another project, never called."""
TRACELENS_S = 1800
_FIGURES = {
    "step ms": lambda s: s.step_ms,
    "GPU idle %": lambda s: None if s.idle is None else 100 * s.idle,
    "exposed communication ms": lambda s: s.exposed_ms,
    "hidden communication ms": lambda s: s.hidden_ms,
    "host launches ms": lambda s: s.launch_ms,
    "launches": lambda s: s.launches,
}


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


class Row(NamedTuple):
    """A figure of both; None where a trace does not have it."""

    name: str
    first: float | None
    second: float | None
    difference: float | None
    """The second less the first; a name that only one trace has is 0 in the other."""


@dataclass
class Comparison:
    """Numbers of two traces side by side, per step."""

    traces: tuple[str, str]
    figures: list[Row]
    segments: list[Row]
    """Milliseconds, those of the largest difference first."""
    kernels: list[Row]
    kinds: str
    """Kinds of the rows of ``kernels``: kernels, operations, or both."""
    notes: list[str]


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


def _other_ranks(run: Path, read: Path) -> Iterator[str]:
    others = sorted(rank for rank, path in recorded(run).items() if path != read)
    if others:
        yield f"there are traces of more ranks, {listed(others)}; rank={others[0]} shows one of them"


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


def compare(first: Summary, second: Summary, num_kernels: int) -> Comparison:
    """Compare summaries that have all of their kernels."""
    notes = list(dict.fromkeys([*first.notes, *second.notes]))
    if first.device != second.device:
        notes.append(f"the devices differ: {first.device} and {second.device}")
    return Comparison(
        (first.trace, second.trace),
        _rows(*({name: value(s) for name, value in _FIGURES.items()} for s in (first, second))),
        _sorted(_rows(_segment_times(first), _segment_times(second))),
        _sorted(_rows(_kernel_times(first), _kernel_times(second)))[:num_kernels],
        " and ".join(dict.fromkeys([first.kinds, second.kinds])),
        notes,
    )


def _rows(first: Mapping[str, float | None], second: Mapping[str, float | None]) -> list[Row]:
    pairs = ((name, first.get(name), second.get(name)) for name in dict.fromkeys([*first, *second]))
    return [Row(name, a, b, None if a is b is None else (b or 0.0) - (a or 0.0)) for name, a, b in pairs]


def _sorted(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -abs(row.difference or 0.0))


def _segment_times(summary: Summary) -> dict[str, float | None]:
    return {f"{s.segment}:{s.part}" if s.part else s.segment: s.ms for s in summary.segments}


def _kernel_times(summary: Summary) -> dict[str, float]:
    found: dict[str, float] = {}
    for kernel in (kernel for segment in summary.segments for kernel in segment.kernels):
        found[kernel.name] = found.get(kernel.name, 0.0) + kernel.ms
    return found


def summary_text(summary: Summary) -> RenderableType:
    """The lines of the whole steps, then segments, then their largest kernels."""
    tables = (Text(), _segments(summary), Text(), _kernels(summary))
    return Group(*map(Text, _head(summary)), *tables, *_notes(summary.notes))


def comparison_text(comparison: Comparison) -> RenderableType:
    """Two traces side by side."""
    parts: list[RenderableType] = [
        Text(f"{name}: {path}") for name, path in zip(("first", "second"), comparison.traces, strict=True)
    ]
    for title, rows in {
        "step": [row for row in comparison.figures if row.difference is not None],
        "segment, ms per step": comparison.segments,
        f"{comparison.kinds} that differ most, ms per step": comparison.kernels,
    }.items():
        cells = [(_short(name), _ms(a), _ms(b), _ms(more, "+")) for name, a, b, more in rows]
        parts += [Text(), text_table([title, "first", "second", "difference"], cells)]
    return Group(*parts, *_notes(comparison.notes))


def _head(summary: Summary) -> Iterator[str]:
    numbers, facts = summary.facts.get("steps"), summary.facts
    which = f"steps {numbers[0]} to {numbers[-1]}" if numbers else f"{summary.num_steps} steps"
    rank = f", rank {facts['rank']} of {facts['num_ranks']}" if "rank" in facts else ""
    yield summary.trace
    yield f"{which}{rank}, {summary.device or 'unknown device'}; all times per step"
    if summary.on == "cpu":
        yield f"step {summary.step_ms:.3f} ms of the host"
        return
    yield f"step {summary.step_ms:.3f} ms, GPU idle {summary.idle:.1%}"
    yield f"communication {summary.exposed_ms:.3f} ms exposed, {summary.hidden_ms:.3f} ms hidden"
    yield f"host {summary.launch_ms:.3f} ms in {summary.launches:.0f} launches"
    yield "busy " + ", ".join(f"stream {name}: {ms:.3f} ms" for name, ms in summary.streams.items())


def _segments(summary: Summary) -> Table:
    """A row for each segment; a column that a CPU has nothing for is left out."""
    rows = [
        (
            row.segment,
            row.part,
            _count(row.calls),
            _ms(row.ms),
            f"{row.ms / summary.step_ms:.1%}" if summary.step_ms else "-",
            _ms(row.communication_ms),
        )
        for row in summary.segments
    ]
    return _without_last(
        summary, ["segment", "part", "calls", "ms", "of step", "communication ms"], rows, (0, 1)
    )


def _kernels(summary: Summary) -> Table:
    rows = [
        (
            *(("", "") if place else (row.segment, row.part)),
            _short(kernel.name),
            _count(kernel.calls),
            _ms(kernel.ms),
            "unknown" if kernel.floor_ms is None else _ms(kernel.floor_ms),
        )
        for row in summary.segments
        for place, kernel in enumerate(row.kernels)
    ]
    kind = summary.kinds.removesuffix("s")
    return _without_last(summary, ["segment", "part", kind, "calls", "ms", "floor ms"], rows, (0, 1, 2))


def _without_last(
    summary: Summary, columns: list[str], rows: Sequence[tuple[str, ...]], names: tuple[int, ...]
) -> Table:
    most = len(columns) - (summary.on == "cpu")
    return text_table(columns[:most], [row[:most] for row in rows], names=names)


def _notes(notes: list[str]) -> list[Text]:
    return [Text(), *(Text(f"note: {note}") for note in notes)] if notes else []


def _short(name: str) -> str:
    return name if len(name) <= SHOWN_NAME else f"{name[: SHOWN_NAME - 3]}..."


def _count(calls: float) -> str:
    return "-" if not calls else f"{calls:g}" if calls == int(calls) else f"{calls:.1f}"


def _ms(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"


if __name__ == "__main__":
    run_tool(main)
