"""Second copies of checkpoints: what they hold, what is taken from them, and mirrors that fail."""

import os
import shutil
import signal
import time

import fsspec
import pytest
import torch

from graphmoe.checkpoint import CheckpointError, mirror
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.masking import to_plain
from graphmoe.config.schema import CheckpointConfig, ConfigError
from graphmoe.run.folder import announce, claim
from tests.damage import flip_bit
from tests.runs import config, trainer_in


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The run's folder of checkpoints, and that of its mirror in the folder ``m``."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out" / "tiny" / "checkpoints", tmp_path / "m" / "out" / "tiny"


def store_of(folder, **settings):
    return CheckpointStore(folder, CheckpointConfig(mirror="m", **settings))


def save(store, *steps):
    for step in steps:
        store.save(step, {"x": torch.full((1000,), float(step)), "step": step}, wait=step % 2 == 0)
    store.close()


def load(store):
    state = {"x": torch.zeros(1000), "step": 0}
    step = store.load(state)
    assert step is None or state["step"] == step and bool((state["x"] == step).all())
    return step


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_mirror_keeps_what_the_run_keeps_and_the_whole_one_of_each_step_is_taken(places, caplog):
    own, mirrored = places
    for step in range(1, 6):
        save(store_of(own, keep_every=2), step)
    assert names(own) == names(mirrored) == [f"step_{step:08d}" for step in (2, 4, 5)]
    for name in names(own):
        for path in (own / name).iterdir():
            assert path.read_bytes() == (mirrored / name / path.name).read_bytes()
    flip_bit(own / "step_00000005" / "__0_0.distcp")
    assert load(store_of(own)) == 5 and "step_00000005 was missing or damaged" in caplog.text
    assert not store_of(own)._damage(5)
    shutil.rmtree(own)
    flip_bit(mirrored / "step_00000005" / ".metadata")
    assert load(store_of(own)) == 4 and names(own) == ["step_00000004"]
    shutil.rmtree(own.parent)
    assert load(store_of(own, resume=False)) is None
    save(store_of(own), 6)
    assert names(mirrored) == ["step_00000005", "step_00000006"]


def test_a_mirror_that_fails_is_told_of_and_gets_all_at_the_next_save(places, tmp_path, caplog):
    own, mirrored = places
    (tmp_path / "m").write_text("a file")
    store = store_of(own)
    save(store, 1)
    assert "checkpoint.mirror=m failed, and the next save tries again" in caplog.text
    assert "Not a directory" in caplog.text and load(store_of(own)) == 1
    (tmp_path / "m").unlink()
    save(store, 2)
    assert names(mirrored) == ["step_00000001", "step_00000002"]
    flip_bit(own / "step_00000002" / "__0_0.distcp")
    save(store, 3)  # before step 2 is loaded
    assert load(store_of(own)) == 3 and names(mirrored) == ["step_00000002", "step_00000003"]


def test_a_process_that_dies_while_it_copies_leaves_whole_steps(places, caplog):
    own, mirrored = places
    store = store_of(own)
    store.save(1, {"x": torch.ones(10_000_000), "step": 1}, wait=True)
    process = store._updates._process
    while not [*mirrored.glob("step_*.tmp-*/*")]:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    store._updates.end(waits=True)
    assert "ended (SIGKILL)" in caplog.text and mirror.Mirror("m", own).steps() == []
    save(store, 2)
    assert names(mirrored) == ["step_00000001", "step_00000002"]


def test_a_url_has_a_step_once_its_manifest_is_there(places, tmp_path):
    own, _ = places
    save(CheckpointStore(own, CheckpointConfig(keep_last=3)), 1, 2, 3)
    place, memory = "memory://there", fsspec.filesystem("memory")
    arguments = (place, str(own), 3, (2, 0), (), 0, lambda: None)
    flip_bit(own / "step_00000002" / "__0_0.distcp")
    assert mirror.update(*arguments) == ["step_00000002: __0_0.distcp is damaged"]
    there = mirror.Mirror(place, own)
    assert there.steps() == [3, 1]
    shutil.rmtree(own / "step_00000003")
    there.fetch(3, own)
    assert load(CheckpointStore(own, CheckpointConfig())) == 3
    content = memory.cat_file(f"{there.folder}/step_00000001/__0_0.distcp")
    memory.pipe_file(f"{there.folder}/step_00000001/__0_0.distcp", content + b"more")
    with pytest.raises(CheckpointError, match="__0_0.distcp is damaged"):
        there.fetch(1, tmp_path / "other")
    assert [*(tmp_path / "other").iterdir()] == []
    memory.rm(f"{there.folder}/step_00000003/manifest.json")
    assert there.steps() == [1]
    shutil.rmtree(own / "step_00000002")
    assert mirror.update(*arguments) == [] and there.steps() == [3, 1]


def test_a_mirror_that_cannot_be_used_is_an_error_of_one_line(places):
    for place in ("nosuch://x", "gs://bucket/x"):
        with pytest.raises(ConfigError, match=rf"^checkpoint\.mirror={place} cannot be used \(.*\); give a"):
            mirror.Mirror(place, places[0])


def test_a_run_goes_on_from_its_mirror_and_not_from_that_of_another(places, tmp_path):
    words = ("train.steps=3", "checkpoint.mirror=m")
    folder, plain = tmp_path / "out" / "tiny", to_plain(config(*words))
    claimed = claim(folder, plain, resume=True)
    announce(claimed, plain)
    trainer = trainer_in(folder, *words)
    trainer.run()
    claimed.release()
    assert names(tmp_path / "m" / "out" / "tiny") == ["resolved.yaml", "step_00000003"]
    shutil.rmtree(folder)
    other = to_plain(config(*words, "optim.lr=1"))
    with pytest.raises(ConfigError, match=r"of another configuration \(optim.lr\) in .*/m/out/tiny; remove"):
        announce(claim(folder, other, resume=True), other)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run in"):
        fresh = to_plain(config(*words, "checkpoint.resume=false"))
        announce(claim(folder, fresh, resume=False), fresh)
    shutil.rmtree(folder)
    announce(claim(folder, plain, resume=True), plain)
    assert trainer_in(folder, *words).step == 3
