"""Make the page of a run from the files in its folder, or one page that compares several runs.

python -m graphmoe.report run=outputs/tiny
python -m graphmoe.report runs=outputs/before,outputs/after out=comparison.html
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphmoe.config.arguments import emit, file_problems, parse_args, run_tool
from graphmoe.config.schema import ConfigError, OutputFormat


@dataclass
class ReportArgs:
    """Arguments of the tool."""

    run: Path | None = None
    """Folder of a run; it may have ended by an error, or go on still."""
    runs: list[Path] | None = None
    """Folders of two or more runs, by comma, to compare; one is the same as run."""
    out: Path | None = None
    """The page, ends in .html; default: report.html in the run's folder, comparison.html here for several."""
    format: OutputFormat = OutputFormat.text
    """text, or json: one document on stdout and nothing else there."""


def main(argv: list[str]) -> None:
    """Write the page and print its path."""
    args = parse_args(ReportArgs, argv, prog="graphmoe.report", places=("runs",))
    if args.run is None and args.runs and len(args.runs) == 1:
        args = ReportArgs(run=args.runs[0], out=args.out, format=args.format)
    if problems := [*_problems(args)]:
        raise ConfigError("; ".join(problems))
    from graphmoe.report.comparison import COMPARISON_FILE, write_comparison
    from graphmoe.report.page import write_report
    from graphmoe.report.run_data import read_run

    path = args.out or Path(COMPARISON_FILE)
    if args.run is not None:
        path = write_report(args.run, args.out)
    else:
        write_comparison([read_run(folder) for folder in args.runs or ()], path)
    emit({"page": str(path)}, f"report: {path}", args.format)


def _problems(args: ReportArgs) -> Iterator[str]:
    if args.run is None and not args.runs:
        yield "nothing to report; name a run's folder, such as outputs/tiny, or several to compare"
    elif args.run is not None and args.runs:
        yield "run=... and runs=... are two ways to name runs; use one of them"
    yield from file_problems("out", args.out, "report.html")


if __name__ == "__main__":
    run_tool(main)
