"""Graphs of what a function launches: CUDA and HIP graphs on a GPU, and a stand-in on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Run = Callable[[], Tensor]


class Graph(Protocol):
    """Runs a function again and again on the tensors that it ran on when the graph was made."""

    def replay(self) -> Tensor:
        """The result, at the same address each time. No device sync."""
        ...


class DeviceGraph:
    """A CUDA or HIP graph. Making it runs ``run`` on the host alone: the device does nothing."""

    def __init__(self, run: Run, stream: torch.cuda.Stream) -> None:
        """``run`` must have run on ``stream`` before: what it does once only cannot be captured."""
        before = torch.cuda.memory_reserved(stream.device)
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads, such as NCCL's watchdog, may query events meanwhile.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._result = run()
        self.pool_bytes = max(torch.cuda.memory_reserved(stream.device) - before, 0)
        """What the device's allocator took for the graph's pool."""

    def replay(self) -> Tensor:
        """Launch the graph on the current stream."""
        self._graph.replay()
        return self._result


class HostGraph:
    """What stands for a graph on a CPU: calls ``run``, which may read nothing but tensors that stay.

    ``given`` are tensors that the caller passes anew each time; they are overwritten, with NaN or a
    number far out of range, so that a function which still reads one of them is found out.
    """

    pool_bytes = 0

    def __init__(self, run: Run, given: Sequence[Tensor]) -> None:
        for tensor in given:
            tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
        self._run = run
        self._result: Tensor | None = None

    def replay(self) -> Tensor:
        result = self._run()
        if self._result is None:
            self._result = result.clone()
        return self._result.copy_(result)
