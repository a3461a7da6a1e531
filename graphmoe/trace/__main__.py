"""Read traces of profile.steps: time per segment, largest kernels, idle GPU, communication, launches.

python -m graphmoe.trace run=outputs/tiny
python -m graphmoe.trace run=outputs/tiny ranks=all
python -m graphmoe.trace run=outputs/before,outputs/after
python -m graphmoe.trace trace=a.trace.json.gz,b.trace.json.gz format=json
"""

import dataclasses
import enum
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphmoe.config.arguments import emit, parse_args, run_tool, text_table
from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError, OutputFormat
from graphmoe.trace.events import listed, read_trace, recorded, traces_of
from graphmoe.trace.ranks import Exchange, exchanges_of
from graphmoe.trace.summary import Summary, summarise

SHOWN_NAME = 64
# command of github.com/AMD-AGI/TraceLens; PyPI's package ``tracelens`` is another project, never called
TRACELENS = "TraceLens_generate_perf_report_pytorch"
TRACELENS_S = 1800
_COLUMNS = "segment", "part"
RanksShown = enum.StrEnum("RanksShown", ("one", "all"))
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
    """Folder of a run with profile.steps; two, separated by a comma, are compared."""
    trace: list[Path] | None = None
    """Trace files, .json or .json.gz, in place of run."""
    rank: int | None = None
    """Rank of the run; default: the lowest that was recorded, by both of two runs."""
    ranks: RanksShown = RanksShown.one
    """all: join the exchanges of all recorded ranks of the run too."""
    kernels: int = 5
    """Largest kernels of each segment to show, > 0."""
    tracelens: bool = True
    """Call AMD's TraceLens too, if it is on PATH."""
    format: OutputFormat = OutputFormat.text
    """Output on stdout: text, or one JSON document."""


def main(argv: list[str]) -> None:
    args = parse_args(TraceArgs, argv, prog="graphmoe.trace", places=("run",))
    if problems := [*_problems(args)]:
        raise ConfigError("; ".join(problems))
    paths = args.trace or traces_of(args.run or [], args.rank)
    traces = [*map(read_trace, paths)]
    summaries = [summarise(trace, sys.maxsize) for trace in traces]
    exchanges: list[Exchange] | None = None
    if args.run and args.ranks is RanksShown.all:
        of_ranks = recorded(args.run[0]).items()
        exchanges, notes = exchanges_of(
            {rank: traces[0] if path == paths[0] else read_trace(path) for rank, path in of_ranks}
        )
        summaries[0].notes += notes if exchanges else [*notes, "no exchange between GPUs to join"]
    elif args.run and args.rank is None and len(paths) == 1:
        summaries[0].notes += _other_ranks(args.run[0], paths[0])
    compared = compare(summaries[0], summaries[1], args.kernels) if len(paths) == 2 else None
    for segment in (segment for summary in summaries for segment in summary.segments):
        del segment.kernels[args.kernels :]
    reports = [report for path in paths if args.tracelens and (report := tracelens_report(path))]
    document = dataclasses.asdict(summaries[0])
    if compared is not None:
        entries = [dataclasses.asdict(summary) for summary in summaries]
        document = {"traces": entries, "comparison": compared, "notes": compared.pop("notes")}
    if exchanges is not None:
        document["exchanges"] = [dataclasses.asdict(exchange) for exchange in exchanges]
    if reports:
        document["tracelens"] = [str(path) for path in reports]
    shown = (
        summary_text(summaries[0], exchanges) if compared is None else comparison_text(summaries, document)
    )
    emit(document, Group(shown, *(Text(f"TraceLens: {path}") for path in reports)), args.format)


def _other_ranks(run: Path, read: Path) -> Iterator[str]:
    others = sorted(rank for rank, path in recorded(run).items() if path != read)
    if others:
        yield (
            f"there are traces of more ranks, {listed(others)}; rank={others[0]} shows one of them, and "
            f"ranks=all joins their exchanges"
        )


def tracelens_report(trace: Path) -> Path | None:
    """Write a TraceLens workbook beside a trace, if TraceLens is on PATH; print its error."""
    if shutil.which(TRACELENS) is None:
        return None
    report = trace.with_name(f"{trace.name.split('.')[0]}.tracelens.xlsx")
    words = [TRACELENS, "--profile_json_path", str(trace), "--output_xlsx_path", str(report)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TRACELENS_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    else:
        if done.returncode == 0 and report.exists():
            return report
        last = " ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-1:])
        why = f"ended with status {done.returncode}: {last}"
    print(f"{TRACELENS} of {trace}: {why}", file=sys.stderr)
    return None


def _problems(args: TraceArgs) -> Iterator[str]:
    paths = [*(args.run or ()), *(args.trace or ())]
    if not paths:
        yield "nothing to read; use run=outputs/tiny or trace=<file>"
    elif args.run and args.trace:
        yield "run=... and trace=... are two ways to name traces; use one of them"
    elif len(paths) > 2:
        yield f"{len(paths)} traces are given; give one to show it, or two to compare them"
    if args.ranks is RanksShown.all and (args.trace or len(paths) > 1):
        yield "ranks=all joins the traces of one run=..."
    if args.rank is not None and args.trace:
        yield f"rank={args.rank} selects a trace of run=...; trace=... names one file"
    if args.kernels < 1:
        yield f"kernels={args.kernels} must be 1 or more"


def compare(first: Summary, second: Summary, num_kernels: int) -> dict[str, Any]:
    """Return differences of two summaries that hold all kernels, the largest first."""
    notes = list(dict.fromkeys([*first.notes, *second.notes]))
    if first.device != second.device:
        notes.append(f"the devices differ: {first.device} and {second.device}")
    both = (first, second)
    segments, kernels = (
        sorted(_rows(*map(times, both)), key=lambda row: -abs(row["difference"] or 0.0))
        for times in (_segment_times, _kernel_times)
    )
    figures = _rows(*({name: value(s) for name, value in _FIGURES.items()} for s in both))
    return {"figures": figures, "segments": segments, "kernels": kernels[:num_kernels], "notes": notes}


def _rows(first: Mapping[str, float | None], second: Mapping[str, float | None]) -> list[dict[str, Any]]:
    rows = []
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name), second.get(name)
        more = None if a is None and b is None else (b or 0.0) - (a or 0.0)
        rows.append({"name": name, "first": a, "second": b, "difference": more})
    return rows


