"""Checkpoints on disk: what comes back, what is refused, damage, leftovers, a full disk, pruning."""

import errno
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from graphmoe.checkpoint import CheckpointError, contents, folders
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import CheckpointConfig
from graphmoe.run.files import CONFIG_FILE
from graphmoe.runtime.ranks import Ranks
from tests.damage import dead_pid, flip_bit
from tests.distributed.ranks import run_ranks


def make_store(folder: Path, **settings) -> CheckpointStore:
    return CheckpointStore(folder, CheckpointConfig(**settings))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def zeros_like(state):
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


@pytest.mark.parametrize("async_save", [True, False])
def test_tensors_come_back_bitwise(tmp_path, async_save):
    random = torch.Generator().manual_seed(1)
    original = {
        f"{dtype} {shape}": (torch.randn(shape, generator=random) * 10).to(dtype)
        for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.bool)
        for shape in ((3, 5), (0, 4), ())
    }
    patterns = [0x7FC01234, -0x80000000, 0x7F800000, 0x00000001]  # a NaN's payload and -0.0 among them
    original["patterns"] = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    store = make_store(tmp_path, async_save=async_save)
    store.save(1, original)
    store.close()
    state = zeros_like(original)
    assert store.load(state) == 1
    for name, tensor in original.items():
        assert state[name].shape == tensor.shape and bits(state[name]) == bits(tensor)


def test_plain_values_come_back_exactly(tmp_path):
    odd_nan = struct.unpack("<d", b"\x01\x02\x03\x04\x05\x06\xf8\xff")[0]
    values = {
        "step": 7, "big": 2**70, "tenth": 0.1, "tiny": 5e-324, "infinity": float("inf"), "flag": True,
        "nothing": None, "text": "a\u00e4\n", "raw": b"\x00\xff", "tuple": (1, (2, 3), None),
        "list": [1, [2.5, "x"], {"k": [1]}], "empty": {}, "by_int": {0: "zero", 1: {"deep": 1}},
    }  # fmt: skip
    make_store(tmp_path).save(1, {"run": values, "nan": odd_nan}, wait=True)
    state: dict = {}
    assert make_store(tmp_path).load(state) == 1
    assert state["run"] == values
    assert type(state["run"]["flag"]) is bool and type(state["run"]["tuple"]) is tuple
    assert struct.pack("<d", state["nan"]) == struct.pack("<d", odd_nan)


def test_changes_after_save_returns_do_not_reach_the_checkpoint(tmp_path, monkeypatch):
    def slow_write(*arguments, write_entries=contents.write_entries):
        time.sleep(0.2)
        return write_entries(*arguments)

    monkeypatch.setattr("graphmoe.checkpoint.store.write_entries", slow_write)
    base, store = torch.empty(100), make_store(tmp_path)
    state = {"x": base, "view": base[10:20], "steps": [1, 2], "deep": {"count": 3}}
    for step in (1, 2):
        base.copy_(torch.arange(100) + step)
        store.save(step, state)
        base.fill_(-1)
        state["steps"].append(99)
        state["deep"]["count"] = 99
    store.close()
    for step in (1, 2):
        loaded = zeros_like(state)
        store.load(loaded, step)
        assert loaded["x"].tolist() == [*range(step, 100 + step)]
        assert loaded["view"].tolist() == [*range(10 + step, 20 + step)]
    assert (loaded["steps"], loaded["deep"]["count"]) == ([1, 2, 99], 99)


def test_all_entries_that_do_not_fit_are_named_at_once(tmp_path):
    saved = {name: torch.ones(2) for name in ("same", "short", "half", "extra")}
    make_store(tmp_path).save(1, {"m": saved, "count": 1, "kind": torch.ones(1)}, wait=True)
    same = torch.zeros(2)
    wanted = {"same": same, "short": torch.zeros(3), "half": torch.zeros(2).half(), "lost": torch.zeros(1)}
    state = {"m": wanted, "count": 0, "epoch": 0, "kind": 5}
    with pytest.raises(CheckpointError) as error:
        make_store(tmp_path).load(state)
    first, *lines = str(error.value).splitlines()
    assert "in 6 entries" in first and sorted(line.strip() for line in lines) == [
        "a plain value here, a tensor in the checkpoint: kind",
        "different: m.half is [2] float16 here, [2] float32 in the checkpoint",
        "different: m.short is [3] float32 here, [2] float32 in the checkpoint",
        "missing in the checkpoint: epoch",
        "missing in the checkpoint: m.lost [1] float32",
        "unexpected in the checkpoint: m.extra [2] float32",
    ]
    assert same.tolist() == [0, 0] and state["count"] == 0


