"""Libraries of vendors on ranks of a CPU: buffers of DeepEP and Primus-Turbo, torch's exchange on NVSHMEM.

Buffers move rows by gloo, take exactly the calls that the recorded signatures take, and refuse what the
kernels refuse or would do wrong: other dtypes, room for fewer rows than arrive, a handle that is another
one's. Dead rows come back as NaN, and a combine writes into the heads of its handle, as the kernels do.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.ops.collectives import transfer
from graphmoe.runtime.dispatch import nvshmem
from graphmoe.runtime.torch_compat import storage_of
from tests.vendor_api import bind, recorded_signature


@dataclass
class FakeConfig:
    num_sms: int
    rows: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 128 * self.rows * num_ranks * self.num_sms * -(-hidden_bytes // 128)


def fake_package(library: str, path: str, extra: bool = False) -> types.SimpleNamespace:
    """A module with a ``Buffer``; ``extra`` puts another tensor before the handle of a dispatch."""
    names = ("__init__", "set_num_sms", "get_dispatch_config", "get_combine_config", "get_dispatch_layout")
    names += ("dispatch", "combine", "destroy")
    signatures = {name: recorded_signature(library, f"{path}.Buffer", name) for name in names}
    members = {"signatures": signatures, "has_extra": extra}
    return types.SimpleNamespace(Buffer=type("Buffer", (FakeBuffer,), members))


class FakeBuffer:
    num_sms = 6
    signatures: dict[str, Any]
    has_extra: bool

    @classmethod
    def set_num_sms(cls, *args: Any, **kwargs: Any) -> None:
        cls.num_sms = cls._bound("set_num_sms", args, kwargs)["new_num_sms"]

    @classmethod
    def get_dispatch_config(cls, *args: Any, **kwargs: Any) -> FakeConfig:
        assert cls._bound("get_dispatch_config", args, kwargs)["num_ranks"] in (2, 4, 8)
        return FakeConfig(cls.num_sms, rows=2)

    @classmethod
    def get_combine_config(cls, *args: Any, **kwargs: Any) -> FakeConfig:
        assert cls._bound("get_combine_config", args, kwargs)["num_ranks"] in (2, 4, 8)
        return FakeConfig(cls.num_sms, rows=3)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        call = self._bound("__init__", args, kwargs)
        self.group, self.num_nvl_bytes = call["group"], call["num_nvl_bytes"]
        self.rank, self.group_size = self.group.rank(), self.group.size()
        assert self.num_nvl_bytes % 128 == 0 and call["explicitly_destroy"]
        assert not call["low_latency_mode"] and not call["num_rdma_bytes"]
        self.destroyed = False

    def destroy(self, *args: Any, **kwargs: Any) -> None:
        self._bound("destroy", args, kwargs)
        dist.barrier(self.group)
        self.destroyed = True

    def get_dispatch_layout(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call = self._bound("get_dispatch_layout", args, kwargs)
        chosen_TK, experts = call["topk_idx"], call["num_experts"]
        assert chosen_TK.dtype == torch.int64 and chosen_TK.is_contiguous()
        ranks_P = torch.arange(self.group_size)
        rank_TK = chosen_TK // (experts // self.group_size)
        in_rank_TP = (rank_TK.unsqueeze(2) == ranks_P).any(dim=1)
        to_expert_E = chosen_TK.flatten().bincount(minlength=experts).int()
        return in_rank_TP.sum(0).int(), None, to_expert_E, in_rank_TP, object()

    def dispatch(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call = self._bound("dispatch", args, kwargs)
        x_TD = call["x"]
        self._check_rows(x_TD, self.get_dispatch_config(self.group_size))
        if call["handle"] is not None:
            assert call["topk_idx"] is None and call["topk_weights"] is None
            return self._again(x_TD, call["handle"]), None, None, None, None, object()
        return self._first(x_TD, call)

    def combine(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call = self._bound("combine", args, kwargs)
        x_ND, (prefix_PP, _, received_PC, source_N, in_rank_TP, head_TP) = call["x"], call["handle"]
        self._check_rows(x_ND, self.get_combine_config(self.group_size))
        assert received_PC.equal(self._channels(2)) and in_rank_TP.equal(head_TP >= 0)
        ends_PP = torch.stack([in_rank.sum(0) for in_rank in self._of_all(in_rank_TP)]).cumsum(0)
        assert len(source_N) == len(x_ND) and prefix_PP[:, self.rank].equal(ends_PP[:, self.rank].int())
        sums, sources = [None, None], self._of_all(source_N)
        for i, rows in enumerate(each for each in (x_ND, call["topk_weights"]) if each is not None):
            total = torch.zeros(len(head_TP), rows.shape[1])
            for rank, theirs in enumerate(self._of_all(rows)):
                token_R = in_rank_TP[:, rank].nonzero().flatten()
                own = slice(int(ends_PP[self.rank, rank]) - len(token_R), int(ends_PP[self.rank, rank]))
                assert sources[rank][own].equal(token_R.int())
                total[token_R] += theirs[own].float()
            sums[i] = total.to(rows.dtype)
        head_TP[head_TP < 0] = -2 - 5 * self.rank
        return *sums, object()

    def _first(self, x_TD: Tensor, call: dict[str, Any]) -> tuple[Any, ...]:
        given = [call[name] for name in ("topk_idx", "topk_weights", "is_token_in_rank")]
        chosen_TK, weight_TK, in_rank_TP = given
        assert weight_TK.dtype == torch.float32 and weight_TK.is_contiguous()
        assert chosen_TK.dtype == torch.int64 and len(chosen_TK) == len(x_TD)
        assert call["num_tokens_per_rank"].equal(in_rank_TP.sum(0).int())
        experts, room = len(call["num_tokens_per_expert"]) // self.group_size, call["num_worst_tokens"]
        parts = []
        for x, chosen, weight, in_rank in zip(*map(self._of_all, (x_TD, *given)), strict=True):
            here = in_rank[:, self.rank]
            number = chosen[here] - experts * self.rank
            number = number.masked_fill((number < 0) | (number >= experts), -1)
            token_R = here.nonzero().flatten().int()
            parts.append((x[here], number, weight[here].masked_fill(number < 0, 0), token_R))
        arrived = sum(len(token_R) for *_, token_R in parts)
        assert arrived <= room, f"{arrived} rows are written where {room} have room"
        received_ND, number_NK, weight_NK, source_N = (
            torch.cat([*each, each[0].new_full((room - arrived, *each[0].shape[1:]), dead)])
            for each, dead in zip(zip(*parts, strict=True), (torch.nan, -1, torch.nan, 2**30), strict=True)
        )
        prefix_PP = torch.full((self.group_size, self.group_size), -99, dtype=torch.int32)
        prefix_PP[:, self.rank] = torch.tensor([len(token_R) for *_, token_R in parts]).cumsum(0)
        head_TP = torch.where(in_rank_TP, in_rank_TP.cumsum(0) - 1, -1).int()
        handle = (prefix_PP, self._channels(1), self._channels(2), source_N, in_rank_TP, head_TP)
        between = (torch.empty(0),) if self.has_extra else ()
        return received_ND, number_NK, weight_NK, [], *between, handle, object()

    def _again(self, x_TD: Tensor, handle: tuple[Tensor, ...]) -> Tensor:
        prefix_PP, channel_PC, _, source_N, in_rank_TP, _ = handle
        assert channel_PC.equal(self._channels(1)) and len(in_rank_TP) == len(x_TD)
        both = zip(self._of_all(x_TD), self._of_all(in_rank_TP), strict=True)
        received = torch.cat([x[in_rank[:, self.rank]] for x, in_rank in both])
        assert int(prefix_PP[-1, self.rank]) == len(received)
        return torch.cat([received, x_TD.new_full((len(source_N) - len(received), x_TD.shape[1]), torch.nan)])

    def _of_all(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.group_size)]
        dist.all_gather([each.view(torch.uint8) for each in found], x.view(torch.uint8), group=self.group)
        return found

    def _check_rows(self, x: Tensor, config: FakeConfig) -> None:
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and not self.destroyed
        assert self.num_nvl_bytes >= config.get_nvl_buffer_size_hint(2 * x.shape[1], self.group_size)

    def _channels(self, value: int) -> Tensor:
        """What only the kernels read of a handle: the place of each channel's rows, sent or received."""
        return torch.full((self.group_size, self.num_sms // 2), value, dtype=torch.int32)

    @classmethod
    def _bound(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        call = bind(cls.signatures[name], args, kwargs)
        assert not call.get("async_finish") and not call.get("allocate_on_comm_stream")
        return call


class FakeExchange:
    """Memory that is known, and torch's exchange by gloo, which refuses what its kernels get wrong."""

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
    fake = FakeExchange()
    with (
        mock.patch.object(nvshmem, "nvshmem_empty", fake.empty),
        mock.patch.object(nvshmem, "all_to_all_by_splits", fake.all_to_all),
    ):
        yield fake
