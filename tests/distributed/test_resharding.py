"""Checkpoints that one layout of ranks wrote, read by others: the whole parameters are the same bits.

A state of parameters that are known, as the ranks of a layout hold it with ZeRO-1.
"""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphmoe.checkpoint import CheckpointError
from graphmoe.checkpoint.entries import flatten, local_part
from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.folders import MismatchError
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import CheckpointConfig
from graphmoe.plan.layout import ALONE, REPLICATED, Cut, Layout, ParameterLayout, own_part
from graphmoe.runtime.ranks import Ranks
from tests.damage import flip_bit
from tests.distributed.ranks import Case, run_ranks

pytestmark = pytest.mark.slow
ATTENTION = ParameterLayout((Cut(0, "tp"),), "dp_cp")
PARAMETERS: dict[str, tuple[tuple[int, ...], ParameterLayout]] = {
    "norm.weight": ((7,), REPLICATED),
    "temperature": ((), REPLICATED),
    "router.weight": ((5, 3), REPLICATED),
    "qkv.weight": ((8, 6), ATTENTION),
    "out.weight": ((6, 8), ParameterLayout((Cut(1, "tp"),), "dp_cp")),
    "gate_up.weight": ((16, 5), ParameterLayout((Cut(0, "tp", 2),), "dp_cp")),
    "experts.w_gate_up": ((8, 8, 3), ParameterLayout((Cut(0, "ep"), Cut(1, "etp", 2)), "edp")),
    "experts.w_down": ((8, 3, 8), ParameterLayout((Cut(0, "ep"), Cut(2, "etp")), "edp")),
    "nothing": ((0, 4), REPLICATED),
}


def whole(name: str, kind: str, step: int) -> Tensor:
    random = torch.Generator().manual_seed(step * 1000 + list(PARAMETERS).index(name) * 10 + len(kind))
    value = torch.randn(PARAMETERS[name][0], generator=random)
    return value.bfloat16() if kind == "model" else value


def whole_state(step: int, part: Callable[[str, str, int], Any] = whole) -> dict[str, Any]:
    kinds = ("model", "main", "exp_avg")
    model, main, moment = ({name: part(name, kind, step) for name in PARAMETERS} for kind in kinds)
    optimizer = {"main": main, "exp_avg": moment}
    return {"model": model, "optimizer": optimizer, "loader": {"position": step}, "step": step}


