"""Two ranks train as one process does on the same global batches, and agree on everything they decide."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphmoe.checkpoint import CheckpointStore
from graphmoe.checkpoint.contents import read_metadata
from graphmoe.world import World
from tests.distributed.ranks import Job, run_ranks
from tests.distributed.training import (
    Outcome,
    Training,
    nan_gradient_in_step_2,
    nan_gradients_from_step_2,
    never_publish_step_4,
    signal_in_step_3,
)
from tests.runs import metrics, numbers
from tests.tolerances import assert_forward_close, assert_gradient_close

BASE = ("train.log_interval=2", "train.val_batches=3", "train.val_interval=2", "checkpoint.interval=0")
THREE = (*BASE, "train.steps=3")
FOUR_BATCHES = (*THREE, "train.global_batch_size=8")
LONG = (*BASE, "train.steps=8", "checkpoint.interval=2")

CLOSE = {
    "four micro-batches": Training(FOUR_BATCHES),
    "balance over the micro-batch": Training(
        (*FOUR_BATCHES, "model.aux_loss=micro_batch", "model.aux_loss_coef=0.1", "model.z_loss_coef=0.01")
    ),
    "balance over the sequence": Training(
        (*FOUR_BATCHES, "model.aux_loss=sequence", "model.aux_loss_coef=0.1")
    ),
    "clipped": Training((*FOUR_BATCHES, "train.clip_grad_norm=0.01")),
    "mtp in bf16": Training((*FOUR_BATCHES, "model.mtp_depth=1", "precision.compute=bf16")),
}
"""Each rank sums its gradients before the ranks' sums are added, which is another order."""
EXACT = {
    "two micro-batches": Training(THREE),
    "captured": Training((*THREE, "graph.scope=full_iteration", "graph.warmup_steps=1")),
    "one bad gradient": Training(THREE, nan_gradient_in_step_2),
}
"""One micro-batch for each rank: the sum of two has one order only."""
OTHERS = {
    "bad gradients": Training((*BASE, "train.steps=20", "train.max_nonfinite=2"), nan_gradients_from_step_2),
    "a signal": Training((*BASE, "train.steps=20"), signal_in_step_3),
    "undisturbed": Training(LONG),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, list[Outcome]]:
    """The outcomes of two ranks."""
    return run_ranks(folder, {**CLOSE, **EXACT, **OTHERS})


@pytest.fixture(scope="module")
def resumed(folder: Path) -> list[Outcome]:
    """The outcomes of two ranks that go on where both were killed while they saved step 4."""
    job = Job(folder, {"killed": dataclasses.replace(OTHERS["undisturbed"], change=never_publish_step_4)})
    checkpoints = folder / "killed" / "checkpoints"
    job.wait_until(lambda: list(checkpoints.glob("step_00000004.tmp-*/.metadata")) != [])
    job.kill()
    assert {path.name.split("-")[0] for path in checkpoints.iterdir()} == {
        "step_00000002",
        "step_00000004.tmp",
    }
    return run_ranks(folder, {"killed": OTHERS["undisturbed"]})["killed"]


def same(one: Any, other: Any) -> bool:
    """Bitwise equality, of NaN too."""
    if isinstance(one, Tensor):
        one, other = (tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))
        return torch.equal(one, other)
    return repr(one) == repr(other)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    differ = [name for name, value in one.items() if not same(value, other[name])]
    assert not differ, differ


@pytest.mark.parametrize("name", [*CLOSE, *EXACT, *OTHERS])
def test_all_ranks_end_with_the_same_bits_and_metrics(ranks, name):
    first, second = ranks[name]
    assert same(first.rows, second.rows) and first.step == second.step
    assert repr(first.written) == repr(second.written) and first.written
    assert_same(first.state, second.state)
    assert_same(first.gradients, second.gradients)


@pytest.mark.parametrize("name", CLOSE)
def test_losses_gradients_and_weights_are_those_of_one_process(ranks, tmp_path, name):
    alone, of_ranks = CLOSE[name](World(), tmp_path), ranks[name][0]
    assert alone.step == of_ranks.step == 3
    assert_forward_close(of_ranks.rows, alone.rows)
    losses = [
        torch.tensor([row["val_loss"] for row in run.written if "val_loss" in row])
        for run in (of_ranks, alone)
    ]
    assert len(losses[0]) == 3
    assert_forward_close(*losses)
    for parameter, weight in alone.weights.items():
        assert_gradient_close(of_ranks.gradients[parameter], alone.gradients[parameter])
        assert_gradient_close(of_ranks.weights[parameter], weight)
    biases = [key for key in alone.state if key.endswith("selection_bias")]
    assert biases and all(alone.state[key].count_nonzero() for key in biases)
    assert_same({key: of_ranks.state[key] for key in biases}, {key: alone.state[key] for key in biases})


