"""Steps and weights that are not finite: they change nothing, are not saved, and end a run."""

import itertools
import math
import re

import pytest
import torch
import yaml

from graphmoe.checkpoint import CheckpointError
from graphmoe.checkpoint.entries import flatten
from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ConfigError
from graphmoe.training import saves
from graphmoe.training.saves import TrainingStopped, first_not_finite
from graphmoe.training.trainer import Trainer
from tests.runs import (
    QUIET,
    TINY,
    assert_same_state,
    command,
    config,
    final_state,
    metrics,
    slow_but,
    spoil_steps,
    train_in,
    trainer_in,
)

BF16 = ("precision.compute=bf16",)
BALANCED = ("model.aux_loss=global_batch", "model.aux_loss_coef=0.1")


def state_of(trainer) -> dict[str, torch.Tensor]:
    """The bytes of all that a checkpoint holds and of the routers' counts, by name."""
    tensors = {**flatten(trainer._state()).tensors, **dict(trainer.model.named_buffers())}
    return {name: t.detach().clone().view(-1).view(torch.uint8) for name, t in tensors.items()}


def steps(trainer: Trainer, count: int) -> Trainer:
    for _ in range(count):
        trainer._train_step()
    return trainer


@pytest.mark.parametrize("words", [(), BF16, BALANCED], ids=["fp32", "bf16", "balanced"])
@pytest.mark.parametrize("why", ["void", "loss", "gradients"])
def test_a_step_that_is_void_or_not_finite_leaves_the_state_as_it_was(tmp_path, monkeypatch, why, words):
    trainer = trainer_in(tmp_path, *QUIET, *words)
    optimizer = trainer.optimizer
    if why != "void":
        spoil_steps(monkeypatch, trainer, {3, 4}, only_gradients=why == "gradients")
    before = state_of(steps(trainer, 2))
    assert any(name.endswith("selection_bias") and t.count_nonzero() for name, t in before.items())
    optimizer.void.fill_(float(why == "void"))
    after = state_of(steps(trainer, 2))
    changed = {name for name, t in before.items() if not torch.equal(t, after[name])}
    counters = {f"optimizer.counters.{name}" for name in ("skipped", "skipped_in_row", "longest_skip")}
    if why == "void":
        assert not changed
    else:
        assert {name for name in changed if not name.endswith("earlier_counts")} == counters
    assert optimizer.applied.item() == 2 and optimizer.skipped.item() == 2 * (why != "void")
    assert trainer.loader.place.consumed == 4 * 4
    optimizer.void.zero_()
    last = state_of(steps(trainer, 1))
    assert not torch.equal(last["model.embed.weight"], after["model.embed.weight"])
    trainer.loader.close()


def test_skipped_steps_are_counted_and_their_rows_are_json(tmp_path, monkeypatch, caplog):
    trainer = trainer_in(tmp_path, "train.steps=8", "train.max_nonfinite=3", "train.log_interval=3")
    spoil_steps(monkeypatch, trainer, {2, 3, 6})
    caplog.set_level("INFO")
    assert trainer.run()
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert [row["skipped_total"] for row in rows] == [0, 1, 2, 2, 2, 3, 3, 3]
    skipped = [step in (2, 3, 6) for step in range(1, 9)]
    assert [row["skipped"] for row in rows] == [row["loss"] is None for row in rows] == skipped
    assert re.findall(r"SKIPPED (\d): not finite", caplog.text) == ["2", "1"]


@pytest.mark.parametrize("only_gradients", [False, True])
def test_too_many_skips_in_a_row_end_the_run_also_between_two_reads(tmp_path, monkeypatch, only_gradients):
    trainer = trainer_in(tmp_path, "train.steps=9", "train.max_nonfinite=3", "train.log_interval=7")
    spoil_steps(monkeypatch, trainer, {4, 5, 6}, only_gradients=only_gradients)
    with pytest.raises(TrainingStopped, match=r"3 steps in a row .*train.max_nonfinite=3.*lower optim.lr"):
        trainer.run()
    assert trainer.step == 6  # read at the validation of step 6
    assert trainer.saves.store.latest() == [6, 3]
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
    assert run.wait() == 1 and run.out.read_text() == ""
    shown = run.err.read_text()
    last = shown.splitlines()[-1]
    assert last.startswith("error: ") and "steps in a row had a loss or gradient that is not finite" in last
    assert "is not finite after step 10, which is not saved; no step before it is saved" in last
    assert "Traceback" not in shown and not (tmp_path / "run/checkpoints").exists()


RUN = (
    "train.steps=12", "train.log_interval=1", "train.max_nonfinite=3", "train.val_batches=0",
    "checkpoint.interval=2",
)  # fmt: skip
GOOD = 4  # the step after which a value is spoiled; it is saved
PLACES = {
    "embedding": "model.embed.weight",
    "attention": "model.layers.0.attn.q_proj.",
    "router": "model.layers.1.moe_router.gate.",
    "expert": "model.layers.1.moe_experts.w_down",
    "norm": "model.loss_head.norm.weight",
    "head": "model.loss_head.head.weight",
    "first moment": "optimizer.exp_avg.layers.1.moe_experts.w_down",
    "second moment": "optimizer.exp_avg_sq.embed.weight",
}


