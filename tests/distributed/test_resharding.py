"""Checkpoints that one layout of ranks wrote, read by others: the whole parameters are the same bits."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from graphmoe.checkpoint import CheckpointError
from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.folders import MismatchError
from graphmoe.checkpoint.metadata_file import read_metadata
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import CheckpointConfig
from graphmoe.plan.layout import ALONE, REPLICATED, Layout
from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import Case, run_ranks
from tests.distributed.sharded_state import (
    ATTENTION,
    PARAMETERS,
    differing,
    load,
    save,
    state_of_rank,
    whole_state,
)

pytestmark = pytest.mark.slow

LAYOUTS = {
    "dp4": Layout(dp=4),
    "dp2 tp2": Layout(dp=2, tp=2),
    "ep2 etp2": Layout(dp=4, ep=2, etp=2),
    "etp2": Layout(dp=4, etp=2),
    "tp4": Layout(tp=4),
    "ep4": Layout(dp=4, ep=4),
    "cp2 tp2 ep4": Layout(cp=2, tp=2, ep=4),
}
FOLDERS = ["dp4 async", "dp2 tp2 sync", "ep2 etp2 async", "etp2 sync"]
"""Layouts that write, and how."""
TWO = {"dp2": Layout(dp=2), "tp2 ep2": Layout(tp=2, ep=2)}


def unfit_state(ranks: Ranks, folder: Path) -> str:
    state = state_of_rank(LAYOUTS["dp2 tp2"], ranks.rank, 0)
    layout = LAYOUTS["dp2 tp2"]
    main, part = state["optimizer"]["main"], torch.zeros(3, 6)
    main["qkv.weight"] = FlatShard.from_part(part, ATTENTION, layout, ranks.rank)
    main["lost"] = FlatShard(torch.zeros(0), 5, torch.Size((5,)), REPLICATED, layout, ranks.rank)
    if ranks.rank == 3:
        main["norm.weight"] = FlatShard.from_part(torch.zeros(7).half(), REPLICATED, layout, 3)
        main["router.weight"] = torch.zeros(3, 5)
    store = CheckpointStore.open_any(folder.parent / FOLDERS[0])
    with pytest.raises(MismatchError) as error:
        store.load(state)
    assert not part.any()
    return str(error.value)


def elements_that_nobody_holds(ranks: Ranks, folder: Path) -> str:
    """Save a parameter whose last element rank 2 has lost, and one that two ranks hold apart."""
    layout, store = LAYOUTS["dp4"], CheckpointStore(folder, CheckpointConfig())
    store.save(1, {"w": torch.ones(1)}, wait=True)
    count = 1 if ranks.rank == 2 else 2
    shard = FlatShard(torch.zeros(count), 2 * ranks.rank, torch.Size((8,)), REPLICATED, layout, ranks.rank)
    twice = FlatShard(torch.zeros(3), ranks.rank, torch.Size((8,)), REPLICATED, layout, ranks.rank)
    with pytest.raises(CheckpointError) as error:
        store.save(2, {"w": shard, "twice": twice}, wait=True)
    assert store.latest() == [1]
    return str(error.value)


def a_rank_that_owns_nothing(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Save a tensor in two halves, and load the tensor where another rank holds none of it."""

    def shards(first: int, value: float) -> dict[str, FlatShard]:
        if ranks.rank not in (first, first + 1):
            return {}
        data, start = torch.full((4,), value), 4 * (ranks.rank - first)
        return {"w": FlatShard(data, start, torch.Size((8,)), REPLICATED, LAYOUTS["dp4"], ranks.rank)}

    store = CheckpointStore(folder, CheckpointConfig())
    store.save(1, {"main": shards(2, 1.0), "step": 1}, wait=True)
    state = {"main": shards(1, 0.0), "step": 0}
    assert store.load(state) == 1
    return {name: shard.data.tolist() for name, shard in state["main"].items()}


