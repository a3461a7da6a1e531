"""The kernels of symm, run by Triton's interpreter on emulated ranks.

Collected by tests/ops/test_symm_kernels.py; see tests/ops/interpreted.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graphmoe.ops.symm import exchange, launches
from tests.emulated_peers import Emulation
from tests.ops.symm_cases import Case, assert_exchanges_are_those_of_alltoall

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Few programs of small tiles: each walks through several, and the interpreter is slow."""
    small = {"tile_bytes": 256, "width_bytes": 64}
    for name, programs in {"PULL": 3, "PUT": 2, "PACK": 0, "SUM": 5}.items():
        launch = dataclasses.replace(getattr(launches, name), programs=programs, **small)
        monkeypatch.setattr(launches, name, launch)
    monkeypatch.setattr(launches, "RECORD_TILE", 64)
    monkeypatch.setattr(launches, "PLACES", 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [0, 2, 9])
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_exchanges_between_two_ranks(slots, block, dtype):
    assert_exchanges_are_those_of_alltoall(Case(2, slots, block=block, dtype=dtype))


@pytest.mark.parametrize("block", [0, 1, 9])
@pytest.mark.parametrize("etp", [1, 2, 4])
def test_exchanges_between_four_ranks(etp, block):
    dtype = torch.bfloat16 if block else torch.float32
    assert_exchanges_are_those_of_alltoall(Case(4, 2, etp, block, dtype))


@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.parametrize("etp", [1, 2])
def test_ranks_that_receive_nothing(etp, block):
    case = Case(4, 2, etp, block, favourites=(0, 1))
    assert (case.arrivals().sum(0) == 0).any()
    assert_exchanges_are_those_of_alltoall(case)


@pytest.mark.parametrize("block", [0, 3])
def test_three_ranks_and_rows_of_odd_width(block):
    assert_exchanges_are_those_of_alltoall(Case(3, 2, block=block, columns=5))
    assert_exchanges_are_those_of_alltoall(Case(3, 3, block=block, columns=37, dtype=torch.bfloat16))


@pytest.mark.parametrize(("rows", "block"), [(0, 0), (5, 0), (9, 0), (4, 2), (6, 2), (2, 1)])
def test_rows_that_do_not_fit_are_left_out_and_nothing_beyond_is_touched(rows, block):
    case = Case(2, 2, block=block, rows=rows)
    assert (case.arrivals().sum(0) > rows).any()
    assert_exchanges_are_those_of_alltoall(case)


def test_more_places_than_one_round_takes(monkeypatch):
    monkeypatch.setattr(launches, "AT_ONCE", 2)
    assert_exchanges_are_those_of_alltoall(Case(2, 3, block=2))
    assert_exchanges_are_those_of_alltoall(Case(2, 3, etp=2, experts=4))


def test_a_region_that_grows_and_what_stands_in_it_change_nothing():
    emulation = Emulation(2)
    for tokens, block in ((5, 0), (5, 2), (9, 4), (3, 1)):
        assert_exchanges_are_those_of_alltoall(Case(2, 2, block=block, tokens=tokens), emulation)


def test_the_same_side_twice_takes_a_barrier_more():
    case = Case(2, 2)

    def body(peers):
        rank, barriers = peers.rank, []
        plan, (weight, expert) = case.plan_of(rank), case.slots_of(rank)
        for seed in range(3):
            received = exchange.dispatch(
                peers, case.tokens_of(rank, seed), weight, expert, *plan, case.num_rows, 2, 1, 0
            )
            barriers.append(peers.barriers)
        return received[0], barriers

    for rank, (received, barriers) in enumerate(Emulation(2).run(body)):
        wanted = case.arriving(rank, [case.tokens_of(other, 2) for other in range(2)])
        assert received[: len(wanted)].equal(wanted) and barriers == [1, 3, 5]


def test_rows_of_a_dtype_that_has_no_kernel_are_refused():
    case = Case(2, 2, dtype=torch.float64)
    with pytest.raises(TypeError, match="float64"):
        assert_exchanges_are_those_of_alltoall(case)
