"""Two ranks train as one process does on the same global batches, and agree on everything they decide."""

import signal
from pathlib import Path

import pytest

from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.runtime.ranks import Ranks
from tests.distributed import training
from tests.distributed.ranks import Job, run_ranks
from tests.distributed.training import Outcome, SignalIn, Training
from tests.runs import assert_same_state, metrics, numbers

BASE = ("train.log_interval=2", "train.val_batches=3", "train.val_interval=2", "checkpoint.interval=0")
THREE = (*BASE, "train.steps=3", "checkpoint.enabled=false", "optim.bucket_mb=0.001")
TWENTY = (*BASE, "train.steps=20")
LONG = (*BASE, "train.steps=8", "checkpoint.interval=2")
CAPTURED = ("graph.scope=full_iteration", "graph.warmup_steps=1")
EXACT = {  # one micro-batch for each rank: the sum of two has one order only
    "one micro-batch": Training(THREE),
    "captured": Training((*THREE, *CAPTURED)),
    "one bad gradient": Training(THREE, training.nan_gradient_in_step_2),
}
SAVED = {
    "bad gradients": Training((*TWENTY, "train.max_nonfinite=2"), training.nan_gradients_from_step_2),
    "a signal": Training(TWENTY, SignalIn(3, signal.SIGINT)),
    "undisturbed": Training(LONG),
    "a bad moment": Training((*LONG, "checkpoint.keep_last=1"), training.infinite_moment_in_step_3),
}


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, list[Outcome]]:
    return run_ranks(folder, EXACT | SAVED)


@pytest.mark.parametrize("name", [*EXACT, *SAVED])
def test_all_ranks_end_with_the_same_bits_and_metrics(ranks, name):
    first, second = ranks[name]
    assert_same_state({**vars(first), "writes": False}, vars(second))
    assert first.written


@pytest.mark.parametrize("name", EXACT)
def test_with_one_micro_batch_for_each_rank_every_bit_is_that_of_one_process(ranks, tmp_path, name):
    alone, of_ranks = EXACT[name](Ranks(), tmp_path), ranks[name][0]
    assert_same_state({"rows": of_ranks.rows} | of_ranks.state, {"rows": alone.rows} | alone.state)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(ranks):
    for outcome in ranks["one bad gradient"]:
        assert [row["skipped"] for row in outcome.written if "loss" in row] == [False, True, False]
        assert outcome.state["optimizer.counters.applied"] == 2


def test_too_many_bad_steps_on_one_rank_stop_all(ranks):
    first, _ = ranks["bad gradients"]
    assert "3 steps in a row had a loss or gradient that is not finite" in first.error and first.step == 4


def test_a_moment_that_is_not_finite_on_one_rank_is_saved_by_none(ranks, folder):
    first, _ = ranks["a bad moment"]
    assert str(folder / "a bad moment/checkpoints/step_00000002") in first.error
    assert "optimizer.exp_avg_sq." in first.error and "is not finite after step 4" in first.error
    assert CheckpointStore.open_any(folder / "a bad moment").latest() == [2]


def test_a_signal_at_one_rank_stops_all_after_the_same_step_and_saves(ranks, folder):
    first, _ = ranks["a signal"]
    assert (first.stopped_by, first.step) == ("SIGINT", 4)  # told before step 4, known after it
    assert CheckpointStore.open_any(folder / "a signal").latest() == [4]


def test_rank_0_alone_writes_the_metrics(ranks, folder):
    for name in EXACT:
        first, second = ranks[name]
        assert first.writes and not second.writes
        written = [(row["step"], "val_loss" in row) for row in metrics(folder / name)]
        assert written == [(row["step"], "val_loss" in row) for row in first.written], name
    row = metrics(folder / "one micro-batch")[0]
    assert row["tokens"] == 4 * 16 and row["tokens_per_s"] == pytest.approx(4 * 16 / row["step_s"])


def test_a_run_whose_ranks_are_killed_while_one_saves_goes_on_bitwise(ranks, folder):
    job = Job(folder, {"killed": Training(LONG, training.never_publish_step_4)})
    checkpoints = folder / "killed" / "checkpoints"
    job.wait_until(lambda: list(checkpoints.glob("step_00000004.tmp-*/.metadata")) != [])
    job.kill()
    left = {path.name.split("-")[0] for path in checkpoints.iterdir()}
    assert left == {"step_00000002", "step_00000004.tmp"}
    resumed = run_ranks(folder, {"killed": Training(LONG)})["killed"]
    for after, whole in zip(resumed, ranks["undisturbed"], strict=True):
        assert len(after.rows) == 6  # from step 2 on
        assert_same_state({"rows": after.rows} | after.state, {"rows": whole.rows[2:]} | whole.state)
    assert numbers(folder / "killed") == numbers(folder / "undisturbed")


def test_another_number_of_ranks_goes_on_with_the_same_samples(ranks, folder, tmp_path):
    start = f"checkpoint.resume_from={folder}/undisturbed/checkpoints/step_00000006"
    alone, whole = Training((*LONG, start))(Ranks(), tmp_path), ranks["undisturbed"][0]
    assert_same_state({"rows": alone.rows} | alone.state, {"rows": whole.rows[6:]} | whole.state)
