"""The loader: micro-batches of one data-parallel rank, prepared ahead, resumable exactly."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from graphmoe.config.schema import ConfigError
from graphmoe.data.samples import Reader, Samples

log = logging.getLogger(__name__)


class Loader:
    """An endless iterator over the micro-batches of one rank.

    Global batch ``n`` is samples ``[n * global_batch_size, (n + 1) * global_batch_size)``. Its micro-step
    ``m`` takes the next ``micro_batch_size * world_size`` of them, of which rank ``r`` gets the ``r``-th
    ``micro_batch_size``. So the samples consumed are always a prefix of one global row, and the state
    is one count of samples that means the same with any number of ranks.
    """

    def __init__(
        self, samples: Samples, *, micro_batch_size: int, global_batch_size: int,
        rank: int = 0, world_size: int = 1, prefetch: int = 4, pin_memory: bool = False,
    ):  # fmt: skip
        assert global_batch_size % (micro_batch_size * world_size) == 0 and 0 <= rank < world_size
        self.samples, self.prefetch, self.pin_memory = samples, prefetch, pin_memory
        self.micro_batch_size, self.rank, self.world_size = micro_batch_size, rank, world_size
        self._position = _Position(0, {}, 0.0)
        self._cursor: _Cursor | None = None
        self._prefetcher: Prefetcher[_Batch] | None = None
        self._closed = False

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Tensor:
        """Token ids [micro_batch_size, seq_len + 1] int64. *Raises* what the prefetch thread ran into."""
        assert not self._closed, "next() on a closed loader"
        if self._cursor is None:
            self._cursor = _Cursor(self, self._position)
            if self.prefetch > 0:
                self._prefetcher = Prefetcher(self._cursor.next_batch, self.prefetch)
        batch = self._prefetcher.get() if self._prefetcher else self._cursor.next_batch()
        self._position = batch.after
        return batch.tokens_BT

    @property
    def consumed(self) -> int:
        """Samples handed out to all ranks together."""
        return self._position.consumed

    @property
    def epochs(self) -> float:
        """Passes over the corpus so far; whole passes for a stream, 0.0 for an endless source."""
        return self._position.epochs

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank: what was handed out, not what was prefetched."""
        consumed, reader, epochs = self._position
        sums = {"fingerprint": self.samples.fingerprint, "contents": self.samples.contents}
        return {"consumed": consumed, **sums, "epochs": epochs, "reader": reader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the samples of this state. *Raises* ConfigError when the data is not the same."""
        if state["fingerprint"] != self.samples.fingerprint:
            raise ConfigError(
                f"the data is not that of the checkpoint (it has {state['fingerprint']}, now it is "
                f"{self.samples.fingerprint}), so the token stream cannot go on where it stopped; restore "
                "the files and the data section, or start a new run folder with hydra.run.dir=..."
            )
        theirs, ours = str(state.get("contents", "")), self.samples.contents
        same_kind = theirs.partition(":")[0] == ours.partition(":")[0]  # others cannot be compared
        if same_kind and theirs != ours:
            raise ConfigError(
                "the data has documents as long as those of the checkpoint, with other tokens or another "
                f"dtype (it has {theirs}, now it is {ours}); restore the files, or start a new run folder "
                "with hydra.run.dir=... (checkpoint.init_from takes over the weights)"
            )
        self._stop()
        self._position = _Position(state["consumed"], state["reader"], state["epochs"])

    def close(self) -> None:
        """Stop the prefetch thread and wait for its end; may be called twice."""
        self._stop()
        self._closed = True

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._prefetcher = self._cursor = None


def first_batches(samples: Samples, n: int, micro_batch_size: int) -> Iterator[Tensor]:
    """The first ``n`` micro-batches [micro_batch_size, seq_len + 1] int64, the same at each call.

    Fewer when an epoch has fewer, so that no sample counts twice; but at least one if ``n > 0``.
    """
    count = n
    if samples.num_samples is not None:
        count = min(n, max(1, samples.num_samples // micro_batch_size))
    if count < n:
        log.debug("validation has %d of %d micro-batches of %d samples", count, n, micro_batch_size)
    reader = samples.reader()
    for batch in range(count):
        yield torch.from_numpy(reader.read(batch * micro_batch_size, micro_batch_size))


class _Position(NamedTuple):
    """A place in the global row of samples."""

    consumed: int
    reader_state: dict[str, Any]
    epochs: float


class _Batch(NamedTuple):
    tokens_BT: Tensor
    after: _Position


class _Cursor:
    """Maker of one rank's batches from a place on; used by one thread at a time."""

    def __init__(self, loader: Loader, place: _Position):
        self._reader: Reader = loader.samples.reader(place.reader_state or None)
        self._consumed = place.consumed
        self._batch = loader.micro_batch_size
        self._skip = loader.rank * loader.micro_batch_size
        self._stride = loader.world_size * loader.micro_batch_size
        # a thread starts on device 0: without this, pinning would open a context there on every rank
        self._device = torch.cuda.current_device() if loader.pin_memory else None

    def next_batch(self) -> _Batch:
        tokens_BT = torch.from_numpy(self._reader.read(self._consumed + self._skip, self._batch))
        if self._device is not None:
            torch.cuda.set_device(self._device)
            tokens_BT = tokens_BT.pin_memory()
        self._consumed += self._stride
        self._reader.seek(self._consumed)  # the same place on every rank
        after = _Position(self._consumed, self._reader.state(), self._reader.epochs(self._consumed))
        return _Batch(tokens_BT, after)


Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Thread that calls ``produce`` ahead; the results are handed out in order.

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