def test_a_value_that_would_not_come_back_is_refused_by_name(tmp_path):
    for value in ({1, 2}, object(), (torch.ones(1),), 1j):
        with pytest.raises(CheckpointError, match=r"the state's a\.b holds a"):
            make_store(tmp_path).save(1, {"a": {"b": value}})
    assert make_store(tmp_path).latest() == []


def test_a_path_may_be_a_run_or_its_checkpoints_or_one_of_them_and_another_says_what_to_give(tmp_path):
    run, other = tmp_path / "outputs" / "tiny", tmp_path / "other"
    for folder in (run / "checkpoints", other):
        folder.mkdir(parents=True)
    (run / CONFIG_FILE).write_text("model: {}")
    missing = run / "checkpoints" / "step_00000003"
    for path in (run, run / "checkpoints", missing):
        with pytest.raises(CheckpointError, match="none was saved yet; .* after checkpoint.interval steps"):
            CheckpointStore.open_any(path)
    store = make_store(run / "checkpoints")
    for step in (1, 2):
        store.save(step, {"step": step})
    store.close()
    (run / "checkpoints" / "step_00000003.tmp-999999999").mkdir()
    for path, step in [("", 2), ("checkpoints", 2), ("checkpoints/step_00000001", 1)]:
        state: dict = {}
        assert CheckpointStore.open_any(run / path).load(state) == step == state["step"]
    assert len([*store.folder.iterdir()]) == 3  # a save in progress is left alone
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3; it has \[2, 1\]"):
        store.load({}, 3)
    near = rf"; did you mean {run}/checkpoints/step_00000002\?"
    places = {tmp_path: (tmp_path, ""), other: (other, ""), other / "checkpoints": (other, "")}
    for path, (place, instead) in (places | {missing: (run, near)}).items():
        said = f"holds no checkpoint; .*such as {place}/checkpoints/step_00000100{instead}$"
        with pytest.raises(CheckpointError, match=said):
            CheckpointStore.open_any(path)


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
    said = {7: "manifest.json: cannot", 6: "manifest.json: cannot", 5: "__0_0.distcp: cannot be read"}
    said |= {4: "__0_0.distcp: 100 bytes, written with", 3: "__0_0.distcp: sha256", 2: ".metadata: sha256"}
    for step, line in said.items():
        assert f"step_0000000{step} is damaged and not used: {line}" in caplog.text
    with pytest.raises(CheckpointError, match=r"steps \[2\] are damaged"):
        store.load({"x": torch.zeros(1000)}, 2)
    (tmp_path / "step_00000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoints of steps \[7, 6, 5, 4, 3, 2, 1\] are damaged"):
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


@pytest.mark.parametrize(("last", "nth", "kept"), [(1, 0, [7]), (3, 0, [7, 6, 5]), (1, 3, [7, 6, 3])])
def test_pruning_keeps_the_last_and_each_nth(tmp_path, last, nth, kept):
    store = make_store(tmp_path, keep_last=last, keep_every=nth)
    save_steps(store, *range(1, 8))
    assert store.latest() == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


def test_leftovers_of_dead_processes_go_and_others_stay_and_are_passed_over(tmp_path):
    save_steps(make_store(tmp_path), 1)
    gone = [f"step_00000002.tmp-{pid}" for pid in (dead_pid(), os.getpid(), 10**30)]
    gone.append("step_00000001.replaced")
    stay = ["step_00000003.tmp-1", "notes", "step_000000002", "step_2", "step_00000002.old"]
    stay.append("step_\u0661" + "\u0660" * 7)
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


