"""Leases of GPUs: disjoint, all or none, freed at death."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from graphmoe.command.sweep import job
from graphmoe.command.sweep.job import lease_gpus, visible_gpus
from tests.runs import ROOT


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(job, "POLL_S", 0.01)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def test_leases_are_disjoint_and_free_again_afterwards():
    with lease_gpus(1) as one, lease_gpus(3) as three:
        assert (one, three) == ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1,2,3"})
    with lease_gpus(4) as four:
        assert four == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def test_a_job_waits_until_enough_are_free_and_holds_none_meanwhile(caplog):
    caplog.set_level("INFO")
    got: list[str] = []

    def wait() -> None:
        with lease_gpus(2) as environment:
            got.append(environment["CUDA_VISIBLE_DEVICES"])

    with lease_gpus(3):
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.1)
        with lease_gpus(1) as other:  # the one that the waiting job could not use alone
            assert other == {"CUDA_VISIBLE_DEVICES": "3"} and got == []
    waiting.join(10)
    assert got == ["0,1"]
    assert caplog.text.count("waiting until 2 of the GPUs 0,1,2,3 are free") == 1


def test_only_gpus_that_this_process_sees_are_leased(monkeypatch):
    cuda = {None: "0 1 2 3", "6, 7": "6 7", "GPU-aa,GPU-bb": "GPU-aa GPU-bb", "": ""}
    for value, seen in cuda.items():
        own = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        assert visible_gpus(own, 4) == seen.split()
    both = {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "3"}
    assert visible_gpus(both, 4) == ["0", "1"]
    assert visible_gpus({"HIP_VISIBLE_DEVICES": "1"}, 4) == ["0", "1", "2", "3"]
    monkeypatch.setattr(torch.version, "hip", "7.0")  # ROCm's own is asked for first, and both are told
    assert visible_gpus(both, 4) == ["3"]
    with lease_gpus(2) as environment:
        assert environment == {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"}


@pytest.mark.slow
def test_the_gpus_of_a_job_that_was_killed_are_free(tmp_path):
    code = (
        f"import torch, tempfile, time; tempfile.tempdir = '{tmp_path}'\n"
        "torch.cuda.device_count = lambda: 4\n"
        "from graphmoe.command.sweep.job import lease_gpus\n"
        "with lease_gpus(4): print('has them', flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", code]
    holder = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, env=dict(os.environ))
    assert holder.stdout.readline() == b"has them\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    with lease_gpus(4) as environment:
        assert environment == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
