"""Tokens between GPUs by symm and the dispatchers of vendors: what ``alltoall`` gives, captured too.

Two ranks share the GPU where there is one; vendors want one each.
"""

import pytest
import torch

from graphmoe.config.packages import is_installed
from graphmoe.plan.layout import Layout
from graphmoe.runtime.torch_compat import has_nvshmem
from tests.distributed.ranks import Job
from tests.distributed.trips import Trip
from tests.gpu.trip_ranks import CapturedTrip, Growing, ManyReplays, NoWaiting, TripBesideProducts
from tests.ops.symm_cases import (
    Case,
    assert_exchanges_are_those_of_alltoall,
    assert_stored_rows_are_rounded_arrivals,
)
from tests.tolerances import assert_forward_close, assert_gradient_close

BF16 = torch.bfloat16
EP = Layout(dp=2, ep=2)
LAYOUTS = {
    2: {"ep": EP, "etp": Layout(dp=2, etp=2)},
    4: {"ep": Layout(dp=4, ep=4), "ep etp": Layout(dp=4, ep=2, etp=2), "ep edp": Layout(dp=4, ep=2)},
}
LAST, SECOND, OWN = "all on the last two experts", "all to the second rank", "nothing from the first rank"
BLOCKS = {"pull": 0, "copies and pull": 100, "copies": 300}
"""Names of transports, for 300 tokens."""


def cases(ranks: int) -> dict[str, Trip]:
    common = {"tokens": 300, "hidden": 2048, "dtype": BF16, "device": "cuda"}
    found: dict[str, Trip] = {}
    for name, layout in LAYOUTS[ranks].items():
        for transport, block in BLOCKS.items():
            label = f"{name}, {transport}"
            found[f"trip {label}"] = Trip("symm", layout, block=block, **common)
            found[f"captured {label}"] = CapturedTrip("symm", layout, block=block, **common)
            beside = TripBesideProducts("symm", layout, block=block, **common)
            found[f"captured {label}, beside products"] = beside
        found[f"trip {name}, {LAST}"] = Trip("symm", layout, LAST, 50, top_k=2, **common)
    first = next(iter(LAYOUTS[ranks].values()))
    for transport, block in BLOCKS.items():
        narrow = common | {"hidden": 36, "dtype": torch.float32}
        found[f"trip narrow rows, {transport}"] = Trip("symm", first, block=block, top_k=1, **narrow)
        found[f"replays {transport}"] = ManyReplays("symm", first, block=block, **common)
        found[f"no waiting {transport}"] = NoWaiting("symm", first, block=block, **common)
        short = Trip("symm", first, block=min(block, 100), rows=100 * ranks, **common)
        found[f"short {transport}"] = short
    found["growing"] = Growing("symm", first, block=20, **common)
    return found


RANKS = 4 if torch.cuda.device_count() >= 4 else 2
CASES = cases(RANKS)


def of_vendor(kind: str, ranks: int) -> dict[str, Trip]:
    common = {"tokens": 300, "hidden": 512, "dtype": BF16, "device": "cuda"}
    layout = Layout(dp=ranks, ep=ranks)
    if ranks == 4:
        return {"natural": Trip(kind, layout, **common)}
    named = {routing: (layout, routing, None) for routing in ("natural", SECOND, OWN)}
    if kind == "nvshmem":
        named |= {"etp": (Layout(dp=2, etp=2), "natural", None), "just room": (layout, SECOND, 600)}
    found: dict[str, Trip] = {}
    for name, (of_case, routing, rows) in named.items():
        found[name] = Trip(kind, of_case, routing, rows=rows, **common)
        found[f"captured {name}"] = CapturedTrip(kind, of_case, routing, rows=rows, **common)
    if kind == "nvshmem":
        found["overflow"] = Trip(kind, layout, SECOND, rows=599, **common)
        found["natural again"] = Trip(kind, layout, **common)
    return found


VENDORS = ("deepep", "nvshmem")
NAMES = [(kind, name) for kind in VENDORS for name in of_vendor(kind, 2) if name.split()[0] != "captured"]
NAMES = [(kind, name) for kind, name in NAMES if name != "overflow"]


def named(kind: str) -> list[str]:
    return [name for name in CASES if name.startswith(kind)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("ranks"), CASES, RANKS, device="cuda").results(seconds=500)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Results of all cases of a vendor's dispatcher on so many GPUs, by rank."""
    known = {}

    def of(kind, ranks=2):
        there = is_installed("deep_ep") if kind == "deepep" else torch.cuda.is_available() and has_nvshmem()
        if not there:
            pytest.skip(f"{kind} is not installed")
        if torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs")
        if (kind, ranks) not in known:
            job = Job(tmp_path_factory.mktemp("ranks"), of_vendor(kind, ranks), ranks, device="cuda")
            known[kind, ranks] = job.results(seconds=300)
        return known[kind, ranks]

    return of


