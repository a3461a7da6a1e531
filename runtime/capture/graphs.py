"""Graphs of a function's launches: CUDA and HIP graphs on a GPU, and a stand-in on the host."""

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
    """Makes graphs that share a pool of memory, or several.

    Results stay for ever. A later graph may have a result in memory that an earlier graph of the same pool
    uses for itself. So between a graph and the last one that reads its results, no graph of the pool may
    replay that was made earlier.
    """

    def __init__(self, device: torch.device) -> None:
        self.on = "device" if device.type == "cuda" else "host"
        self._made: weakref.WeakSet[DeviceGraph] = weakref.WeakSet()
        self._pools: dict[Hashable, Any] = {}

    def make(self, run: Run, given: Sequence[Tensor] = (), pool: Hashable = 0) -> Graph:
        """Make a graph of ``run`` on the current stream, where it has run before. Nothing is executed.

        ``given`` are tensors that ``run`` must not read, since static ones stand in for them; the stand-in
        for a graph on a CPU spoils them.
        """
        if self.on == "host":
            return HostGraph(run, given)
        if pool not in self._pools:
            self._pools[pool] = torch.cuda.graph_pool_handle()
        graph = DeviceGraph(run, self._pools[pool])
        self._made.add(graph)
        return graph

    def release(self) -> None:
        """End all graphs, wherever they are held: NCCL's groups cannot end before graphs with their sums.

        None of them may replay any more.
        """
        for graph in self._made:
            graph.release()

    def drop(self) -> None:
        """End all graphs and give the memory of their pools back, but for results that are still held."""
        self.prepare()  # the device may be replaying one
        self.release()
        self._made.clear()
        self._pools.clear()  # torch starts no graph in a pool that has lost all of its own
        self.prepare()

    def prepare(self) -> None:
        """Give the memory that others hold in reserve back to the device, where a pool can take it."""
        gc.collect()
        if self.on == "device":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def pool_bytes(self) -> int:
        """Bytes that the device's allocator took for the pools."""
        return sum(segment["total_size"] for segment in self._segments())

    def pool_unused_bytes(self) -> int:
        """Bytes of the pools that nothing holds: only the next graph may take them."""
        return sum(segment["total_size"] - segment["allocated_size"] for segment in self._segments())

    def _segments(self) -> list[Any]:
        pools = self._pools.values()
        return [s for pool in pools for s in torch.cuda.memory_snapshot(pool, include_traces=False)]


class DeviceGraph:
    """A CUDA or HIP graph. To make it, ``run`` runs on the host alone: the device does nothing."""

    def __init__(self, run: Run, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # on the host, where its nodes can be counted
        # "thread_local": other threads, such as NCCL's watchdog, may query events meanwhile.
        with _garbage_kept():
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._results = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # an invalid capture; what made it so says more
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        self.nodes = _count_nodes(self._graph.raw_cuda_graph())
        """Kernels, copies and memsets in it; None where nobody counts them."""
        self._graph.instantiate()

    def replay(self) -> tuple[Tensor, ...]:
        """Launch the graph on the current stream; returns results at the same addresses each time."""
        self._graph.replay()
        return self._results

    def release(self) -> None:
        """Give the graph back to the device, with what it holds of communicators."""
        self._graph.reset()


class HostGraph:
    """Stand-in for a graph on a CPU: calls ``run``, which may read nothing but tensors that stay.

    ``given`` are tensors that the caller passes anew each time; they are overwritten, with NaN or a
    number far out of range, so that a function which still reads one of them is found out.
    """

    def __init__(self, run: Run, given: Sequence[Tensor]) -> None:
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
"""A function's launches, which run again and again on the tensors of the capture."""


def _count_nodes(graph: int) -> int | None:
    """Count the nodes of a cudaGraph_t (a CUgraph for the driver) or hipGraph_t; None if it cannot say."""
    hip = torch.version.hip is not None
    libraries = [f"libamdhip64.so{end}" for end in ("", ".7", ".6")] if hip else ["libcuda.so.1"]
    count = ctypes.c_size_t()
    for library in libraries:
        try:  # only what is loaded: another copy of the runtime would not know the graph
            loaded = ctypes.CDLL(library, mode=ctypes.DEFAULT_MODE | os.RTLD_NOLOAD)
            get_nodes = loaded.hipGraphGetNodes if hip else loaded.cuGraphGetNodes
        except (OSError, AttributeError):
            continue
        failed = get_nodes(ctypes.c_void_p(graph), None, ctypes.byref(count))
        return None if failed else count.value
    return None


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Collect no garbage inside: that might free memory for which the device has to be waited for."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def static_copy(tensor: Tensor) -> Tensor:
    """Copy without a place in autograd's graph, with the strides of the tensor even if they leave gaps."""
    tensor = tensor.detach()
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
