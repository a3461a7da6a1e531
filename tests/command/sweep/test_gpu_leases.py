"""Leases of GPUs: disjoint, all or none, freed at death; which of them the jobs of a sweep take."""

import subprocess
import sys
import threading

import pytest
import torch
from hydra.core.hydra_config import HydraConfig

from graphmoe.command.sweep import job
from graphmoe.command.sweep.job import in_sweep, job_gpus, lease_gpus, visible_gpus
from graphmoe.config.schema import ConfigError, DeviceChoice, LaunchConfig, RunConfig
from tests.runs import ROOT, hydra_config


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(job, "POLL_S", 0.01)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


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
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"has them\n"
        holder.kill()
    with lease_gpus(4) as environment:
        assert environment == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.fixture
def job_of():
    """Make this process one that runs a job of a sweep with these words."""

    def start(*words: str) -> None:
        HydraConfig.instance().set_config(hydra_config("hydra.mode=MULTIRUN", *words))

    yield start
    HydraConfig.instance().cfg = None


def config_of(nproc: int = 1, gpus: int | None = None, device: str = "cuda") -> RunConfig:
    found = RunConfig(launch=LaunchConfig(nproc=nproc, gpus_per_job=gpus))
    found.run.device = DeviceChoice(device)
    return found


def test_jobs_side_by_side_have_gpus_of_their_own_or_are_refused(job_of):
    job_of("hydra/launcher=joblib")
    assert in_sweep()
    with job_gpus(config_of(2, 2)) as first, job_gpus(config_of(2, 2)) as second:
        assert [each["CUDA_VISIBLE_DEVICES"] for each in (first, second)] == ["0,1", "2,3"]
    workers = "launch.nproc=2 workers need a GPU each, and launch.gpus_per_job=1;"
    share = "launcher=joblib .*; launch.gpus_per_job=2 gives each job its own"
    for gpus, said in {None: share, 1: workers}.items():
        with pytest.raises(ConfigError, match=said):
            job_gpus(config_of(2, gpus)).__enter__()


def test_a_job_that_shares_with_nobody_takes_the_gpus_as_they_are(job_of):
    alone = {
        "hydra/launcher=joblib": config_of(device="cpu"),
        "hydra/launcher=basic": config_of(),
        "hydra/launcher=joblib hydra.mode=RUN": config_of(gpus=9),
    }
    for words, config in alone.items():
        job_of(*words.split())
        with job_gpus(config) as environment:
            assert environment == {}, words
