"""Copies of tensors on the host, so that training may change the originals while they are written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphmoe.checkpoint.flat_shards import FlatShard

# torch's own DefaultStager cannot be used: in 2.11 it drops its memory after each call and then fails.


class HostCopies:
    """Host memory that is allocated at the first snapshot and reused by the next ones.

    It costs the size of the state in host memory. For tensors on a GPU it is pinned, and each
    tensor's part is rounded up to a power of two by torch's allocator.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor | FlatShard]) -> dict[str, Tensor]:
        """Copies of this rank's part of each tensor, complete on return and valid until the next call.

        Syncs each device once for all its tensors.
        """
        sources = {name: local_part(tensor) for name, tensor in tensors.items()}
        self._buffers = {name: self._buffer(name, source) for name, source in sources.items()}
        for name, source in sources.items():
            self._buffers[name].copy_(source, non_blocking=source.is_cuda)
        for device in {source.device for source in sources.values() if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._buffers)

    def close(self) -> None:
        """Give the host memory back."""
        self._buffers = {}

    def _buffer(self, name: str, source: Tensor) -> Tensor:
        old = self._buffers.get(name)
        fits = old is not None and old.shape == source.shape and old.dtype == source.dtype
        if old is not None and fits and old.is_pinned() == _wants_pinned(source):
            return old
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=_wants_pinned(source))


def local_part(tensor: Tensor | FlatShard) -> Tensor:
    """What this rank holds of a tensor, sharing its memory and cut off from autograd."""
    if isinstance(tensor, FlatShard):
        return tensor.data.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _wants_pinned(source: Tensor) -> bool:
    return source.is_cuda and source.numel() > 0
