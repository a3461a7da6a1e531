"""Launches of the kernels of symm, which are compiled without a GPU: eight ranks, six slots, bf16."""

from __future__ import annotations

from graphmoe.ops.symm import back_kernels as back
from graphmoe.ops.symm import launches
from graphmoe.ops.symm import out_kernels as out

INTEGERS, ADDRESSES, ROWS, WEIGHTS = "*i32:16", "*i64:16", "*bf16:16", "*fp32:16"
SLOTS, HIDDEN = 6, 2048
RANKS = {"P": 8, "RANKS": 8}
COUNTS = {"me": "i32", "rows": "i32", "block": "i32"}


def ahead_of_time_cases():
    return [*out_cases(), *back_cases()]


def tile(launch, columns=HIDDEN, element_bytes=2, rows="ROWS"):
    height, width = launch.tile(columns, element_bytes)
    return {rows: height, "COLUMNS": width}


def out_cases():
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
    return {
        "name": name,
        "kernel": back.sum_kernel,
        "signature": {"from_TW": ADDRESSES, "x_TD": pointer, "tokens": "i32", "columns": columns},
        "constexprs": {"W": places, "AT_ONCE": launches.AT_ONCE, "ALIGNMENT": alignment} | sizes,
        "threads": launches.SUM.threads,
    }