GROUPS = [(2, 1, 1), (4, 2, 3), (8, 1, 6), (3, 1, 2)]
ROWS = [(torch.float32, 2048), (BF16, 7168 + 8), (torch.float32, 37)]


@pytest.mark.parametrize("block", [0, 40, 400])
@pytest.mark.parametrize(
    ("group", "row"),
    [(group, (BF16, 2048)) for group in GROUPS] + [(GROUPS[1], row) for row in ROWS],
    ids=str,
)
def test_emulated_ranks_on_one_gpu_exchange_as_alltoall_does(group, row, block):
    (ranks, etp, slots), (dtype, columns) = group, row
    case = Case(ranks, slots, etp, block, dtype, columns, tokens=333, experts=4, device="cuda")
    assert_exchanges_are_those_of_alltoall(case)


@pytest.mark.parametrize("block", [0, 40, 400])
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_emulated_ranks_on_one_gpu_send_rows_in_8_bits(group, block):
    ranks, etp, slots = group
    case = Case(ranks, slots, etp, block, BF16, 2048, tokens=333, experts=4, device="cuda")
    assert_stored_rows_are_rounded_arrivals(case)


@pytest.mark.parametrize("name", named("trip"))
def test_values_and_gradients_are_bitwise_those_of_alltoall(results, name):
    for found in results[name]:
        found.assert_bitwise()


@pytest.mark.parametrize("name", named("short"))
def test_rows_that_do_not_fit_are_left_out(results, name):
    assert sum(found.lost(CASES[name].num_rows) for found in results[name]) > 0


def assert_replayed(replayed, wanted) -> None:
    for captured, plain in zip(replayed.captured, replayed.plain, strict=True):
        assert captured.equal(plain)
    out, dh, dweight = replayed.captured[:3]
    assert out.equal(wanted["out"]) and dh.equal(wanted["dh"]) and dweight.equal(wanted["dweight"])


@pytest.mark.parametrize("name", named("captured"))
def test_replay_with_new_routing_is_bitwise_the_uncaptured_run_and_alltoall(results, name):
    for replayed, wanted in results[name]:
        assert_replayed(replayed, wanted)


@pytest.mark.parametrize("name", named("replays"))
def test_graphs_and_eager_runs_in_turns_stay_bitwise_those_of_alltoall(results, name):
    for outcomes in results[name]:
        assert len(outcomes) == 6
        for outcome in outcomes:
            assert all(found.equal(wanted) for found, wanted in outcome.values())


@pytest.mark.parametrize("name", named("no waiting"))
def test_the_host_does_not_wait_for_the_device(results, name):
    assert all(results[name])


def test_memory_grows_outside_captures_only(results):
    for said in results["growing"]:
        assert "a capture cannot allocate" in said


@pytest.mark.parametrize("kind, name", NAMES)
def test_a_trip_by_a_vendor_gives_bitwise_what_alltoall_gives(outcomes, kind, name):
    for found in outcomes(kind)[name]:
        found.assert_bitwise()  # the order of a sum of two does not show
        live = len(found.wanted["number"])
        assert int(found.actual["room"]) == live and (found.actual["number"][live:] == -1).all()


@pytest.mark.parametrize("kind, name", [each for each in NAMES if each[1] != "natural again"])
def test_a_captured_trip_replays_on_other_tokens_without_the_host(outcomes, kind, name):
    for replayed, wanted in outcomes(kind)[f"captured {name}"]:
        assert_replayed(replayed, wanted)
        number, room = replayed.captured[3:]
        assert int(room) == len(wanted["number"]) and number[: int(room)].equal(wanted["number"])


@pytest.mark.parametrize("kind", VENDORS)
def test_a_trip_between_four_gpus_gives_what_alltoall_gives(outcomes, kind):
    for found in outcomes(kind, 4)["natural"]:
        wanted, actual, live = found.wanted, found.actual, len(found.wanted["number"])
        assert int(actual["room"]) == live and actual["received"][:live].equal(wanted["received"])
        assert_forward_close(actual["out"], wanted["out"])
        for key in ("dh", "dweight"):
            assert_gradient_close(actual[key], wanted[key])


def test_where_rows_do_not_fit_nothing_is_sent_and_nothing_is_overwritten(outcomes):
    for rank, found in enumerate(outcomes("nvshmem")["overflow"]):
        assert int(found.actual["room"]) == [0, 600][rank]
        assert (found.actual["number"] == -1).all()
        assert not found.actual["out"].any() and not found.actual["dh"].any()
