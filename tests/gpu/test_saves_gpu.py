"""Numbers that are not finite on a GPU: never saved, and huge gradients are skipped, in graphs too."""

import math

import pytest
import torch

from graphmoe.training.saves import TrainingStopped, first_not_finite
from tests.gpu.tiny import COMPILED, GPU
from tests.runs import metrics, trainer_in

WORDS = (*GPU, "model.num_layers=2", "train.val_batches=0", "train.log_interval=1")
SCOPES = pytest.mark.parametrize("scope", ["none", "full_iteration"])


@COMPILED
@SCOPES
def test_a_weight_that_is_not_finite_ends_the_run_and_the_last_good_checkpoint_stays(
    tmp_path, compiled, scope
):
    words = (*WORDS, compiled, f"graph.scope={scope}", "train.steps=12", "checkpoint.interval=4")
    trainer = trainer_in(tmp_path, *words, "checkpoint.keep_last=1", "train.max_nonfinite=3")
    step = trainer._train_step

    def spoil_after_six() -> None:
        step()
        if trainer.step == 6:
            trainer.optimizer.state_dict()["main"]["embed.weight"].view(-1)[5] = math.nan

    trainer._train_step = spoil_after_six
    with pytest.raises(TrainingStopped, match="embed.weight is not finite after step .*step_00000004"):
        trainer.run()
    assert trainer.store.latest() == [4]


@COMPILED
@SCOPES
def test_gradients_whose_squares_overflow_are_skipped(tmp_path, compiled, scope):
    words = (*WORDS, compiled, f"graph.scope={scope}", "train.steps=8", "train.max_nonfinite=9")
    huge = ("model.aux_loss=sequence", "model.aux_loss_coef=1e27", "train.clip_grad_norm=0")
    trainer = trainer_in(tmp_path, *words, *huge, "checkpoint.interval=0")
    before = [weight.clone() for weight in trainer.optimizer.main]
    trainer.run()
    rows = metrics(tmp_path)
    assert rows[-1]["skipped_total"] == len(rows) == 8
    assert all(map(torch.equal, before, trainer.optimizer.main))
    assert first_not_finite({"optimizer": trainer.optimizer.state_dict()}) is None
