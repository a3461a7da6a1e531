"""torch's exchange of rows on NVSHMEM, on ranks of a CPU: by gloo, refusing what its kernels get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from graphmoe.runtime.dispatch import nvshmem
from graphmoe.runtime.dispatch.alltoall import transfer
from graphmoe.runtime.torch_compat import storage_of


class FakeExchange:
    """Memory that is known, and the exchange."""

    def __init__(self) -> None:
        self._known: list[Any] = []
        self.exchanges = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: Any) -> Tensor:
        tensor = torch.full(shape, 127, dtype=dtype, device=device)
        self._known.append(storage_of(tensor)[0])
        return tensor

    def all_to_all(self, rows: Tensor, out: Tensor, splits: Tensor, out_splits: Tensor, group: Any) -> None:
        ranks, tensors = group.size(), (rows, out, splits, out_splits)
        assert all(storage_of(tensor)[0] in self._known and tensor.is_contiguous() for tensor in tensors)
        assert splits.dtype == out_splits.dtype == torch.int64 and out_splits.shape == (2, ranks)
        sent = splits.tolist()
        came = transfer(splits.view(ranks, 1), [1] * ranks, [1] * ranks, group).flatten().tolist()
        assert sum(sent) <= len(rows), "reads past the end"
        assert sum(came) <= len(out), "writes past the end"
        for most in (64, 16):  # within a node, between nodes
            wanted = -(-rows.numel() * rows.element_size() // 65536)
            programs = max(min(-(-wanted // ranks) * ranks, most) // ranks, 1)
            assert all(n * rows.stride(0) * rows.element_size() % programs == 0 for n in came), "a residue"
        out[: sum(came)] = transfer(rows[: sum(sent)], sent, came, group)
        out_splits[0] = torch.tensor(came)
        out_splits[1] = torch.tensor([0, *came[:-1]]).cumsum(0)
        self.exchanges += 1


@contextmanager
def fake_exchange() -> Iterator[FakeExchange]:
    """Put a fake in place of torch's exchange in the dispatcher."""
    fake = FakeExchange()
    with (
        mock.patch.object(nvshmem, "nvshmem_empty", fake.empty),
        mock.patch.object(nvshmem, "all_to_all_by_splits", fake.all_to_all),
    ):
        yield fake
