"""Libraries of vendors on ranks of a CPU: buffers of DeepEP and Primus-Turbo, torch's exchange on NVSHMEM.

Buffers move rows by gloo, take exactly the calls that the recorded signatures take, and refuse what the
kernels refuse or would do wrong: other dtypes, room for fewer rows than arrive, a handle that is another
one's. Dead rows come back as NaN, and a combine writes into the heads of its handle, as the kernels do.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.runtime.dispatch import nvshmem
from graphmoe.runtime.dispatch.alltoall import transfer
from graphmoe.runtime.torch_compat import storage_of
from tests.vendor_api import bind, recorded_signature


@dataclass
class FakeConfig:
    """Sizes of the queues of a transfer."""

    num_sms: int
    rows: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 128 * self.rows * num_ranks * self.num_sms * -(-hidden_bytes // 128)


def fake_package(library: str, path: str, extra: bool = False) -> types.SimpleNamespace:
    """A module with a ``Buffer``; ``extra`` puts another tensor before the handle of a dispatch."""
    calls = {
        name: recorded_signature(library, f"{path}.Buffer", name)
        for name in ("__init__", "set_num_sms", "get_dispatch_config", "get_combine_config")
        + ("get_dispatch_layout", "dispatch", "combine", "destroy")
    }

    class Buffer(FakeBuffer):
        num_sms, signatures, has_extra = 6, calls, extra

        @classmethod
        def set_num_sms(cls, *args: Any, **kwargs: Any) -> None:
            cls.num_sms = bind(calls["set_num_sms"], args, kwargs)["new_num_sms"]

        @classmethod
        def get_dispatch_config(cls, *args: Any, **kwargs: Any) -> FakeConfig:
            assert bind(calls["get_dispatch_config"], args, kwargs)["num_ranks"] in (2, 4, 8)
            return FakeConfig(cls.num_sms, rows=2)

        @classmethod
        def get_combine_config(cls, *args: Any, **kwargs: Any) -> FakeConfig:
            assert bind(calls["get_combine_config"], args, kwargs)["num_ranks"] in (2, 4, 8)
            return FakeConfig(cls.num_sms, rows=3)

    return types.SimpleNamespace(Buffer=Buffer)


class FakeBuffer:
    """Buffer that moves rows between the ranks of a group of gloo."""

    num_sms: int
    signatures: dict[str, Any]
    has_extra: bool
    get_dispatch_config: Callable[[int], FakeConfig]
    get_combine_config: Callable[[int], FakeConfig]

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
        assert len(source_N) == len(x_ND)
        assert received_PC.equal(self._starts(self._channels(in_rank_TP)))
        arrived, sent = self._arrived(prefix_PP), (head_TP >= 0).sum(0).tolist()
        tokens = [(head_TP[:, rank] >= 0).nonzero().flatten() for rank in range(self.group_size)]
        total, live = None, sum(arrived)
        for rows in (x_ND, call["topk_weights"]):
            if rows is None:
                continue
            back = transfer(rows[:live], arrived, sent, self.group).split(sent)
            assert transfer(source_N[:live], arrived, sent, self.group).equal(torch.cat(tokens).int())
            sums = torch.zeros(len(head_TP), rows.shape[1])
            for each, its_tokens in zip(back, tokens, strict=True):
                sums[its_tokens] += each.float()
            total = (*(total or ()), sums.to(rows.dtype))
        head_TP[head_TP < 0] = -2 - 5 * self.rank
        return *total, *[None] * (2 - len(total)), object()

    def _first(self, x_TD: Tensor, call: dict[str, Any]) -> tuple[Any, ...]:
        chosen_TK, weight_TK, in_rank_TP = call["topk_idx"], call["topk_weights"], call["is_token_in_rank"]
        assert weight_TK.dtype == torch.float32 and weight_TK.is_contiguous()
        assert chosen_TK.dtype == torch.int64 and len(chosen_TK) == len(x_TD)
        experts = len(call["num_tokens_per_expert"]) // self.group_size
        sent = call["num_tokens_per_rank"].tolist()
        prefix_PP = torch.full((self.group_size, self.group_size), -99, dtype=torch.int32)
        arrivals = [torch.empty(self.group_size, dtype=torch.int32) for _ in sent]
        dist.all_gather(arrivals, call["num_tokens_per_rank"], group=self.group)
        prefix_PP[:, self.rank] = torch.stack(arrivals)[:, self.rank].cumsum(0)
        arrived, room = self._arrived(prefix_PP), call["num_worst_tokens"]
        assert sum(arrived) <= room, f"{sum(arrived)} rows are written where {room} have room"
        mine_PTK = chosen_TK - experts * torch.arange(self.group_size).view(-1, 1, 1)
        mine_PTK = mine_PTK.masked_fill((mine_PTK < 0) | (mine_PTK >= experts), -1)
        weight_PTK = weight_TK.expand_as(mine_PTK).masked_fill(mine_PTK < 0, 0)
        token_T = torch.arange(len(x_TD), dtype=torch.int32)

        def travel(of_rank: Any, dead: float) -> Tensor:
            rows = torch.cat([of_rank(rank)[in_rank_TP[:, rank]] for rank in range(self.group_size)])
            received = transfer(rows, sent, arrived, self.group)
            missing = received.new_full((room - len(received), *received.shape[1:]), dead)
            return torch.cat([received, missing])

        head_TP = torch.where(in_rank_TP, in_rank_TP.cumsum(0) - 1, -1).int()
        channels = self._channels(in_rank_TP)
        source_N = travel(lambda _: token_T, 2**30)
        handle = (prefix_PP, channels, self._starts(channels), source_N, in_rank_TP, head_TP)
        received_ND = travel(lambda _: x_TD, torch.nan)
        number_NK = travel(lambda rank: mine_PTK[rank], -1)
        weight_NK = travel(lambda rank: weight_PTK[rank], torch.nan)
        between = (torch.empty(0),) if self.has_extra else ()
        return received_ND, number_NK, weight_NK, [], *between, handle, object()

    def _again(self, x_TD: Tensor, handle: tuple[Tensor, ...]) -> Tensor:
        prefix_PP, channel_PC, _, source_N, in_rank_TP, _ = handle
        assert channel_PC.equal(self._channels(in_rank_TP)) and len(in_rank_TP) == len(x_TD)
        arrived = self._arrived(prefix_PP)
        rows = torch.cat([x_TD[in_rank_TP[:, rank]] for rank in range(self.group_size)])
        received = transfer(rows, in_rank_TP.sum(0).tolist(), arrived, self.group)
        found = received.new_full((len(source_N), x_TD.shape[1]), torch.nan)
        found[: len(received)] = received
        return found

    def _check_rows(self, x: Tensor, config: FakeConfig) -> None:
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and not self.destroyed
        assert self.num_nvl_bytes >= config.get_nvl_buffer_size_hint(2 * x.shape[1], self.group_size)

    def _arrived(self, prefix_PP: Tensor) -> list[int]:
        ends = prefix_PP[:, self.rank].tolist()
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def _channels(self, in_rank_TP: Tensor) -> Tensor:
        """Rows for each rank up to the end of each channel, which has equal parts of the tokens."""
        channels = self.num_sms // 2
        step = -(-len(in_rank_TP) // channels)
        parts = [in_rank_TP[: (c + 1) * step].sum(0) for c in range(channels)]
        return torch.stack(parts, 1).int()

    def _starts(self, channel_PC: Tensor) -> Tensor:
        """Beginnings of the rows of each channel of each source here, among those of the source."""
        ones = [1] * self.group_size
        ends_PC = transfer(channel_PC, ones, ones, self.group)
        return torch.cat([torch.zeros_like(ends_PC[:, :1]), ends_PC[:, :-1]], 1)

    def _bound(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        call = bind(self.signatures[name], args, kwargs)
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
