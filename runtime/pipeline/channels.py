"""Channels carry messages between the ranks of a pipeline."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.ops.waits import waiting
from graphmoe.plan.pipeline.transfers import Channel, Message
from graphmoe.runtime.launch.stamps import wait_for
from graphmoe.runtime.ranks import COLLECTIVE_TIMEOUT


class Spec(NamedTuple):
    """Shape and dtype of a tensor; both ranks know them, so they are not sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Specs = tuple[Spec, ...]


def specs_of(tensors: Iterable[Tensor]) -> Specs:
    return tuple(Spec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)


Arrival = Callable[[], tuple[Tensor, ...]]
"""Waits for receives (NCCL: the stream, gloo: the host); returns tensors on the device."""


class Channels:
    """A communicator for each ordered pair of ranks: no send waits for a receive. Collective construction."""

    def __init__(
        self, channels: Iterable[Channel], pipelines: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        """``pipelines``: ``layout.groups("pp")``."""
        self._device = device
        self.has_nccl = "cuda:nccl" in dist.get_backend_config()
        self.by_host = False
        """True if messages pass through host memory. Set it alike on all ranks, between steps.

        Then no stream waits for another rank, so a rank may compile or capture, which sync the device.
        """
        self._ends: dict[Channel, tuple[dist.ProcessGroup, int]] = {}  # group, and rank at the other end
        self._in_flight: dict[Message, tuple[list[dist.Work], list[Tensor]]] = {}
        for channel in sorted(channels):
            for ranks in pipelines:
                source, destination = (ranks[index] for index in channel)
                # All ranks make all groups: torch names a group that only members make by their number of
                # groups, on which the ranks of a pipeline disagree (_hash_ranks_to_str,
                # torch/distributed/distributed_c10d.py, torch 2.11 to 2.13).
                group = dist.new_group([source, destination], timeout=COLLECTIVE_TIMEOUT)
                if dist.get_rank() in (source, destination):
                    self._ends[channel] = group, destination if dist.get_rank() == source else source
        self._open(next((ranks for ranks in pipelines if dist.get_rank() in ranks), ()) if self._ends else ())

    def send(self, message: Message, tensors: Iterable[Tensor]) -> None:
        """Start sending; tensors must not change until ``release``."""
        group, peer = self._ends[message.channel]
        held = [tensor.to(self._place).contiguous() for tensor in tensors]
        self._in_flight[message] = [_begun(dist.isend, tensor, peer, group) for tensor in held], held

    def receive(self, message: Message, specs: Specs) -> Arrival:
        """Post receives, in the order of the source's sends; return a function that waits for them."""
        group, peer = self._ends[message.channel]
        tensors = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=self._place) for spec in specs)
        works = [_begun(dist.irecv, tensor, peer, group) for tensor in tensors]

        def arrived() -> tuple[Tensor, ...]:
            for work in works:
                with waiting():
                    wait_for(work.wait)
            return tuple(tensor.to(self._device) for tensor in tensors)

        return arrived

    def release(self, messages: Iterable[Message]) -> None:
        """Wait for sent messages (NCCL: the stream, gloo: the host)."""
        for message in messages:
            for work in self._in_flight.pop(message)[0]:
                with waiting():
                    wait_for(work.wait)

    def finish(self) -> None:
        self.release(list(self._in_flight))

    @property
    def _place(self) -> torch.device:
        return torch.device("cpu") if self.by_host or not self.has_nccl else self._device

    def _open(self, ranks: Sequence[int]) -> None:
        for channel, (group, peer) in self._ends.items():
            # NCCL makes a communicator at its first message, which no graph could capture
            byte = torch.zeros(1, dtype=torch.uint8, device=self._place)
            way = dist.isend if ranks[channel[0]] == dist.get_rank() else dist.irecv
            wait_for(_begun(way, byte, peer, group).wait)


def _begun(
    way: Callable[..., dist.Work | None], tensor: Tensor, peer: int, group: dist.ProcessGroup
) -> dist.Work:
    work = way(tensor, peer, group=group)
    assert work is not None, "this rank is not in the group"
    return work
