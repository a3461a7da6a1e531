"""Tokens there and back between ranks on a CPU: every dispatcher gives bitwise what ``alltoall`` gives.

Libraries of vendors are replaced by fakes.
"""

import itertools

import pytest
import torch

from graphmoe.plan.layout import Layout
from tests.distributed.ranks import run_ranks
from tests.distributed.trips import GRADIENTS, PACKAGES, Checks, GradientsOfSlots, TooLittleRoom, Trip
from tests.tolerances import assert_gradient_close, relative_error

pytestmark = pytest.mark.slow
LAYOUTS = {
    "ep=2": Layout(dp=2, ep=2),
    "etp=2": Layout(dp=2, etp=2),
    "ep=4": Layout(dp=4, ep=4),
    "ep=2 etp=2": Layout(dp=4, ep=2, etp=2),
    "ep=2 edp=2": Layout(dp=4, ep=2),
}
BF16, EP, ETP = torch.bfloat16, LAYOUTS["ep=2"], LAYOUTS["etp=2"]
LAST, SECOND, OWN = "all on the last two experts", "all to the second rank", "nothing from the first rank"
BLOCKS = (0, 2, 10)  # none, one that some pairs of ranks exceed, and one that no pair fills
SYMM = {f"{name}, block {b}": Trip("symm", LAYOUTS[name], block=b) for name in LAYOUTS for b in BLOCKS}
SYMM |= {
    f"{name}, block {b}, {LAST}": Trip("symm", LAYOUTS[name], LAST, b, top_k=2)
    for b, name in itertools.product(BLOCKS, ("etp=2", "ep=4", "ep=2 etp=2"))
}
SYMM["bf16"] = Trip("symm", LAYOUTS["ep=2 etp=2"], block=2, dtype=BF16)
SYMM["fp64"] = Trip("symm", LAYOUTS["ep=4"], block=0, dtype=torch.float64)
SYMM["one slot"] = Trip("symm", LAYOUTS["ep=4"], block=2, top_k=1)
SYMM["aot_eager"] = Trip("symm", LAYOUTS["ep=2 etp=2"], block=2, backend="aot_eager")
SYMM["inductor"] = Trip("symm", EP, backend="inductor")
SHORT = {
    "too few rows": Trip("symm", EP, rows=6),
    "too few rows behind blocks": Trip("symm", EP, block=2, rows=6),
    "no row behind blocks": Trip("symm", LAYOUTS["ep=4"], block=2, rows=8),
}
OF_NVSHMEM = {"dtype": BF16, "tokens": 13, "hidden": 10}
OF_BUFFER = OF_NVSHMEM | {"hidden": 16}
NATURAL = ("natural", "eager"), ("natural", "aot_eager")
VENDORS = {
    f"{kind}, {routing}, {backend}": Trip(
        kind, EP, routing, backend=backend, **(OF_BUFFER if kind in PACKAGES else OF_NVSHMEM)
    )
    for kind in (*PACKAGES, "nvshmem")
    for routing, backend in ((SECOND, "eager"), (OWN, "eager"), *NATURAL)
}
VENDORS["nvshmem, etp"] = Trip("nvshmem", ETP, **OF_NVSHMEM)
VENDORS["nvshmem, just room"] = Trip("nvshmem", EP, SECOND, rows=26, **OF_NVSHMEM)
TRIPS = SYMM | VENDORS
CHECKS = {
    **{f"torch accepts symm, block {b}": Checks("symm", ETP, block=b, rows=18) for b in BLOCKS[:2]},
    "torch accepts deepep": Checks("deepep", EP, **OF_BUFFER),
    "torch accepts nvshmem": Checks("nvshmem", EP, **OF_BUFFER),
    "the gradient of a weight is of its expert's rank alone": GradientsOfSlots("deepep", EP, **OF_BUFFER),
    "room for less than all tokens is refused": TooLittleRoom("deepep", EP, **OF_BUFFER),
}
OVERFLOW = {"overflow": Trip("nvshmem", EP, SECOND, rows=25, **OF_NVSHMEM)}
CASES = TRIPS | SHORT | OVERFLOW | CHECKS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    found = {}
    for size in (2, 4):
        cases = {name: case for name, case in CASES.items() if case.layout.size("world") == size}
        found |= run_ranks(tmp_path_factory.mktemp(f"ranks_{size}"), cases, size)
    return found


@pytest.mark.parametrize("name", TRIPS)
def test_values_and_gradients_are_bitwise_those_of_alltoall_and_its_definition(results, name):
    for rank, found in enumerate(results[name]):
        found.assert_bitwise()
        for key, value in TRIPS[name].by_definition(rank).items():
            if TRIPS[name].dtype is BF16:  # a sum over ranks of rounded numbers
                assert relative_error(found.wanted[key].float(), value) < 2e-2, key
            else:
                assert_gradient_close(found.wanted[key].float(), value)


@pytest.mark.parametrize("name", [*TRIPS, *SHORT])
def test_rows_behind_those_that_arrived_are_of_no_expert_and_the_room_is_told(results, name):
    trip, found = CASES[name], results[name]
    for rank, one in enumerate(found):
        actual, arrived = one.actual, len(one.wanted["received"])
        dead = torch.ones(trip.num_rows, dtype=torch.bool)
        dead[one.live_A[one.live_A < trip.num_rows]] = False
        assert (actual["number"][dead] == -1).all()
        assert len(actual["number"]) == trip.num_rows and actual["number"].dtype == torch.int32
        assert int(actual["room"]) == arrived or trip.block
        if trip.kind in ("symm", "nvshmem"):
            group, index = trip.layout.group("ep_etp", rank), trip.layout.index("ep_etp", rank)
            arrivals = actual["arrivals"]
            assert all(arrivals.equal(found[other].actual["arrivals"]) for other in group)
            assert int(arrivals[:, index].sum()) == arrived


def test_cases_route_as_their_names_say(results):
    for name, trip in SYMM.items():
        arrivals = results[name][0].actual["arrivals"]
        assert trip.block != 2 or (arrivals > 2).any()
        assert trip.block < 10 or (arrivals < trip.block).all()
        assert LAST not in name or trip.layout.ep == 1 or (arrivals.sum(0) == 0).any()
    for kind in (*PACKAGES, "nvshmem"):
        assert [int(found.actual["room"]) for found in results[f"{kind}, {SECOND}, eager"]] == [0, 26]


@pytest.mark.parametrize("name", SHORT)
def test_rows_that_do_not_fit_are_left_out_and_count_as_zeros(results, name):
    assert sum(found.lost(SHORT[name].num_rows) for found in results[name]) > 0
    assert any(not found.actual["out"].equal(found.wanted["out"]) for found in results[name])


def test_where_the_rows_of_one_rank_do_not_fit_nothing_is_sent_and_the_host_can_tell(results):
    for rank, found in enumerate(results["overflow"]):
        assert int(found.actual["room"]) == [0, 26][rank]
        assert (found.actual["number"] == -1).all() and not found.actual["received"].any()
        assert not any(found.actual[key].any() for key in GRADIENTS)


@pytest.mark.parametrize("check", CHECKS)
def test_each_rank_finds_that(results, check):
    assert results[check] == [None, None]
