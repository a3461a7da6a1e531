"""Saving and loading one state: what comes back, where it lands, what is refused."""

import struct
import time
from pathlib import Path

import pytest
import torch

from graphmoe.checkpoint import CheckpointError, CheckpointStore, contents
from graphmoe.config.schema import CheckpointConfig
from graphmoe.run.files import CONFIG_FILE
from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import run_ranks


def make_store(folder: Path, **settings) -> CheckpointStore:
    return CheckpointStore(folder, CheckpointConfig(**settings))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def zeros_like(state):
    """The same structure with each tensor zeroed and each plain value None."""
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(item, dict | torch.Tensor) for item in state):
        return [zeros_like(item) for item in state]
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
    write_entries = contents.write_entries

    def slow_write(*arguments):
        time.sleep(0.2)
        return write_entries(*arguments)

    monkeypatch.setattr("graphmoe.checkpoint.store.write_entries", slow_write)
    base = torch.arange(100.0)
    state = {"x": base, "view": base[10:20], "steps": [1, 2], "deep": {"count": 3}}
    store = make_store(tmp_path)
    for step in (1, 2):
        base.copy_(torch.arange(100.0) + step)
        store.save(step, state)
        base.fill_(-1)
        state["steps"].append(99)
        state["deep"]["count"] = 99
    store.close()
    for step in (1, 2):
        loaded = zeros_like(state)
        store.load(loaded, step)
        assert loaded["x"].tolist() == (torch.arange(100.0) + step).tolist()
        assert loaded["view"].tolist() == (torch.arange(10.0, 20.0) + step).tolist()
    assert (loaded["steps"], loaded["deep"]["count"]) == ([1, 2, 99], 99)


def test_all_entries_that_do_not_fit_are_named_at_once(tmp_path):
    saved = {name: torch.ones(2) for name in ("same", "short", "half", "extra")}
    make_store(tmp_path).save(1, {"m": saved, "count": 1, "kind": torch.ones(1)}, wait=True)
    same = torch.zeros(2)
    wanted = {"same": same, "short": torch.zeros(3), "half": torch.zeros(2).half(), "lost": torch.zeros(1)}
    state = {"m": wanted, "count": 0, "epoch": 0, "kind": 5}
    with pytest.raises(CheckpointError) as error:
        make_store(tmp_path).load(state)
    report = str(error.value)
    assert "in 6 entries" in report
    assert "missing in the checkpoint: m.lost [1] float32" in report
    assert "missing in the checkpoint: epoch" in report
    assert "unexpected in the checkpoint: m.extra [2] float32" in report
    assert "m.short is [3] float32 here, [2] float32 in the checkpoint" in report
    assert "m.half is [2] float16 here, [2] float32 in the checkpoint" in report
    assert "a plain value here, a tensor in the checkpoint: kind" in report
    assert same.tolist() == [0, 0] and state["count"] == 0


def test_a_part_of_the_state_is_read_alone_and_cast(tmp_path):
    full = {"model": {"w": torch.full((2,), 1.5)}, "optim": {"m": torch.ones(2)}, "step": 3, "epoch": 1}
    make_store(tmp_path).save(1, full, wait=True)
    state = {"model": {"w": torch.zeros(2, dtype=torch.bfloat16)}, "step": 0}
    assert make_store(tmp_path).load(state, partial=True) == 1
    assert state["model"]["w"].tolist() == [1.5, 1.5] and state["model"]["w"].dtype == torch.bfloat16
    assert state == {"model": state["model"], "step": 3}


@pytest.mark.parametrize("value", [{1, 2}, object(), (torch.ones(1),), 1j])
def test_a_value_that_would_not_come_back_is_refused_by_name(tmp_path, value):
    with pytest.raises(CheckpointError, match=r"the state's a\.b holds a"):
        make_store(tmp_path).save(1, {"a": {"b": value}})
    assert make_store(tmp_path).latest() == []


def test_a_path_may_be_a_run_or_its_checkpoints_or_one_of_them(tmp_path):
    store = make_store(tmp_path / "run" / "checkpoints")
    for step in (1, 2):
        store.save(step, {"step": step})
    store.close()
    (tmp_path / "run" / "checkpoints" / "step_00000003.tmp-999999999").mkdir()
    for path, step in [("run", 2), ("run/checkpoints", 2), ("run/checkpoints/step_00000001", 1)]:
        state: dict = {}
        assert CheckpointStore.open_any(tmp_path / path).load(state) == step == state["step"]
    assert len([*store.folder.iterdir()]) == 3  # a save in progress is left alone
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3; it has \[2, 1\]"):
        store.load({}, 3)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        CheckpointStore.open_any(tmp_path)


def test_a_path_without_a_checkpoint_says_what_to_give_or_to_wait_for(tmp_path):
    run, other = tmp_path / "outputs" / "tiny", tmp_path / "other"
    for folder in (run / "checkpoints", other):
        folder.mkdir(parents=True)
    (run / CONFIG_FILE).write_text("model: {}")
    for path in (run, run / "checkpoints", run / "checkpoints" / "step_00000003"):
        with pytest.raises(CheckpointError, match="none was saved yet; .* after checkpoint.interval steps"):
            CheckpointStore.open_any(path)
    make_store(run / "checkpoints").save(1, {"x": 1}, wait=True)
    example = "such as {}/checkpoints/step_00000100"
    missing = run / "checkpoints" / "step_00000003"
    for path, place in [(tmp_path, tmp_path), (other, other), (other / "checkpoints", other), (missing, run)]:
        with pytest.raises(CheckpointError, match=f"holds no checkpoint; .*{example.format(place)}$"):
            CheckpointStore.open_any(path)


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
