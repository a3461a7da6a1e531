"""The operations of symm by kernels between emulated ranks, against alltoall, and their machine code."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch

from graphmoe.ops.dispatch import SendPlan
from graphmoe.ops.symm import launches
from graphmoe.ops.symm.peers import Region, Sizes
from tests.emulated_peers import Emulation
from tests.ops.ahead_of_time import launches_of
from tests.ops.interpreted import INTERPRETING, KERNELS, device_of, in_turn
from tests.ops.symm_cases import (
    Case,
    assert_exchanges_are_those_of_alltoall,
    assert_stored_rows_are_rounded_arrivals,
)

SLOTS, HIDDEN = 6, 2048


@pytest.fixture
def few_programs(monkeypatch):
    """Few programs of small tiles: each walks through several, and the interpreter is slow."""
    if INTERPRETING:
        for name, programs in {"PULL": 3, "PUT": 2, "PACK": 0, "SUM": 5}.items():
            small = {"programs": programs, "tile_bytes": 256, "width_bytes": 64}
            monkeypatch.setattr(launches, name, dataclasses.replace(getattr(launches, name), **small))
        monkeypatch.setattr(launches, "RECORD_TILE", 64)
        monkeypatch.setattr(launches, "PLACES", 8)


BF16 = torch.bfloat16
CASES = [
    *(
        Case(2, slots, block=block, dtype=dtype)
        for slots in (1, 2, 3, 4)
        for block in in_turn((0, 2, 9), slots)
        for dtype in in_turn((torch.float32, BF16), slots // 2)
    ),
    *(
        Case(4, 2, etp, block, BF16 if block else torch.float32)
        for etp in (1, 2, 4)
        for block in in_turn((0, 1, 9), etp // 2)
    ),
    *(Case(4, 2, etp, block, favourites=(0, 1)) for etp in (1, 2) for block in in_turn((0, 2), etp)),
    *(Case(3, 2, block=block, columns=5) for block in (0, 3)),
    *(Case(3, 3, block=block, columns=37, dtype=BF16) for block in (0, 3)),
    *(Case(2, 2, block=block, rows=rows) for rows, block in ((0, 0), (5, 0), (9, 0), (4, 2), (6, 2), (2, 1))),
]
"""Slots and blocks, ranks of the same experts or that receive nothing, odd widths, rows that do not fit."""


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", KERNELS)
def test_ranks_exchange_as_alltoall_does(backend, case, few_programs):
    case = dataclasses.replace(case, device=device_of(backend))
    arriving = case.arrivals.sum(0)
    assert not case.favourites or (arriving == 0).any()
    assert case.rows is None or (arriving > case.rows).any()
    assert_exchanges_are_those_of_alltoall(case)


STORED = [
    *(Case(2, slots, block=block, dtype=BF16) for slots in (1, 3) for block in (0, 2, 9)),
    *(Case(4, 2, 2, block, favourites=(0, 1), columns=48) for block in (0, 2)),
    Case(2, 2, rows=9, dtype=BF16),
]


@pytest.mark.parametrize("case", STORED, ids=str)
@pytest.mark.parametrize("backend", KERNELS)
def test_rows_in_8_bits_have_the_bits_of_rounding_at_arrival(backend, case, few_programs):
    assert_stored_rows_are_rounded_arrivals(dataclasses.replace(case, device=device_of(backend)))


@pytest.mark.parametrize("backend", KERNELS)
def test_places_are_written_in_several_rounds_where_one_is_too_few(backend, monkeypatch, few_programs):
    monkeypatch.setattr(launches, "AT_ONCE", 2)
    assert_exchanges_are_those_of_alltoall(Case(2, 3, block=2, device=device_of(backend)))
    assert_exchanges_are_those_of_alltoall(Case(2, 3, etp=2, experts=4, device=device_of(backend)))


@pytest.mark.parametrize("backend", KERNELS)
def test_a_region_that_grows_and_what_stands_in_it_change_nothing(backend, few_programs):
    emulation = Emulation(2, device_of(backend))
    for tokens, block in ((5, 0), (5, 2), (9, 4), (3, 1)):
        case = Case(2, 2, block=block, tokens=tokens, device=emulation.device)
        assert_exchanges_are_those_of_alltoall(case, emulation)


@pytest.mark.parametrize("backend", KERNELS)
def test_rows_of_a_dtype_that_has_no_kernel_are_refused(backend, few_programs):
    case = Case(2, 2, dtype=torch.float64, device=device_of(backend))
    with pytest.raises(TypeError, match="float64"):
        assert_exchanges_are_those_of_alltoall(case)


def ahead_of_time_cases():
    """Exchanges of 8 ranks, whose tokens have 6 slots and as many places, in bf16."""
    meta = functools.partial(torch.empty, device="meta")
    peers = SimpleNamespace(
        rank=3,
        size=8,
        addresses=meta(8, dtype=torch.int64),
        view=lambda rank, offset, shape, dtype: meta(shape, dtype=dtype),
    )
    tokens, rows, block = 4099, 40_001, 601
    region = Region.with_room_for(Sizes(tokens, 2 * HIDDEN, SLOTS, SLOTS, rows, block), 8)
    x, y = (meta(n, HIDDEN, dtype=BF16) for n in (tokens, rows))
    words, received = (meta(n, HIDDEN // 4).int() for n in (tokens, rows))  # of rows in 8 bits
    sizes = (8,), (8,), (tokens, SLOTS), (tokens * SLOTS,), (8, 8)
    *plan, arrivals = (meta(size).int() for size in sizes)
    plan, dweight = SendPlan(*plan), meta(rows, SLOTS)
    of_slots = meta(tokens, SLOTS), meta(tokens, SLOTS).int()
    way, from_N = (plan.send_ends_P, plan.send_row_TW, arrivals, block), meta(rows).long()
    for name, run, *given in (
        ("with slots", launches.put_records, peers, region, plan, *of_slots, 3, 1),
        ("of tokens", launches.put_records, peers, region, plan, None, None, 3, 1),
        ("", launches.pack, peers, region, x, plan, y, block),
        ("with slots", launches.receive, peers, region, rows, SLOTS, 2 * HIDDEN, block),
        ("of tokens", launches.receive, peers, region, rows, 0, 2 * HIDDEN, block),
        ("", launches.pull, peers, from_N, y, arrivals, block),
        ("of words", launches.pack, peers, region, words, plan, received, block),
        ("of words", launches.pull, peers, from_N, received, arrivals, block),
        ("", launches.put_live, peers, region.sums, y, arrivals, block),
        ("of weights", launches.put_live, peers, region.dweights, dweight, arrivals, block),
        ("", launches.way_back, peers, region, way, None, y, dweight),
        ("staged", launches.way_back, peers, region, way, y, y, dweight),
        ("", launches.sum_parts, peers, 256, meta(4, 512, HIDDEN, dtype=BF16), 4),
        ("6", launches.sum_places, meta(tokens, 6).long(), HIDDEN, BF16),
        ("16", launches.sum_places, meta(tokens, 16).long(), HIDDEN, BF16),
        ("of weights", launches.sum_places, meta(tokens, 6).long(), SLOTS, torch.float32),
    ):
        yield from launches_of(name, functools.partial(run, *given))
