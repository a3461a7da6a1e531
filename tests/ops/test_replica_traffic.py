"""Traffic of replicas between emulated ranks by kernels, against its definition, and their machine code."""

import dataclasses
import functools
import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphmoe.ops.replicas import shared
from graphmoe.ops.replicas.exchange import Prefetch, room_bytes, when_at_owners
from graphmoe.ops.symm import exchange as symm
from graphmoe.ops.symm.peers import COUNT_BYTES, exchange_of
from tests.emulated_peers import Emulation, GuardedMemory
from tests.ops import symm_cases
from tests.ops.ahead_of_time import launches_of
from tests.ops.interpreted import INTERPRETING, KERNELS, device_of, in_turn
from tests.ops.replica_cases import HOLDERS, Case, assert_traffic_is_that_of_the_definition

BF16 = torch.bfloat16


@pytest.fixture
def few_programs(monkeypatch):
    """Few programs of small tiles: each walks through several, and the interpreter is slow."""
    if INTERPRETING:
        sizes = {"HOME_TILE": 32, "HOME_PROGRAMS": 2}
        for name, programs in (("PULL", 2), ("PUT", 3)):
            sizes[name] = dataclasses.replace(getattr(shared, name), programs=programs, tile_bytes=128)
        for name, size in sizes.items():
            monkeypatch.setattr(shared, name, size)


CASES = [
    *(Case(ranks, owned, owned, holders) for ranks, owned in ((2, 3), (3, 2), (4, 2)) for holders in HOLDERS),
    *(Case(8, 2, slots, holders, BF16) for slots, holders in ((2, "plan"), (3, "all"))),
    *(Case(2, 2, 3, "all", dtype) for dtype in (BF16, torch.float8_e4m3fn, torch.uint8)),
    Case(3, 2, 2, "all", BF16, ((3, 11), (1, 5))),
    Case(3, 2, 2, "all", torch.uint8, ((3, 5), (4, 1), (64,))),
]
"""Ranks of which one expert is on all; numbers of 1, 2 and 4 bytes; lengths that no vector divides."""


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", KERNELS)
def test_ranks_get_what_the_definition_says(backend, case, few_programs):
    case = dataclasses.replace(case, device=device_of(backend), by_autograd=backend == "interpreted")
    emulation = Emulation(case.ranks, case.device)

    def body(peers):
        with GuardedMemory() as memory:
            results = case.run(peers.rank)
        memory.assert_guards_are_whole()
        return results

    results = emulation.run(body)
    emulation.assert_guards_are_whole()
    assert_traffic_is_that_of_the_definition(case, results)
    assert (case.expert_RS >= 0).any() == (case.holders != "none")


@pytest.mark.parametrize("backend", KERNELS)
def test_a_call_has_two_barriers_and_reserved_memory_is_enough(backend, few_programs):
    case = Case(2, 3, 3, "all", device=device_of(backend))
    shapes = [(case.owned, *shape) for shape in case.shapes]
    emulation = Emulation(2, case.device)

    def body(peers):
        exchange, barriers = exchange_of(2), list[int]()
        memory, expert_RS = peers.replicas, case.expert_RS.to(case.device)
        memory.reserve(room_bytes(shapes, 4, case.slots, along=False, apart=True)[1])
        had = emulation.replicas.num_bytes
        weights = [case.weights(peers.rank, i).to(case.device) for i in range(2)]
        torch.ops.graphmoe.replica_counts(case.counts_RE[peers.rank].to(case.device), 2)
        barriers.append(memory.barriers)
        exchange.pull(weights, expert_RS)
        barriers.append(memory.barriers)
        with exchange.slot_gradients([*map(torch.zeros_like, weights)], expert_RS, torch.float32):
            pass
        assert peers.barriers == 0 and emulation.replicas.num_bytes == had
        return *barriers, memory.barriers

    assert emulation.run(body) == [(2, 4, 6)] * 2


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("holders", "block"),
    [(each, block) for at, each in enumerate(("none", "hot", "all")) for block in in_turn((2, 0), at)],
)
def test_weights_come_along_with_rows_behind_the_barrier_of_these(backend, block, holders, few_programs):
    device = device_of(backend)
    case, rows = Case(3, 2, 3, holders, device=device), symm_cases.Case(3, 2, block=block, device=device)
    emulation = Emulation(3, device)

    def body(peers):
        rank, found = peers.rank, []
        plan, expert_RS = rows.plans[rank], case.expert_RS.to(device)
        with GuardedMemory() as memory:
            for seed in range(3):  # the last two follow each other, as those of two forwards may
                along = Prefetch(tuple(case.weights(rank, i, seed).to(device) for i in range(2)), expert_RS)
                bring = functools.partial(symm.bring, peers, rows.tokens_of(rank, seed), plan, along=along)
                before = peers.barriers
                slots = None if seed == 1 else rows.slots_of(rank)
                received, *_ = bring(slots, None, rows.num_rows, block, rows.experts, 1)
                assert peers.barriers - before == 1 + (seed > 0)
                assert received[rows.live(rank)].equal(
                    rows.arriving(rank, [rows.tokens_of(r, seed) for r in range(3)])
                )
                used = case.expert_RS[rank] >= 0
                found.append([w_SX.cpu()[used] for w_SX in exchange_of(3).pull(along.weights, expert_RS)])
        memory.assert_guards_are_whole()
        return found

    for rank, found in enumerate(emulation.run(body)):
        for seed, pulled in enumerate(found):
            assert all(w_SX.equal(case.pulled(rank, i, seed)) for i, w_SX in enumerate(pulled))
    emulation.assert_guards_are_whole()


