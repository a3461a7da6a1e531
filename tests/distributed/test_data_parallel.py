"""Two ranks train as one process does on the same global batches, and agree on everything they decide."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from graphmoe.checkpoint import CheckpointStore
from graphmoe.checkpoint.metadata_file import read_metadata
from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import Job, run_ranks
from tests.distributed.training import (
    Outcome,
    Training,
    infinite_moment_in_step_3,
    nan_gradient_in_step_2,
    nan_gradients_from_step_2,
    never_publish_step_4,
    signal_in_step_3,
)
from tests.runs import metrics, numbers

BASE = ("train.log_interval=2", "train.val_batches=3", "train.val_interval=2", "checkpoint.interval=0")
SMALL_BUCKETS = "optim.bucket_mb=0.001"
THREE = (*BASE, "train.steps=3", "checkpoint.enabled=false", SMALL_BUCKETS)
LONG = (*BASE, "train.steps=8", "checkpoint.interval=2")
CAPTURED = ("graph.scope=full_iteration", "graph.warmup_steps=1")

EXACT = {
    "one micro-batch": Training(THREE),
    "captured": Training((*THREE, *CAPTURED)),
    "one bad gradient": Training(THREE, nan_gradient_in_step_2),
}
"""One micro-batch for each rank: the sum of two has one order only."""
SAVED = {
    "bad gradients": Training((*BASE, "train.steps=20", "train.max_nonfinite=2"), nan_gradients_from_step_2),
    "a signal": Training((*BASE, "train.steps=20"), signal_in_step_3),
    "undisturbed": Training(LONG),
    "a bad moment": Training((*LONG, "checkpoint.keep_last=1"), infinite_moment_in_step_3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, list[Outcome]]:
    """The outcomes of two ranks that save nothing."""
    return run_ranks(folder, EXACT)


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, list[Outcome]]:
    """The outcomes of two ranks that save."""
    return run_ranks(folder, SAVED)


@pytest.fixture(scope="module")
def resumed(folder: Path, saved: dict[str, list[Outcome]]) -> list[Outcome]:
    """The outcomes of two ranks that go on where both were killed while they saved step 4."""
    job = Job(folder, {"killed": dataclasses.replace(SAVED["undisturbed"], change=never_publish_step_4)})
    checkpoints = folder / "killed" / "checkpoints"
    job.wait_until(lambda: list(checkpoints.glob("step_00000004.tmp-*/.metadata")) != [])
    job.kill()
    assert {path.name.split("-")[0] for path in checkpoints.iterdir()} == {
        "step_00000002",
        "step_00000004.tmp",
    }
    return run_ranks(folder, {"killed": SAVED["undisturbed"]})["killed"]


def same(one: Any, other: Any) -> bool:
    """Bitwise equality; every NaN is the same, whose sign depends on the path that made it."""
    if isinstance(one, Tensor):
        if one.is_floating_point():
            one, other = (tensor.where(~tensor.isnan(), torch.nan) for tensor in (one, other))
        one, other = (tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))
        return torch.equal(one, other)
    return repr(one) == repr(other)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    differ = [name for name, value in one.items() if not same(value, other[name])]
    assert not differ, differ


@pytest.mark.parametrize("name", [*EXACT, *SAVED])
def test_all_ranks_end_with_the_same_bits_and_metrics(ranks, saved, name):
    first, second = (ranks | saved)[name]
    assert same(first.rows, second.rows) and first.step == second.step
    assert repr(first.written) == repr(second.written) and first.written
    for part in ("state", "gradients", "model"):
        assert_same(getattr(first, part), getattr(second, part))


@pytest.mark.parametrize("name", EXACT)
def test_with_one_micro_batch_for_each_rank_every_bit_is_that_of_one_process(ranks, tmp_path, name):
    alone, of_ranks = EXACT[name](Ranks(), tmp_path), ranks[name][0]
    assert same(of_ranks.rows, alone.rows)
    assert_same(of_ranks.state, alone.state)


def test_a_captured_step_of_two_ranks_is_bitwise_the_uncaptured_one(ranks):
    for captured, plain in zip(ranks["captured"], ranks["one micro-batch"], strict=True):
        assert same(captured.rows, plain.rows)
        assert_same(captured.state, plain.state)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(ranks):
    for outcome in ranks["one bad gradient"]:
        assert [row["skipped"] for row in outcome.written if "loss" in row] == [False, True, False]
        assert outcome.state["optimizer.counters.applied"] == 2


def test_too_many_bad_steps_on_one_rank_stop_all(saved):
    first, second = saved["bad gradients"]
    assert "3 steps in a row had a loss or gradient that is not finite" in first.error
    assert first.error == second.error and first.step == second.step == 4


def test_a_moment_that_is_not_finite_on_one_rank_is_saved_by_none(saved, folder):
    first, second = saved["a bad moment"]
    assert "optimizer.exp_avg_sq." in first.error and "is not finite after step 4" in first.error
    assert (
        first.error == second.error and str(folder / "a bad moment/checkpoints/step_00000002") in first.error
    )
    assert CheckpointStore.open_any(folder / "a bad moment").latest() == [2]


def test_a_signal_at_one_rank_stops_all_after_the_same_step_and_saves(saved, folder):
    assert [outcome.stopped_by for outcome in saved["a signal"]] == ["SIGINT", "SIGINT"]
    assert [outcome.step for outcome in saved["a signal"]] == [4, 4]  # told before step 4, known after it
    assert CheckpointStore.open_any(folder / "a signal").latest() == [4]


def test_rank_0_alone_writes_the_metrics(ranks, folder):
    for name, (first, second) in ranks.items():
        assert first.writes and not second.writes
        written = [(row["step"], "val_loss" in row) for row in metrics(folder / name)]
        assert written == [(row["step"], "val_loss" in row) for row in first.written], name
    row = metrics(folder / "one micro-batch")[1]
    assert row["tokens"] == 4 * 16 and row["tokens_per_s"] == pytest.approx(4 * 16 / row["step_s"])


def test_a_run_whose_ranks_are_killed_while_one_saves_goes_on_bitwise(saved, resumed, folder):
    for after, whole in zip(resumed, saved["undisturbed"], strict=True):
        assert len(after.rows) == 6  # from step 2 on
        assert same(after.rows, whole.rows[2:])
        assert_same(after.state, whole.state)
    assert numbers(folder / "killed") == numbers(folder / "undisturbed")


def test_what_both_ranks_hold_is_saved_once_half_by_each(saved, folder):
    checkpoint = folder / "undisturbed" / "checkpoints" / "step_00000008"
    held = {n: v.nbytes for n, v in saved["undisturbed"][0].state.items() if isinstance(v, Tensor)}
    metadata, sizes, found = read_metadata(checkpoint), dict.fromkeys(held, 0), [0, 0]
    for index, place in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        if isinstance(entry, TensorStorageMetadata):
            (box,) = [chunk for chunk in entry.chunks if chunk.offsets == index.offset]
            num_bytes = box.sizes.numel() * entry.properties.dtype.itemsize
            sizes[index.fqn] += num_bytes
            found[("__0_0.distcp", "__1_0.distcp").index(place.relative_path)] += num_bytes
    assert sizes == held and max(found) < 0.51 * sum(found)


def test_another_number_of_ranks_goes_on_with_the_same_samples(saved, folder, tmp_path):
    start = f"checkpoint.resume_from={folder}/undisturbed/checkpoints/step_00000006"
    alone = Training((*LONG, start))(Ranks(), tmp_path)
    whole = saved["undisturbed"][0]
    assert same(alone.rows, whole.rows[6:])
    assert_same(alone.state, whole.state)
