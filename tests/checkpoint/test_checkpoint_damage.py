"""Damaged, half-written and left-over checkpoints, a full disk, and what pruning keeps."""

import errno
import os
import subprocess
from pathlib import Path

import pytest
import torch

from graphmoe.checkpoint import CheckpointError, CheckpointStore
from graphmoe.config.schema import CheckpointConfig
from tests.damage import flip_bit


def make_store(folder: Path, **settings) -> CheckpointStore:
    return CheckpointStore(folder, CheckpointConfig(**settings))


def save_steps(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, {"x": torch.full((1000,), float(step)), "step": step})
    store.wait()


def load_step(store: CheckpointStore) -> int | None:
    state = {"x": torch.zeros(1000)}
    step = store.load(state)
    assert step is None or state == {"x": state["x"], "step": step} and bool((state["x"] == step).all())
    return step


def test_damaged_checkpoints_are_reported_and_the_newest_whole_one_used(tmp_path, caplog):
    store = make_store(tmp_path, keep_last=9)
    save_steps(store, *range(1, 8))
    (tmp_path / "step_00000007" / "manifest.json").unlink()
    (tmp_path / "step_00000006" / "manifest.json").write_text('{"files": ')
    (tmp_path / "step_00000005" / "__0_0.distcp").unlink()
    os.truncate(tmp_path / "step_00000004" / "__0_0.distcp", 100)
    flip_bit(tmp_path / "step_00000003" / "__0_0.distcp")
    flip_bit(tmp_path / "step_00000002" / ".metadata")
    assert load_step(store) == 1
    for step, said in [
        (7, "manifest.json: cannot be read"),
        (6, "manifest.json: cannot be read"),
        (5, "__0_0.distcp: cannot be read"),
        (4, "__0_0.distcp: 100 bytes, written with"),
        (3, "__0_0.distcp: sha256"),
        (2, ".metadata: sha256"),
    ]:
        assert f"step_0000000{step} is damaged and not used: {said}" in caplog.text
    with pytest.raises(CheckpointError, match=r"steps \[2\] are damaged"):
        store.load({"x": torch.zeros(1000)}, 2)
    (tmp_path / "step_00000001" / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"the checkpoints of steps \[7, 6, 5, 4, 3, 2, 1\] are damaged"
    ):
        load_step(make_store(tmp_path))
    save_steps(store, 7)
    assert load_step(store) == 7


def test_a_damaged_checkpoint_does_not_push_a_good_one_out(tmp_path):
    save_steps(make_store(tmp_path), 1, 2)
    flip_bit(tmp_path / "step_00000002" / "__0_0.distcp")
    store = make_store(tmp_path)
    assert load_step(store) == 1
    save_steps(store, 3)
    assert store.latest() == [3, 1]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({"keep_last": 1}, [7]), ({"keep_last": 3}, [7, 6, 5]), ({"keep_last": 1, "keep_every": 3}, [7, 6, 3])],
)
def test_pruning_keeps_the_last_and_each_nth(tmp_path, settings, kept):
    store = make_store(tmp_path, **settings)
    save_steps(store, *range(1, 8))
    assert store.latest() == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


SPELLINGS = ("step_000000002", "step_\u0661" + "\u0660" * 7, "step_2", "step_00000002.old")
"""Names that are no names of checkpoints."""


def test_leftovers_of_dead_processes_go_and_others_stay_and_are_passed_over(tmp_path):
    save_steps(make_store(tmp_path), 1)
    dead = subprocess.Popen(["true"])
    dead.wait()
    gone = [f"step_00000002.tmp-{pid}" for pid in (dead.pid, os.getpid(), 10**30)] + [
        "step_00000002.replaced"
    ]
    stay = ["step_00000003.tmp-1", "notes", *SPELLINGS]
    for name in [*gone, *stay]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("x")
    assert load_step(make_store(tmp_path)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", *stay}
    for name in gone[2:]:  # files and links are no leftovers
        (tmp_path / name).write_text("no folder")
        assert load_step(make_store(tmp_path)) == 1
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to(tmp_path)
        assert load_step(make_store(tmp_path)) == 1


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("victim", ["__0_0.distcp", ".metadata.tmp", "manifest.json.tmp"])
def test_a_full_disk_is_reported_and_loses_no_earlier_checkpoint(tmp_path, monkeypatch, async_save, victim):
    store = make_store(tmp_path, async_save=async_save)
    save_steps(store, 1)
    path_open = Path.open

    def full_open(self, mode="r", *arguments, **settings):
        is_full = self.name.startswith(victim) and "w" in mode
        return path_open(Path("/dev/full") if is_full else self, mode, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full_open)
        with pytest.raises(CheckpointError) as error:
            save_steps(store, 2)
    report = str(error.value)
    assert "No space left on device" in report and str(tmp_path) in report and "4000 bytes" in report
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    save_steps(store, 2)
    assert load_step(store) == 2


def test_an_error_in_the_background_is_raised_once_by_the_next_call(tmp_path, monkeypatch):
    store = make_store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("graphmoe.checkpoint.folders.publish", _fail)
        store.save(1, {"x": 1})
        store._writer.join()
    with pytest.raises(CheckpointError, match="disk on fire"):
        store.save(2, {"x": 2})
    store.save(3, {"x": 3})
    store.close()
    assert store.latest() == [3]


def test_a_small_disk_that_runs_full_keeps_its_checkpoints(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        store = make_store(tmp_path, keep_last=999)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_steps(store, *range(1, 999))
        steps = store.latest()
        assert len(steps) > 10 and load_step(store) == steps[0]
        big = {"x": torch.zeros(2_000_000), "step": 0}
        with pytest.raises(CheckpointError, match=r"needs 7\.63 MiB"):
            store.save(5000, big, wait=True)
        assert store.latest() == steps and len(list(tmp_path.iterdir())) == len(steps)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def _fail(*arguments):
    raise OSError(errno.EIO, "disk on fire")