def state_of_rank(layout: Layout, rank: int, step: int) -> dict[str, Any]:
    """State of a rank after a step; 0 for a state to load into, of other numbers."""

    def held(name: str, kind: str, step: int) -> Tensor | FlatShard:
        parallel = PARAMETERS[name][1]
        part = own_part(whole(name, kind, step), parallel, layout, rank).contiguous()
        if kind == "model":
            return FlatShard.from_part(part, parallel, layout, rank) if parallel.cuts else part
        index, size = layout.index(parallel.summed_over, rank), layout.size(parallel.summed_over)
        # shares of one size, less 2 elements for the first: ranges that are no rows, and empty ones
        bounds = [0, *(max(part.numel() * i // size - 2, 0) for i in range(1, size)), part.numel()]
        start, stop = bounds[index], bounds[index + 1]
        flat = torch.cat([torch.zeros(3), part.reshape(-1)[start:stop]])
        return FlatShard(flat[3:], start, part.shape, parallel, layout, rank)

    return whole_state(step, held)


def differing(state: dict[str, Any], other: dict[str, Any]) -> list[str]:
    ours, theirs = flatten(state), flatten(other)
    assert ours.names == theirs.names
    names = [name for name, value in ours.values.items() if value != theirs.values[name]]
    for name, tensor in ours.tensors.items():
        left, right = local_part(tensor), local_part(theirs.tensors[name])
        if left.dtype != right.dtype or not torch.equal(left, right):
            names.append(name)
    return sorted(names)


def save(layout: Layout, steps: tuple[int, ...], async_save: bool, ranks: Ranks, folder: Path) -> None:
    store = CheckpointStore(folder, CheckpointConfig(async_save=async_save, keep_last=9))
    state = state_of_rank(layout, ranks.rank, 0)
    for step in steps:
        for tensor, value in _pairs(state, state_of_rank(layout, ranks.rank, step)):
            tensor.copy_(value)
        store.save(step, state | {"loader": {"position": step}, "step": step})
        for tensor, _ in _pairs(state, state):
            tensor.fill_(-1)
    store.close()


def load(layout: Layout, source: str, ranks: Ranks, folder: Path) -> tuple[int | None, list[str]]:
    state = state_of_rank(layout, ranks.rank, 0)
    step = CheckpointStore.open_any(folder.parent / source).load(state)
    return step, differing(state, state_of_rank(layout, ranks.rank, step or 0))


def _pairs(state: dict[str, Any], other: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    theirs = flatten(other).tensors
    return [(local_part(t), local_part(theirs[name])) for name, t in flatten(state).tensors.items()]


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
TWO = {"dp2": Layout(dp=2), "tp2 ep2": Layout(tp=2, ep=2)}


def what_does_not_fit_is_reported_with_whole_shapes(ranks: Ranks, folder: Path) -> None:
    layout = LAYOUTS["dp2 tp2"]
    state = state_of_rank(layout, ranks.rank, 0)
    main, part = state["optimizer"]["main"], torch.zeros(3, 6)
    main["qkv.weight"] = FlatShard.from_part(part, ATTENTION, layout, ranks.rank)
    main["lost"] = FlatShard(torch.zeros(0), 5, torch.Size((5,)), REPLICATED, layout, ranks.rank)
    if ranks.rank == 3:
        main["norm.weight"] = FlatShard.from_part(torch.zeros(7).half(), REPLICATED, layout, 3)
        main["router.weight"] = torch.zeros(3, 5)
    store = CheckpointStore.open_any(folder.parent / FOLDERS[0])
    with pytest.raises(MismatchError, match="in 4 entries") as error:
        store.load(state)
    assert not part.any()
    for said in (
        "optimizer.main.qkv.weight is [6, 6] float32 here, [8, 6] float32 in the checkpoint",
        "missing in the checkpoint: optimizer.main.lost [5] float32",
        "optimizer.main.norm.weight is [7] float16 here, [7] float32 in the checkpoint",
        "optimizer.main.router.weight is [3, 5] float32 here, [5, 3] float32 in",
    ):
        assert said in str(error.value)


def shards_that_leave_elements_out_or_overlap_are_not_saved(ranks: Ranks, folder: Path) -> None:
    """Save a parameter whose last element rank 2 has lost, and one that two ranks hold apart."""
    layout, store = LAYOUTS["dp4"], CheckpointStore(folder, CheckpointConfig())
    store.save(1, {"w": torch.ones(1)}, wait=True)
    count = 1 if ranks.rank == 2 else 2
    shard = FlatShard(torch.zeros(count), 2 * ranks.rank, torch.Size((8,)), REPLICATED, layout, ranks.rank)
    twice = FlatShard(torch.zeros(3), ranks.rank, torch.Size((8,)), REPLICATED, layout, ranks.rank)
    with pytest.raises(CheckpointError) as error:
        store.save(2, {"w": shard, "twice": twice}, wait=True)
    assert store.latest() == [1]
    assert "the ranks hold 7 of the 8 elements of w" in str(error.value)
    assert "the ranks hold 12 of the 8 elements of twice" in str(error.value)
    assert "earlier checkpoints are intact: [1]" in str(error.value)


def a_rank_may_own_nothing_of_what_others_share(ranks: Ranks, folder: Path) -> None:
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
    found = {name: shard.data.tolist() for name, shard in state["main"].items()}
    assert found == ({"w": [1.0] * 4} if ranks.rank in (1, 2) else {})


def damage_of_one_ranks_file_is_seen_by_all_and_the_previous_read(ranks: Ranks, folder: Path) -> None:
    save(LAYOUTS["dp2 tp2"], (1, 2), False, ranks, folder)
    ranks.on_first(lambda: flip_bit(folder / "step_00000002" / "__2_0.distcp"))
    assert load(LAYOUTS["ep4"], folder.name, ranks, folder) == (1, [])


STATES = (
    what_does_not_fit_is_reported_with_whole_shapes,
    shards_that_leave_elements_out_or_overlap_are_not_saved,
    a_rank_may_own_nothing_of_what_others_share,
    damage_of_one_ranks_file_is_seen_by_all_and_the_previous_read,
)


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[Any]]:
    def loads(layouts: dict[str, Layout]) -> dict[str, Case]:
        pairs = itertools.product([*FOLDERS, "alone"], layouts.items())
        return {
            f"{source} -> {name}": functools.partial(load, layout, source) for source, (name, layout) in pairs
        }

    CheckpointStore(folder / "alone", CheckpointConfig()).save(3, whole_state(3), wait=True)
    cases: dict[str, Case] = {}
    for name in FOLDERS:
        layout, _, how = name.rpartition(" ")
        cases[name] = functools.partial(save, LAYOUTS[layout], (1, 2), how == "async")
    cases |= loads(LAYOUTS) | {case.__name__: case for case in STATES}
    return run_ranks(folder, cases, num_ranks=4) | run_ranks(folder, loads(TWO), num_ranks=2)


@pytest.mark.parametrize("layout", [*LAYOUTS, *TWO])
@pytest.mark.parametrize("source", [*FOLDERS, "alone"])
def test_each_layout_reads_what_each_wrote(results, source, layout):
    by_rank = results[f"{source} -> {layout}"]
    assert by_rank == [(3 if source == "alone" else 2, [])] * len(by_rank)


@pytest.mark.parametrize("source", FOLDERS)
def test_one_process_reads_whole_tensors_that_any_layout_wrote(folder, results, source):
    store, shards = CheckpointStore.open_any(folder / source), state_of_rank(ALONE, 0, 0)
    for step in (1, 2):
        state = whole_state(0)
        assert store.load(state, step) == step and differing(state, whole_state(step)) == []
    assert store.load(shards) == 2 and differing(shards, state_of_rank(ALONE, 0, 2)) == []


@pytest.mark.parametrize("state", [case.__name__ for case in STATES])
def test_each_rank_finds_that(results, state):
    assert results[state] == [None] * 4
