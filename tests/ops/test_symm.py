"""The operations of symm by kernels between emulated ranks, against alltoall, and their machine code."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graphmoe.ops.symm import exchange, launches
from tests.emulated_peers import Emulation
from tests.ops.ahead_of_time import TARGETS, assert_sound, compiled
from tests.ops.interpreted import INTERPRETING, KERNELS, assert_passed_in_the_interpreter, device_of
from tests.ops.symm_cases import Case, assert_exchanges_are_those_of_alltoall

DTYPES = (torch.float32, torch.bfloat16)
INTEGERS, ADDRESSES, ROWS, WEIGHTS = "*i32:16", "*i64:16", "*bf16:16", "*fp32:16"
SLOTS, HIDDEN = 6, 2048
RANKS = {"P": 8, "RANKS": 8}
COUNTS = {"me": "i32", "rows": "i32", "block": "i32"}


def case_on(backend, *sizes, **settings):
    return Case(*sizes, **settings, device=device_of(backend))


@pytest.fixture
def few_programs(monkeypatch):
    """Few programs of small tiles: each walks through several, and the interpreter is slow."""
    if not INTERPRETING:
        return
    small = {"tile_bytes": 256, "width_bytes": 64}
    for name, programs in {"PULL": 3, "PUT": 2, "PACK": 0, "SUM": 5}.items():
        launch = dataclasses.replace(getattr(launches, name), programs=programs, **small)
        monkeypatch.setattr(launches, name, launch)
    monkeypatch.setattr(launches, "RECORD_TILE", 64)
    monkeypatch.setattr(launches, "PLACES", 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [0, 2, 9])
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", KERNELS)
def test_two_ranks_exchange_as_alltoall_does(backend, slots, block, dtype, few_programs):
    assert_exchanges_are_those_of_alltoall(case_on(backend, 2, slots, block=block, dtype=dtype))


@pytest.mark.parametrize("block", [0, 1, 9])
@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize("backend", KERNELS)
def test_four_ranks_exchange_as_alltoall_does(backend, etp, block, few_programs):
    dtype = torch.bfloat16 if block else torch.float32
    assert_exchanges_are_those_of_alltoall(case_on(backend, 4, 2, etp, block, dtype))


@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("backend", KERNELS)
def test_ranks_that_receive_nothing_exchange_as_alltoall_does(backend, etp, block, few_programs):
    case = case_on(backend, 4, 2, etp, block, favourites=(0, 1))
    assert (case.arrivals().sum(0) == 0).any()
    assert_exchanges_are_those_of_alltoall(case)


@pytest.mark.parametrize("block", [0, 3])
@pytest.mark.parametrize("backend", KERNELS)
def test_three_ranks_exchange_rows_of_odd_width_as_alltoall_does(backend, block, few_programs):
    assert_exchanges_are_those_of_alltoall(case_on(backend, 3, 2, block=block, columns=5))
    assert_exchanges_are_those_of_alltoall(
        case_on(backend, 3, 3, block=block, columns=37, dtype=torch.bfloat16)
    )


@pytest.mark.parametrize(("rows", "block"), [(0, 0), (5, 0), (9, 0), (4, 2), (6, 2), (2, 1)])
@pytest.mark.parametrize("backend", KERNELS)
def test_rows_that_do_not_fit_are_left_out_and_nothing_beyond_is_touched(backend, rows, block, few_programs):
    case = case_on(backend, 2, 2, block=block, rows=rows)
    assert (case.arrivals().sum(0) > rows).any()
    assert_exchanges_are_those_of_alltoall(case)


@pytest.mark.parametrize("backend", KERNELS)
def test_places_are_written_in_several_rounds_where_one_is_too_few(backend, monkeypatch, few_programs):
    monkeypatch.setattr(launches, "AT_ONCE", 2)
    assert_exchanges_are_those_of_alltoall(case_on(backend, 2, 3, block=2))
    assert_exchanges_are_those_of_alltoall(case_on(backend, 2, 3, etp=2, experts=4))


@pytest.mark.parametrize("backend", KERNELS)
def test_a_region_that_grows_and_what_stands_in_it_change_nothing(backend, few_programs):
    emulation = Emulation(2, device_of(backend))
    for tokens, block in ((5, 0), (5, 2), (9, 4), (3, 1)):
        assert_exchanges_are_those_of_alltoall(case_on(backend, 2, 2, block=block, tokens=tokens), emulation)


@pytest.mark.parametrize("backend", KERNELS)
def test_the_same_side_twice_takes_a_barrier_more(backend, few_programs):
    case = case_on(backend, 2, 2)

    def body(peers):
        rank, barriers = peers.rank, []
        plan, (weight, expert) = case.plan_of(rank), case.slots_of(rank)
        for seed in range(3):
            received = exchange.dispatch(
                peers, case.tokens_of(rank, seed), weight, expert, plan, case.num_rows, 2, 1, 0
            )
            barriers.append(peers.barriers)
        return received[0], barriers

    for rank, (received, barriers) in enumerate(Emulation(2, device_of(backend)).run(body)):
        wanted = case.arriving(rank, [case.tokens_of(other, 2) for other in range(2)])
        assert received[: len(wanted)].equal(wanted) and barriers == [1, 3, 5]


@pytest.mark.parametrize("backend", KERNELS)
def test_rows_of_a_dtype_that_has_no_kernel_are_refused(backend, few_programs):
    case = case_on(backend, 2, 2, dtype=torch.float64)
    with pytest.raises(TypeError, match="float64"):
        assert_exchanges_are_those_of_alltoall(case)


@pytest.mark.slow
def test_the_kernels_pass_in_the_interpreter():
    assert_passed_in_the_interpreter(__file__)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_ahead_of_time(target):
    facts = compiled("tests.ops.test_symm", target)
    assert_sound(facts)
    assert not {name: fact.atomics for name, fact in facts.items() if fact.atomics}
    # 16 bytes at a time: 64 of each thread that pulls or puts; packing one vector, beside four of counts and
    # ends, which is stored in up to six blocks, where it is received, and as a token; summing one of each
    # place.
    wide = {"pull": (4, 4), "put": (4, 4), "pack": (5, 8), "sum 6": (6, 1), "sum 16": (16, 1)}
    assert wide == {name: (facts[name].wide_loads, facts[name].wide_stores) for name in wide}


def ahead_of_time_cases():
    return [*out_cases(), *back_cases()]


def tile(launch, columns=HIDDEN, element_bytes=2, rows="ROWS"):
    height, width = launch.tile(columns, element_bytes)
    return {rows: height, "COLUMNS": width}


def out_cases():
    from graphmoe.ops.symm import kernels as out

    for slots, lanes in ((SLOTS, 16), (0, 1)):
        sizes = {"K": slots, "LANES": lanes, "ROWS": launches.RECORD_TILE // lanes, **RANKS}
        plan = dict.fromkeys(("slot_R", "counts_P", "ends_P", "record_R", "to_counts_P"), INTEGERS)
        of_slots = {"weight_TK": WEIGHTS, "expert_TK": INTEGERS}
        absent = {} if slots else dict.fromkeys(of_slots)
        yield {
            "name": f"records {slots}",
            "kernel": out.records_kernel,
            "signature": plan | (of_slots if slots else {}) | {"experts": "i32", "num_rows": "i32"},
            "constexprs": sizes | absent | {"W": SLOTS, "ETP": 1},
            "threads": launches.RECORD_THREADS,
        }
        offsets = dict.fromkeys(("counts_offset", "records_offset", "tokens_offset", "row_bytes"), "i64:16")
        results = {"from_N": ADDRESSES, "weight_NK": WEIGHTS, "number_NK": INTEGERS, "arrivals_PP": INTEGERS}
        yield {
            "name": f"receive {slots}",
            "kernel": out.receive_kernel,
            "signature": {"address_P": ADDRESSES, **results, **offsets, **COUNTS},
            "constexprs": sizes,
            "threads": launches.RECORD_THREADS,
        }
    places = {"W": SLOTS, "AT_ONCE": launches.AT_ONCE}
    yield {
        "name": "pack",
        "kernel": out.pack_kernel,
        "signature": dict.fromkeys(("x_TD", "token_TD", "block_PBD", "received_ND"), ROWS)
        | dict.fromkeys(("row_TW", "counts_P", "ends_P"), INTEGERS)
        | {"tokens": "i32", "columns": "i32:16", "me": "i32", "block": "i32"},
        "constexprs": RANKS | places | tile(launches.PACK, rows="TOKENS"),
        "threads": launches.PACK.threads,
    }
    yield {
        "name": "pull",
        "kernel": out.pull_kernel,
        "signature": {"from_N": ADDRESSES, "received_ND": ROWS, "arrivals_PP": INTEGERS, "columns": "i32:16"}
        | COUNTS,
        "constexprs": RANKS | tile(launches.PULL) | {"ALIGNMENT": 16},
        "threads": launches.PULL.threads,
    }


def back_cases():
    from graphmoe.ops.symm import kernels as back

    for name, pointer, columns, element_bytes in (("put", ROWS, HIDDEN, 2), ("put weights", WEIGHTS, 6, 4)):
        yield {
            "name": name,
            "kernel": back.put_kernel,
            "signature": {"y_ND": pointer, "sum_ND": pointer, "arrivals_PP": INTEGERS, **COUNTS}
            | {"columns": "i32:16" if columns % 16 == 0 else "i32"},
            "constexprs": RANKS | tile(launches.PUT, columns, element_bytes),
            "threads": launches.PUT.threads,
        }
    for name, staged in (("way back", None), ("way back, staged", ROWS)):
        plan = dict.fromkeys(("row_TW", "ends_P", "arrivals_PP"), INTEGERS)
        tables = dict.fromkeys(("address_P", "from_TW", "dweight_from_TW"), ADDRESSES)
        offsets = dict.fromkeys(("sums_offset", "dweights_offset", "row_bytes"), "i64:16")
        yield {
            "name": name,
            "kernel": back.way_back_kernel,
            "signature": plan | tables | offsets | COUNTS | {"num_places": "i32"}
            | {"y_ND": ROWS, "dweight_NK": WEIGHTS}
            | ({"staged_PBD": staged} if staged else {}),
            "constexprs": RANKS | {"K": SLOTS, "PLACES": launches.PLACES}
            | ({} if staged else {"staged_PBD": None}),
            "threads": launches.PLACE_THREADS,
        }  # fmt: skip
    for places in (6, 16):
        yield sum_case(f"sum {places}", places, ROWS, "i32:16", 16, tile(launches.SUM, rows="TOKENS"))
    yield sum_case("sum weights", 6, WEIGHTS, "i32", 8, tile(launches.SUM, SLOTS, 4, "TOKENS"))


def sum_case(name, places, pointer, columns, alignment, sizes):
    from graphmoe.ops.symm import kernels as back

    return {
        "name": name,
        "kernel": back.sum_kernel,
        "signature": {"from_TW": ADDRESSES, "x_TD": pointer, "tokens": "i32", "columns": columns},
        "constexprs": {"W": places, "AT_ONCE": launches.AT_ONCE, "ALIGNMENT": alignment} | sizes,
        "threads": launches.SUM.threads,
    }