@pytest.mark.parametrize("backend", KERNELS)
def test_weights_that_no_replica_needs_are_not_put(backend, few_programs):
    case = Case(3, 3, 2, "hot", device=device_of(backend))
    emulation = Emulation(3, case.device)
    weights = case.values(3, 0).to(case.device)
    emulation.run(lambda peers: exchange_of(3).pull([weights], case.expert_RS.to(case.device)))
    size = 3, weights[0].nbytes
    rooms = [p.replicas.view(p.rank, COUNT_BYTES, size, torch.uint8) for p in emulation.peers]
    is_put = [(room != 255).any(1).tolist() for room in rooms]
    assert is_put == [[False, False, True], *[[False] * 3] * 2]


def test_what_another_stream_reads_is_held_until_gradients_are_at_home(one_peer):
    exchange = exchange_of(1)
    expert_RS, total_LX = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 3)
    called, others = list[bool](), list[bool]()
    gradients = exchange.slot_gradients([total_LX], expert_RS, torch.float32, may_defer=True)
    with exchange.deferring(), when_at_owners(lambda: called.append(True)), gradients as made:
        made[0].fill_(2.0)
    with when_at_owners(lambda: others.append(True)):  # a unit that defers nothing reports at once
        pass
    expert_RS.fill_(-1)  # a later micro-batch's plan in the same memory
    held = weakref.ref(exchange.deferred.expert_RS)
    exchange.add_deferred()
    assert held() is not None and not called and others
    exchange.settle()
    assert held() is None and called and total_LX.tolist() == [[3.0] * 3]


@pytest.mark.parametrize("captured", [False, True])
def test_a_graph_reads_no_weights_that_came_outside_of_it(captured, one_peer, monkeypatch):
    """A replay would find them gone: then they come by a call of their own, inside."""
    capturing, exchange = [captured], exchange_of(1)
    monkeypatch.setattr("graphmoe.ops.replicas.exchange.is_capturing", lambda: capturing[0])
    w_LX, expert_RS = torch.ones(1, 3), torch.zeros(1, 1, dtype=torch.int32)
    for number in (7.0, 8.0):  # of the same plan's tensor, as those of two steps are
        exchange.keep(Prefetch((w_LX,), expert_RS), [torch.full((1, 3), number)])
    assert exchange.pull([w_LX], expert_RS)[0].tolist() == [[8.0] * 3]
    capturing[0] = not captured
    assert exchange.pull([w_LX], expert_RS)[0].tolist() == [[1.0] * 3]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_layers_read_the_last_two_prefetches_in_any_order(order, one_peer):
    exchange, expert_RS, weights = exchange_of(1), torch.zeros(1, 1).int(), torch.zeros(3, 1, 3).unbind()
    for number, w_LX in enumerate(weights):
        exchange.keep(Prefetch((w_LX,), expert_RS), [w_LX + number + 1])
    found = {number: exchange.pull([weights[number]], expert_RS)[0].max().item() for number in order}
    assert found == {0: 0.0, 1: 2.0, 2: 3.0} and not exchange._prefetched  # the first was dropped


def ahead_of_time_cases() -> list[dict[str, Any]]:
    """Kernels of 8 ranks with 32 experts, in bf16 and 8 bits."""
    meta = functools.partial(torch.empty, device="meta")
    memory = SimpleNamespace(rank=3, size=8, addresses=meta(8, dtype=torch.int64))
    expert_RS = meta(8, 32, dtype=torch.int32)
    w_LX, odd_LX = meta(32, 4096, 7168, dtype=BF16), meta(32, 333, dtype=torch.uint8)
    cases = []
    for name, words in (("", shared._words(w_LX)), ("of odd length", shared._words(odd_LX))):
        cases += launches_of(name, functools.partial(shared.put_held, words, words, expert_RS, 3))
        cases += launches_of(name, functools.partial(shared.pull_slots, memory, 2**31, words, expert_RS, 32))
    names, dtypes = ("", "of bf16", "from bf16", "from and of bf16"), (w_LX.float(), w_LX)
    for name, both in zip(names, itertools.product(dtypes, repeat=2), strict=True):
        cases += launches_of(name, functools.partial(shared.add_home, memory, 2**31, *both, expert_RS))
    return cases
