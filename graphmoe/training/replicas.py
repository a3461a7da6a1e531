"""Comparison of what several ranks hold alike, by hashes: finds a flipped bit that leaves numbers finite.

After each step the weights that it has read are hashed, before the next step gathers new ones over them. What
stays from step to step, such as frozen weights, is hashed when ranks compare.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphmoe.config.ranges import number_of
from graphmoe.optim.base import COUNTERS
from graphmoe.optim.flat_buffers import Family
from graphmoe.plan.layout import Axis, Layout, layout_of
from graphmoe.run.machine import place_of
from graphmoe.runtime.launch.stamps import wait_for
from graphmoe.runtime.ranks import Ranks

log = logging.getLogger(__name__)

ROW = 512  # int64 words that are summed before their position is hashed
_WORD = 8  # bytes
_ODD = -7046029254386353131  # 2^64 over the golden ratio
Key = tuple[Axis, str]


class Holder(Protocol):
    """An optimizer of `zero1`."""

    families: list[Family]
    frozen: dict[str, Tensor]
    model: nn.Module


class ReplicaCheck:
    """Hashes of this rank's copies, and their comparison with those of other ranks."""

    def __init__(self, optimizer: Holder, ranks: Ranks, layout: Layout, step: int) -> None:
        """``step``: the last one that is done."""
        self._optimizer, self._ranks, self._since = optimizer, ranks, step
        self._groups_of = cache(lambda axis: {r: group for group in layout.groups(axis) for r in group})
        self._sums: dict[Key, Tensor] = {}
        num_bytes = sum(copy.nbytes for _, copy in self._gathered())
        log.info("replicas: %.4g MiB of weights are hashed in each step", num_bytes / 2**20)

    @torch.no_grad()
    def add(self) -> None:
        """Hash the weights that a step has read. No device sync."""
        for key, copy in self._gathered():
            self._sums[key] = self._sums.get(key, 0) * _ODD + hash_of(copy)

    @torch.no_grad()
    def difference(self, step: int) -> str | None:
        """Return which copies differ after ``step``, None if none do. One device sync. Collective."""
        sums = dict(self._sums)
        for key, copy in self._lasting():
            sums[key] = sums.get(key, 0) * _ODD + hash_of(copy)
        own = dict(zip(sums, wait_for(torch.stack([*sums.values()]).tolist), strict=True))
        copies: dict[tuple[Key, tuple[int, ...]], dict[int, int]] = {}
        for rank, found in enumerate(self._ranks.gather(own)):
            for (axis, name), value in found.items():
                copies.setdefault(((axis, name), self._groups_of(axis)[rank]), {})[rank] = value
        unequal = {key: by_rank for key, by_rank in copies.items() if len({*by_rank.values()}) > 1}
        since, self._since = self._since, step
        if not unequal:
            return None
        places = self._ranks.gather(place_of(next(iter(sums.values())).device))
        said = [_said(name, by_rank, places) for ((_, name), _), by_rank in unequal.items()]
        return f"{'; '.join(said)} (all were equal until step {since})"

    def _gathered(self) -> Iterator[tuple[Key, Tensor]]:
        for family in self._optimizer.families:
            if family.group is not None and family.weight is not None:
                what = "weights of matrices" if family.of_matrices else "weights"
                yield (family.axis, f"{what} over {family.axis}"), family.weight

    def _lasting(self) -> Iterator[tuple[Key, Tensor]]:
        for tensor in self._optimizer.frozen.values():
            axis = layout_of(tensor).summed_over
            yield (axis, f"frozen weights over {axis}"), tensor
        parameters = {name for name, _ in self._optimizer.model.named_parameters()}
        for name, tensor in self._optimizer.model.state_dict().items():
            if name not in parameters:
                yield ("stage", "selection biases"), tensor
        for name in COUNTERS:
            yield ("world", "counters of steps"), getattr(self._optimizer, name)


def hash_of(tensor: Tensor) -> Tensor:
    """Return a hash, int64 []. Any one flipped bit changes it. Reads memory once; no device sync."""
    flat = tensor.detach().reshape(-1)
    of_word = _WORD // flat.element_size()
    if flat.numel() % of_word or flat.storage_offset() % of_word:
        flat = F.pad(flat, (0, -flat.numel() % of_word)).clone()
    words = flat.view(torch.int64)
    rows = words.numel() // ROW * ROW
    # Sums and products wrap. A sum in another dtype would copy the words first.
    sums = torch.cat([words[:rows].view(-1, ROW).sum(dim=1), words[rows:]])
    return _mixed(sums + _ODD * torch.arange(1, len(sums) + 1, device=sums.device)).sum()


def _mixed(h: Tensor) -> Tensor:
    # finaliser of MurmurHash3 (A. Appleby) in int64, one to one; shifts are logical by the masks
    h = (h ^ ((h >> 33) & 0x7FFFFFFF)) * -49064778989728563
    h = (h ^ ((h >> 33) & 0x7FFFFFFF)) * -4265267296055464877
    return h ^ ((h >> 33) & 0x7FFFFFFF)


def _said(name: str, by_rank: dict[int, int], places: list[str]) -> str:
    ((most, count),) = Counter(by_rank.values()).most_common(1)
    has_majority = 2 * count > len(by_rank)
    odd = [rank for rank, value in by_rank.items() if value != most or not has_majority]
    if has_majority:
        return f"{_named(odd, places)} differ{'s' * (len(odd) == 1)} from {count} others in {name}"
    copies = number_of(len(odd), "copy")
    return f"{_named(odd, places)} differ in {name}, and {copies} do not tell which is wrong"


def _named(ranks: Iterable[int], places: list[str]) -> str:
    return ", ".join(f"rank {rank} ({places[rank]})" for rank in ranks)