def test_an_old_checkpoint_that_cannot_be_removed_ends_nothing(tmp_path, monkeypatch, caplog):
    """As on a mount, or if NFS keeps a file that is open. The next save, or start, removes it."""
    store = make_store(tmp_path, keep_last=1)
    save_steps(store, 1)
    rmtree = shutil.rmtree

    def busy(path, *args, **how):
        if "step_00000001" in str(path):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        rmtree(path, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        save_steps(store, 2, 3)
        assert store.latest() == [3] and "step_00000001 cannot be removed now: [Errno 16]" in caplog.text
        assert load_step(make_store(tmp_path, keep_last=1)) == 3
        assert len([*tmp_path.iterdir()]) == 2
    save_steps(store, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


def test_of_an_old_checkpoint_that_is_a_link_the_link_is_removed(tmp_path):
    store = make_store(tmp_path / "run", keep_last=1)
    save_steps(store, 1)
    (tmp_path / "run" / "step_00000001").rename(tmp_path / "archived")
    (tmp_path / "run" / "step_00000001").symlink_to(tmp_path / "archived")
    save_steps(store, 2)
    assert store.latest() == [2] and len([*(tmp_path / "run").iterdir()]) == 1
    assert (tmp_path / "archived" / "manifest.json").exists()


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("victim", ["__0_0.distcp", ".metadata", "manifest.json.tmp-{pid}"])
def test_a_full_disk_is_reported_and_loses_no_earlier_checkpoint(tmp_path, monkeypatch, async_save, victim):
    store = make_store(tmp_path, async_save=async_save)
    save_steps(store, 1)

    def with_full_file(folder, step, make_temporary=folders.make_temporary):
        temporary = make_temporary(folder, step)
        (temporary / victim.format(pid=os.getpid())).symlink_to("/dev/full")
        return temporary

    with monkeypatch.context() as patch:
        patch.setattr(folders, "make_temporary", with_full_file)
        with pytest.raises(CheckpointError) as error:
            save_steps(store, 2)
    report = str(error.value)
    assert "No space left on device" in report and str(tmp_path) in report
    assert "needs 3.91 KiB (4000 bytes)" in report and "earlier checkpoints are intact: [1]" in report
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    save_steps(store, 2)
    assert load_step(store) == 2


def test_an_error_in_the_background_is_raised_once_by_the_next_call(tmp_path, monkeypatch):
    store = make_store(tmp_path)
    with monkeypatch.context() as patch:
        fail = Mock(side_effect=OSError(errno.EIO, "disk on fire"))
        patch.setattr("graphmoe.checkpoint.folders.publish", fail)
        store.save(1, {"x": 1})
        store._writer.join()
    with pytest.raises(CheckpointError, match="disk on fire"):
        store.save(2, {"x": 2})
    store.save(3, {"x": 3})
    store.close()
    assert store.latest() == [3]


def copied(ranks: Ranks, folder: Path) -> set[str]:
    """The tensors that a save in the background copies to this rank's host memory."""
    store = CheckpointStore(folder, CheckpointConfig())
    store._copies.copy = Mock(wraps=store._copies.copy)
    same = {f"w{number}": torch.ones(100 + number) for number in range(4)}
    store.save(1, {**same, f"rng.rank{ranks.rank}": torch.ones(1), "step": 1})
    store.close()
    return {*store._copies.copy.call_args.args[0]}


def test_a_rank_copies_only_what_it_saves_to_its_host(tmp_path):
    first, second = run_ranks(tmp_path, {"copied": copied})["copied"]
    assert first == {"w3", "w0", "rng.rank0"} and second == {"w2", "w1", "rng.rank1"}
    state = {"step": 0, **{f"w{number}": torch.zeros(100 + number) for number in range(4)}}
    assert CheckpointStore.open_any(tmp_path / "copied").load(state, partial=True) == 1
    assert all(state[f"w{number}"].sum() == 100 + number for number in range(4)) and state["step"] == 1


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
