"""Dispatchers of vendors between GPUs: what ``alltoall`` gives through NCCL, captured in a graph too."""

from __future__ import annotations

import pytest
import torch

from graphmoe.config.packages import is_installed
from graphmoe.runtime.torch_compat import has_nvshmem
from tests.distributed.ranks import Job
from tests.gpu.vendor_ranks import TOKENS, VendorTrip
from tests.tolerances import assert_forward_close, assert_gradient_close

ROUTINGS = ("natural", "all to the second rank", "nothing from the first rank")
CASES = {
    "deepep": {routing: VendorTrip("deepep", routing) for routing in ROUTINGS},
    "nvshmem": {
        **{routing: VendorTrip("nvshmem", routing) for routing in ROUTINGS},
        "etp": VendorTrip("nvshmem", "natural", etp=2),
        "just room": VendorTrip("nvshmem", "all to the second rank", room=2 * TOKENS),
    },
}
NAMES = [(choice, name) for choice, cases in CASES.items() for name in cases]


def skip_where_missing(choice):
    there = is_installed("deep_ep") if choice == "deepep" else torch.cuda.is_available() and has_nvshmem()
    if not there:
        pytest.skip(f"{choice} is not installed")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Outcomes of all cases of a dispatcher on so many GPUs, by rank."""
    known = {}

    def of(choice, ranks):
        skip_where_missing(choice)
        if torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs")
        if (choice, ranks) not in known:
            cases = {name: case for name, case in CASES[choice].items() if ranks == 2 or name == "natural"}
            job = Job(tmp_path_factory.mktemp("ranks"), cases, num_ranks=ranks, device="cuda")
            known[choice, ranks] = job.results(seconds=300)
        return known[choice, ranks]

    return of


@pytest.mark.parametrize("choice, name", NAMES)
def test_a_trip_between_two_gpus_gives_bitwise_what_alltoall_gives(outcomes, choice, name):
    for outcome in outcomes(choice, 2)[name]:
        found, expected = outcome.found, outcome.expected
        live = len(expected.number)
        assert int(found.room) == live
        assert found.received[:live].equal(expected.received)
        assert found.number[:live].equal(expected.number) and (found.number[live:] == -1).all()
        here = expected.number >= 0
        assert found.weight[:live][here].equal(expected.weight[here])
        # The order of a sum of two does not show.
        assert found.y.equal(expected.y) and found.dh.equal(expected.dh)
        assert found.dweight.equal(expected.dweight) and found.dweight.any()


@pytest.mark.parametrize("choice, name", NAMES)
def test_a_captured_trip_replays_on_other_tokens_without_the_host(outcomes, choice, name):
    for outcome in outcomes(choice, 2)[name]:
        y, dh, dweight, number, room = outcome.replayed.captured
        expected = outcome.expected_again
        assert y.equal(expected.y) and dh.equal(expected.dh) and dweight.equal(expected.dweight)
        assert int(room) == len(expected.number) and number[: int(room)].equal(expected.number)
        for replayed, plain in zip(outcome.replayed.captured, outcome.replayed.plain, strict=True):
            assert replayed.equal(plain)


@pytest.mark.parametrize("choice", CASES)
def test_a_trip_between_four_gpus_gives_what_alltoall_gives(outcomes, choice):
    for outcome in outcomes(choice, 4)["natural"]:
        found, expected = outcome.found, outcome.expected
        live = len(expected.number)
        assert int(found.room) == live and found.received[:live].equal(expected.received)
        assert_forward_close(found.y, expected.y)
        assert_gradient_close(found.dh, expected.dh)
        assert_gradient_close(found.dweight, expected.dweight)


def test_where_rows_do_not_fit_nothing_is_sent_and_nothing_is_overwritten(tmp_path):
    skip_where_missing("nvshmem")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    small = VendorTrip("nvshmem", "all to the second rank", room=2 * TOKENS - 1)
    enough = VendorTrip("nvshmem", "natural")
    results = Job(tmp_path, {"small": small, "enough": enough}, device="cuda").results(seconds=300)
    for rank, outcome in enumerate(results["small"]):
        assert int(outcome.found.room) == [0, 2 * TOKENS][rank]
        assert (outcome.found.number == -1).all() and not outcome.found.y.any() and not outcome.found.dh.any()
    for outcome in results["enough"]:
        assert outcome.found.y.equal(outcome.expected.y) and outcome.found.dh.equal(outcome.expected.dh)
