"""A background thread that prepares items ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Calls ``produce`` ahead in a thread and hands the results out in order.

    An exception in the thread is raised by ``get`` after the items made before it, and by each later
    ``get`` again.
    """

    def __init__(self, produce: Callable[[], Item], depth: int):
        assert depth > 0
        self._produce = produce
        self._depth = depth
        self._ready: deque[Item] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="graphmoe-prefetch", daemon=True)
        self._thread.start()

    def get(self) -> Item:
        """The next item; waits for it. *Raises* what ``produce`` raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed)
            if self._closed:
                raise RuntimeError("the prefetch thread is closed")
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            assert self._error is not None
            raise self._error

    def close(self) -> None:
        """Stop the thread and wait for its end; what was prepared is dropped."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                if self._closed:
                    return
            try:
                item = self._produce()
            except BaseException as error:  # raised again in get(), whatever it is
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(item)
                self._changed.notify_all()
