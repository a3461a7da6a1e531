"""A run that was saved in one layout goes on in another, on as many ranks or not, and in its own bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import Job
from tests.distributed.training import Outcome, Training, assert_went_on
from tests.runs import assert_same_state

BASE = (
    "model.num_dense_layers=1", "model.mtp_depth=1", "train.global_batch_size=8", "train.steps=5",
    "train.log_interval=1", "train.val_batches=2", "train.val_interval=4", "checkpoint.interval=2",
    "checkpoint.keep_last=3", "optim.bucket_mb=0.01",
)  # fmt: skip
SAVED = ("parallel.tp=2", "parallel.ep=2", "parallel.etp=2")
OF_FOUR = {
    "the same layout": SAVED,
    "data parallel": (),
    "experts over all ranks": ("parallel.ep=4",),
    "other folds": ("parallel.tp=2", "parallel.etp=2"),
}
OF_TWO = {"two ranks of tp": ("parallel.tp=2",), "two ranks of ep": ("parallel.ep=2",)}
ALONE = "one process"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """A run of five steps that four ranks did, and those that others did from its second on."""
    folder = tmp_path_factory.mktemp("resumed")
    start = f"checkpoint.resume_from={folder}/whole/checkpoints/step_00000002"
    four = {"whole": Training((*BASE, *SAVED))}
    four |= {name: Training((*BASE, *words, start)) for name, words in OF_FOUR.items()}
    two = {name: Training((*BASE, *words, start)) for name, words in OF_TWO.items()}
    found = Job(folder, four, num_ranks=4).results() | Job(folder, two).results()
    return found | {ALONE: [Training((*BASE, start))(Ranks(), folder / "alone")]}


@pytest.mark.parametrize("name", [*OF_FOUR, *OF_TWO, ALONE])
def test_a_run_goes_on_in_another_layout_with_the_same_losses(runs, name):
    for found in runs[name]:
        assert found.step == 5
        assert_went_on(found, runs["whole"][0], step=2)
        assert [row["tokens"] for row in found.written if "loss" in row] == [8 * 16 * n for n in (3, 4, 5)]


def test_in_its_own_layout_it_goes_on_bitwise(runs):
    for found, whole in zip(runs["the same layout"], runs["whole"], strict=True):
        assert torch.equal(found.rows, whole.rows[2:])
        assert_same_state(found.state, whole.state)


def test_the_run_that_was_resumed_from_stays_as_it_was(runs, tmp_path_factory):
    folder = Path(tmp_path_factory.getbasetemp(), "resumed0", "whole", "checkpoints")
    assert sorted(path.name for path in folder.iterdir()) == [f"step_{n:08d}" for n in (2, 4, 5)]
