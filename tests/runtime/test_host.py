"""Garbage is collected at fixed steps inside, and as before outside."""

from __future__ import annotations

import gc

import pytest

from graphmoe.config import HostConfig
from runtime.host import GarbageCollection
from tests.runs import trainer_in


@pytest.fixture(autouse=True)
def collections(monkeypatch):
    """Collections that were asked for, counted."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    yield calls
    gc.enable()


def test_collections_happen_at_the_interval_only(collections):
    with GarbageCollection(HostConfig(gc_interval=3)) as garbage:
        assert not gc.isenabled() and len(collections) == 1
        due = []
        for step in range(1, 10):
            before = len(collections)
            garbage.after_step(step)
            if len(collections) > before:
                due.append(step)
    assert due == [3, 6, 9] and gc.isenabled()


def test_an_error_inside_enables_the_collector_again():
    with pytest.raises(KeyError), GarbageCollection(HostConfig()):
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with GarbageCollection(HostConfig()):
        pass
    assert not gc.isenabled()


def test_without_manual_gc_python_decides(collections):
    with GarbageCollection(HostConfig(manual_gc=False, gc_interval=1)) as garbage:
        assert gc.isenabled()
        garbage.after_step(1)
    assert gc.isenabled() and collections == []


def test_a_run_collects_by_itself_and_leaves_the_collector_on(tmp_path, monkeypatch, collections):
    words = ("host.manual_gc=true", "host.gc_interval=2", "train.steps=5", "train.val_batches=0")
    trainer = trainer_in(tmp_path, *words, "checkpoint.enabled=false")
    inside, step = [], trainer._train_step
    monkeypatch.setattr(trainer, "_train_step", lambda: (step(), inside.append(gc.isenabled())))
    assert trainer.run()
    assert inside == [False] * 5 and gc.isenabled()
    assert len(collections) == 1 + 2
