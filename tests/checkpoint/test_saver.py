"""The process that writes beside a trainer: what it writes, its death, its signals."""

import itertools
import mmap
import os
import random
import signal
import time
from unittest.mock import Mock

import pytest
import torch

from graphmoe.checkpoint import CheckpointError, contents
from graphmoe.checkpoint.entries import HostCopies
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import CheckpointConfig

STATE = {"x": torch.arange(1000.0), "step": 1}


def load(store: CheckpointStore) -> int | None:
    state = {"x": torch.zeros(1000), "step": 0}
    step = store.load(state)
    assert torch.equal(state["x"], STATE["x"])
    return step


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path, CheckpointConfig())
    store.save(1, STATE)
    store.wait()
    yield store
    store.close()


def test_views_of_any_strides_are_written_as_their_elements():
    copies, chance = HostCopies(), random.Random(1)
    shapes = [(4, 6, 5), (3, 1, 8), (7,), (), (0, 3), (2, 3, 4, 5)]
    state = {str(shape): torch.randint(99, shape, dtype=torch.int16) for shape in shapes}
    copied = copies.copy(state)
    memory = memoryview(mmap.mmap(copies.file.fileno(), 0))
    for (name, tensor), _ in itertools.product(copied.items(), range(30)):
        assert torch.equal(tensor, state[name])
        for dim, size in enumerate(tensor.shape):
            first = chance.randrange(size + 1)
            tensor = tensor.narrow(dim, first, chance.randrange(size - first + 1))
        if chance.random() < 0.3:
            tensor = tensor.permute(chance.sample(range(tensor.dim()), tensor.dim()))
        written = b"".join(copies.place(tensor).parts(memory))
        assert written == contents._bytes_of(tensor).tobytes() == tensor.numpy().tobytes()


def test_memory_is_used_again_and_grows(store):
    first = store._copies._memory.data_ptr()
    store.save(2, STATE)
    store.wait()
    assert store._copies._memory.data_ptr() == first
    large = {"x": torch.ones(100_000)}
    store.save(3, large)
    store.load(loaded := {"x": torch.zeros(100_000)})
    assert torch.equal(loaded["x"], large["x"])


def test_the_trainer_neither_writes_nor_hashes_beside_its_steps(store, monkeypatch):
    monkeypatch.setattr(contents, "write_file", Mock(side_effect=OSError("written in the trainer")))
    store.save(2, STATE)
    assert load(store) == 2
    with pytest.raises(CheckpointError, match="written in the trainer"):
        store.save(3, STATE, wait=True)


def test_a_saver_that_dies_is_an_error_of_its_save_and_the_next_one_works(store, tmp_path):
    os.kill(store._saver.pid, signal.SIGSTOP)
    store._saver.ask = Mock(wraps=store._saver.ask)
    store.save(2, STATE)
    while not store._saver.ask.called:
        time.sleep(0.001)
    os.kill(store._saver.pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match=r"step 2 could not .* saver process \d+ ended \(SIGKILL\)"):
        store.wait()
    assert load(store) == 1 and [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    store.save(3, STATE)
    assert load(store) == 3


def test_signals_to_the_whole_job_do_not_end_the_saver(store):
    pid = store._saver.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    store.save(2, STATE)
    assert load(store) == 2 and store._saver.pid == pid
    store.close()
    assert not os.path.exists(f"/proc/{pid}")
