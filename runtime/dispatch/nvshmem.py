"""Dispatcher ``nvshmem``: torch's all-to-all on NVSHMEM, whose kernels read the counts.

Suffixes: T tokens, K slots, P ranks of ``ep_etp``, W send slots, S rows sent, N receive capacity, D hidden.

A token, its weights and its experts are sent as one row of bytes, once to each rank. The exchange checks no
limit, so ranks first gather their counts: if any rank would overflow, nothing is sent and all received rows
are 0, in a step that is repeated anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import CustomOpDef

from graphmoe.ops.collectives import all_gather_into
from graphmoe.ops.dispatch import register_exchange
from graphmoe.ops.waits import waiting
from graphmoe.plan.experts import Load
from graphmoe.runtime.torch_compat import all_to_all_by_splits, nvshmem_empty

# From 4 MiB torch exchanges by 64 blocks (16 between nodes), each with an equal part of a rank's rows;
# `_row_of` makes rows divisible.
MIN_BYTES = 8 << 20


class PeerRows:
    """Symmetric memory of a group's ranks, for all layers. Construction is a collective of the job."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        """``num_bytes``: `bytes_of` the largest exchange, the same on all ranks."""
        self.group, self.rank, self.size = group, group.rank(), group.size()
        assert self.size & (self.size - 1) == 0, self.size
        region = max(num_bytes, MIN_BYTES)
        # sent, received
        self._regions = [nvshmem_empty((region,), torch.uint8, device, group) for _ in range(2)]
        self._splits = nvshmem_empty((self.size,), torch.int64, device, group)
        self._came_splits = nvshmem_empty((2, self.size), torch.int64, device, group)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)

    def gather(self, counts_P: Tensor) -> Tensor:
        """Return row counts from each rank to each rank, [P, P]. A barrier for earlier reads, as `wait`."""
        arrivals = counts_P.new_empty(self.size * self.size)
        all_gather_into(arrivals, counts_P.contiguous(), group=self.group)
        return arrivals.view(self.size, self.size)

    def wait(self) -> None:
        """Make the stream wait until all ranks have read all earlier rows."""
        with waiting():
            dist.all_reduce(self._nothing, group=self.group)

    def exchange(self, columns: Sequence[Tensor], splits_P: Tensor, rows: int) -> list[Tensor]:
        """Send rows after `gather` or `wait`; return views of received columns, valid until the next call."""
        places, width = _row_of([_bytes(column) for column in columns], self.size)
        sent, came = (region[: len(region) // width * width].view(-1, width) for region in self._regions)
        assert max(rows, *map(len, columns)) <= len(came), "more rows than the symmetric memory holds"
        for column, place in zip(columns, places, strict=True):
            sent[: len(column), place].view(column.dtype).copy_(column)
        self._splits.copy_(splits_P)
        all_to_all_by_splits(sent, came, self._splits, self._came_splits, self.group)
        return [came[:rows, p].view(c.dtype) for c, p in zip(columns, places, strict=True)]


def bytes_of(
    tokens: int, places: int, rows: int, hidden: int, dtype: torch.dtype, top_k: int, ranks: int
) -> int:
    """Return bytes of an exchange that sends a token to up to ``places`` ranks; each receives ``rows``."""
    _, width = _row_of([hidden * dtype.itemsize, 4 * top_k, 4 * top_k], ranks)
    return max(rows, tokens * min(places, ranks)) * width


def _bytes(column: Tensor) -> int:
    return column.shape[1] * column.element_size()


def _row_of(sizes: Sequence[int], ranks: int) -> tuple[list[slice], int]:
    # a row has a multiple of 16 bytes for each block
    places, end = [], 0
    for size in sizes:
        places.append(slice(end, end + size))
        end += -(-size // 16) * 16
    step = 16 * max(64 // ranks, 1)
    return places, -(-end // step) * step


_in_use: list[PeerRows] = []  # the last one; graphs may read earlier ones


def use_rows(rows: PeerRows | None) -> None:
    """Set the memory of this process's operations; None frees the memory of all earlier calls."""
    if rows is None:
        _in_use.clear()
    else:
        _in_use.append(rows)


def has_rows(group: dist.ProcessGroup, num_bytes: int) -> bool:
    """Return whether the memory in use is large enough for exchanges of this size in a group."""
    return bool(_in_use) and _in_use[-1].group is group and len(_in_use[-1]._regions[0]) >= num_bytes


@dataclass(frozen=True)
class Nvshmem:
    """Sends each token once to each rank of its experts, and sums the returned rows."""

    handle: ClassVar[tuple[str, ...]] = ("arrivals",)  # rows from rank to rank, int32 [P, P]
    chunk: ClassVar[None] = None

    capacity: Load
    num_experts: int  # of each rank
    etp: int

    def dispatch(
        self, h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *plan: Tensor
    ) -> tuple[Tensor, ...]:
        return torch.ops.graphmoe.nvshmem_dispatch(
            h_TD, weight_TK, expert_TK, *plan, self.capacity.rows, self.num_experts, self.etp
        )

    def combine(self, sum_ND: Tensor, *plan_and_handle: Tensor) -> Tensor:
        return torch.ops.graphmoe.nvshmem_combine(sum_ND, *plan_and_handle)


class _Way(NamedTuple):
    there_P: Tensor  # rows from this rank to each
    here_P: Tensor  # rows from each to this rank
    fits: Tensor

    @classmethod
    def of(cls, arrivals_PP: Tensor, rank: int, rows: int) -> _Way:
        fits = (arrivals_PP.sum(0) <= rows).all()
        sent_PP = torch.where(fits, arrivals_PP, 0)
        return cls(sent_PP[rank], sent_PP[:, rank], fits)

    def copy(self, column: Tensor) -> Tensor:
        return torch.where(self.fits, column, torch.zeros((), dtype=column.dtype, device=column.device))


def _peers(ranks: int) -> PeerRows:
    if not _in_use:
        raise RuntimeError("no symmetric memory for rows to other ranks: call use_rows")
    assert _in_use[-1].size == ranks, (_in_use[-1].size, ranks)
    return _in_use[-1]


def _sent_slots(slot_R: Tensor, row_TW: Tensor, ranks: int) -> Tensor:
    return slot_R[: len(row_TW) * min(row_TW.shape[1], ranks)]


_PLAN = "Tensor counts, Tensor ends, Tensor row, Tensor slot"


def _operation(name: str, schema: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    return torch.library.custom_op(f"graphmoe::nvshmem_{name}", mutates_args=(), schema=schema)


@_operation(
    "dispatch",
    f"(Tensor h, Tensor weight, Tensor expert, {_PLAN}, int rows, int experts, int etp) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _dispatch(
    h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *plan_and_numbers: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    # tokens, weights, expert numbers, number of rows sent here, then the handle
    counts_P, ends_P, row_TW, slot_R, rows, experts, etp = plan_and_numbers
    peers = _peers(len(counts_P))
    arrivals_PP = peers.gather(counts_P)
    way, slot_S = _Way.of(arrivals_PP, peers.rank, rows), _sent_slots(slot_R, row_TW, peers.size)
    h_SD = torch.ops.graphmoe.permute(h_TD, slot_S, row_TW, ends_P)
    token_S = slot_S // row_TW.shape[1]
    came = peers.exchange([h_SD, weight_TK[token_S], expert_TK[token_S]], way.there_P, rows)
    received_ND, weight_NK, number_NK = (way.copy(column) for column in came)
    number_NK = number_NK - peers.rank // etp * experts
    dead_N = torch.arange(rows, device=h_TD.device) >= way.here_P.sum()
    elsewhere_NK = dead_N.unsqueeze(1) | (number_NK < 0) | (number_NK >= experts)
    room = arrivals_PP[:, peers.rank].sum().int()
    return received_ND, weight_NK, number_NK.masked_fill(elsewhere_NK, -1), room, arrivals_PP


@_operation(
    "dispatch_grad", f"(Tensor dreceived, Tensor dweight, {_PLAN}, Tensor arrivals) -> (Tensor, Tensor)"
)
def _dispatch_grad(dreceived_ND: Tensor, dweight_NK: Tensor, *way: Tensor) -> tuple[Tensor, ...]:
    return (*_back([dreceived_ND, dweight_NK], *way),)


@_operation("combine", f"(Tensor rows, {_PLAN}, Tensor arrivals) -> Tensor")
def _combine(sum_ND: Tensor, *way: Tensor) -> Tensor:
    return _back([sum_ND], *way)[0]


@_operation("combine_grad", f"(Tensor dy, {_PLAN}, Tensor arrivals, int rows) -> Tensor")
def _combine_grad(dy_TD: Tensor, *way_and_rows: Any) -> Tensor:
    _, ends_P, row_TW, slot_R, arrivals_PP, rows = way_and_rows
    peers = _peers(len(arrivals_PP))
    way, slot_S = _Way.of(arrivals_PP, peers.rank, rows), _sent_slots(slot_R, row_TW, peers.size)
    peers.wait()
    dy_SD = torch.ops.graphmoe.permute(dy_TD, slot_S, row_TW, ends_P)
    (dsum_ND,) = peers.exchange([dy_SD], way.there_P, rows)
    return way.copy(dsum_ND)


def _back(columns: Sequence[Tensor], *way: Tensor) -> list[Tensor]:
    # back to the senders, summed per token in the order of its send slots
    _, ends_P, row_TW, slot_R, arrivals_PP = way
    peers = _peers(len(arrivals_PP))
    way = _Way.of(arrivals_PP, peers.rank, len(columns[0]))
    slot_S = _sent_slots(slot_R, row_TW, peers.size)
    peers.wait()
    came = peers.exchange(columns, way.here_P, len(slot_S))
    return [torch.ops.graphmoe.unpermute(way.copy(column), slot_S, row_TW, ends_P, None) for column in came]


@_dispatch.register_fake
def _(h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    counts_P, *_, rows, _, _ = rest
    ranks, slots = len(counts_P), expert_TK.shape[1]
    received_ND, weight_NK = h_TD.new_empty(rows, h_TD.shape[1]), weight_TK.new_empty(rows, slots)
    ints = counts_P.new_empty
    return received_ND, weight_NK, expert_TK.new_empty(rows, slots), ints(()), ints(ranks, ranks)


@_combine_grad.register_fake
def _(dy_TD: Tensor, *rest: Any) -> Tensor:
    return dy_TD.new_empty(rest[-1], dy_TD.shape[1])


register_exchange(
    _dispatch,
    _dispatch_grad,
    _combine,
    _combine_grad,
    way_back=lambda inputs, output: (*inputs[3:7], output[-1]),
    way_there=lambda inputs: (*inputs[1:], inputs[0].shape[0]),
    token_tensor=lambda way: way[2],
)
