"""Processes that are killed while they save, and processes that save together."""

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch

from graphmoe.checkpoint import CheckpointError, folders
from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import CheckpointConfig
from graphmoe.plan.layout import REPLICATED, Layout
from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import run_ranks
from tests.forked import FORKS


def state_at(step: int) -> dict:
    layers = {str(layer): torch.full((250_000,), float(step)) for layer in range(4)}
    return {"model": layers, "counters": {"step": step}}


def run_child(target, *arguments) -> BaseProcess:
    child = FORKS.Process(target=target, args=arguments, daemon=True)
    child.start()
    return child


def newest(folder: Path) -> int:
    state = state_at(0)
    step = CheckpointStore(folder, CheckpointConfig()).load(state)
    assert step is not None and state["counters"]["step"] == step
    assert all(bool((layer == step).all()) for layer in state["model"].values())
    assert all(path.name.startswith("step_") and "." not in path.name for path in folder.iterdir())
    return step


def save_for_ever(folder: Path, async_save: bool) -> None:
    torch.set_num_threads(1)
    store = CheckpointStore(folder, CheckpointConfig(async_save=async_save))
    step = (store.latest() or [0])[0]
    while True:
        step += 1
        store.save(step, state_at(step))


def wait_until_ended(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 10
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline
                time.sleep(0.01)


@pytest.mark.parametrize("victim", ["trainer", "saver", "trainer that waits"])
def test_killed_at_random_moments_the_newest_whole_checkpoint_is_right(tmp_path, victim):
    delays, last, async_save = random.Random(5), 0, victim != "trainer that waits"
    for _ in range(4):
        child = run_child(save_for_ever, tmp_path, async_save)
        deadline = time.monotonic() + 30
        while (folders.saved_steps(tmp_path) or [0])[0] <= last and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(delays.uniform(0, 0.15))
        savers = psutil.Process(child.pid).children()
        assert len(savers) == async_save
        if victim == "saver":
            savers[0].kill()
            child.join(0.3)  # between two saves another saver is started
            savers = psutil.Process(child.pid).children() if child.is_alive() else []
        child.kill()
        child.join()
        assert child.exitcode in (-signal.SIGKILL, 1 if victim == "saver" else -signal.SIGKILL)
        wait_until_ended(savers)
        step = newest(tmp_path)
        assert step > last
        last = step


def die(*arguments, **settings):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_publishing(self: Path, to: Path, rename=Path.rename) -> None:
    die() if ".tmp-" in self.name else rename(self, to)


STAGES = {
    "before the manifest": (CheckpointStore, "_publish", die, 1),
    "before the rename": (folders, "publish", die, 1),
    "between the renames": (Path, "rename", die_in_publishing, 1),
    "while deleting": (shutil, "rmtree", die, 2),
}
"""What dies at each stage of a save, and the step that is left."""


def save_and_die(folder: Path, stage: str) -> None:
    torch.set_num_threads(1)
    store = CheckpointStore(folder, CheckpointConfig(keep_last=1))
    store.save(1, state_at(1), wait=True)
    setattr(*STAGES[stage][:3])
    step = 1 if stage == "between the renames" else 2
    store.save(step, state_at(step), wait=True)


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_each_stage_of_a_save_a_whole_checkpoint_stays(tmp_path, stage):
    child = run_child(save_and_die, tmp_path, stage)
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert newest(tmp_path) == STAGES[stage][-1]


def save_slowly_and_leave(folder: Path) -> None:
    store = CheckpointStore(folder, CheckpointConfig())
    folders.publish = lambda *arguments: time.sleep(60)
    store.save(1, {"x": 1})


def test_a_save_in_the_background_does_not_keep_the_process_alive(tmp_path):
    child = run_child(save_slowly_and_leave, tmp_path)
    child.join(20)
    assert child.exitcode == 0


def save_and_load_as_rank(ranks: Ranks, folder: Path) -> None:
    rank = ranks.rank
    part, where = torch.arange(20.0)[10 * rank :][:10], (REPLICATED, Layout(dp=2), rank)

    def state(scale: float) -> dict:
        own = {f"rng.rank{rank}": torch.full((2,), rank * scale)}
        sharded = FlatShard(part * scale, 10 * rank, torch.Size((5, 4)), *where)
        return {"w": sharded, "same": torch.ones(3) * scale, **own}

    store = CheckpointStore(folder, CheckpointConfig())
    saved = {**state(1.0), "step": 1}
    store._copies.copy = Mock(wraps=store._copies.copy)
    store.save(1, saved)
    copied = {*store._copies.copy.call_args.args[0]}  # to the host: what this rank saves, and no more
    assert {"w", f"rng.rank{rank}"} == copied - {"same"}
    saved["w"].data.fill_(-1)
    store.save(2, {**state(2.0), "step": 2})
    store.wait()
    if rank == 0:
        (folder / "step_00000002/__1_0.distcp").write_bytes(b"")
    assert sorted(store._ranks.gather("same" in copied)) == [False, True]
    loaded = state(0.0)
    assert store.load(loaded) == 1 and loaded["step"] == 1
    assert torch.equal(loaded["w"].data, part)
    assert loaded[f"rng.rank{rank}"].tolist() == [rank, rank] and loaded["same"].tolist() == [1, 1, 1]
    if rank == 1:
        CheckpointStore._publish = die  # only rank 0 publishes
    else:
        folders.publish = Mock(side_effect=OSError("no luck"))
    store.save(3, {"step": 3})
    with pytest.raises(CheckpointError, match="no luck"):  # the error of rank 0, on each rank
        store.wait()


def test_two_ranks_save_and_load_sharded_tensors_together(tmp_path):
    run_ranks(tmp_path, {"checkpoints": save_and_load_as_rank})
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000001", "step_00000002"]
    state = {"w": torch.zeros(5, 4, dtype=torch.bfloat16)}
    assert CheckpointStore.open_any(tmp_path).load(state, 1, partial=True) == 1
    assert state["w"].dtype == torch.bfloat16
    assert state.keys() == {"w"} and state["w"].flatten().tolist() == list(range(20))
