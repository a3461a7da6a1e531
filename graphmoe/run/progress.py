"""The progress bar of a run: on a terminal only, below the log lines."""

from __future__ import annotations

from types import TracebackType

from rich import progress
from rich.console import Console


class Progress:
    """Inside a ``with`` block, a bar with the time left, or nothing where stderr is no terminal."""

    def __init__(self, console: Console, total_steps: int, *, wanted: bool) -> None:
        self._bar = progress.Progress(
            progress.TextColumn("training"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not (wanted and console.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task("training", total=total_steps)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, step: int) -> None:
        """Show that ``step`` is done."""
        self._bar.update(self._task, completed=step)