def damaged(ranks: Ranks, folder: Path) -> tuple[int | None, list[str]]:
    save(LAYOUTS["dp2 tp2"], (1, 2), False, ranks, folder)
    path = folder / "step_00000002" / "__2_0.distcp"
    content = path.read_bytes()
    ranks.barrier()
    if ranks.is_first:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    ranks.barrier()
    return load(LAYOUTS["ep4"], folder.name, ranks, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resharding")
    store = CheckpointStore(root / "alone", CheckpointConfig())
    store.save(3, whole_state(3), wait=True)
    return root


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[Any]]:
    cases: dict[str, Case] = {}
    for name in FOLDERS:
        layout, _, how = name.rpartition(" ")
        cases[name] = functools.partial(save, LAYOUTS[layout], (1, 2), how == "async")
    for source, layout in itertools.product([*FOLDERS, "alone"], LAYOUTS):
        cases[f"{source} -> {layout}"] = functools.partial(load, LAYOUTS[layout], source)
    others = (unfit_state, elements_that_nobody_holds, a_rank_that_owns_nothing, damaged)
    return run_ranks(folder, cases | {case.__name__: case for case in others}, num_ranks=4)


@pytest.fixture(scope="module")
def two_ranks(folder: Path, results: dict[str, list[Any]]) -> dict[str, list[Any]]:
    cases = {
        f"{source} -> {layout}": functools.partial(load, TWO[layout], source)
        for source, layout in itertools.product([*FOLDERS, "alone"], TWO)
    }
    return run_ranks(folder, cases, num_ranks=2)


@pytest.mark.parametrize("layout", [*LAYOUTS, *TWO])
@pytest.mark.parametrize("source", [*FOLDERS, "alone"])
def test_each_layout_reads_what_each_wrote(results, two_ranks, source, layout):
    by_rank = (two_ranks if layout in TWO else results)[f"{source} -> {layout}"]
    assert by_rank == [(3 if source == "alone" else 2, [])] * len(by_rank)


@pytest.mark.parametrize("source", FOLDERS)
def test_one_process_reads_whole_tensors_that_any_layout_wrote(folder, results, source):
    store, shards = CheckpointStore.open_any(folder / source), state_of_rank(ALONE, 0, 0)
    for step in (1, 2):
        state = whole_state(0)
        assert store.load(state, step) == step and differing(state, whole_state(step)) == []
    assert store.load(shards) == 2 and differing(shards, state_of_rank(ALONE, 0, 2)) == []


@pytest.mark.parametrize("source", FOLDERS)
def test_each_element_is_written_once(folder, results, source):
    saved = read_metadata(folder / source / "step_00000002")
    for name in PARAMETERS:
        for entry in (f"model.{name}", f"optimizer.main.{name}", f"optimizer.exp_avg.{name}"):
            size = saved.state_dict_metadata[entry].size
            held = torch.zeros(size, dtype=torch.int64)
            for chunk in saved.state_dict_metadata[entry].chunks:
                held[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
            assert bool((held == 1).all()) and tuple(size) == PARAMETERS[name][0], entry


def test_all_that_does_not_fit_is_reported_with_whole_shapes(results):
    reports = set(results["unfit_state"])
    (report,) = reports
    assert "optimizer.main.qkv.weight is [6, 6] float32 here, [8, 6] float32 in the checkpoint" in report
    assert "missing in the checkpoint: optimizer.main.lost [5] float32" in report
    assert "optimizer.main.norm.weight is [7] float16 here, [7] float32 in the checkpoint" in report
    assert "optimizer.main.router.weight is [3, 5] float32 here, [5, 3] float32 in" in report
    assert "in 4 entries" in report


def test_shards_that_leave_elements_out_or_overlap_are_not_saved(results):
    for report in results["elements_that_nobody_holds"]:
        assert "the ranks hold 7 of the 8 elements of w" in report
        assert "the ranks hold 12 of the 8 elements of twice" in report
        assert "earlier checkpoints are intact: [1]" in report


def test_a_rank_may_own_nothing_of_what_others_share(results):
    some = {"w": [1.0] * 4}
    assert results["a_rank_that_owns_nothing"] == [{}, some, some, {}]


def test_damage_of_one_ranks_file_is_seen_by_all_and_the_previous_checkpoint_read(results):
    assert results["damaged"] == [(1, [])] * 4
