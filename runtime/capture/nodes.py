"""Nodes of CUDA and HIP graphs: how many, their names, and the profiler ranges that made them.

Functions of the CUDA driver, whose nodes have names, or of the HIP runtime, whose nodes do not.
"""

import contextlib
import ctypes
import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from graphmoe.runtime.torch_compat import demangle

_OF_TYPES = {0: "", 1: "memcpy", 2: "memset"}  # a kernel without a name, and others; of both vendors
_MOST_DEMANGLED = 1024  # characters, by torch's profiler (pytorch/kineto, libkineto/src/Demangle.cpp)


class MadeBy(NamedTuple):
    """Neighbouring nodes of a graph, in the order of their capture, and the range that made them."""

    unit: str  # empty outside of all ranges
    part: str
    nodes: list[str]  # kernels by name, "" if unknown; "memcpy", "memset"


class NodeRanges:
    """Makes profiler ranges that count the nodes which the capture on a stream makes inside."""

    def __init__(self, stream: int) -> None:
        self._stream, self._owner, self._counted = stream, ("", ""), 0
        self.found: list[tuple[str, str, int]] = []  # unit, part, number of nodes

    @contextlib.contextmanager
    def range(self, unit: str, part: str) -> Iterator[None]:
        self.count()
        outer, self._owner = self._owner, (unit, part)
        try:
            yield
        finally:
            self.count()
            self._owner = outer

    def count(self) -> None:
        """Add the nodes since the last call to the innermost open range."""
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        found = *map(ctypes.byref, (status, number, graph)), None, None
        if _call("StreamGetCaptureInfo_v2", ctypes.c_void_p(self._stream), *found) or not graph.value:
            return
        if (nodes := count_nodes(graph.value) or 0) > self._counted:
            self.found.append((*self._owner, nodes - self._counted))
            self._counted = nodes


def count_nodes(graph: int) -> int | None:
    """Return the number of nodes of a cudaGraph_t (a CUgraph for the driver) or hipGraph_t, if known."""
    count = ctypes.c_size_t()
    failed = _call("GraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    return None if failed else count.value


def made_by(graph: int, ranges: NodeRanges) -> list[MadeBy]:
    """Return a graph's nodes by the ranges of its capture, without those that run nothing on the device."""
    names = _names(graph)
    parts = ((unit, part, itertools.islice(names, count)) for unit, part, count in ranges.found)
    return [MadeBy(unit, part, [name for name in some if name is not None]) for unit, part, some in parts]


class _KernelNode(ctypes.Structure):
    # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("launch", ctypes.c_uint * 7),
        *((name, ctypes.c_void_p) for name in ("arguments", "extra", "kernel", "context")),
    )


def _names(graph: int) -> Iterator[str | None]:
    # drivers list nodes in the order of their creation; tests/gpu/test_trace_gpu.py
    count = ctypes.c_size_t(count_nodes(graph) or 0)
    nodes = (ctypes.c_void_p * count.value)()
    failed = _call("GraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(count))
    for node in () if failed else map(ctypes.c_void_p, nodes):
        kind, kernel, name = ctypes.c_int(-1), _KernelNode(), ctypes.c_char_p()
        _call("GraphNodeGetType", node, ctypes.byref(kind))
        is_kernel = kind.value == 0 and not _call("GraphKernelNodeGetParams_v2", node, ctypes.byref(kernel))
        # it has a function, or a kernel of a library
        if is_kernel and _call("FuncGetName", ctypes.byref(name), ctypes.c_void_p(kernel.function)):
            _call("KernelGetName", ctypes.byref(name), ctypes.c_void_p(kernel.kernel))
        symbol = (name.value or b"").decode()
        is_mangled = symbol.startswith("_Z") and len(symbol) <= _MOST_DEMANGLED
        yield demangle(symbol) if is_mangled else symbol or _OF_TYPES.get(kind.value)


def _call(function: str, *arguments: Any) -> bool:
    # returns whether the function is missing or failed
    hip = torch.version.hip is not None
    for library in [f"libamdhip64.so{end}" for end in ("", ".7", ".6")] if hip else ["libcuda.so.1"]:
        try:  # RTLD_NOLOAD: another copy of the runtime would not know the graph
            loaded = ctypes.CDLL(library, mode=ctypes.DEFAULT_MODE | os.RTLD_NOLOAD)
            return bool(getattr(loaded, f"{'hip' if hip else 'cu'}{function}")(*arguments))
        except (OSError, AttributeError):
            continue
    return True
