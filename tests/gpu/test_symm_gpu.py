"""The operations of symm on GPUs: between emulated ranks on one, and between two or four ranks.

Two ranks share the GPU where there is one.
"""

from __future__ import annotations

import pytest
import torch

from graphmoe.plan.layout import Layout
from tests.distributed.ranks import Job
from tests.distributed.symm_trips import SymmTrip
from tests.emulated_peers import Emulation
from tests.gpu.symm_ranks import CapturedTrip, Growing, ManyReplays, NoWaiting, TripBesideProducts
from tests.ops.symm_cases import Case, assert_exchanges_are_those_of_alltoall

BF16 = torch.bfloat16
LAYOUTS = {
    2: {"ep": Layout(dp=2, ep=2), "etp": Layout(dp=2, etp=2)},
    4: {"ep": Layout(dp=4, ep=4), "ep etp": Layout(dp=4, ep=2, etp=2), "ep edp": Layout(dp=4, ep=2)},
}
LAST = "all on the last two experts"
BLOCKS = {"pull": 0, "copies and pull": 100, "copies": 300}
"""Names of transports, for 300 tokens."""


def cases(ranks: int) -> dict[str, SymmTrip]:
    """Trips that a number of ranks runs, by name."""
    common = {"tokens": 300, "hidden": 2048, "dtype": BF16, "device": "cuda"}
    found: dict[str, SymmTrip] = {}
    for name, layout in LAYOUTS[ranks].items():
        for transport, block in BLOCKS.items():
            label = f"{name}, {transport}"
            found[f"trip {label}"] = SymmTrip(layout, block=block, **common)
            found[f"captured {label}"] = CapturedTrip(layout, block=block, **common)
            found[f"captured {label}, beside products"] = TripBesideProducts(layout, block=block, **common)
        found[f"trip {name}, {LAST}"] = SymmTrip(layout, LAST, 50, top_k=2, **common)
    first = next(iter(LAYOUTS[ranks].values()))
    for transport, block in BLOCKS.items():
        narrow = common | {"hidden": 36, "dtype": torch.float32}
        found[f"trip narrow rows, {transport}"] = SymmTrip(first, block=block, top_k=1, **narrow)
        found[f"replays {transport}"] = ManyReplays(first, block=block, **common)
        found[f"no waiting {transport}"] = NoWaiting(first, block=block, **common)
        found[f"short {transport}"] = SymmTrip(first, block=min(block, 100), rows=100 * ranks, **common)
    found["growing"] = Growing(first, block=20, **common)
    return found


RANKS = 4 if torch.cuda.device_count() >= 4 else 2
CASES = cases(RANKS)


def named(kind: str) -> list[str]:
    return [name for name in CASES if name.startswith(kind)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each case, by rank."""
    return Job(tmp_path_factory.mktemp("ranks"), CASES, RANKS, device="cuda").results(seconds=500)


@pytest.mark.parametrize("block", [0, 40, 400])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(("ranks", "etp", "slots"), [(2, 1, 1), (4, 2, 3), (8, 1, 6), (3, 1, 2)])
def test_emulated_ranks_on_one_gpu_exchange_as_alltoall_does(ranks, etp, slots, dtype, block):
    for columns in (2048, 7168 + 8, 37):
        case = Case(ranks, slots, etp, block, dtype, columns, tokens=333, experts=4, device="cuda")
        assert_exchanges_are_those_of_alltoall(case)


@pytest.mark.parametrize("block", [0, 100])
def test_emulated_ranks_on_one_gpu_leave_out_rows_that_do_not_fit(block):
    emulation = Emulation(4, "cuda")
    for rows in (400, 411, 700):
        case = Case(4, 3, 1, block, BF16, 2048, tokens=333, rows=rows, device="cuda")
        assert_exchanges_are_those_of_alltoall(case, emulation)


@pytest.mark.parametrize("name", named("trip"))
def test_values_and_gradients_are_bitwise_those_of_alltoall(results, name):
    for found in results[name]:
        assert found.wanted["number"].equal(found.number_NK[found.live_A])
        for key in ("out", "received", "received_weight", "dh", "dweight"):
            assert found.actual[key].equal(found.wanted[key]), key


@pytest.mark.parametrize("name", named("short"))
def test_rows_that_do_not_fit_are_left_out(results, name):
    lost = 0
    for found in results[name]:
        fits = found.live_A < CASES[name].num_rows
        lost += int((~fits).sum())
        assert found.actual["received"].equal(found.wanted["received"][fits])
        assert found.number_NK[found.live_A[fits]].equal(found.wanted["number"][fits])
        assert all(bool(found.actual[key].isfinite().all()) for key in ("out", "dh", "dweight"))
    assert lost > 0


@pytest.mark.parametrize("name", named("captured"))
def test_replay_with_new_routing_is_bitwise_the_uncaptured_run_and_alltoall(results, name):
    for replayed, wanted in results[name]:
        for captured, plain in zip(replayed.captured, replayed.plain, strict=True):
            assert captured.equal(plain)
        out, dh, dweight = replayed.captured[:3]
        assert out.equal(wanted["out"]) and dh.equal(wanted["dh"]) and dweight.equal(wanted["dweight"])


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
        assert "no capture can make more" in said