def spoil(trainer: Trainer, place: str, value: float = math.nan) -> str:
    tensors = flatten(trainer._state()).tensors
    name = next(name for name in tensors if name.startswith(place))
    tensors[name].view(-1)[-1] = value
    return name


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("place", slow_but(PLACES, "expert"))
def test_weights_that_are_not_finite_end_the_run_and_the_last_good_checkpoint_stays(tmp_path, place, keep):
    overrides = (*RUN, f"checkpoint.keep_last={keep}")
    trainer = steps(trainer_in(tmp_path / "run", *overrides), GOOD)
    spoil(trainer, place)
    with pytest.raises(TrainingStopped) as stopped:
        trainer.run()
    good = tmp_path / f"run/checkpoints/step_{GOOD:08d}"
    assert "is not finite after step" in str(stopped.value) and str(good) in str(stopped.value)
    assert trainer.saves.store.latest() == [4, 2][:keep]
    for step in trainer.saves.store.latest():
        state = trainer_in(tmp_path / "scratch", *overrides)._state()
        trainer.saves.store.load(state, step)
        assert first_not_finite({part: state[part] for part in ("model", "optimizer")}) is None
    if keep == 1:
        states = []
        for name in ("run", "whole"):
            train_in(tmp_path / name, *overrides)
            states.append(final_state(tmp_path / name, tmp_path / f"of {name}", *overrides))
        assert_same_state(*states)


@pytest.mark.parametrize("place", ["model.embed.weight", "optimizer.main.layers.1.moe_experts.w_down"])
def test_bf16_weights_and_the_fp32_ones_they_are_rounded_from_are_both_looked_at(tmp_path, place):
    trainer = steps(trainer_in(tmp_path, *RUN, "precision.compute=bf16"), 3)
    name = spoil(trainer, place, math.inf)
    with pytest.raises(TrainingStopped, match=f"{name} is not finite after step 3, .*step_00000002"):
        trainer._save(wait=True)
    assert trainer.saves.store.latest() == [2]
    trainer.loader.close()


def test_a_start_names_what_is_not_finite_and_the_newest_good_one(tmp_path, monkeypatch):
    trainer = steps(trainer_in(tmp_path / "run", *RUN), 5)
    first = spoil(trainer, PLACES["head"])
    with monkeypatch.context() as older:
        older.setattr(saves, "not_finite", lambda *_: None)
        steps(trainer, 1).saves.store.wait()
    trainer.loader.close()
    assert trainer.saves.store.latest() == [6, 4, 2]
    bad, good = (tmp_path / f"run/checkpoints/step_0000000{step}" for step in (6, 4))
    for folder, more in (("run", ()), ("other", (f"checkpoint.resume_from={tmp_path / 'run'}",))):
        with pytest.raises(CheckpointError) as refused:
            trainer_in(tmp_path / folder, *RUN, *more)
        assert f"{bad} cannot be resumed: {first}" in str(refused.value)
        assert f"but {good} is: remove step_00000006" in str(refused.value)
    with pytest.raises(CheckpointError, match="no earlier one there can be used"):
        trainer_in(tmp_path / "one", *RUN, f"checkpoint.resume_from={bad}")
    assert trainer_in(tmp_path / "good", *RUN, f"checkpoint.resume_from={good}").step == 4
    (tmp_path / "run/resolved.yaml").write_text(yaml.safe_dump(to_plain(config(*RUN))))
    said = f"checkpoint.init_from=.*its {first} has values that are not finite"
    with pytest.raises(ConfigError, match=said):
        trainer_in(tmp_path / "new", *RUN, f"checkpoint.init_from={tmp_path / 'run'}")
    assert not [*tmp_path.glob("other/checkpoints/*"), *tmp_path.glob("new/checkpoints/*")]


def test_checkpoints_from_before_skipped_steps_stay_until_a_step_is_applied_again(tmp_path, monkeypatch):
    overrides = (*RUN, "checkpoint.interval=1", "checkpoint.keep_last=1", "train.max_nonfinite=9")
    trainer = steps(trainer_in(tmp_path, *overrides), 3)
    spoil_steps(monkeypatch, trainer, {4, 5, 6})
    found = [steps(trainer, 1).saves.store.latest() for _ in range(4)]
    assert found == [[4, 3], [5, 3], [6, 3], [7]]
    trainer.loader.close()


def test_a_number_is_named_by_the_first_tensor_that_holds_one_that_is_not_finite():
    largest = torch.finfo(torch.float32).max
    fine = {"a": torch.full((3,), largest), "b": torch.tensor([1, 2]), "c": torch.zeros(0)}
    assert first_not_finite({"of": fine}) is None
    for value, place in itertools.product((math.nan, math.inf, -math.inf), range(5)):
        bad = torch.zeros(5, dtype=torch.bfloat16)
        bad[place] = value
        assert first_not_finite({"of": fine, "more": {"x": bad, "y": bad}}) == "more.x"
