"""Logging of a run: the console on stderr, and a file for each rank and for the launching process."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from rich.console import Console

FORMAT = "%(asctime)s %(levelname)s %(message)s"
FILE_ONLY = {"file_only": True}
"""``extra`` of a record that the console does not show."""


@functools.cache
def console() -> Console:
    """The one console of this process, which the log shares with the progress bar."""
    return Console(stderr=True)


class ConsoleHandler(logging.Handler):
    """Writes records through the console, so that a progress bar stays below them."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "file_only", False):
            return
        style = "bold red" if record.levelno >= logging.WARNING else ""
        text = self.format(record)
        console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def start_logging(log_dir: Path | None, name: str, *, on_console: bool) -> None:
    """Send the log to ``<log_dir>/<name>.log``, if a folder is given, and to the console."""
    handlers: list[logging.Handler] = [ConsoleHandler()] if on_console else []
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(log_dir / f"{name}.log", encoding="utf-8")
        file.setFormatter(logging.Formatter(FORMAT))
        handlers.append(file)
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
