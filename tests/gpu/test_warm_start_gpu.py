"""The second job on a GPU: all compiled code is found, our own kernels too, and it computes the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphmoe.run.files import SUMMARY_FILE
from tests.gpu.tiny import GPU
from tests.runs import metrics

WORDS = (
    *GPU, "data=synthetic", "train.steps=4", "train.log_interval=1", "train.global_batch_size=4",
    "train.micro_batch_size=2", "train.val_batches=0", "checkpoint=none", "log.tensorboard=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("jobs")
    exact = ("precision.deterministic=true",)
    runs = {"first": (), "second": ("optim.lr=2e-3",), "third": (), "exact": exact, "exact again": exact}
    return {name: job(folder, name.replace(" ", "_"), *words) for name, words in runs.items()}


def job(folder: Path, name: str, *words: str) -> dict[str, Any]:
    torchs = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in torchs}
    environment["GRAPHMOE_CACHE"] = str(folder / "cache")
    command = [sys.executable, "-m", "graphmoe.train", *WORDS, *words, f"hydra.run.dir={folder / name}"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-4000:]
    held = subprocess.run(
        [sys.executable, "-m", "graphmoe.cache", "format=json"],
        env=environment, capture_output=True, text=True, check=True, cwd=root,
    )  # fmt: skip
    run = folder / name
    blobs = (folder / "cache").glob("**/blobs/*/*")
    return {
        "stored": {path.name for path in blobs},
        "losses": [row["loss"] for row in metrics(run) if "loss" in row],
        "cache": json.loads((run / "compile_report.json").read_text())["cache"],
        "files": {row["key"]: row["files"] for row in json.loads(held.stdout)["entries"]},
        "summary": json.loads((run / SUMMARY_FILE).read_text()),
    }


@pytest.mark.parametrize(
    ("first", "again"), [("first", "second"), ("first", "third"), ("exact", "exact again")]
)
def test_a_later_job_compiles_no_graph_and_no_kernel(jobs, first, again):
    assert jobs[first]["cache"]["fx_misses"] > 0
    found = jobs[again]["cache"]
    assert found["fx_hits"] == jobs[first]["cache"]["fx_misses"] + jobs[first]["cache"]["fx_hits"]
    assert (found["fx_misses"], found["aot_misses"]) == (0, 0)
    assert jobs[again]["files"].items() >= jobs[first]["files"].items()  # nor added a file


@pytest.mark.parametrize(("first", "again"), [("first", "third"), ("exact", "exact again")])
def test_a_later_job_tunes_no_kernel(jobs, first, again):
    """The result of a tuning names the time that it took, so it would be stored as another."""
    assert jobs[again]["stored"] == jobs[first]["stored"] != set()


def test_kernels_are_tuned_alike_so_the_first_loss_is_bitwise_the_same(jobs):
    """Compare first losses only: without precision.deterministic, sums of a backward have no fixed order."""
    first, second, third = (jobs[name]["losses"][0] for name in ("first", "second", "third"))
    assert first == second == third


def test_deterministic_jobs_have_the_same_losses_cold_and_warm(jobs):
    assert len(jobs["exact"]["losses"]) == 4
    assert jobs["exact again"]["losses"] == jobs["exact"]["losses"]


def test_the_later_job_starts_sooner(jobs):
    first, third = (jobs[name]["summary"]["time_to_first_step_s"] for name in ("first", "third"))
    assert third < 0.5 * first
