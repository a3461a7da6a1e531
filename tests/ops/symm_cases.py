"""Routings between emulated ranks, what they must give, and checks: in the interpreter or on a GPU.

Suffixes as in graphmoe/ops/symm. What is expected is made by the arithmetic of the dispatcher alltoall.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import graphmoe.ops.fp8_mlp  # noqa: F401  # registers fp8_rows
from graphmoe.ops.dispatch import SendPlan, send_plan
from graphmoe.ops.fp8 import fp8_dtype, quantise
from graphmoe.ops.symm import combine_grad_stored, dispatch_stored, exchange
from graphmoe.ops.symm.collective import positions
from tests.emulated_peers import EmulatedPeers, Emulation, GuardedMemory

NAN = float("nan")


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
        likelihood = torch.ones(self.tokens, self.num_experts)
        if self.favourites:
            likelihood = torch.zeros_like(likelihood)
            likelihood[:, list(self.favourites)] = 1
        expert_TK = torch.multinomial(likelihood, self.slots, generator=generator).int()
        weight_TK = torch.rand(self.tokens, self.slots, generator=generator)
        return weight_TK.to(self.device), expert_TK.to(self.device)

    def plan_of(self, rank: int) -> SendPlan:
        ep = self.ranks // self.etp
        return send_plan(self.slots_of(rank)[1], self.num_experts, ep, self.etp)

    def arrivals(self) -> Tensor:
        return torch.stack([self.plan_of(rank).send_counts_P for rank in range(self.ranks)])

    def arriving(self, rank: int, sent: list[Tensor]) -> Tensor:
        """The rows that come to a rank of tensors [T, ...] of all ranks, in the order of sources."""
        parts = []
        for source, x in enumerate(sent):
            counts, ends, row_TW, slot_R = self.plan_of(source)
            own = slot_R[ends[rank] - counts[rank] : ends[rank]].long()
            parts.append(x[own // row_TW.shape[1]])
        return torch.cat(parts)

    def returned(self, rank: int, made: list[Tensor], rows: int) -> Tensor:
        """The sums over their places of a rank's tokens, of received tensors [N, ...] of all ranks."""
        parts = []
        for other, y_ND in enumerate(made):
            at = positions(self.arrivals(), other, self.block)
            starts = self.arrivals()[:, other].cumsum(0) - self.arrivals()[:, other]
            own = at[starts[rank] : starts[rank] + self.arrivals()[rank, other]]
            padded = torch.cat([y_ND, y_ND.new_zeros(1, y_ND.shape[1])])
            parts.append(padded[own.clamp(max=rows)])
        _, ends, row_TW, slot_R = self.plan_of(rank)
        return torch.ops.graphmoe.unpermute(torch.cat(parts), slot_R, row_TW, ends, None)

    def live(self, rank: int) -> Tensor:
        """Positions of the rows that arrive, int64 [A]."""
        return positions(self.arrivals(), rank, self.block)

    def with_nan(self, rank: int, seed: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[N, columns] of values in live rows, and NaN in dead ones."""
        at = self.live(rank)
        y = self.values(self.num_rows, columns, seed=seed + rank).to(dtype)
        dead = torch.ones(self.num_rows, dtype=torch.bool, device=self.device)
        dead[at[at < self.num_rows]] = False
        return y.masked_fill(dead[:, None], NAN)


def assert_exchanges_are_those_of_alltoall(case: Case, emulation: Emulation | None = None) -> None:
    """Compare all four operations, in the order of a training step, with the reference; guards stay whole."""
    fresh = emulation is None
    emulation = emulation or Emulation(case.ranks, case.device)
    ranks, rows, block = range(case.ranks), case.num_rows, case.block
    made = [case.with_nan(rank, 1000, case.columns, case.dtype) for rank in ranks]
    drows = [case.with_nan(rank, 2000, case.columns, case.dtype) for rank in ranks]
    dweights = [case.with_nan(rank, 3000, case.slots, torch.float32) for rank in ranks]
    assert any(bool(y.isnan().any()) for y in made) or case.rows is not None

    def body(peers: EmulatedPeers) -> tuple[Tensor, ...]:
        rank, memory = peers.rank, GuardedMemory()
        h, dy, (weight, expert) = case.tokens_of(rank), case.tokens_of(rank, 1), case.slots_of(rank)
        plan = case.plan_of(rank)
        before = peers.barriers, peers.last
        with memory:
            *received, arrivals = exchange.bring(
                peers, h, plan, (weight, expert), None, rows, block, case.experts, case.etp
            )
            way = (plan.send_ends_P, plan.send_row_TW, arrivals, block)
            y, _ = exchange.sums(peers, made[rank], None, *way)
            dsum, *_ = exchange.bring(peers, dy, plan, None, arrivals, rows, block)
            gradients = exchange.sums(peers, drows[rank], dweights[rank], *way)
        memory.assert_guards_are_whole()
        assert peers.barriers - before[0] == 4, "one barrier for each exchange"
        return *received, arrivals, y, dsum, *gradients

    results = emulation.run(body)
    emulation.assert_guards_are_whole()
    if fresh:
        assert_only_live_rows_for_others_were_put(case, emulation)
    weights, experts = zip(*map(case.slots_of, ranks), strict=True)
    for rank, (h_ND, weight_NK, number_NK, arrivals, y, dsum, dh, dweight) in enumerate(results):
        assert arrivals.equal(case.arrivals())
        at = case.live(rank)
        fits, at = at < rows, at[at < rows]
        for actual, sent in (
            (h_ND, [case.tokens_of(r) for r in ranks]),
            (weight_NK, list(weights)),
            (dsum, [case.tokens_of(r, 1) for r in ranks]),
        ):
            assert len(actual) == rows and actual[at].equal(case.arriving(rank, sent)[fits])
        number = case.arriving(rank, list(experts)) - rank // case.etp * case.experts
        number = number.masked_fill((number < 0) | (number >= case.experts), -1)[fits]
        wanted = torch.full((rows, case.slots), -1, dtype=torch.int32, device=case.device)
        wanted[at] = number
        assert number_NK.equal(wanted)
        for actual, of_rows in ((y, made), (dh, drows), (dweight, dweights)):
            assert actual.equal(case.returned(rank, of_rows, rows))


def assert_only_live_rows_for_others_were_put(case: Case, emulation: Emulation) -> None:
    """Check that in sums and gradients of weights rows that are dead or of own tokens stay as they were."""
    assert emulation.region is not None
    region, row_bytes = emulation.region, case.columns * case.dtype.itemsize
    parts = (region.sums, row_bytes), (region.dweights, 4 * case.slots)
    for rank, peers in enumerate(emulation.peers):
        at, arrived_P = case.live(rank), case.arrivals()[:, rank].long()
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
    """Compare rows sent in 8 bits, both ways, with the rounding of what arrives; a dead row has no expert."""
    emulation = Emulation(case.ranks, case.device)
    ranks, rows, block, kind = range(case.ranks), case.num_rows, case.block, fp8_dtype()

    def wide(rank: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * seed + rank)
        exponents = torch.randint(-120, 120, (case.tokens, 1), generator=generator)
        x = torch.randn(case.tokens, case.columns, generator=generator) * exponents.float().exp2()
        x[0], x[1, 2] = 0, torch.inf
        return x.to(case.device, case.dtype)

    def body(peers: EmulatedPeers) -> tuple[Tensor, ...]:
        rank, plan = peers.rank, case.plan_of(peers.rank)
        *received, arrivals = dispatch_stored(
            wide(rank, 0), *case.slots_of(rank), *plan, rows, case.experts, case.etp, block
        )
        dsum = combine_grad_stored(wide(rank, 1), *plan, arrivals, rows, block)
        return *received, arrivals, dsum

    results = emulation.run(body)
    emulation.assert_guards_are_whole()
    weights, experts = zip(*map(case.slots_of, ranks), strict=True)
    for rank, (carrier, weight_NK, number_NK, arrivals, dsum) in enumerate(results):
        at = case.live(rank)
        fits = at < rows
        number = case.arriving(rank, list(experts)) - rank // case.etp * case.experts
        number = number.masked_fill((number < 0) | (number >= case.experts), -1)[fits]
        dead = torch.ones(rows, dtype=torch.bool, device=case.device).index_fill(0, at[fits], False)
        assert arrivals.equal(case.arrivals())
        assert number_NK[at[fits]].equal(number) and (number_NK[dead] == -1).all()
        assert weight_NK[at[fits]].equal(case.arriving(rank, list(weights))[fits])
        for seed, arrived in enumerate((carrier, dsum)):
            found = torch.ops.graphmoe.fp8_arrived(arrived)
            q, scale = quantise(case.arriving(rank, [wide(each, seed) for each in ranks])[fits], kind)
            assert arrived.dtype == case.dtype and arrived.shape == (rows, case.columns)
            for part, wanted in zip(found, (q, scale), strict=True):
                assert same_bits(part[at[fits]], wanted)
