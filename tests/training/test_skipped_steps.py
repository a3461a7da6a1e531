"""Steps whose loss or gradients are not finite: they change nothing, and too many in a row end the run."""

import pytest
import torch

from graphmoe.checkpoint.entries import flatten
from graphmoe.training.saves import TrainingStopped
from tests.runs import QUIET, TINY, command, metrics, spoil_steps, train_in, trainer_in

BALANCED = ("model.aux_loss=global_batch", "model.aux_loss_coef=0.1")


def state_of(trainer) -> dict[str, torch.Tensor]:
    """The bytes of all that a checkpoint holds and of the routers' counts, by name."""
    tensors = {**flatten(trainer._state()).tensors, **dict(trainer.model.named_buffers())}
    return {name: t.detach().clone().view(-1).view(torch.uint8) for name, t in tensors.items()}


@pytest.mark.parametrize(
    "words", [(), ("precision.compute=bf16",), BALANCED], ids=["fp32", "bf16", "balanced"]
)
@pytest.mark.parametrize("why", ["void", "loss", "gradients"])
def test_a_step_that_is_void_or_not_finite_leaves_the_state_as_it_was(tmp_path, monkeypatch, why, words):
    trainer = trainer_in(tmp_path, *QUIET, *words)
    optimizer = trainer.optimizer
    if why != "void":
        spoil_steps(monkeypatch, trainer, {3, 4}, only_gradients=why == "gradients")
    for _ in range(2):
        trainer._train_step()
    before = state_of(trainer)
    assert any(name.endswith("selection_bias") and t.count_nonzero() for name, t in before.items())
    optimizer.void.fill_(float(why == "void"))
    for _ in range(2):
        trainer._train_step()
    after = state_of(trainer)
    changed = {name for name, t in before.items() if not torch.equal(t, after[name])}
    counters = {f"optimizer.counters.{name}" for name in ("skipped", "skipped_in_row", "longest_skip")}
    assert changed - {n for n in before if n.endswith("earlier_counts")} == (
        counters if why != "void" else set()
    )
    assert optimizer.applied.item() == 2 and optimizer.skipped.item() == 2 * (why != "void")
    assert trainer.loader.place.consumed == 4 * 4
    optimizer.void.zero_()
    trainer._train_step()
    assert not torch.equal(state_of(trainer)["model.embed.weight"], after["model.embed.weight"])
    trainer.loader.close()


def test_skipped_steps_are_counted_and_their_rows_are_json(tmp_path, monkeypatch, caplog):
    trainer = trainer_in(tmp_path, "train.steps=8", "train.max_nonfinite=3", "train.log_interval=3")
    spoil_steps(monkeypatch, trainer, {2, 3, 6})
    caplog.set_level("INFO")
    assert trainer.run()
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert [row["skipped"] for row in rows] == [step in (2, 3, 6) for step in range(1, 9)]
    assert [row["skipped_total"] for row in rows] == [0, 1, 2, 2, 2, 3, 3, 3]
    assert [row["loss"] is None for row in rows] == [row["skipped"] for row in rows]
    assert caplog.text.count("SKIPPED: not finite") == 3


@pytest.mark.parametrize("only_gradients", [False, True])
def test_too_many_skips_in_a_row_end_the_run_also_between_two_reads(tmp_path, monkeypatch, only_gradients):
    trainer = trainer_in(tmp_path, "train.steps=9", "train.max_nonfinite=3", "train.log_interval=7")
    spoil_steps(monkeypatch, trainer, {4, 5, 6}, only_gradients=only_gradients)
    with pytest.raises(TrainingStopped, match=r"3 steps in a row .*train.max_nonfinite=3.*lower optim.lr"):
        trainer.run()
    assert trainer.step == 6  # read at the validation of step 6
    assert trainer.store.latest() == [6, 3]
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_a_stopped_run_without_checkpoints_names_the_one_that_it_began_from(tmp_path, monkeypatch):
    train_in(tmp_path / "old", "train.steps=3")
    words = ("train.max_nonfinite=1", "train.log_interval=1", "checkpoint.enabled=false")
    trainer = trainer_in(tmp_path / "new", *words, f"checkpoint.resume_from={tmp_path / 'old'}")
    spoil_steps(monkeypatch, trainer, {4})
    began = tmp_path / "old" / "checkpoints" / "step_00000003"
    said = rf"nothing is saved \(checkpoint.enabled=false\); the run began from {began}\. "
    with pytest.raises(TrainingStopped, match=said):
        trainer.run()


def test_a_run_whose_last_steps_were_all_skipped_is_not_finished_by_starting_it_again(tmp_path, monkeypatch):
    overrides = ("train.steps=4", "train.max_nonfinite=2", "train.log_interval=1")
    trainer = trainer_in(tmp_path / "run", *overrides)
    spoil_steps(monkeypatch, trainer, {3, 4})
    with pytest.raises(TrainingStopped, match="weights before them are saved at step 4"):
        trainer.run()
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(TrainingStopped, match="^2 steps in a row"):
            train_in(tmp_path / "run", *overrides)
    again = train_in(tmp_path / "run", *overrides[1:], "train.steps=6")
    assert again.optimizer.applied.item() == 4
    assert train_in(tmp_path / "run", *overrides[1:], "train.steps=6").step == 6


def test_a_hopeless_learning_rate_ends_the_command_with_status_1_and_saves_no_weights_of_it(tmp_path):
    hopeless = ("optim.lr=1e38", "train.steps=30", "train.max_nonfinite=4", "train.log_interval=50")
    rest = ("checkpoint.interval=0", "train.val_interval=10", "hydra.run.dir=run")
    run = command(tmp_path, *TINY, *hopeless, *rest)
    assert run.wait() == 1
    last = run.err.read_text().splitlines()[-1]
    assert last.startswith("error: ") and "steps in a row had a loss or gradient that is not finite" in last
    assert "is not finite after step 10, which is not saved; no step before it is saved" in last
    assert "Traceback" not in run.err.read_text()
    assert not (tmp_path / "run/checkpoints").exists()
    assert run.out.read_text() == ""
