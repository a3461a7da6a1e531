"""Loader of one data-parallel rank's micro-batches: prefetched, exactly resumable."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from graphmoe.config.schema import ConfigError
from graphmoe.data.samples import Samples

if TYPE_CHECKING:  # imports no torch, so checks of files and tokenizers are fast
    from torch import Tensor

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Position of a loader in the global sequence of samples."""

    consumed: int  # samples before it, over all ranks
    reader_state: dict[str, Any]
    epochs: float  # passes over the corpus; integral for a stream, 0.0 for an endless source


class Loader:
    """Endless iterator over one rank's micro-batches.

    Global batch ``n`` is samples ``[n * global_batch_size, (n + 1) * global_batch_size)``. Its micro-step
    ``m`` uses the next ``micro_batch_size * world_size``; rank ``r`` gets the ``r``-th ``micro_batch_size``.
    Consumed samples form a prefix, so the state is one count, independent of the number of ranks.
    """

    def __init__(
        self, samples: Samples, *, micro_batch_size: int, global_batch_size: int,
        rank: int = 0, world_size: int = 1, prefetch: int = 4, pin_memory: bool = False,
    ):  # fmt: skip
        assert global_batch_size % (micro_batch_size * world_size) == 0 and 0 <= rank < world_size
        self.samples, self.prefetch, self.pin_memory = samples, prefetch, pin_memory
        self.micro_batch_size, self.rank, self.world_size = micro_batch_size, rank, world_size
        self.place = Place(0, {}, 0.0)  # position after the last returned batch, not the last prefetched one
        self._pool: ThreadPoolExecutor | None = None
        self._batches: Iterator[tuple[Tensor, Place]]
        self._ahead: deque[Future[tuple[Tensor, Place]]] = deque()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Tensor:
        """Return token ids [micro_batch_size, seq_len + 1] int64. *Raises* errors of the prefetch thread."""
        if self._pool is None:
            import torch

            self._pool = ThreadPoolExecutor(1, "graphmoe-prefetch")
            # a thread starts on device 0: without this, pinning would open a context there on every rank
            device = torch.cuda.current_device() if self.pin_memory else None
            self._batches = self._read(self.place, device)
        while len(self._ahead) <= self.prefetch:
            self._ahead.append(self._pool.submit(next, self._batches))
        tokens_BT, self.place = self._ahead[0].result()  # a failed batch stays first and fails again
        self._ahead.popleft()
        return tokens_BT

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, equal on all ranks; prefetched batches do not count."""
        consumed, reader, epochs = self.place
        sums = {"fingerprint": self.samples.fingerprint, "contents": self.samples.contents}
        return {"consumed": consumed, **sums, "epochs": epochs, "reader": reader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the samples that ``state`` counts. *Raises* ConfigError if the data differ."""
        if state["fingerprint"] != self.samples.fingerprint:
            raise ConfigError(
                f"the data is not that of the checkpoint (checkpoint: {state['fingerprint']}, now: "
                f"{self.samples.fingerprint}), so the token stream cannot continue where it stopped; restore "
                "the files and the data section, or start a new run folder with hydra.run.dir=..."
            )
        theirs, ours = str(state.get("contents", "")), self.samples.contents
        same_kind = theirs.partition(":")[0] == ours.partition(":")[0]  # others cannot be compared
        if same_kind and theirs != ours:
            raise ConfigError(
                "the data has other tokens, or another dtype, than the checkpoint's, in documents of equal "
                f"lengths (checkpoint: {theirs}, now: {ours}); restore the files, or start a new run folder "
                "with hydra.run.dir=... (checkpoint.init_from takes over the weights)"
            )
        self.close()
        self.place = Place(state["consumed"], state["reader"], state["epochs"])

    def close(self) -> None:
        """Join the prefetch thread; may be called twice."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._ahead.clear()

    def _read(self, start: Place, device: int | None) -> Iterator[tuple[Tensor, Place]]:
        import torch

        reader, size = self.samples.reader(start.reader_state or None), self.micro_batch_size
        consumed = start.consumed
        while True:
            tokens_BT = torch.from_numpy(reader.read(consumed + self.rank * size, size))
            if device is not None:
                torch.cuda.set_device(device)
                tokens_BT = tokens_BT.pin_memory()
            consumed += self.world_size * size
            reader.seek(consumed)  # the same place on every rank
            yield tokens_BT, Place(consumed, reader.state(), reader.epochs(consumed))


def first_batches(samples: Samples, n: int, micro_batch_size: int) -> Iterator[Tensor]:
    """Yield the first ``n`` micro-batches [micro_batch_size, seq_len + 1] int64, the same each call.

    Stops after one epoch, but yields at least one if ``n > 0``.
    """
    import torch

    count = n
    if samples.num_samples is not None:
        count = min(n, max(1, samples.num_samples // micro_batch_size))
    if count < n:
        log.debug("validation has %d of %d micro-batches of %d samples", count, n, micro_batch_size)
    reader = samples.reader()
    for batch in range(count):
        yield torch.from_numpy(reader.read(batch * micro_batch_size, micro_batch_size))
