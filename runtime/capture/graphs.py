"""Graphs of launches: CUDA and HIP graphs, and a stand-in on the host."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], tuple[Tensor, ...]]


class GraphMaker:
    """Makes graphs that share memory pools, whose results are never freed.

    A later graph may place a result in memory that an earlier one uses internally. So between a graph and the
    last reader of its results, no older graph of the pool may replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.on = "device" if device.type == "cuda" else "host"
        self._made: weakref.WeakSet[DeviceGraph] = weakref.WeakSet()
        self._pools: dict[Hashable, Any] = {}

    def make(self, run: Run, given: Sequence[Tensor] = (), pool: Hashable = 0) -> Graph:
        """Capture ``run``, which has run before and must not read ``given``. Nothing is executed."""
        if self.on == "host":
            return HostGraph(run, given)
        if pool not in self._pools:
            self._pools[pool] = torch.cuda.graph_pool_handle()
        graph = DeviceGraph(run, self._pools[pool])
        self._made.add(graph)
        return graph

    def release(self) -> None:
        """End all graphs."""
        # NCCL groups cannot be destroyed before graphs that hold their collectives
        for graph in self._made:
            graph.release()

    def drop(self) -> None:
        """End all graphs and free their pools, except results still held."""
        self.prepare()  # the device may be replaying one
        self.release()
        self._made.clear()
        self._pools.clear()  # torch starts no graph in a pool that has lost all of its own
        self.prepare()

    def prepare(self) -> None:
        """Return cached memory to the device. Syncs."""
        gc.collect()
        if self.on == "device":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def pool_bytes(self) -> int:
        return sum(segment["total_size"] for segment in self._segments())

    def pool_unused_bytes(self) -> int:
        # only the next graph can use them
        return sum(segment["total_size"] - segment["allocated_size"] for segment in self._segments())

    def _segments(self) -> list[Any]:
        pools = self._pools.values()
        return [s for pool in pools for s in torch.cuda.memory_snapshot(pool, include_traces=False)]


class DeviceGraph:
    """A CUDA or HIP graph; the capture executes nothing."""

    def __init__(self, run: Run, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # for counting nodes
        # "thread_local": other threads, such as NCCL's watchdog, may query events meanwhile.
        with _garbage_kept():
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._results = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture is invalid; the first error says why
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        # kernels, copies and memsets; None if unknown
        self.nodes = _count_nodes(self._graph.raw_cuda_graph())
        self._graph.instantiate()

    def replay(self) -> tuple[Tensor, ...]:
        """Launch on the current stream; results stay in place."""
        self._graph.replay()
        return self._results

    def release(self) -> None:
        self._graph.reset()


class HostGraph:
    """Stand-in on a CPU: ``run`` may read static tensors only."""

    def __init__(self, run: Run, given: Sequence[Tensor]) -> None:
        # a function that still reads one of them shows NaN or a number far out of range
        for tensor in given:
            tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
        self.nodes: int | None = None  # a CPU launches nothing
        self._run = run
        self._results: tuple[Tensor, ...] | None = None

    def replay(self) -> tuple[Tensor, ...]:
        results = tuple(result.detach() for result in self._run())
        if self._results is None:
            self._results = tuple(map(static_copy, results))
        for kept, result in zip(self._results, results, strict=True):
            kept.copy_(result)
        return self._results


Graph = DeviceGraph | HostGraph


def _count_nodes(graph: int) -> int | None:
    # graph is a cudaGraph_t (a CUgraph for the driver) or hipGraph_t
    hip = torch.version.hip is not None
    libraries = [f"libamdhip64.so{end}" for end in ("", ".7", ".6")] if hip else ["libcuda.so.1"]
    count = ctypes.c_size_t()
    for library in libraries:
        try:  # RTLD_NOLOAD: another copy of the runtime would not know the graph
            loaded = ctypes.CDLL(library, mode=ctypes.DEFAULT_MODE | os.RTLD_NOLOAD)
            get_nodes = loaded.hipGraphGetNodes if hip else loaded.cuGraphGetNodes
        except (OSError, AttributeError):
            continue
        failed = get_nodes(ctypes.c_void_p(graph), None, ctypes.byref(count))
        return None if failed else count.value
    return None


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    # a collection inside a capture might free memory, which syncs with the device
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def static_copy(tensor: Tensor) -> Tensor:
    """Copy detached, with the same strides."""
    tensor = tensor.detach()
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
