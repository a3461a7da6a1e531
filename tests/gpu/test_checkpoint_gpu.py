"""Checkpoints of tensors on a GPU."""

import pytest
import torch

from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import CheckpointConfig
from graphmoe.plan.layout import ALONE, Cut, Layout, ParameterLayout, own_part


def test_tensors_changed_after_save_returns_are_saved_as_they_were(tmp_path):
    store = CheckpointStore(tmp_path, CheckpointConfig(keep_last=9))
    weight = torch.zeros(4096, 4096, device="cuda")
    empty, count = torch.zeros(0, 3, device="cuda"), torch.tensor(0, device="cuda")
    for step in (1, 2, 3):
        torch.cuda._sleep(50_000_000)  # the copy must wait for work that is queued before it
        weight.fill_(step)
        count.fill_(step)
        state = {"w": weight, "t": weight.t()[:7], "empty": empty, "count": count, "cpu": torch.ones(2)}
        store.save(step, state)
        weight.fill_(-1)
    store.close()
    for step in (1, 2, 3):
        state = {"w": torch.zeros(4096, 4096), "t": torch.zeros(7, 4096, device="cuda")}
        state |= {"empty": torch.zeros(0, 3), "count": torch.tensor(9), "cpu": torch.zeros(2, device="cuda")}
        store.load(state, step)
        assert bool((state["w"] == step).all()) and bool((state["t"] == step).all())
        assert (state["count"].item(), state["cpu"].tolist()) == (step, [1, 1])


def test_snapshots_lie_in_pinned_memory_that_is_reused(tmp_path):
    store = CheckpointStore(tmp_path, CheckpointConfig())
    state = {"w": torch.ones(1000, device="cuda")}
    first, second = (store._copies.copy(state)["w"] for _ in range(2))
    assert first.is_pinned() and first.data_ptr() == second.data_ptr()
    larger = store._copies.copy({"w": torch.ones(10_000, device="cuda")})["w"]
    assert larger.is_pinned() and larger.sum() == 10_000
    store._copies.close()
    store.save(1, state)
    store.close()
    store.load(loaded := {"w": torch.zeros(1000)})
    assert loaded["w"].sum() == 1000


@pytest.mark.parametrize("async_save", [True, False])
def test_flat_shards_on_the_gpu_are_saved_as_they_were_and_filled_in_place(tmp_path, async_save):
    gate_up = ParameterLayout((Cut(1, "tp", 2),), "dp_cp")
    whole, store = torch.randn(3, 16, 5), CheckpointStore(tmp_path, CheckpointConfig(async_save=async_save))
    saved = FlatShard.from_part(whole.cuda(), gate_up, ALONE, 0)
    store.save(1, {"w": saved})
    if async_save:
        assert store._copies._memory.is_pinned()
        saved.data.fill_(-1)
    store.close()
    for rank in range(2):
        part = own_part(whole, gate_up, Layout(tp=2), rank)
        buffer = torch.zeros(120, device="cuda")
        shard = FlatShard(buffer[3:110], 7, part.shape, gate_up, Layout(tp=2), rank)
        store.load({"w": shard})
        assert torch.equal(buffer[3:110].cpu(), part.reshape(-1)[7:114])
        assert not buffer[:3].any() and not buffer[110:].any()
