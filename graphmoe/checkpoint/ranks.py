"""The few collectives that a checkpoint needs; without a process group they are plain calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from graphmoe.world import PATIENCE

T = TypeVar("T")


class Ranks:
    """All ranks of the job, over a gloo group of their own.

    The background writer talks while training's collectives are in flight, so it must not share
    their group. Creating one is collective: every rank builds its store at the same point.
    """

    def __init__(self) -> None:
        spread = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group: dist.ProcessGroup | None = (
            dist.new_group(backend="gloo", timeout=PATIENCE) if spread else None
        )
        self.index = dist.get_rank() if spread else 0
        self.count = dist.get_world_size() if spread else 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def gather(self, item: T) -> list[T]:
        """Every rank's ``item``, in the order of ranks, on every rank."""
        if self.group is None:
            return [item]
        items: list[Any] = [None] * self.count
        dist.all_gather_object(items, item, group=self.group)
        return items

    def on_first(self, action: Callable[[], T]) -> T:
        """Result of ``action``, run on rank 0 only; its error is raised on every rank."""
        if self.group is None:
            return action()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = action()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]
