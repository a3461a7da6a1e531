"""Transfers between ranks on a stream of their own, beside what the current stream does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch

from graphmoe.ops.symm.peers import beside_products_on

Result = TypeVar("Result")


class TransferStream:
    """Runs transfers one after the other, each behind all that was queued before it; none on a CPU.

    A transfer may pack what it sends on the current stream, which then waits for the transfer before it.

    What a transfer reads must stay until the current stream has waited for it: the allocator knows one stream
    for each memory, and would give it to others.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        self._under_way: dict[Hashable, tuple[torch.cuda.Event, Any]] = {}

    def run(self, key: Hashable, call: Callable[[], Result], reads: Any) -> Result:
        """What ``call`` returns, to be read after ``wait`` for the key; ``reads`` is held till then."""
        if self._stream is None:
            return call()
        products = torch.cuda.current_stream()
        self._stream.wait_stream(products)
        with torch.cuda.stream(self._stream), beside_products_on(products):
            result = call()
            done = torch.cuda.Event()
            done.record()
        self._under_way[key] = done, reads
        return result

    def wait(self, keys: Iterable[Hashable]) -> None:
        """Let the current stream wait for those of these that are under way. No device sync."""
        for key in keys:
            if key in self._under_way:
                done, _ = self._under_way.pop(key)
                done.wait()

    def wait_for_all(self) -> None:
        """Let the current stream wait for all of them."""
        self.wait([*self._under_way])
