"""Ranks that exchange tokens by `graphmoe.ops.symm`, and their peer memory.

Compiled graphs must not hold group names and addresses, which differ from job to job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.ops import IN_USE

Side = Literal["out", "back"]


class Peers(Protocol):
    rank: int
    size: int


class CollectivePeers:
    """Peers on torch.distributed, without shared memory. Each operation syncs the device once."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        # no group: this rank is alone
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else group.size()


@dataclass(frozen=True)
class Sizes:
    """Sizes of a dispatch or combine, equal on all ranks."""

    tokens: int
    row_bytes: int  # of a token: D elements
    slots: int
    places: int
    rows: int  # received, live and dead
    block: int = 0
    weights: int = 0  # bytes of experts' weights that are sent along

    def joined(self, other: Sizes) -> Sizes:
        return Sizes(*map(max, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Region:
    """Byte offsets in a rank's peer memory: "out" (tokens to weights) for dispatch, "back" for combine.

    Only that rank writes to its memory; it writes one side while peers may read the other.
    """

    sizes: Sizes
    tokens: int  # [T, D]
    blocks: int  # [P, block, D]: the first rows for each rank
    records: int  # int32 [R, 1 + 2 K]: token, weights and expert numbers of each row sent
    counts: int  # int32 [P]: rows for each rank
    weights: int  # of own experts, for ranks with replicas of them
    sums: int  # [rows, D]
    dweights: int  # fp32 [rows, K]
    num_bytes: int

    @classmethod
    def with_room_for(cls, sizes: Sizes, num_ranks: int) -> Region:
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


ALIGNMENT = 256  # bytes, for loads of any width


def offsets(parts: Iterable[int]) -> list[int]:
    """Return the aligned start offset of each part, then the end offset."""
    found = [0]
    for num_bytes in parts:
        found.append(found[-1] + -(-num_bytes // ALIGNMENT) * ALIGNMENT)
    return found


COUNT_BYTES = 16 << 10  # counts of 4,096 experts


class Regions(Peers, Protocol):
    """Peer memory: each rank has a region that all ranks read. All ranks make the same calls in one order."""

    addresses: Tensor  # int64 [P] on the device: base of each rank's region

    def view(self, rank: int, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a view of a rank's region from ``offset_bytes`` on."""

    def barrier(self) -> None:
        """Make earlier writes visible to all ranks, on the current stream. No device sync."""


class SharedMemory(Regions, Protocol):
    """Peer memory that grows; as graphs hold its address, replaced memory stays until ``forget_graphs``."""

    num_bytes: int

    def reserve(self, num_bytes: int) -> None:
        """Grow regions to ``num_bytes``. A collective; RuntimeError in a capture. No sync if large enough."""

    def forget_graphs(self) -> None:
        """Free memory kept for graphs."""


class MemoryPeers(Regions, Protocol):
    """Peers that read each other's regions, one exchange at a time."""

    # Side of the last exchange, and whether it was captured; None if unknown. A replay does not set it:
    # graphs, and code that runs between them, must alternate sides, or call `forget_order` first.
    last: tuple[Side, bool] | None
    streams: Sequence[torch.cuda.Stream]  # for copies from the P - 1 other ranks; none on a CPU
    replicas: SharedMemory  # a second memory, so that weights are sent beside exchanges of rows

    def reserve(self, sizes: Sizes) -> Region:
        """Grow the regions to hold ``sizes``, as `SharedMemory.reserve` does; return the byte offsets."""

    def forget_graphs(self) -> None:
        """Free memory kept for graphs, here and in ``replicas``."""


def reserve(sizes: Sizes, replica_bytes: int) -> None:
    """Grow the peer memory in use, if any, to these sizes. A collective, not in a capture."""
    if IN_USE.exchange and not isinstance(IN_USE.exchange.peers, CollectivePeers):
        peers = cast(MemoryPeers, IN_USE.exchange.peers)
        peers.replicas.reserve(replica_bytes)
        peers.reserve(sizes)


def forget_graphs() -> None:
    """Free memory kept for graphs; call after all graphs have been deleted."""
    for axis in IN_USE.shared.values():
        axis.memory.forget_graphs()
    if IN_USE.exchange and not isinstance(IN_USE.exchange.peers, CollectivePeers):
        cast(MemoryPeers, IN_USE.exchange.peers).forget_graphs()


def forget_order() -> None:
    """Let the next exchange of rows begin with a barrier; call before a graph is captured or replayed."""
    if IN_USE.exchange and not isinstance(IN_USE.exchange.peers, CollectivePeers):
        cast(MemoryPeers, IN_USE.exchange.peers).last = None


def forget_halves() -> None:
    """Let the next exchange along each axis begin with a barrier; call before captures, after replays."""
    # A graph's halves are fixed, and a unit may have an odd number of exchanges: what replays or runs before
    # it may end in the half with which it begins.
    for axis in IN_USE.shared.values():
        axis.last = None


def exchange_of(size: int) -> Any:
    """Return the `Exchange` in use. Raises RuntimeError unless it has ``size`` peers."""
    exchange = IN_USE.exchange
    if exchange is None:
        raise RuntimeError(
            "this process has no peers to exchange rows with; call graphmoe.ops.symm.use_peers"
        )
    if exchange.peers.size != size:
        raise RuntimeError(
            f"the send plan is for {size} ranks, but there are {exchange.peers.size} peers: the plan is "
            f"for another layout than use_peers received"
        )
    return exchange


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def beside_products_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Context that overlaps each dispatch or combine inside with GEMMs queued on ``stream`` afterwards."""
    # A kernel launched on another stream after GEMMs waits for a free SM, and delays the transfer. So the
    # exchange packs what it sends on the GEMMs' stream.
    before, IN_USE.products = IN_USE.products, stream
    try:
        yield
    finally:
        IN_USE.products = before


@contextmanager
def before_products() -> Iterator[None]:
    """Context whose kernels use the stream of `beside_products_on`, if any, ordered with the current one."""
    products = IN_USE.products
    if products is None:
        yield
        return
    here = torch.cuda.current_stream()
    products.wait_stream(here)
    with torch.cuda.stream(products):
        yield
    here.wait_stream(products)
