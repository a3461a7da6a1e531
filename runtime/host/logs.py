"""Logging to stderr, and a file per rank and launcher. Write errors (closed pipe, full disk) end no run."""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rich import progress
from rich.console import Console

from graphmoe.config.masking import masked
from graphmoe.config.progress import console, shown_in
from graphmoe.runtime.host.files import LineFile

log = logging.getLogger(__name__)

FORMAT = "%(asctime)s %(levelname)s %(message)s"
FILE_ONLY = {"file_only": True}  # ``extra`` of a record that the console omits


class _Masked(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


class ConsoleHandler(logging.Handler):
    """Handler that prints through the console, above progress bars."""

    def __init__(self, job: str | None = None) -> None:
        """``job``: number of the sweep job."""
        super().__init__()
        of_job = f" job {job}:" if job is not None else ""
        self.setFormatter(_Masked(f"%(asctime)s{of_job} %(message)s", "%H:%M:%S"))
        self.addFilter(lambda record: not getattr(record, "file_only", False))

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            _print_warning(text)
        else:
            console().print(text, markup=False, highlight=False, soft_wrap=True)
        for stream in _streams.values():
            if why := stream.news():
                log.warning("writing %s failed (%s); the run continues", stream.title, why, extra=FILE_ONLY)


class LogFile(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.setFormatter(_Masked(FORMAT))
        self._file = LineFile(path, _print_warning)

    def emit(self, record: logging.LogRecord) -> None:
        self._file.append([self.format(record)])

    def close(self) -> None:
        self._file.close()
        super().close()


def start_logging(log_dir: Path | None, name: str, *, on_console: bool, job: str | None = None) -> None:
    """Log to ``<log_dir>/<name>.log``, if a folder is given, and to the console."""
    keep_streams()
    handlers: list[logging.Handler] = [ConsoleHandler(job)] if on_console else []
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        handlers.append(LogFile(log_dir / f"{name}.log"))
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)


class Progress:
    """Progress bar, if stderr is a terminal."""

    def __init__(self, console: Console, total_steps: int, *, wanted: bool) -> None:
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
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
        self._words = ExitStack()

    def __enter__(self) -> Progress:
        self._bar.start()
        if not self._bar.disable:
            self._words.enter_context(shown_in(self._describe))
        return self

    def __exit__(self, *_: object) -> None:
        self._words.close()
        self._bar.stop()

    def _describe(self, words: str) -> None:
        self._bar.update(self._task, description=words or "training")

    def advance(self, step: int) -> None:
        self._bar.update(self._task, completed=step)


@contextmanager
def without_text(pattern: bytes) -> Iterator[None]:
    """Context that removes matches from stderr, also from C++ libraries; prints the rest when it ends."""
    try:
        kept, stderr = tempfile.TemporaryFile(), os.dup(2)  # noqa: SIM115  (opened outside of the `with`)
    except OSError:  # no room for a file, or no stderr
        yield
        return
    with kept:
        sys.stderr.flush()
        os.dup2(kept.fileno(), 2)
        if dumps := faulthandler.is_enabled():
            faulthandler.enable(stderr)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            if dumps:
                faulthandler.enable(2)
            os.close(stderr)
            kept.seek(0)
            with suppress(OSError), open(2, "wb", closefd=False) as file:
                file.write(re.sub(pattern, b"", kept.read()))


def _print_warning(text: str) -> None:
    console().print(text, style="bold red", markup=False, highlight=False, soft_wrap=True)


class _Stream(io.FileIO):
    """Descriptor of stdout or stderr that drops what it cannot write."""

    def __init__(self, title: str, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.title = title
        self._error: OSError | None = None
        self._told = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or len(data)  # None: non-blocking, and its reader is slow
        except OSError as error:
            self._error = error
            return len(data)

    def news(self) -> str | None:
        if self._error is None or self._told:
            return None
        self._told = True
        return self._error.strerror


class _MaskedText(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        super().write(masked(text))
        return len(text)


_streams: dict[str, _Stream] = {}


def keep_streams() -> None:
    """Make stdout and stderr mask secrets and survive a closed pipe or a full disk."""
    for title in ("stdout", "stderr"):
        old = getattr(sys, title)
        # streams that another program has replaced stay
        if title in _streams or old is None or old is not getattr(sys, f"__{title}__"):
            continue
        with suppress(OSError):
            old.flush()
        stream = _streams[title] = _Stream(title, old.fileno())
        new = _MaskedText(
            stream if old.write_through else io.BufferedWriter(stream),  # with PYTHONUNBUFFERED as without us
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=old.line_buffering,
            write_through=old.write_through,
        )
        setattr(sys, title, new)