@pytest.mark.parametrize("name", EXACT)
def test_with_one_micro_batch_for_each_rank_every_bit_is_that_of_one_process(ranks, tmp_path, name):
    alone, of_ranks = EXACT[name](World(), tmp_path), ranks[name][0]
    assert same(of_ranks.rows, alone.rows)
    assert_same(of_ranks.state, alone.state)


def test_a_captured_step_of_two_ranks_is_bitwise_the_uncaptured_one(ranks):
    for captured, plain in zip(ranks["captured"], ranks["two micro-batches"], strict=True):
        assert same(captured.rows, plain.rows)
        assert_same(captured.state, plain.state)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(ranks):
    for outcome in ranks["one bad gradient"]:
        assert [row["skipped"] for row in outcome.written if "loss" in row] == [False, True, False]
        assert outcome.state["optimizer.counters.applied"] == 2


def test_too_many_bad_steps_on_one_rank_stop_all(ranks):
    first, second = ranks["bad gradients"]
    assert "3 steps in a row had a loss or gradient that is not finite" in first.error
    assert first.error == second.error and first.step == second.step == 4


def test_a_signal_at_one_rank_stops_all_after_the_same_step_and_saves(ranks, folder):
    assert [outcome.stopped_by for outcome in ranks["a signal"]] == ["SIGINT", "SIGINT"]
    assert [outcome.step for outcome in ranks["a signal"]] == [4, 4]  # told before step 4, known after it
    assert CheckpointStore.open_any(folder / "a signal").latest() == [4]


def test_rank_0_alone_writes_the_metrics(ranks, folder):
    for name, (first, second) in ranks.items():
        assert first.writes and not second.writes
        written = [(row["step"], "val_loss" in row) for row in metrics(folder / name)]
        assert written == [(row["step"], "val_loss" in row) for row in first.written], name
    row = metrics(folder / "four micro-batches")[1]
    assert row["tokens"] == 8 * 16 and row["tokens_per_s"] == pytest.approx(8 * 16 / row["step_s"])


def test_a_run_whose_ranks_are_killed_while_one_saves_goes_on_bitwise(ranks, resumed, folder):
    for after, whole in zip(resumed, ranks["undisturbed"], strict=True):
        assert len(after.rows) == 6  # from step 2 on
        assert same(after.rows, whole.rows[2:])
        assert_same(after.state, whole.state)
    assert numbers(folder / "killed") == numbers(folder / "undisturbed")


def test_what_both_ranks_hold_is_saved_once_half_by_each(ranks, folder):
    checkpoint = folder / "undisturbed" / "checkpoints" / "step_00000008"
    held = {n: v.nbytes for n, v in ranks["undisturbed"][0].state.items() if isinstance(v, Tensor)}
    shares: dict[str, dict[str, int]] = {"__0_0.distcp": {}, "__1_0.distcp": {}}
    for index, place in read_metadata(checkpoint).storage_data.items():
        assert all(index.fqn not in names for names in shares.values())
        shares[place.relative_path][index.fqn] = held.get(index.fqn, 0)
    assert set().union(*shares.values()) >= held.keys()
    sizes = [sum(names.values()) for names in shares.values()]
    assert sum(sizes) == sum(held.values()) and max(sizes) < 0.51 * sum(sizes)


def test_another_number_of_ranks_goes_on_with_the_same_samples(ranks, folder, tmp_path):
    start = f"checkpoint.resume_from={folder}/undisturbed/checkpoints/step_00000006"
    alone = Training((*LONG, start))(World(), tmp_path)
    whole = ranks["undisturbed"][0]
    assert same(alone.rows, whole.rows[6:])
    assert_same(alone.state, whole.state)


@pytest.mark.slow
def test_compiled_and_captured_layers_of_two_ranks_train_as_one_eager_process(tmp_path):
    words = (*FOUR_BATCHES, "model.num_layers=1", "model.num_dense_layers=0", "train.val_batches=0")
    compiled = (*words, "compile.enabled=true", "graph.scope=layer", "graph.warmup_steps=1")
    first, second = Job(tmp_path, {"compiled": Training(compiled)}).results(seconds=600)["compiled"]
    assert same(first.rows, second.rows)
    assert_same(first.gradients, second.gradients)
    assert_same(first.weights, second.weights)
    alone = Training(words)(World(), tmp_path / "alone")
    assert_forward_close(first.rows, alone.rows)
    for name, weight in alone.weights.items():
        assert_gradient_close(first.weights[name], weight)
