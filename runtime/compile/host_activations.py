"""Saved activations in host memory (``recompute.offload``).

A unit's tensors are copied to pinned host memory behind its forward, on a stream of their own. Its backward
waits for their copies on the device, which the backward of the unit after it has started. The newest unit's
tensors stay on the device until the next one is stored: its backward may be next.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.torch_compat import storage_of
from graphmoe.segments import Executor, Segment

ALIGNED = 16  # elements: compiled code expects the alignment of what it saved


class _Span(NamedTuple):
    flat: Tensor  # in host memory
    start: int  # of the span in its storage, in elements
    members: list[tuple[int, torch.Size, tuple[int, ...], int]]  # index, shape, strides, offset


class HostActivations:
    """Stores the tensors that units save. No device sync."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None  # made at the first use on a GPU
        self._newest: Saved | None = None  # its tensors are still on the device
        self._last: weakref.ref[Saved] | None = None

    def begin(self) -> Saved:
        """Return a unit's store, to be filled before the next one begins."""
        if self._newest is not None:
            self._newest.leave()
        self._newest = Saved(self, self._last)
        self._last = weakref.ref(self._newest)
        return self._newest

    def store(self, tensors: Sequence[Tensor]) -> Saved:
        found = self.begin()
        found.add(tensors)
        return found

    def host(self) -> AbstractContextManager[Any]:
        """Context in which host memory is allocated; a dry run counts it apart."""
        return nullcontext()

    def taken(self, saved: Saved) -> None:
        if self._newest is saved:
            self._newest = None


class Saved:
    """The stored tensors of one unit."""

    def __init__(self, owner: HostActivations, before: weakref.ref[Saved] | None) -> None:
        self._owner, self._before = owner, before
        self._here: list[Tensor] = []  # on the device
        self._spans: list[_Span] = []
        self._copied: torch.cuda.Event | None = None  # the last copy, in either direction
        self._device = torch.device("cpu")

    @torch.no_grad()
    def add(self, tensors: Sequence[Tensor]) -> int:
        """Start to copy tensors to the host; return the index of the first. Views of one storage are one."""
        first = len(self._here)
        of_storages: dict[tuple[Any, ...], list[int]] = {}
        for i, tensor in enumerate(tensors):
            of_storages.setdefault((storage_of(tensor)[0], tensor.dtype), []).append(i)
        self._here += [tensor.detach() for tensor in tensors]
        with self._copying(tensors[0].device):
            for indices in of_storages.values():
                self._spans.append(self._to_host([first + i for i in indices]))
        return first

    def leave(self) -> None:
        """Free the device's tensors once they are copied."""
        self._wait()
        self._here = []

    def take(self) -> list[Tensor]:
        """Return the tensors on the device; frees host memory, and starts the fetch of the unit before."""
        self.start()
        self._wait()
        found, self._spans, self._copied = self._here, [], None
        self._owner.taken(self)
        before = self._before() if self._before is not None else None
        if before is not None:
            before.start()
        return found

    @torch.no_grad()
    def start(self) -> None:
        """Start to fetch the tensors, unless they are on the device."""
        if self._here or not self._spans:
            return
        device = self._device
        self._here = [torch.empty(0)] * sum(len(span.members) for span in self._spans)
        flats = [torch.empty_like(span.flat, device=device, pin_memory=False) for span in self._spans]
        with self._copying(device):
            for flat, span in zip(flats, self._spans, strict=True):
                flat.copy_(span.flat, non_blocking=True)
                if self._owner.stream is not None:
                    flat.record_stream(self._owner.stream)  # this unit may be freed before it is taken
                for i, shape, strides, offset in span.members:
                    self._here[i] = flat.as_strided(shape, strides, offset - span.start)

    def _to_host(self, indices: Sequence[int]) -> _Span:
        own = [(i, self._here[i]) for i in indices]
        members = [(i, tensor.shape, tensor.stride(), int(tensor.storage_offset())) for i, tensor in own]
        start = min(offset for *_, offset in members) // ALIGNED * ALIGNED
        stop = max(offset + _length(shape, strides) for _, shape, strides, offset in members)
        source = self._here[indices[0]].as_strided((stop - start,), (1,), start)
        self._device = source.device
        with self._owner.host():
            flat = torch.empty(stop - start, dtype=source.dtype, pin_memory=source.is_cuda)
        return _Span(flat.copy_(source, non_blocking=True), start, members)

    @contextmanager
    def _copying(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda":
            yield
            return
        if self._owner.stream is None:
            self._owner.stream = torch.cuda.Stream(device)
        # memory of fetched tensors is the current stream's, which may still read what was there before
        self._owner.stream.wait_stream(torch.cuda.current_stream(device))
        self._copied = self._copied or torch.cuda.Event()
        with torch.cuda.stream(self._owner.stream):
            yield
            self._copied.record()

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


def _length(shape: Sequence[int], strides: Sequence[int]) -> int:
    return (
        1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    )


def offloading(execute: Executor, recompute: Recompute, host: HostActivations) -> Executor:
    """Return an executor of uncompiled segments that stores what the named ones save."""

    def run(
        segments: Sequence[Segment], tensors: dict[str, Tensor], keep: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            return execute(segments, tensors, keep)
        hooked = [
            replace(each, run=functools.partial(_stored, host, each.run))
            if each.name in recompute.offload and not recompute.covers(each.name, each.layer)
            else each
            for each in segments
        ]
        return execute(hooked, tensors, keep)

    return run


def _stored(host: HostActivations, run: Callable[..., Any], *tensors: Tensor) -> Any:
    saved, indices, known = host.begin(), dict[int, int](), list[Tensor]()
    fetched: list[Tensor] = []
    device = tensors[0].device  # not the tensors: autograd holds the functions below until the backward

    def pack(tensor: Tensor) -> int | Tensor:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) or not tensor.numel() or tensor.device != device:
            return tensor
        if id(tensor) not in indices:
            known.append(tensor)  # so that its id stays its own
            indices[id(tensor)] = saved.add([tensor])
        return indices[id(tensor)]

    def unpack(packed: int | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not fetched:
            fetched.extend(saved.take())
        return fetched[packed]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        results = run(*tensors)
    known.clear()
    return results
