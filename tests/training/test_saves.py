"""Weights and moments that are not finite are never saved, and never started from."""

import math
from pathlib import Path

import pytest
import torch
import yaml

from graphmoe.checkpoint import CheckpointError, CheckpointStore
from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ConfigError
from graphmoe.training.saves import Saves, TrainingStopped, first_not_finite
from graphmoe.training.trainer import Trainer
from tests.runs import assert_same_state, config, final_state, spoil_steps, train_in, trainer_in

RUN = ("train.steps=12", "train.log_interval=1", "train.max_nonfinite=3", "checkpoint.interval=2")
RUN = (*RUN, "train.val_batches=0")
GOOD = 4
"""The step after which a value is spoiled; it is saved."""
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


def tensors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    state = trainer._state()
    optimizer = {k: v for k, v in state["optimizer"].items() if k != "counters"}
    parts = {"model": state["model"], **{f"optimizer.{k}": v for k, v in optimizer.items()}}
    return {f"{part}.{name}": t for part, tensors in parts.items() for name, t in tensors.items()}


def spoil(trainer: Trainer, place: str, value: float = math.nan) -> str:
    """Put a value into the last element of a tensor; its name."""
    name, tensor = next((n, t) for n, t in tensors_of(trainer).items() if n.startswith(place))
    tensor.view(-1)[-1] = value
    return name


def steps(trainer: Trainer, count: int) -> Trainer:
    for _ in range(count):
        trainer._train_step()
    return trainer


def names_in(store: CheckpointStore, scratch: Path, *overrides: str) -> list[str | None]:
    """Name the first value of each checkpoint that is not finite."""
    found = []
    for step in store.latest():
        state = trainer_in(scratch, *overrides)._state()
        store.load(state, step)
        found.append(first_not_finite({part: state[part] for part in ("model", "optimizer")}))
    return found


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize(
    "place", [pytest.param(p, id=n, marks=[pytest.mark.slow] * (n != "expert")) for n, p in PLACES.items()]
)
def test_weights_that_are_not_finite_end_the_run_and_the_last_good_checkpoint_stays(tmp_path, place, keep):
    overrides = (*RUN, f"checkpoint.keep_last={keep}")
    trainer = steps(trainer_in(tmp_path / "run", *overrides), GOOD)
    spoil(trainer, place)
    with pytest.raises(TrainingStopped) as stopped:
        trainer.run()
    good = tmp_path / f"run/checkpoints/step_{GOOD:08d}"
    assert "is not finite after step" in str(stopped.value) and str(good) in str(stopped.value)
    assert trainer.store.latest() == [4, 2][:keep]
    assert names_in(trainer.store, tmp_path / "scratch", *overrides) == [None] * keep
    if keep == 1:
        train_in(tmp_path / "run", *overrides)
        train_in(tmp_path / "whole", *overrides)
        run, whole = (
            final_state(tmp_path / name, tmp_path / f"of {name}", *overrides) for name in ("run", "whole")
        )
        assert_same_state(run, whole)


@pytest.mark.parametrize("place", ["model.embed.weight", "optimizer.main.layers.1.moe_experts.w_down"])
def test_bf16_weights_and_the_fp32_ones_they_are_rounded_from_are_both_looked_at(tmp_path, place):
    trainer = steps(trainer_in(tmp_path, *RUN, "precision.compute=bf16"), 3)
    name = spoil(trainer, place, math.inf)
    with pytest.raises(TrainingStopped, match=f"{name} is not finite after step 3, .*step_00000002"):
        trainer._save(wait=True)
    assert trainer.store.latest() == [2]
    trainer.loader.close()


def saved_without_a_look(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run's folder whose checkpoint of step 6 is not finite, as older versions wrote them; the name."""
    trainer = steps(trainer_in(folder, *RUN), 5)
    name = spoil(trainer, PLACES["head"])
    with monkeypatch.context() as patch:
        patch.setattr(Saves, "not_finite", lambda *_: None)
        steps(trainer, 1)
        trainer.store.wait()
    trainer.loader.close()
    assert trainer.store.latest() == [6, 4, 2]
    return name


def test_a_start_from_weights_that_are_not_finite_names_the_tensor_and_the_newest_good_one(
    tmp_path, monkeypatch
):
    first = saved_without_a_look(tmp_path / "run", monkeypatch)
    checkpoints = tmp_path / "run/checkpoints"
    resumed = f"checkpoint.resume_from={tmp_path / 'run'}"
    for folder, more in (("run", ()), ("other", (resumed,))):
        with pytest.raises(CheckpointError) as refused:
            trainer_in(tmp_path / folder, *RUN, *more)
        bad, good = checkpoints / "step_00000006", checkpoints / "step_00000004"
        assert f"{bad} is nothing to go on from: {first}" in str(refused.value)
        assert f"but {good} is: remove step_00000006" in str(refused.value)
    with pytest.raises(CheckpointError, match="no earlier one there can be used"):
        trainer_in(tmp_path / "one", *RUN, f"checkpoint.resume_from={checkpoints / 'step_00000006'}")
    assert (
        trainer_in(tmp_path / "good", *RUN, f"checkpoint.resume_from={checkpoints / 'step_00000004'}").step
        == 4
    )
    (tmp_path / "run/resolved.yaml").write_text(yaml.safe_dump(to_plain(config(*RUN))))
    with pytest.raises(
        ConfigError, match=f"checkpoint.init_from=.*its {first} has values that are not finite"
    ):
        trainer_in(tmp_path / "new", *RUN, f"checkpoint.init_from={tmp_path / 'run'}")
    assert not [*tmp_path.glob("other/checkpoints/*"), *tmp_path.glob("new/checkpoints/*")]


def test_checkpoints_from_before_skipped_steps_stay_until_a_step_is_applied_again(tmp_path, monkeypatch):
    overrides = (*RUN, "checkpoint.interval=1", "checkpoint.keep_last=1", "train.max_nonfinite=9")
    trainer = steps(trainer_in(tmp_path, *overrides), 3)
    spoil_steps(monkeypatch, trainer, {4, 5, 6})
    found = []
    for _ in range(4):
        steps(trainer, 1)
        found.append(trainer.store.latest())
    assert found == [[4, 3], [5, 3], [6, 3], [7]]
    trainer.loader.close()


def test_a_number_is_named_by_the_first_tensor_that_holds_one_that_is_not_finite():
    largest = torch.finfo(torch.float32).max
    fine = {"a": torch.full((3,), largest), "b": torch.tensor([1, 2]), "c": torch.zeros(0)}
    assert first_not_finite({"of": fine}) is None
    for value in (math.nan, math.inf, -math.inf):
        for place in range(5):
            bad = torch.zeros(5, dtype=torch.bfloat16)
            bad[place] = value
            assert first_not_finite({"of": fine, "more": {"x": bad, "y": bad}}) == "more.x"
