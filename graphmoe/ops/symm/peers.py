"""The ranks that exchange rows by the operations of `graphmoe.ops.symm`, and the memory that they share.

A process group's name and an address differ from job to job, so a compiled graph must not hold them.
``use_peers`` says at start who they are; the operations ask when they run.

Suffixes: T tokens, K slots, P ranks of ``ep_etp``, W places of a token in the send plan, R = T * W, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

Side = Literal["out", "back"]


class Peers(Protocol):
    """This rank among the ranks of ``ep_etp``."""

    rank: int
    size: int


class CollectivePeers:
    """Peers without common memory: rows travel by collectives of torch.distributed, on any backend.

    The host waits for the device once in each operation. Without a group this rank is alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else group.size()


@dataclass(frozen=True)
class Sizes:
    """Sizes of one exchange; equal on all ranks."""

    tokens: int
    row_bytes: int
    """Bytes of a token: D elements."""
    slots: int
    places: int
    rows: int
    """Received, live and dead."""
    block: int = 0
    weights: int = 0
    """Bytes of the weights of a rank's experts that go along with rows."""

    def joined(self, other: Sizes) -> Sizes:
        """The least that has room for both."""
        return Sizes(*map(max, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Region:
    """Offsets of the parts of each rank's region, in bytes from its base; the same on all ranks.

    The side "out" is tokens, blocks, records, counts and weights of experts, the side "back" is sums and
    gradients of slots' weights. Only its owner writes to a region. A side is written while peers may still
    read the other.
    """

    sizes: Sizes
    tokens: int
    """[T, D]"""
    blocks: int
    """[P, block, D]: the first rows for each rank."""
    records: int
    """int32 [R, 1 + 2 K]: token, weights and expert numbers of each row sent."""
    counts: int
    """int32 [P]: rows for each rank."""
    weights: int
    """Weights of own experts, for ranks that have replicas of them."""
    sums: int
    """[rows, D]"""
    dweights: int
    """fp32 [rows, K]"""
    num_bytes: int

    @classmethod
    def with_room_for(cls, sizes: Sizes, num_ranks: int) -> Region:
        """The region with room for these sizes."""
        parts = (
            sizes.tokens * sizes.row_bytes,
            num_ranks * sizes.block * sizes.row_bytes,
            4 * sizes.tokens * sizes.places * (1 + 2 * sizes.slots),
            4 * num_ranks,
            sizes.weights,
            sizes.rows * sizes.row_bytes,
            4 * sizes.rows * sizes.slots,
        )
        return cls(sizes, *offsets(parts))


ALIGNMENT = 256
"""Bytes at a multiple of which each part of a region begins, which suits loads of any width."""


def offsets(parts: Iterable[int]) -> list[int]:
    """Return where parts of so many bytes begin that follow each other, and where the last ends."""
    found = [0]
    for num_bytes in parts:
        found.append(found[-1] + -(-num_bytes // ALIGNMENT) * ALIGNMENT)
    return found


COUNT_BYTES = 16 << 10
"""Bytes of a place for counts of 4,096 experts."""


class SharedMemory(Peers, Protocol):
    """Memory of each rank that all of them read, its region. Calls are alike on all ranks.

    Used on one stream, or on streams that wait for each other; two memories do not wait for each other.

    A captured graph holds addresses, so memory that ``reserve`` replaced stays until ``forget_graphs``.
    """

    addresses: Tensor
    """int64 [P] on the device: the base of each rank's region."""

    def reserve(self, num_bytes: int) -> None:
        """Let the region of each rank have room for so many bytes.

        Collective where it grows, which it cannot in a capture: RuntimeError. No device sync otherwise.
        """

    def view(self, rank: int, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Part of a rank's region as a tensor."""

    def barrier(self) -> None:
        """Let all ranks see what was written before. On the current stream; no device sync."""


class MemoryPeers(Peers, Protocol):
    """Peers that read each other's regions. Calls are alike on all ranks.

    One exchange at a time, on one stream or on streams that wait for each other.

    A captured graph holds addresses, so memory that ``reserve`` replaced stays until ``forget_graphs``.
    """

    last: tuple[Side, bool] | None
    """The side of the last exchange, and whether that was captured; `graphmoe.ops.symm.exchange` keeps it.
    A replay does not set it: graphs and what runs between them must use the sides in turn."""
    addresses: Tensor
    """int64 [P] on the device: the base of each rank's region."""
    streams: Sequence[torch.cuda.Stream]
    """One for the copy from each other rank, at least P - 1, beside which kernels run; none on a CPU."""
    replicas: SharedMemory
    """Another memory, of `graphmoe.ops.replicas.exchange`, which runs beside exchanges of rows."""

    def reserve(self, sizes: Sizes) -> Region:
        """The region, after it has grown to have room for ``sizes`` and all earlier ones.

        As `SharedMemory.reserve`.
        """

    def forget_graphs(self) -> None:
        """As ``forget_graphs``, of both memories."""

    def view(self, rank: int, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `SharedMemory.view`."""

    def barrier(self) -> None:
        """As `SharedMemory.barrier`."""


_in_use: Peers | None = None


def use_peers(peers: Peers | None) -> None:
    """Let the operations of this process exchange rows with these peers; None forgets them."""
    global _in_use
    _in_use = peers


def reserve(sizes: Sizes) -> None:
    """Let the peers in use have memory in common for exchanges of these sizes. A collective of them."""
    if _in_use is not None and not isinstance(_in_use, CollectivePeers):
        cast(MemoryPeers, _in_use).reserve(sizes)


def forget_graphs() -> None:
    """Let the peers in use give back memory that they kept for graphs, all of which have ended."""
    if _in_use is not None and not isinstance(_in_use, CollectivePeers):
        cast(MemoryPeers, _in_use).forget_graphs()


def peers_of(size: int) -> Peers:
    """The peers in use. Raises RuntimeError where there are none, or not ``size`` of them."""
    if _in_use is None:
        raise RuntimeError(
            "rows go to other ranks, and this process has no peers; call graphmoe.ops.symm.use_peers"
        )
    if _in_use.size != size:
        raise RuntimeError(
            f"a send plan for {size} ranks, and there are {_in_use.size} peers: the plan was made for "
            f"another layout than use_peers was given"
        )
    return _in_use


def is_capturing() -> bool:
    """Return whether the current stream is being captured into a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_products: torch.cuda.Stream | None = None
"""Stream of this process, not of a thread: autograd runs gradients in a thread of its own."""


@contextmanager
def beside_products_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Queue exchanges inside that run beside products, which are queued on ``stream`` afterwards.

    A transfer by copy engines hides beside products, but what it sends must be packed first. Kernels of
    another stream that come when products have begun wait until these leave a multiprocessor, and the
    transfer waits with them: so the exchange packs on the stream of the products.
    """
    global _products
    before, _products = _products, stream
    try:
        yield
    finally:
        _products = before


@contextmanager
def before_products() -> Iterator[None]:
    """Queue kernels inside on the stream of the products, if there is one, behind all of the current stream.

    Later kernels of the current stream come after them, so memory of the current stream may be used inside.
    """
    products = _products
    if products is None:
        yield
        return
    here = torch.cuda.current_stream()
    products.wait_stream(here)
    with torch.cuda.stream(products):
        yield
    here.wait_stream(products)
