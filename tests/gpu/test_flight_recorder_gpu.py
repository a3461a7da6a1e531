"""Torch's flight recorder on two GPUs: dumps of a collective that waits in vain, named by the error."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from graphmoe.runtime.launch.failures import NAME, dump_lines, dumps_since
from tests.faults import HANG_AT
from tests.faults import WORDS as FAULTY
from tests.gpu.tiny import GPU
from tests.runs import ROOT, TINY, command

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL takes one a rank")


def collectives_in(dump: Path) -> list[str]:
    return [entry["profiling_name"] for entry in pickle.loads(dump.read_bytes())["entries"]]


def test_a_rank_that_hangs_lets_the_ranks_dump_and_the_error_names_the_files(tmp_path):
    words = ("launch.nproc=2", "train.steps=8", "hydra.run.dir=run", "launch.hang_timeout_s=20")
    run = command(tmp_path, *TINY, *GPU, *words, *FAULTY, environment={HANG_AT: "1:0:6"}, seconds=150)
    assert run.wait() == 1
    said, logs = run.err.read_text().partition("error: ")[2], tmp_path / "run" / "logs"
    assert said.startswith("rank 1 on ") and "no progress for " in said.splitlines()[0]
    dumps = dumps_since(0.0, logs)
    assert [dump.name for dump in dumps.values()] == [f"{NAME}0", f"{NAME}1"]
    for line in dump_lines(dumps):
        assert line in said
    waiting, hanging = map(collectives_in, dumps.values())
    assert len(waiting) > len(hanging) > 0


def test_a_collective_that_times_out_leaves_a_dump(tmp_path):
    began = time.time()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.gpu.late_rank", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0, done.stderr
    dumps = dumps_since(began, tmp_path)
    assert f"{NAME}0" in [dump.name for dump in dumps.values()], done.stderr[-2000:]
    assert collectives_in(dumps[0]).count("nccl:all_reduce") == 2
