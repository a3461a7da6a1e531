"""The operations of symm between ranks on a CPU: bitwise what the dispatcher alltoall gives."""

from __future__ import annotations

import pytest
import torch

from graphmoe.plan.layout import Layout
from tests.distributed.ranks import run_ranks
from tests.distributed.symm_trips import TOKENS, Checks, Differences, SymmTrip

pytestmark = pytest.mark.slow

LAYOUTS = {
    "ep=2": Layout(dp=2, ep=2),
    "etp=2": Layout(dp=2, etp=2),
    "ep=4": Layout(dp=4, ep=4),
    "ep=2 etp=2": Layout(dp=4, ep=2, etp=2),
    "ep=2 edp=2": Layout(dp=4, ep=2),
}
LAST = "all on the last two experts"
BLOCKS = (0, 2, TOKENS + 1)
"""Sizes: none, one that some pairs of ranks exceed, and one that no pair fills."""
TRIPS = {
    f"{name}, block {block}": SymmTrip(LAYOUTS[name], block=block) for name in LAYOUTS for block in BLOCKS
}
for block in BLOCKS:
    for layout in ("etp=2", "ep=4", "ep=2 etp=2"):
        TRIPS[f"{layout}, block {block}, {LAST}"] = SymmTrip(LAYOUTS[layout], LAST, block, top_k=2)
    TRIPS[f"bf16, block {block}"] = SymmTrip(LAYOUTS["ep=2 etp=2"], block=block, dtype=torch.bfloat16)
    TRIPS[f"fp64, block {block}"] = SymmTrip(LAYOUTS["ep=4"], block=block, dtype=torch.float64)
    TRIPS[f"one slot, block {block}"] = SymmTrip(LAYOUTS["ep=4"], block=block, top_k=1)
TRIPS["aot_eager"] = SymmTrip(LAYOUTS["ep=2 etp=2"], block=2, backend="aot_eager")
TRIPS["inductor"] = SymmTrip(LAYOUTS["ep=2"], backend="inductor")
TRIPS["inductor, block 2, bf16"] = SymmTrip(
    LAYOUTS["ep=2"], block=2, dtype=torch.bfloat16, backend="inductor"
)
SHORT = {
    "too few rows": SymmTrip(LAYOUTS["ep=2"], rows=6),
    "too few rows behind blocks": SymmTrip(LAYOUTS["ep=2"], block=2, rows=6),
    "no row behind blocks": SymmTrip(LAYOUTS["ep=4"], block=2, rows=8),
}
DIFFERENCES = {
    f"differences, {name}, block {block}": Differences(LAYOUTS[name], block=block)
    for name in ("ep=2", "ep=2 etp=2")
    for block in BLOCKS[:2]
}
CHECKS = {
    f"checks, block {block}": Checks(LAYOUTS["etp=2"], block=block, rows=2 * TOKENS) for block in BLOCKS[:2]
}
CASES = TRIPS | SHORT | DIFFERENCES | CHECKS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each case, by rank."""
    found = {}
    for size in (2, 4):
        cases = {name: case for name, case in CASES.items() if case.layout.size("world") == size}
        found |= run_ranks(tmp_path_factory.mktemp(f"ranks_{size}"), cases, size)
    return found


@pytest.mark.parametrize("name", TRIPS)
def test_values_and_gradients_are_bitwise_those_of_alltoall(results, name):
    for found in results[name]:
        assert found.wanted["number"].equal(found.number_NK[found.live_A])
        for key in ("out", "received", "received_weight", "dh", "dweight"):
            assert found.actual[key].dtype == found.wanted[key].dtype
            assert found.actual[key].equal(found.wanted[key]), key


@pytest.mark.parametrize("name", [*TRIPS, *SHORT])
def test_dead_rows_have_no_expert_and_arrivals_are_those_of_the_plans(results, name):
    trip, found = CASES[name], results[name]
    for rank, one in enumerate(found):
        dead = torch.ones(trip.num_rows, dtype=torch.bool)
        dead[one.live_A[one.live_A < trip.num_rows]] = False
        assert (one.number_NK[dead] == -1).all()
        assert len(one.number_NK) == trip.num_rows
        group, index = trip.layout.group("ep_etp", rank), trip.layout.index("ep_etp", rank)
        assert all(one.arrivals_PP.equal(found[other].arrivals_PP) for other in group)
        assert int(one.arrivals_PP[:, index].sum()) == len(one.wanted["received"])


@pytest.mark.parametrize("name", TRIPS)
def test_each_case_routes_as_its_name_says(results, name):
    trip, arrivals = TRIPS[name], results[name][0].arrivals_PP
    if trip.block == 2:
        assert (arrivals > 2).any()
    if trip.block > TOKENS:
        assert (arrivals < trip.block).all()
    if LAST in name and trip.layout.ep > 1:
        assert (arrivals.sum(0) == 0).any()


@pytest.mark.parametrize("name", SHORT)
def test_rows_that_do_not_fit_are_left_out_and_count_as_zeros(results, name):
    trip, lost = SHORT[name], 0
    for found in results[name]:
        fits = found.live_A < trip.num_rows
        lost += int((~fits).sum())
        assert found.actual["received"].equal(found.wanted["received"][fits])
        assert found.number_NK[found.live_A[fits]].equal(found.wanted["number"][fits])
        assert all(bool(found.actual[key].isfinite().all()) for key in ("out", "dh", "dweight"))
        same = (found.actual["out"] == found.wanted["out"]).all(1)
        assert found.actual["out"][same].equal(found.wanted["out"][same])
    assert lost > 0 and any(not found.actual["out"].equal(found.wanted["out"]) for found in results[name])


@pytest.mark.parametrize("name", DIFFERENCES)
def test_gradients_are_those_of_differences(results, name):
    by_gradients, by_differences = (sum(part) for part in zip(*results[name], strict=True))
    assert abs(by_gradients - by_differences) < 1e-7 * max(abs(by_gradients), 1)


@pytest.mark.parametrize("name", CHECKS)
def test_torch_accepts_the_operations(results, name):
    assert results[name] == [4, 4]
