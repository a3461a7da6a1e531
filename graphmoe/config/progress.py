"""Progress of what takes long: a line every five seconds on stderr or in the log, or words in a live bar."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Seconds between two lines."""
_bars: list[Callable[[str], None]] = []


def starting(prog: str) -> None:
    """Say that a command has begun, before it imports what takes seconds; nothing where that is done."""
    if "torch" not in sys.modules:
        print(f"{prog}: starting", file=sys.stderr, flush=True)


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
    words, began, ended = [what], time.monotonic(), threading.Event()

    def tell() -> None:
        while not ended.wait(EVERY_S):
            _say(f"{words[0]} ({time.monotonic() - began:.0f} s)")

    def change(text: str) -> None:
        words[0] = text

    thread = threading.Thread(target=tell, name="graphmoe-progress", daemon=True)
    thread.start()
    try:
        yield change
    finally:
        ended.set()
        thread.join()
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
        print(text, file=sys.stderr, flush=True)
