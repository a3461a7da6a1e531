"""Expert loads of ``moe.expert_load``, written to the routers' buffers before each step."""

from collections.abc import Mapping

import torch

from graphmoe.model.moe_segments import Router
from graphmoe.plan.forced_loads import LOADS, ends, load, read_counts, recorded
from graphmoe.plan.plan import Plan


class ForcedLoads:
    """Writes forced expert loads to each ``Router.load_ends`` in place: captured graphs hold its address."""

    def __init__(self, plan: Plan, routers: Mapping[int, Router]) -> None:
        moe, model = plan.moe, plan.model
        self._name, self._ranks, self._routers = moe.expert_load, plan.layout.ep, routers
        self._sizes = model.num_experts, model.top_k
        recorded = moe.expert_load not in LOADS
        self._counts = read_counts(moe.expert_load, model.num_experts) if recorded else None
        self._now: list[list[int]] = []

    def set(self, step: int) -> None:
        """Write the loads of a step, from 1, if they changed. No device sync."""
        ends_LE = [ends(self._load(step, layer)) for layer in self._routers]
        if ends_LE == self._now:
            return
        self._now, found = ends_LE, torch.tensor(ends_LE)
        for router, end_E in zip(self._routers.values(), found, strict=True):
            assert router.load_ends is not None
            # The pinned-memory allocator reuses it only after the copy is done.
            end_E = end_E.pin_memory() if router.load_ends.is_cuda else end_E
            router.load_ends.copy_(end_E, non_blocking=True)

    def _load(self, step: int, layer: int) -> list[float]:
        if self._counts is not None:
            return recorded(self._counts, step, layer, self._sizes[1])
        return load(self._name, step, layer, *self._sizes, self._ranks)
