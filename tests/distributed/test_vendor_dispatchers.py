"""Dispatchers of vendors between two processes, their libraries replaced by fakes: results of `AllToAll`."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.vendor_trips import (
    LIKELIHOODS,
    PACKAGES,
    TOKENS,
    Buffered,
    Symmetric,
    checked_operations,
    gradients_of_slots,
    too_little_room,
)

pytestmark = pytest.mark.slow
TRIPS = {
    **{
        f"{package}, {routing}": Buffered(package, routing) for package in PACKAGES for routing in LIKELIHOODS
    },
    **{f"nvshmem, {routing}": Symmetric(routing) for routing in LIKELIHOODS},
    "nvshmem, etp": Symmetric("natural", etp=2),
    "nvshmem, just room": Symmetric("all to the second rank", room=2 * TOKENS),
}
CASES = {
    **TRIPS,
    "overflow": Symmetric("all to the second rank", room=2 * TOKENS - 1),
    "operations": checked_operations,
    "gradients of slots": gradients_of_slots,
    "room": too_little_room,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("ranks"), CASES)


@pytest.mark.parametrize("name", TRIPS)
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_trip_gives_bitwise_what_alltoall_gives(results, name, how):
    for eager, compiled, expected in results[name]:
        found = eager if how == "eager" else compiled
        live = len(expected.number)
        assert int(found.room) == live
        assert found.received[:live].equal(expected.received)
        assert found.number[:live].equal(expected.number)
        here = expected.number >= 0
        assert found.weight[:live][here].equal(expected.weight[here])
        # Two ranks: the order of a sum of two does not show.
        assert found.y.equal(expected.y) and found.dh.equal(expected.dh)
        assert found.dweight.equal(expected.dweight) and found.dweight.any()


@pytest.mark.parametrize("name", TRIPS)
def test_rows_behind_those_that_arrived_are_of_no_expert(results, name):
    for found, _, expected in results[name]:
        live = len(expected.number)
        assert found.number.shape[0] == 2 * TOKENS and found.number.dtype == torch.int32
        assert (found.number[live:] == -1).all()


@pytest.mark.parametrize("dispatcher", ["deepep", "turbo", "nvshmem"])
def test_a_rank_may_get_all_tokens_and_another_none(results, dispatcher):
    first, second = (trip for trip, _, _ in results[f"{dispatcher}, all to the second rank"])
    assert int(first.room) == 0 and int(second.room) == 2 * TOKENS


def test_where_the_rows_of_one_rank_do_not_fit_nothing_is_sent_and_the_host_can_tell(results):
    for rank, trips in enumerate(results["overflow"]):
        for found in trips[:2]:
            assert int(found.room) == [0, 2 * TOKENS][rank]
            assert (found.number == -1).all() and not found.received.any()
            assert not any(tensor.any() for tensor in (found.y, found.dh, found.dweight))


def test_the_gradient_of_a_weight_comes_from_the_rank_of_its_expert_alone(results):
    for gradient in results["gradients of slots"]:
        assert (gradient == 1).all()


def test_schemas_and_fakes_of_the_operations_hold(results):
    assert results["operations"] == [None, None]


def test_room_for_less_than_all_tokens_is_refused_before_rows_are_written(results):
    for message in results["room"]:
        assert message == "24 rows are not a multiple of 13 tokens"
