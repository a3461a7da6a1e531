"""Progress of what takes long: a line every five seconds on stderr or in the log, or words in a live bar."""

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Seconds between two lines."""
_bars: list[Callable[[str], None]] = []
_blocks: list[str] = []
"""Words of each `working` block that runs."""


@functools.cache
def starting(prog: str) -> None:
    """Say once that a command has begun, before it imports what takes seconds; nothing where that is done.

    From then on it says every few seconds that it is at work, until it keeps a log, where nothing else does.
    Of the ranks that torchrun and others start on a node the first says so.
    """
    if "torch" in sys.modules or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    _print(f"{prog}: starting")
    began = time.monotonic()

    def tell() -> None:
        while not logging.getLogger().handlers:
            time.sleep(EVERY_S)
            if not _blocks and not _bars and not logging.getLogger().handlers:
                _print(f"{prog}: at work ({time.monotonic() - began:.0f} s)")

    threading.Thread(target=tell, name="graphmoe-at-work", daemon=True).start()


@contextmanager
def shown_in(bar: Callable[[str], None]) -> Iterator[None]:
    """Inside the block words of progress go to a live bar, an empty text where there are none."""
    _bars.append(bar)
    try:
        yield
    finally:
        _bars.remove(bar)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Say what is being done every five seconds while the block runs; its result changes the words."""
    words, began, ended = what, time.monotonic(), threading.Event()
    depth = len(_blocks)
    _blocks.append(what)

    def tell() -> None:
        while not ended.wait(EVERY_S):
            if len(_blocks) == depth + 1:  # none is inside that knows more
                _say(f"{words} ({time.monotonic() - began:.0f} s)")

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
    """As `working`; its result takes bytes that are done, and their share is said."""
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


def _print(text: str) -> None:
    """Print on stderr, not by its stream: the main thread may be in the middle of a write, or of its end."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())
