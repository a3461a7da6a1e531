"""Traffic of replicas, and what it must give. Suffixes as in `graphmoe.ops.replicas.exchange`."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphmoe.ops.symm.peers import exchange_of

HOLDERS = ("none", "plan", "hot", "all")
SENT = (torch.float32, torch.bfloat16)
"""Dtypes in which gradients are sent, in turns."""
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Weights of all ranks, and the experts in their slots."""

    ranks: int
    owned: int
    slots: int
    holders: str
    """Experts in slots: none, those of a plan, one expert in a slot of each other rank, one in each slot."""
    dtype: torch.dtype = torch.float32
    shapes: tuple[tuple[int, ...], ...] = ((6, 20), (10, 6))
    """Shapes of an expert's weights."""
    device: str = "cpu"
    by_autograd: bool = True
    """As a plain eager layer calls them, too. On a GPU autograd has one thread, so emulated ranks cannot."""

    @property
    def has_gradients(self) -> bool:
        return self.by_autograd and self.dtype.is_floating_point and self.dtype.itemsize > 1

    def seeded(self, *numbers: int) -> torch.Generator:
        return torch.Generator().manual_seed(hash(numbers) % 2**31)

    @functools.cached_property
    def counts_RE(self) -> Tensor:
        counts = torch.randint(0, 9, (self.ranks, self.ranks * self.owned), generator=self.seeded(0))
        counts[:, 1] += 50
        return counts.int()

    @functools.cached_property
    def expert_RS(self) -> Tensor:
        if self.holders == "plan":
            found: Tensor = torch.ops.graphmoe.replica_plan(self.counts_RE, self.slots, 0)[1]
            return found
        expert_RS = torch.full((self.ranks, self.slots), -1, dtype=torch.int32)
        if self.holders == "hot":
            expert_RS[1:, -1] = self.owned - 1
        for rank in range(self.ranks) if self.holders == "all" else ():
            experts = torch.randperm(self.ranks * self.owned, generator=self.seeded(1, rank))
            others = experts[experts // self.owned != rank][: self.slots]
            expert_RS[rank, : len(others)] = others
        return expert_RS

    def values(self, rows: int, weight: int, *seed: int, whole: bool = False) -> Tensor:
        """[rows, X], if so small integers, whose sums are exact in any dtype."""
        x = torch.randn(rows, *self.shapes[weight], generator=self.seeded(weight, *seed))
        return (4 * x).round() + 0.0 if whole else x  # no -0

    def weights(self, rank: int, weight: int, seed: int = 0) -> Tensor:
        """Weights of a rank's own experts; NaN are those that are in no slot."""
        w_LX = self.values(self.owned, weight, 2, rank, seed)
        experts = torch.arange(rank * self.owned, (rank + 1) * self.owned)
        w_LX[~torch.isin(experts, self.expert_RS)] = float("nan")
        return w_LX.to(self.dtype)

    def gradients(self, rank: int, weight: int, seed: int = 0, whole: bool = False) -> Tensor:
        """Gradients of a rank's slots as they are sent; NaN those of slots without an expert."""
        d_SX = self.values(self.slots, weight, 3, rank, seed, whole=whole)
        d_SX[self.expert_RS[rank] < 0] = float("nan")
        return d_SX.to(SENT[seed % len(SENT)])

    def totals(self, rank: int, weight: int, seed: int = 0, whole: bool = False) -> Tensor:
        return self.values(self.owned, weight, 4, rank, seed, whole=whole)

    def pulled(self, rank: int, weight: int, seed: int = 0) -> Tensor:
        """The weights that a rank's slots with an expert must have, behind each other."""
        w_EX = torch.cat([self.weights(r, weight, seed) for r in range(self.ranks)])
        held = self.expert_RS[rank]
        return w_EX[held[held >= 0].long()]

    def came_home(self, rank: int, weight: int, seed: int = 0, whole: bool = False) -> Tensor:
        total_LX = self.totals(rank, weight, seed, whole)
        for source in range(self.ranks):
            d_SX = self.gradients(source, weight, seed, whole)
            for slot, expert in enumerate(self.expert_RS[source].tolist()):
                if expert // self.owned == rank:
                    total_LX[expert % self.owned] += d_SX[slot]
        return total_LX

    def run(self, rank: int) -> Results:
        """All calls in a row, of which some follow a call of their own kind; gradients wait for the next."""
        on = functools.partial(torch.Tensor.to, device=self.device)
        expert_RS, both, exchange = on(self.expert_RS), range(len(self.shapes)), exchange_of(self.ranks)
        used = self.expert_RS[rank] >= 0
        found = {"counts": torch.ops.graphmoe.replica_counts(on(self.counts_RE[rank]), self.ranks)}
        found["counts again"] = torch.ops.graphmoe.replica_counts(on(self.counts_RE[rank] + 1), self.ranks)
        for seed, weights in enumerate((both, both[:1], both)):
            pulled = exchange.pull([on(self.weights(rank, i, seed)) for i in weights], expert_RS)
            assert all(w_SX.dtype == self.dtype for w_SX in pulled)
            # As bytes: numbers in 8 bits can't be pickled.
            found |= {f"pulled {i} {seed}": w_SX[used].view(torch.uint8) for i, w_SX in enumerate(pulled)}
        for seed, dtype in enumerate(SENT):
            totals = [on(self.totals(rank, i, seed)) for i in both]
            gradients = exchange.slot_gradients(totals, expert_RS, dtype, may_defer=True)
            with exchange.deferring(), gradients as made:
                for i, to_SX in enumerate(made):
                    to_SX[used] = on(self.gradients(rank, i, seed))[used]  # the others are never written
            found |= {f"home {i} {seed}": total_LX for i, total_LX in enumerate(totals)}
        totals = [on(self.totals(rank, i, 2, whole=True)).to(torch.bfloat16) for i in both]
        with exchange.slot_gradients(totals, expert_RS, SENT[0]) as made:
            for i, to_SX in enumerate(made):
                to_SX.copy_(self.gradients(rank, i, 2, whole=True))
        found |= {f"home of bf16 {i}": total_LX for i, total_LX in enumerate(totals)}
        return found | self.run_by_autograd(rank, expert_RS) if self.has_gradients else found

    def run_by_autograd(self, rank: int, expert_RS: Tensor) -> Results:
        w_LX = self.weights(rank, 0).to(self.device).requires_grad_()
        groups = torch.cat([w_LX, torch.ops.graphmoe.replica_weights(w_LX, expert_RS)])
        d_own, d_slots = self.totals(rank, 0, 3, whole=True), self.gradients(rank, 0, 3, whole=True)
        dgroups = torch.cat([d_own, d_slots]).to(self.device, self.dtype)
        (dw_LX,) = torch.autograd.grad(groups, w_LX, dgroups)
        return {"by autograd": groups[self.owned :][self.expert_RS[rank] >= 0].detach(), "gradient": dw_LX}

    def wanted(self, rank: int) -> Results:
        both, found = range(len(self.shapes)), {"counts": self.counts_RE, "counts again": self.counts_RE + 1}
        for seed, weights in enumerate((both, both[:1], both)):
            found |= {f"pulled {i} {seed}": self.pulled(rank, i, seed).view(torch.uint8) for i in weights}
        for seed in range(len(SENT)):
            found |= {f"home {i} {seed}": self.came_home(rank, i, seed) for i in both}
        found |= {f"home of bf16 {i}": self.came_home(rank, i, 2, whole=True).bfloat16() for i in both}
        if self.has_gradients:
            found["by autograd"] = self.pulled(rank, 0)
            found["gradient"] = self.came_home(rank, 0, 3, whole=True).to(self.dtype)
        return found


def assert_traffic_is_that_of_the_definition(case: Case, results: Sequence[Results]) -> None:
    """Compare the results of all ranks bitwise; what stands in slots without an expert does not matter."""
    for rank, found in enumerate(results):
        wanted = case.wanted(rank)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            actual = found[name].cpu()
            assert actual.dtype == tensor.dtype and actual.shape == tensor.shape, name
            assert actual.view(torch.uint8).equal(tensor.view(torch.uint8)), name
