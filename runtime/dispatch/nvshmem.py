"""The dispatcher ``nvshmem``: torch's exchange of rows on NVSHMEM, whose kernels read the counts.

Suffixes: T tokens, K slots, P ranks of ``ep_etp``, W places of a token in the plan, S rows sent, N rows that
there is room for, D hidden.

A token, its weights and its experts travel as one row of bytes, once to each rank. The exchange itself would
write past the end where more rows come than there is room for. So ranks first tell each other their counts,
and where the rows of any rank do not fit, none are sent and all that arrives is 0: that step is void anyway.
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
from graphmoe.plan.experts import Load
from graphmoe.runtime.torch_compat import all_to_all_by_splits, nvshmem_empty

MIN_BYTES = 8 << 20
"""Least bytes of a region. From 4 MiB on torch moves the rows of one exchange by 64 programs (16 between
nodes), and each takes an equal part of a rank's rows. The size of a row makes the parts come out even."""


class PeerRows:
    """Symmetric memory through which the ranks of a group exchange rows, for all layers.

    Making one is a collective of all ranks of the job, with the same numbers everywhere.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        """``num_bytes`` are those of the largest exchange, by `bytes_of`."""
        self.group, self.rank, self.size = group, group.rank(), group.size()
        assert self.size & (self.size - 1) == 0, self.size
        region = max(num_bytes, MIN_BYTES)
        self._regions = [nvshmem_empty((region,), torch.uint8, device, group) for _ in range(2)]
        """Regions of what is sent, and of what has come."""
        self._splits = nvshmem_empty((self.size,), torch.int64, device, group)
        self._came_splits = nvshmem_empty((2, self.size), torch.int64, device, group)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)

    def gather(self, counts_P: Tensor) -> Tensor:
        """Return rows from each rank to each rank, [P, P]; all ranks have then read all earlier rows."""
        arrivals = counts_P.new_empty(self.size * self.size)
        all_gather_into(arrivals, counts_P.contiguous(), group=self.group)
        return arrivals.view(self.size, self.size)

    def wait(self) -> None:
        """Let the device go on when all ranks have read all rows that were sent to them before."""
        dist.all_reduce(self._nothing, group=self.group)

    def exchange(self, columns: Sequence[Tensor], splits_P: Tensor, rows: int) -> list[Tensor]:
        """Return the columns of received rows, room for ``rows``: views, to be read before the next call.

        `gather` or `wait` must have run since the last.
        """
        places, width = _row_of([_bytes(column) for column in columns], self.size)
        sent, came = (region[: len(region) // width * width].view(-1, width) for region in self._regions)
        assert max(rows, *map(len, columns)) <= len(came), "more rows than there is symmetric memory for"
        for column, place in zip(columns, places, strict=True):
            sent[: len(column), place].view(column.dtype).copy_(column)
        self._splits.copy_(splits_P)
        all_to_all_by_splits(sent, came, self._splits, self._came_splits, self.group)
        return [came[:rows, p].view(c.dtype) for c, p in zip(columns, places, strict=True)]


def bytes_of(
    tokens: int, places: int, rows: int, hidden: int, dtype: torch.dtype, top_k: int, ranks: int
) -> int:
    """Bytes of the largest exchange of tokens with so many places each, and room for so many rows."""
    _, width = _row_of([hidden * dtype.itemsize, 4 * top_k, 4 * top_k], ranks)
    return max(rows, tokens * min(places, ranks)) * width


def _bytes(column: Tensor) -> int:
    return column.shape[1] * column.element_size()


def _row_of(sizes: Sequence[int], ranks: int) -> tuple[list[slice], int]:
    """Lay columns of these bytes out in a row, which has 16 bytes, or more, for each program."""
    places, end = [], 0
    for size in sizes:
        places.append(slice(end, end + size))
        end += -(-size // 16) * 16
    step = 16 * max(64 // ranks, 1)
    return places, -(-end // step) * step


_in_use: list[PeerRows] = []
"""The last is used; those before it may be read by graphs."""


def use_rows(rows: PeerRows | None) -> None:
    """From now on the operations of this process exchange through it; None forgets it and all before it.

    Those before it stay: graphs that were captured with them hold their addresses.
    """
    if rows is None:
        _in_use.clear()
    else:
        _in_use.append(rows)


def has_rows(group: dist.ProcessGroup, num_bytes: int) -> bool:
    """Return whether what is used serves exchanges of this size in a group."""
    return bool(_in_use) and _in_use[-1].group is group and len(_in_use[-1]._regions[0]) >= num_bytes


@dataclass(frozen=True)
class Nvshmem:
    """Sends each token once to each rank that holds one of its experts, and sums what comes back."""

    handle: ClassVar[tuple[str, ...]] = ("arrivals",)
    """Rows from each rank to each rank, int32 [P, P], the same on all of them."""
    chunk: ClassVar[None] = None

    capacity: Load
    num_experts: int
    """Experts of each rank."""
    etp: int

    def dispatch(
        self, h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *plan: Tensor
    ) -> tuple[Tensor, ...]:
        """As ``Dispatcher.dispatch``. No device sync."""
        return torch.ops.graphmoe.nvshmem_dispatch(
            h_TD, weight_TK, expert_TK, *plan, self.capacity.rows, self.num_experts, self.etp
        )

    def combine(self, sum_ND: Tensor, *plan_and_handle: Tensor) -> Tensor:
        """As ``Dispatcher.combine``. No device sync."""
        return torch.ops.graphmoe.nvshmem_combine(sum_ND, *plan_and_handle)


class _Way(NamedTuple):
    """Rows of each rank for this one and of this one for each rank, and whether all of them fit."""

    there_P: Tensor
    here_P: Tensor
    fits: Tensor

    @classmethod
    def of(cls, arrivals_PP: Tensor, rank: int, rows: int) -> _Way:
        fits = (arrivals_PP.sum(0) <= rows).all()
        sent_PP = torch.where(fits, arrivals_PP, 0)
        return cls(sent_PP[rank], sent_PP[:, rank], fits)

    def copy(self, column: Tensor) -> Tensor:
        """Copy what came to memory of its own; 0 where nothing was sent."""
        return torch.where(self.fits, column, torch.zeros((), dtype=column.dtype, device=column.device))


def _peers(ranks: int) -> PeerRows:
    if not _in_use:
        raise RuntimeError("this process has no symmetric memory for rows to other ranks: call use_rows")
    assert _in_use[-1].size == ranks, (_in_use[-1].size, ranks)
    return _in_use[-1]


def _sent_slots(slot_R: Tensor, row_TW: Tensor, ranks: int) -> Tensor:
    return slot_R[: len(row_TW) * min(row_TW.shape[1], ranks)]


_PLAN = "Tensor counts, Tensor ends, Tensor row, Tensor slot"
"""The plan among the arguments of an operation."""


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
    """Received tokens, weights, numbers of experts, how many rows were sent here, and the handle."""
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
    """The sum over ranks of each token's rows -> [T, D]."""
    return _back([sum_ND], *way)[0]


@_operation("combine_grad", f"(Tensor dy, {_PLAN}, Tensor arrivals, int rows) -> Tensor")
def _combine_grad(dy_TD: Tensor, *way_and_rows: Any) -> Tensor:
    """The gradient of each token on the ranks that it went to -> [N, D]."""
    _, ends_P, row_TW, slot_R, arrivals_PP, rows = way_and_rows
    peers = _peers(len(arrivals_PP))
    way, slot_S = _Way.of(arrivals_PP, peers.rank, rows), _sent_slots(slot_R, row_TW, peers.size)
    peers.wait()
    dy_SD = torch.ops.graphmoe.permute(dy_TD, slot_S, row_TW, ends_P)
    (dsum_ND,) = peers.exchange([dy_SD], way.there_P, rows)
    return way.copy(dsum_ND)


def _back(columns: Sequence[Tensor], *way: Tensor) -> list[Tensor]:
    """Columns of received rows to where these came from, summed for each token in the order of its places."""
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
