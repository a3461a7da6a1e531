"""Jobs of two GPUs, as the launcher starts them: a rank that dies, and all that start again."""

import re
import signal

import pytest
import torch

from tests.faults import SIGNAL_AT, STEP_S
from tests.faults import WORDS as FAULTY
from tests.gpu.tiny import GPU
from tests.runs import TINY, Command, command, numbers

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL takes one a rank")

SYMM = ("moe.dispatcher=symm", "moe.balance=none", "moe.receive_budget=worst_case")
WORDS = (
    *TINY, *GPU, *SYMM, "launch.nproc=2", "parallel.ep=2", "train.steps=8", "graph.scope=full_iteration",
    "compile.enabled=true", "precision.deterministic=true", "hydra.run.dir=run", *FAULTY,
)  # fmt: skip
KILLED = {SIGNAL_AT[signal.SIGKILL]: "1:0:6", STEP_S: "1"}
"""Rank 1, the first time, before step 6, when steps are replayed from a graph.

A thread writes the checkpoint of step 3, which takes longer than replays of two steps of this size would.
"""


def assert_finished(run: Command) -> None:
    assert run.wait() == 0, run.err.read_text()
    assert run.out.read_text().endswith("results: run\n")


def test_after_a_killed_rank_all_start_again_and_the_run_is_bitwise_the_undisturbed_one(tmp_path):
    folders = [tmp_path / name for name in ("undisturbed", "killed")]
    for folder in folders:
        folder.mkdir()
    undisturbed = command(folders[0], *WORDS, seconds=150)
    assert_finished(undisturbed)
    killed = command(folders[1], *WORDS, "launch.max_restarts=1", environment=KILLED, seconds=200)
    assert_finished(killed)
    said = killed.err.read_text()
    # Rank 0 may leave an error, wait in NCCL until it is killed too, or be aborted.
    assert re.search(
        r"(rank 1 on \S+ ended without a word|worker was killed).*are restarted \(1 of 1\)", said
    )
    assert "continuing after step 3 of" in said
    first, second = (numbers(folder / "run") for folder in folders)
    assert first == second and [row["step"] for row in first if "loss" in row][-1] == 8