def _segment_times(summary: Summary) -> dict[str, float]:
    return {f"{s.segment}:{s.part}" if s.part else s.segment: s.ms for s in summary.segments}


def _kernel_times(summary: Summary) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for kernel in (kernel for segment in summary.segments for kernel in segment.kernels):
        found[kernel.name] += kernel.ms
    return found


def comparison_text(summaries: Sequence[Summary], document: Mapping[str, Any]) -> Group:
    parts: list[RenderableType] = [
        Text(f"{name}: {s.trace}{f', wall: {s.wall.name}' if s.wall else ''}")
        for name, s in zip(("first", "second"), summaries, strict=True)
    ]
    kinds = " and ".join(dict.fromkeys(summary.kinds for summary in summaries))
    titles = ("step", "segment, ms per step", f"{kinds} that differ most, ms per step")
    for title, rows in zip(titles, document["comparison"].values(), strict=True):
        cells = [
            (_short(row["name"]), _ms(row["first"]), _ms(row["second"]), _ms(row["difference"], "+"))
            for row in rows
            if row["difference"] is not None
        ]
        parts += [Text(), text_table([title, "first", "second", "difference"], cells)]
    return Group(*parts, *_notes(document["notes"]))


def summary_text(summary: Summary, exchanges: Sequence[Exchange] | None = None) -> Group:
    segments = [
        (
            row.segment,
            row.part,
            _count(row.calls),
            _ms(row.ms),
            f"{row.ms / summary.step_ms:.1%}" if summary.step_ms else "-",
            _ms(row.communication_ms),
            _ms(row.floor_ms),
            "-" if not row.floor_ms else f"{row.ms / row.floor_ms:.2f}",
        )
        for row in summary.segments
    ]
    kernels = [
        (
            *(("", "") if place else (row.segment, row.part)),
            _short(kernel.name),
            _count(kernel.calls),
            _ms(kernel.ms),
        )
        for row in summary.segments
        for place, kernel in enumerate(row.kernels)
    ]
    kind, most = summary.kinds.removesuffix("s"), 5 if summary.on == "cpu" else 8
    parts: list[RenderableType] = [*map(Text, _head(summary))]
    for columns, rows, names in (
        ([*_COLUMNS, "calls", "ms", "of step", "communication ms", "floor ms", "of floor"], segments, (0, 1)),
        ([*_COLUMNS, kind, "calls", "ms"], kernels, (0, 1, 2)),
    ):
        parts += [Text(), text_table(columns[:most], [row[:most] for row in rows], names=names)]
    if exchanges:
        parts += [Text(), _table(exchanges)]
    return Group(*parts, *_notes(summary.notes))


def _table(exchanges: Sequence[Exchange]) -> Table:
    rows = [
        (
            e.name,
            listed(e.ranks),
            _count(e.calls),
            _ms(e.transfer_ms),
            _ms(sum(e.waiting_ms.values()) / len(e.ranks)),
            "-" if e.gb_per_s is None else f"{e.gb_per_s:.1f}",
            ", ".join(f"{rank}: {share:.0%}" for rank, share in e.last.items()) or "-",
        )
        for e in exchanges
    ]
    columns = ["exchange", "ranks", "calls", "transfer ms", "waiting ms", "GB/s", "last"]
    return text_table(columns, rows, names=(0, 1, 6))


def _head(summary: Summary) -> Iterator[str]:
    numbers, facts = summary.facts.get("steps"), summary.facts
    which = f"steps {numbers[0]} to {numbers[-1]}" if numbers else number_of(summary.num_steps, "step")
    rank = f", rank {facts['rank']} of {facts['num_ranks']}" if "rank" in facts else ""
    yield summary.trace
    yield f"{which}{rank}, {summary.device or 'unknown device'}; all times per step"
    if summary.on == "cpu":
        yield f"step {summary.step_ms:.3f} ms of the host"
        return
    yield f"step {summary.step_ms:.3f} ms, GPU idle {summary.idle:.1%}"
    yield f"communication {summary.exposed_ms:.3f} ms exposed, {summary.hidden_ms:.3f} ms hidden"
    yield f"host {summary.launch_ms:.3f} ms in {summary.launches:.0f} launches"
    yield "busy " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in summary.streams.items())
    if summary.wall:
        yield f"wall: {summary.wall.name}, {summary.wall.why}"


def _notes(notes: Sequence[str]) -> list[Text]:
    return [Text(), *(Text(f"note: {note}") for note in notes)] if notes else []


def _short(name: str) -> str:
    return name if len(name) <= SHOWN_NAME else f"{name[: SHOWN_NAME - 3]}..."


def _count(calls: float) -> str:
    return "-" if not calls else f"{calls:g}" if calls == int(calls) else f"{calls:.1f}"


def _ms(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"


if __name__ == "__main__":
    run_tool(main)
