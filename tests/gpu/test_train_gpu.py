"""Training on a GPU: bf16 with fp32 main weights, and a host that never waits."""

import math

import pytest
import torch

from graphmoe.generate import load_model
from graphmoe.plan.costs.hardware import peak_tflops
from tests.gpu.sleeping import assert_host_is_back_while_the_device_sleeps, syncs_are_errors
from tests.gpu.tiny import COMPILED, DOCUMENTS, GPU
from tests.runs import config, metrics, train_in


def test_five_steps_in_bf16_keep_fp32_main_weights(tmp_path):
    trainer = train_in(tmp_path, *GPU, "train.steps=5")
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["loss"] == pytest.approx(math.log(512), rel=0.1) and not row["skipped"]
        assert row["grad_norm"] > 0 and row["tokens_per_s"] > 0 and row["memory_gib"] > 0
        if peak_tflops(torch.cuda.get_device_name()):
            assert 0 < row["mfu"] < 1
    for weight, main in zip(trainer.optimizer.weights, trainer.optimizer.main, strict=True):
        assert weight.dtype == torch.bfloat16 and main.dtype == torch.float32
        assert torch.equal(weight, main.bfloat16())
    model, step = load_model(tmp_path, config(*GPU).model, torch.device("cpu"))
    assert step == 5
    assert torch.equal(model.embed.weight.bfloat16(), trainer.model.embed.weight.cpu())


@COMPILED
@pytest.mark.parametrize(
    "overrides",
    [(), ("model.mtp_depth=1",), ("model.aux_loss=global_batch",), DOCUMENTS],
    ids=["plain", "mtp", "global_batch", "documents"],
)
def test_a_bf16_step_that_is_not_read_never_syncs_the_device(warm, overrides, compiled):
    trainer = warm(*overrides, compiled)
    with syncs_are_errors():
        for _ in range(3):
            trainer._train_step()
    assert trainer.step == 6 and len(trainer.rows) == 5  # the first is read at once
    read = trainer.rows.read()
    assert all(math.isfinite(row.values["loss"]) and row.seconds > 0 for row in read)


@pytest.mark.alone  # beside other tests the launches of an eager step take longer than the limit
@COMPILED
def test_the_host_is_back_from_a_step_while_the_device_is_still_asleep(warm, compiled):
    # One layer and one micro-batch: eager launches of more would take the host longer than the limit.
    trainer = warm("model.num_layers=1", "model.num_dense_layers=0", "train.micro_batch_size=4", compiled)
    assert_host_is_back_while_the_device_sleeps(trainer._train_step)
