"""What a command with nothing but a model chooses on GPUs, and that it trains with it."""

import json

import pytest
import torch
import yaml

from tests.runs import command, metrics

WORDS = ("data=synthetic", "model.num_layers=2", "data.seq_len=128", "train.steps=8", "train.val_batches=0")
WORDS += ("checkpoint=none", "log.report=false", "run.name=run")


def chosen(tmp_path, *words: str) -> dict[str, str]:
    """Automatic keys of a finished run that captured what it chose, with their values."""
    run = command(tmp_path, *WORDS, *words, seconds=300)
    assert run.wait() == 0, run.err.read_text()
    folder = tmp_path / "outputs" / "run"
    notes = yaml.safe_load((folder / "resolved.yaml").read_text())["run"]["auto"]
    assert "  auto        " + ", ".join(notes) in run.err.read_text()
    assert json.loads((folder / "capture_report.json").read_text())["graphs"] > 0
    assert all(row["loss"] < 10 for row in metrics(folder) if "loss" in row)
    return dict(note.partition(" (")[0].split("=") for note in notes)


def test_one_gpu_captures_the_whole_step_in_large_micro_batches(tmp_path):
    found = chosen(tmp_path)
    assert found["graph.scope"] == "full_iteration" and found["moe.dispatcher"] == "local"
    assert found["train.micro_batch_size"] == "16"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_exchange_through_peer_memory_with_overlap(tmp_path):
    found = chosen(tmp_path, "launch.nproc=2", "parallel.ep=2")
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("the GPUs cannot map each other's memory")
    assert found["moe.dispatcher"] == "symm" and found["moe.balance"] == "replicas"
    assert found["graph.scope"] == "full_iteration" and found["pipeline.ep_overlap"] == "true"
    assert found["train.micro_batch_size"] == "4"
