"""Routings between emulated ranks, and what alltoall gives for them. Suffixes as in graphmoe/ops/symm."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import graphmoe.ops.fp8_mlp  # noqa: F401  # registers fp8_rows
from graphmoe.ops.dispatch import SendPlan, send_plan
from graphmoe.ops.fp8 import fp8_dtype, quantise
from graphmoe.ops.symm import combine_grad_stored, dispatch_stored, exchange
from graphmoe.ops.symm.collective import positions
from graphmoe.ops.symm.peers import forget_order
from tests.emulated_peers import EmulatedPeers, Emulation, GuardedMemory


@dataclass(frozen=True)
class Case:
    """Tokens of all ranks, their experts, and an exchange of them."""

    ranks: int
    slots: int
    etp: int = 1
    block: int = 0
    dtype: torch.dtype = torch.float32
    columns: int = 16
    tokens: int = 7
    experts: int = 2
    """Experts of each rank."""
    favourites: tuple[int, ...] = ()
    """The experts among which all choose; all if there are none."""
    rows: int | None = None
    """Rows of the received tensors; without it, a few more than can arrive."""
    device: str = "cpu"

    @property
    def num_rows(self) -> int:
        return self.ranks * max(self.tokens, self.block) + 5 if self.rows is None else self.rows

    @property
    def num_experts(self) -> int:
        return self.experts * self.ranks // self.etp

    def values(self, *shape: int, seed: int) -> Tensor:
        """Small integers, so that sums are exact: the interpreter cuts off what bf16 does not hold."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-4, 5, shape, generator=generator).to(self.device, self.dtype)

    def tokens_of(self, rank: int, seed: int = 0) -> Tensor:
        return self.values(self.tokens, self.columns, seed=100 * seed + rank)

    def slots_of(self, rank: int) -> tuple[Tensor, Tensor]:
        """Weights and experts [T, K]."""
        generator = torch.Generator().manual_seed(rank + 50)
        likelihood = torch.zeros(self.tokens, self.num_experts)
        likelihood[:, list(self.favourites or range(self.num_experts))] = 1
        expert_TK = torch.multinomial(likelihood, self.slots, generator=generator).int()
        weight_TK = torch.rand(self.tokens, self.slots, generator=generator)
        return weight_TK.to(self.device), expert_TK.to(self.device)

    @functools.cached_property
    def plans(self) -> list[SendPlan]:
        sizes = self.num_experts, self.ranks // self.etp, self.etp
        return [send_plan(self.slots_of(rank)[1], *sizes) for rank in range(self.ranks)]

    @functools.cached_property
    def arrivals(self) -> Tensor:
        return torch.stack([plan.send_counts_P for plan in self.plans])

    def arriving(self, rank: int, sent: Sequence[Tensor]) -> Tensor:
        """The rows that come to a rank of tensors [T, ...] of all ranks, in the order of sources."""
        parts = []
        for (counts, ends, row_TW, slot_R), x in zip(self.plans, sent, strict=True):
            own = slot_R[ends[rank] - counts[rank] : ends[rank]].long()
            parts.append(x[own // row_TW.shape[1]])
        return torch.cat(parts)

    def returned(self, rank: int, made: list[Tensor], rows: int) -> Tensor:
        """The sums over their places of a rank's tokens, of received tensors [N, ...] of all ranks."""
        parts = []
        for other, y_ND in enumerate(made):
            at = positions(self.arrivals, other, self.block)
            starts = self.arrivals[:, other].cumsum(0) - self.arrivals[:, other]
            own = at[starts[rank] : starts[rank] + self.arrivals[rank, other]]
            padded = torch.cat([y_ND, y_ND.new_zeros(1, y_ND.shape[1])])
            parts.append(padded[own.clamp(max=rows)])
        _, ends, row_TW, slot_R = self.plans[rank]
        return torch.ops.graphmoe.unpermute(torch.cat(parts), slot_R, row_TW, ends, None)

    def live(self, rank: int) -> Tensor:
        """Positions of the rows that arrive, int64 [A]."""
        return positions(self.arrivals, rank, self.block)

    def with_nan(self, rank: int, seed: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[N, columns] of values in live rows, and NaN in dead ones."""
        at, y = self.live(rank), self.values(self.num_rows, columns, seed=seed + rank).to(dtype)
        at = at[at < self.num_rows]
        return torch.full_like(y, float("nan")).index_copy(0, at, y[at])


def assert_exchanges_are_those_of_alltoall(case: Case, emulation: Emulation | None = None) -> None:
    """Compare all four operations, in the order of a training step, with the reference; guards stay whole."""
    fresh, emulation = emulation is None, emulation or Emulation(case.ranks, case.device)
    ranks, rows, block = range(case.ranks), case.num_rows, case.block
    made = [case.with_nan(rank, 1000, case.columns, case.dtype) for rank in ranks]
    drows = [case.with_nan(rank, 2000, case.columns, case.dtype) for rank in ranks]
    dweights = [case.with_nan(rank, 3000, case.slots, torch.float32) for rank in ranks]
    assert any(bool(y.isnan().any()) for y in made) or case.rows is not None

    def body(peers: EmulatedPeers) -> tuple[Tensor, ...]:
        rank, plan, before = peers.rank, case.plans[peers.rank], peers.barriers
        h, dy, slots = case.tokens_of(rank), case.tokens_of(rank, 1), case.slots_of(rank)
        with GuardedMemory() as memory:
            *received, arrivals = exchange.bring(
                peers, h, plan, slots, None, rows, block, case.experts, case.etp
            )
            way = (plan.send_ends_P, plan.send_row_TW, arrivals, block)
            y, _ = exchange.sums(peers, made[rank], None, *way)
            dsum, *_ = exchange.bring(peers, dy, plan, None, arrivals, rows, block)
            gradients = exchange.sums(peers, drows[rank], dweights[rank], *way)
            assert peers.barriers - before == 4, "one barrier for each exchange"
            forget_order()
            exchange.bring(peers, h, plan, None, arrivals, rows, block)
            assert peers.barriers - before == 6, "another, as nobody knows what replayed before"
            exchange.sums(peers, drows[rank], None, *way)
        memory.assert_guards_are_whole()
        return *received, arrivals, y, dsum, *gradients

    results = emulation.run(body)
    emulation.assert_guards_are_whole()
    if fresh:
        assert_only_live_rows_for_others_were_put(case, emulation)
    for rank, (h_ND, *of_slots, y, dsum, dh, dweight) in enumerate(results):
        at = assert_slots_arrived(case, rank, *of_slots)
        for seed, actual in enumerate((h_ND, dsum)):
            sent = case.arriving(rank, [case.tokens_of(r, seed) for r in ranks])
            assert len(actual) == rows and actual[at[at < rows]].equal(sent[at < rows])
        for actual, of_rows in ((y, made), (dh, drows), (dweight, dweights)):
            assert actual.equal(case.returned(rank, of_rows, rows))


def assert_slots_arrived(
    case: Case, rank: int, weight_NK: Tensor, number_NK: Tensor, arrivals: Tensor
) -> Tensor:
    """Compare what came with rows, whose positions are returned; a dead row has no expert."""
    weights, experts = zip(*map(case.slots_of, range(case.ranks)), strict=True)
    at, wanted = case.live(rank), torch.full_like(number_NK, -1)
    fits = at < case.num_rows
    number = case.arriving(rank, experts) - rank // case.etp * case.experts
    wanted[at[fits]] = number.masked_fill((number < 0) | (number >= case.experts), -1)[fits]
    assert number_NK.equal(wanted) and number_NK.shape == weight_NK.shape == (case.num_rows, case.slots)
    assert arrivals.equal(case.arrivals) and number_NK.dtype == torch.int32
    assert weight_NK[at[fits]].equal(case.arriving(rank, weights)[fits])
    return at


def assert_only_live_rows_for_others_were_put(case: Case, emulation: Emulation) -> None:
    """Check that in sums and gradients of weights rows that are dead or of own tokens stay as they were."""
    assert emulation.region is not None
    region, row_bytes = emulation.region, case.columns * case.dtype.itemsize
    parts = (region.sums, row_bytes), (region.dweights, 4 * case.slots)
    for rank, peers in enumerate(emulation.peers):
        at, arrived_P = case.live(rank), case.arrivals[:, rank].long()
        source = torch.arange(case.ranks, device=case.device).repeat_interleave(arrived_P)
        put = torch.zeros(case.num_rows, dtype=torch.bool, device=case.device)
        put[at[(at < case.num_rows) & (source != rank)]] = True
        for offset, num_bytes in parts:
            rows = peers.view(rank, offset, (case.num_rows, num_bytes), torch.uint8)
            assert bool((rows[~put] == 255).all())


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    """Compare the bits of two tensors; any NaN equals any other."""
    bits = torch.uint8 if wanted.element_size() == 1 else torch.int32
    kept = [(x.float().isnan(), x.view(bits).masked_fill(x.float().isnan(), 0)) for x in (found, wanted)]
    return all(one.equal(other) for one, other in zip(*kept, strict=True))


def assert_stored_rows_are_rounded_arrivals(case: Case) -> None:
    """Compare rows sent in 8 bits, both ways, with the rounding of what arrives."""
    emulation, rows, block = Emulation(case.ranks, case.device), case.num_rows, case.block

    def wide(rank: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * seed + rank)
        exponents = torch.randint(-120, 120, (case.tokens, 1), generator=generator)
        x = torch.randn(case.tokens, case.columns, generator=generator) * exponents.float().exp2()
        x[0], x[1, 2] = 0, torch.inf
        return x.to(case.device, case.dtype)

    def body(peers: EmulatedPeers) -> tuple[Tensor, ...]:
        rank, plan = peers.rank, case.plans[peers.rank]
        *received, arrivals = dispatch_stored(
            wide(rank, 0), *case.slots_of(rank), *plan, rows, case.experts, case.etp, block
        )
        dsum = combine_grad_stored(wide(rank, 1), *plan, arrivals, rows, block)
        return *received, arrivals, dsum

    results = emulation.run(body)
    emulation.assert_guards_are_whole()
    for rank, (carrier, *of_slots, dsum) in enumerate(results):
        at = assert_slots_arrived(case, rank, *of_slots)
        for seed, arrived in enumerate((carrier, dsum)):
            found = torch.ops.graphmoe.fp8_arrived(arrived)
            sent = case.arriving(rank, [wide(each, seed) for each in range(case.ranks)])[at < rows]
            assert arrived.dtype == case.dtype and arrived.shape == (rows, case.columns)
            for part, wanted in zip(found, quantise(sent, fp8_dtype()), strict=True):
                assert same_bits(part[at[at < rows]], wanted)
