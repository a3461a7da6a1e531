"""CUDA and HIP graphs, a stand-in for them on a CPU, and their memory pools."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphmoe.ops.symm.peers import forget_halves
from graphmoe.runtime.capture.nodes import MadeBy, NodeRanges, count_nodes, made_by
from graphmoe.segments import profiler_range, ranges_wanted

Run = Callable[[], tuple[Tensor, ...]]
R = TypeVar("R", bound="Replay")


class GraphMaker:
    """Captures graphs in shared memory pools, in which results are never freed.

    A later graph's result may be in memory that an earlier graph uses internally. So no older graph of the
    pool may replay between a graph and the last reader of its results.
    """

    def __init__(self, device: torch.device) -> None:
        self.on = "device" if device.type == "cuda" else "host"
        self._made: weakref.WeakSet[DeviceGraph] = weakref.WeakSet()
        self._pools: dict[Hashable, Any] = {}

    def make(self, run: Run, given: Sequence[Tensor] = (), pool: Hashable = 0) -> Graph:
        """Return a graph of ``run``, which ran before and reads static copies of ``given``, not ``given``."""
        if self.on == "host":
            return HostGraph(run, given)
        if pool not in self._pools:
            self._pools[pool] = torch.cuda.graph_pool_handle()
        graph = DeviceGraph(run, self._pools[pool])
        self._made.add(graph)
        return graph

    def release(self) -> None:
        """Destroy all graphs."""
        # NCCL groups cannot be destroyed before graphs that hold their collectives
        for graph in self._made:
            graph.release()

    def drop(self) -> None:
        """Destroy all graphs and free their pools, except results that are still referenced."""
        self.prepare()  # the device may be replaying one
        self.release()
        self._made.clear()
        self._pools.clear()  # torch captures no graph in a pool whose graphs were all released
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
    def __init__(self, run: Run, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # for counting nodes
        self._ranges = NodeRanges(torch.cuda.current_stream().cuda_stream)
        forget_halves()
        # "thread_local": other threads, such as NCCL's watchdog, may query events meanwhile.
        with _garbage_kept():
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                with ranges_wanted(self._ranges.range):
                    self._results = run()
                self._ranges.count()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture is invalid; the first error says why
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        # kernels, copies and memsets; None if unknown
        self.nodes = count_nodes(self._graph.raw_cuda_graph())
        self._graph.instantiate()

    def replay(self) -> tuple[Tensor, ...]:
        """Launch on the current stream; results keep their addresses."""
        self._graph.replay()
        forget_halves()
        return self._results

    def made_by(self) -> list[MadeBy]:
        """Return the names of its nodes by the ranges that made them."""
        return made_by(self._graph.raw_cuda_graph(), self._ranges)

    def release(self) -> None:
        self._graph.reset()


class HostGraph:
    """Stand-in for a graph on a CPU: a replay calls ``run`` again, which may read static tensors only."""

    def __init__(self, run: Run, given: Sequence[Tensor]) -> None:
        # a function that still reads one of them shows NaN or a number far out of range
        for tensor in given:
            tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
        self.nodes: int | None = None  # a CPU launches nothing
        self._run = run
        self._results: tuple[Tensor, ...] | None = None

    def replay(self) -> tuple[Tensor, ...]:
        forget_halves()
        results = tuple(result.detach() for result in self._run())
        forget_halves()
        if self._results is None:
            self._results = tuple(map(static_copy, results))
        for kept, result in zip(self._results, results, strict=True):
            kept.copy_(result)
        return self._results

    def made_by(self) -> list[MadeBy]:
        return []


Graph = DeviceGraph | HostGraph


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
    """Return a detached copy with the same strides."""
    tensor = tensor.detach()
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


@dataclass
class Span:
    """Neighbouring segments that are captured together, and statistics of their graphs."""

    unit: str
    # empty for the whole step
    segments: tuple[str, ...]
    # positions in the model, each with graphs of its own
    places: int = 0
    graphs: int = 0
    # kernels, copies and memsets; None if they cannot be counted
    nodes: int | None = 0
    # spent on making the graphs
    seconds: float = 0.0

    def make(self, maker: GraphMaker, run: Run, given: Sequence[Tensor] = (), pool: Hashable = 0) -> Graph:
        """Capture ``run(*given)`` by ``maker`` and add the graph to the span's statistics."""
        started = time.perf_counter()
        graph = maker.make(run, given, pool)
        self.graphs += 1
        self.nodes = None if self.nodes is None or graph.nodes is None else self.nodes + graph.nodes
        self.seconds += time.perf_counter() - started
        return graph


class Pool:
    """Memory pool of the graphs of one micro-batch slot, which replay in the order of their capture."""

    def __init__(self, maker: GraphMaker, key: Hashable, addresses: set[int]) -> None:
        self.maker, self.key = maker, key
        self.addresses = addresses  # of results, which are fixed
        # True if a backward of this micro-batch ran without a graph. A graph made after it would be older
        # than the one that replaces it next time.
        self.has_gap = False
        self.num_left = 0  # backwards whose wgrad still has to replay
        self.num_made = 0
        self.newest = -1  # graph with results that replayed for this micro-batch

    def begin(self) -> None:
        self.newest, self.has_gap, self.num_left = -1, False, 0

    def is_behind(self, replay: Replay) -> bool:
        # results are read until the micro-batch ends, so by the rule of GraphMaker no older graph may replay
        return replay.number <= self.newest

    def find(self, replays: Sequence[R], given: Sequence[Tensor] = ()) -> R | None:
        """Return the first captured graph that may replay now; None if the caller must capture another."""
        fit = (replay for replay in replays if not self.is_behind(replay) and replay.moved(given) is None)
        return next(fit, None)


class Replay:
    """A graph and its static inputs. A call copies inputs there; those in ``stays`` must be there already."""

    def __init__(
        self,
        span: Span,
        pool: Pool,
        run: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] | None,
        static: Sequence[Tensor] = (),
        stays: Sequence[bool] = (),
        *,
        part: str,
    ) -> None:
        """Without ``run`` there is no graph: a call only copies the inputs."""
        self._unit, self._part = span.unit, part
        self.static, self._stays, self._pool = static, stays, pool
        self.number = pool.num_made
        pool.num_made += 1
        self._graph = span.make(pool.maker, lambda: run(self.static), pool=pool.key) if run else None
        self._is_new = True

    def moved(self, given: Sequence[Tensor]) -> int | None:
        """Return the index of a ``stays`` input at another address than at capture, if any."""
        for i, (stays, static, tensor) in enumerate(zip(self._stays, self.static, given, strict=True)):
            if stays and static.data_ptr() != tensor.data_ptr():
                return i
        return None

    def __call__(self, given: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        with profiler_range(self._unit, self._part):
            for static, tensor in zip(self.static, given, strict=True):
                if static.data_ptr() != tensor.data_ptr():
                    static.copy_(tensor.detach())
            results = self._graph.replay() if self._graph else ()
        if results:
            self._pool.newest = self.number
        if self._is_new:
            self._pool.addresses.update(result.data_ptr() for result in results)
            self._is_new = False
        return results
