"""Which rank saves what several ranks name."""

from pathlib import Path

import torch

from graphmoe.checkpoint import CheckpointStore
from graphmoe.checkpoint.shares import assign
from graphmoe.config.schema import CheckpointConfig
from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import run_ranks


def test_shares_are_even_and_each_name_is_saved_once():
    sizes = {f"w{number}": 10 + number for number in range(30)}
    writers = assign([sizes, sizes, sizes])
    assert writers.keys() == sizes.keys()
    loads = [sum(sizes[name] for name in sizes if writers[name] == rank) for rank in range(3)]
    assert max(loads) - min(loads) <= 10


def test_what_one_rank_alone_names_is_its_own():
    writers = assign([{"shared": 8, "rng.rank0": 100}, {"shared": 8, "rng.rank1": 4}])
    assert writers == {"rng.rank0": 0, "rng.rank1": 1, "shared": 1}


def test_what_ranks_hold_alone_counts_before_the_rest_is_shared_out():
    assert assign([{"own": 50, "a": 60}, {"a": 60}]) == {"own": 0, "a": 1}


def test_the_order_of_names_makes_no_difference():
    assert assign([{"a": 1, "b": 1}, {"b": 1, "a": 1}]) == assign([{"b": 1, "a": 1}, {"a": 1, "b": 1}])


def copied(ranks: Ranks, folder: Path) -> set[str]:
    """The tensors that a save in the background copies to this rank's host memory."""
    store = CheckpointStore(folder, CheckpointConfig())
    same = {f"w{number}": torch.ones(100 + number) for number in range(4)}
    store.save(1, {**same, f"rng.rank{ranks.rank}": torch.ones(1), "step": 1})
    names = set(store._copies._buffers)
    store.close()
    return names


def test_a_rank_copies_only_what_it_saves_to_its_host(tmp_path):
    first, second = run_ranks(tmp_path, {"copied": copied})["copied"]
    assert first == {"w3", "w0", "rng.rank0"} and second == {"w2", "w1", "rng.rank1"}
    state = {"step": 0, **{f"w{number}": torch.zeros(100 + number) for number in range(4)}}
    assert CheckpointStore.open_any(tmp_path / "copied").load(state, partial=True) == 1
    assert all(state[f"w{number}"].sum() == 100 + number for number in range(4)) and state["step"] == 1
