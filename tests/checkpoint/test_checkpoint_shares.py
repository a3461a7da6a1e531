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
