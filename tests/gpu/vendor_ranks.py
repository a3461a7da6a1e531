"""Tokens there and back between GPUs by the dispatchers of vendors, as cases of `tests.distributed.ranks`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphmoe.config.schema import DispatcherChoice, ModelConfig
from graphmoe.ops import collectives
from graphmoe.plan.experts import Load
from graphmoe.plan.layout import Layout
from graphmoe.runtime.dispatch.vendors import close_vendor, open_buffer, open_rows, vendor_dispatcher
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.vendor_trips import (
    EXPERTS,
    TOP_K,
    Problem,
    Trip,
    experts_of,
    reference,
    travel,
)
from tests.gpu.parallel_ranks import Replayed, captured

HIDDEN, TOKENS = 512, 300


@dataclass
class Outcome:
    """A trip and the same by ``alltoall``; of another input a captured trip, and the same by ``alltoall``."""

    found: Trip
    expected: Trip
    replayed: Replayed
    expected_again: Trip


@dataclass(frozen=True)
class VendorTrip:
    """A trip on GPUs, eager and captured."""

    choice: str
    routing: str
    etp: int = 1
    room: int | None = None
    """Rows that there is room for, or the worst case."""

    def __call__(self, ranks: Ranks, folder: Path) -> Outcome:
        layout = Layout(dp=ranks.size, ep=ranks.size // self.etp, etp=self.etp)
        mesh, device = Mesh(layout), torch.device("cuda", ranks.rank)
        collectives.use_groups(mesh)
        model = ModelConfig(hidden_size=HIDDEN, num_experts=EXPERTS, top_k=TOP_K)
        room = Load(
            ranks.size * TOKENS if self.room is None else self.room, slots=ranks.size * TOKENS * TOP_K
        )
        choice = DispatcherChoice(self.choice)
        if choice is DispatcherChoice.nvshmem:
            open_rows(model, mesh, TOKENS, room.rows, torch.bfloat16, device)
        else:
            open_buffer(choice, mesh, HIDDEN)
        dispatcher = vendor_dispatcher(choice, model, layout, TOKENS, room)
        first, second = (self._problem(layout, ranks.rank + seed) for seed in (0, ranks.size))
        found, expected = travel(dispatcher, first).cpu(), reference(first, mesh).cpu()
        expected_again = reference(second, mesh).cpu()
        now = self._problem(layout, ranks.rank)
        h, weight = now.h.requires_grad_(), now.weight.requires_grad_()

        def change(number: int) -> None:
            to = (first, second)[number]
            with torch.no_grad():
                for tensor, values in zip(
                    (h, weight, now.expert, now.dy), (to.h, to.weight, to.expert, to.dy), strict=True
                ):
                    tensor.copy_(values)

        def run() -> list[Tensor]:
            plan = now.plan()
            received, of_slots, number, arrived, *handle = dispatcher.dispatch(h, weight, now.expert, *plan)
            y = dispatcher.combine(experts_of(received, of_slots, number), *plan, *handle)
            return [y.detach(), *torch.autograd.grad(y, (h, weight), now.dy), number, arrived]

        replayed = captured(run, change)
        close_vendor()
        collectives.use_groups(None)
        return Outcome(found, expected, replayed, expected_again)

    def _problem(self, layout: Layout, seed: int) -> Problem:
        return Problem.of(self.routing, layout, seed, "cuda", HIDDEN, TOKENS)
