"""A captured step: static buffers, what is refused, and training that it does not change."""

import json

import pytest
import torch

from graphmoe.runtime.capture.capture import REPORT_FILE, Capture
from graphmoe.runtime.capture.step import CapturedStep
from tests.runs import (
    COMPILED,
    assert_load_swings,
    assert_same_state,
    final_state,
    metrics,
    numbers,
    train_in,
    trainer_in,
)

pytestmark = pytest.mark.usefixtures("unmeasured")
CPU = torch.device("cpu")
CAPTURED = "graph.scope=full_iteration"
STEPS = ("train.steps=8", "graph.warmup_steps=2", "train.val_interval=4", "checkpoint.interval=4")


def tokens(*values: int) -> list[torch.Tensor]:
    return [torch.full((2, 3), value) for value in values]


def captured(step, warmup_steps: int = 1) -> tuple[CapturedStep, Capture]:
    capture = Capture("full_iteration", CPU, warmup_steps)
    return CapturedStep(step, CPU, capture), capture


def test_a_step_runs_on_static_buffers_and_its_result_stays_where_it_is():
    seen = []

    def step(batches):
        seen.append([batch.data_ptr() for batch in batches])
        return torch.stack([batch.sum() for batch in batches])

    run, capture = captured(step, warmup_steps=2)
    results = [run(tokens(number, 10 * number)) for number in range(1, 6)]
    assert all(pointers == seen[0] for pointers in seen) and len(seen) == 5
    assert results[0].tolist() == [6, 60] and results[1].tolist() == [12, 120]  # not replayed
    assert len({result.data_ptr() for result in results[2:]}) == 1
    assert results[-1].tolist() == [30, 300]
    report = capture.report
    assert (report.scope, report.on, report.warmup_steps, report.graphs) == ("full_iteration", "host", 2, 1)


def test_a_step_that_reads_what_it_was_given_and_not_the_buffers_is_found_out():
    held = []

    def step(batches):
        return torch.stack([given.max() for given in held])

    run, _ = captured(step)
    for number in (1, 2):
        held[:] = tokens(number)
        result = run(held)
    assert result.item() == torch.iinfo(torch.long).min  # 2 if nobody had noticed


@pytest.mark.parametrize("other", [torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 3)])
def test_another_shape_or_dtype_is_an_error_that_names_it(other):
    run, _ = captured(lambda batches: batches[0].sum())
    run(tokens(1))
    with pytest.raises(ValueError, match=r"tokens of micro-batch 0 are .* buffers are torch.int64 \[2, 3\]"):
        run([other])


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.micro_batch_size=4",),
        ("train.micro_batch_size=1", "model.aux_loss=global_batch", "model.aux_loss_coef=0.1"),
        ("model.mtp_depth=1", "precision.compute=bf16"),
        pytest.param(COMPILED, marks=pytest.mark.slow),
    ],
    ids=["two micro-batches", "one", "global balance", "mtp in bf16", "compiled"],
)
def test_training_is_bitwise_the_uncaptured_one(tmp_path, overrides):
    for name, words in (("plain", ()), ("captured", (CAPTURED,))):
        train_in(tmp_path / name, *STEPS, *overrides, *words)
    assert numbers(tmp_path / "captured") == numbers(tmp_path / "plain")
    plain, replayed = (
        final_state(tmp_path / name / "checkpoints", tmp_path / f"{name}_scratch", *STEPS, *overrides)
        for name in ("plain", "captured")
    )
    assert_same_state(plain, replayed)
    report = json.loads((tmp_path / "captured" / REPORT_FILE).read_text())
    assert report["scope"] == "full_iteration" and report["on"] == "host" and report["graphs"] == 1
    assert not (tmp_path / "plain" / REPORT_FILE).exists()


@pytest.mark.parametrize(
    "words",
    [
        (CAPTURED,),
        pytest.param(("graph.scope=layer", *COMPILED), marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
def test_a_load_that_swings_from_step_to_step_changes_no_bit(tmp_path, swinging_load, words):
    words = (*words, "model.top_k=1", "train.global_batch_size=2", "train.steps=12", "train.val_batches=0")
    plain = train_in(tmp_path / "plain", *words, "graph.warmup_steps=12")
    captured = train_in(tmp_path / "captured", *words, "graph.warmup_steps=2")
    assert numbers(tmp_path / "captured") == numbers(tmp_path / "plain")
    for one, other in zip(plain.optimizer.main, captured.optimizer.main, strict=True):
        assert torch.equal(one, other)
    assert_load_swings(metrics(tmp_path / "captured"), num_experts=4, after=2)


def test_metrics_are_written_a_step_late_and_completely(tmp_path):
    words = ("train.steps=7", "train.val_batches=0", "checkpoint.interval=0", "train.log_interval=2")
    trainer = trainer_in(tmp_path, *words, CAPTURED)
    written = []
    for _ in range(7):
        trainer._train_step()
        written.append(len(metrics(tmp_path)))
    assert written == [0, 0, 2, 2, 4, 4, 7]  # the last step is written at once
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 8))
    assert all(row["tokens"] == 4 * 16 * row["step"] and row["step_s"] > 0 for row in metrics(tmp_path))
    trainer.loader.close()
