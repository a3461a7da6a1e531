"""Logging of a run: the console on stderr, and each rank's own file."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

FORMAT = "%(asctime)s %(levelname)s %(message)s"


class ConsoleHandler(logging.Handler):
    """Writes records through a rich console, so that a progress bar stays below them."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        style = "bold red" if record.levelno >= logging.WARNING else ""
        text = self.format(record)
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def start_logging(folder: Path, rank: int, console: Console) -> None:
    """Send the log to ``<folder>/logs/rank<N>.log`` and, from rank 0, to the console."""
    path = folder / "logs" / f"rank{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(logging.INFO)
    root.addHandler(file)
    if rank == 0:
        root.addHandler(ConsoleHandler(console))
