"""Progress output on stderr: a bar, a rewritten line, or lines."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

EVERY_S = 5.0  # seconds until the first line; intervals then double
_bars: list[Callable[[str], None]] = []
_blocks: list[str] = []
_has_output = threading.Event()


@functools.cache
def console() -> Console:
    """Return the console that log, bars and rewritten lines share."""
    from rich.console import Console

    return Console(stderr=True)


def output_begins() -> None:
    """Stop the progress lines of `starting`."""
    _has_output.set()


@functools.cache
def starting(prog: str) -> None:
    """Print that a command is starting, until log or output begins."""
    # without torch imported a start is slow; only the first rank of a node prints
    if "torch" in sys.modules or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    _print(f"{prog}: starting")
    began = time.monotonic()

    def tell() -> None:
        wait_s = EVERY_S
        while not _has_output.wait(wait_s) and not logging.getLogger().handlers:
            if not _blocks and not _bars:
                _print(f"{prog}: at work ({time.monotonic() - began:.0f} s)")
                wait_s *= 2

    threading.Thread(target=tell, name="graphmoe-at-work", daemon=True).start()


@contextmanager
def shown_in(bar: Callable[[str], None]) -> Iterator[None]:
    """Send progress to a live bar inside the block; empty text clears it."""
    _bars.append(bar)
    try:
        yield
    finally:
        _bars.remove(bar)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Report work while the block runs; the yielded function changes the text."""
    words, began, ended = what, time.monotonic(), threading.Event()
    depth = len(_blocks)
    _blocks.append(what)

    def tell() -> None:
        wait_s = EVERY_S
        with ExitStack() as line:
            while not ended.wait(wait_s):
                if len(_blocks) > depth + 1:  # an inner block reports instead
                    continue
                if not _bars and not logging.getLogger().handlers and _can_rewrite():
                    line.enter_context(_rewritten_line())
                _say(f"{words} ({time.monotonic() - began:.0f} s)")
                wait_s *= 1 if _bars else 2

    def change(text: str) -> None:
        nonlocal words
        words = text

    thread = threading.Thread(target=tell, name="graphmoe-progress", daemon=True)
    thread.start()
    try:
        yield change
    finally:
        ended.set()
        thread.join()
        del _blocks[depth:]
        for bar in _bars:
            bar("")


@contextmanager
def counting(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Report work and its share done while the block runs; the yielded function adds finished bytes."""
    done = 0
    with working(what) as say:

        def add(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            say(f"{what}: {done / max(total_bytes, 1):.0%} of {total_bytes / 2**20:,.1f} MiB")

        yield add


def _say(text: str) -> None:
    if _bars:
        _bars[-1](text)
    elif logging.getLogger().handlers:
        log.info("%s", text)
    else:
        _print(text)


def _can_rewrite() -> bool:
    return console().is_terminal and not console().is_dumb_terminal


@contextmanager
def _rewritten_line() -> Iterator[None]:
    from rich.live import Live
    from rich.text import Text

    live = Live(console=console(), transient=True, auto_refresh=False, redirect_stdout=False)

    def show(text: str) -> None:
        live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    with live, shown_in(show):
        yield


def _print(text: str) -> None:
    # not through sys.stderr: the main thread may be inside a write, or at exit
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())
