"""Sizes that are refused before a run starts, and the record of its machine."""

import dataclasses
import os
from types import SimpleNamespace

import psutil
import pytest
import torch

from graphmoe.config.schema import ConfigError, HostConfig, ModelConfig
from graphmoe.model.sizes import count_parameters, state_bytes
from graphmoe.plan.plan import plan_of
from graphmoe.run.machine import check_processes
from graphmoe.training.start_state import check_memory
from tests.runs import TINY, config


def test_a_model_larger_than_the_memory_is_refused_with_the_sizes():
    small = config()
    check_memory(plan_of(small, 1), torch.device("cpu"))
    huge = dataclasses.replace(small, model=ModelConfig(num_layers=10_000, num_experts=512))
    with pytest.raises(ConfigError, match=r"10000 has [\d,]+ parameters.* GiB, and this cpu has .* GiB"):
        check_memory(plan_of(huge, 1), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"take [\d.]+ GiB on each of 8 ranks, and this cpu has"):
        check_memory(plan_of(huge, 8), torch.device("cpu"))


def test_ranks_that_share_the_state_need_less_of_it(monkeypatch):
    run = config("precision.compute=bf16")
    bytes_of = 18 * count_parameters(run.model).total.full
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=0.6 * bytes_of))
    with pytest.raises(ConfigError):
        check_memory(plan_of(run, 1), torch.device("cpu"))
    with pytest.raises(ConfigError):
        check_memory(plan_of(run, 2), torch.device("cpu"))  # (6 + 18 / 2) / 18 = 0.83
    check_memory(plan_of(run, 8), torch.device("cpu"))  # (6 + 18 / 8) / 18 = 0.46


def test_with_a_pipeline_the_ranks_that_hold_most_are_those_that_count(monkeypatch):
    run = config(
        "launch.nproc=4", "parallel.pp=4", "pipeline.layout=E|t|tttt|tL", "model.num_layers=6",
        "train.global_batch_size=8",
    )  # fmt: skip
    plan = plan_of(run, 4)
    assert plan.pipeline is not None
    needed = [
        sum(state_bytes(run.model, plan.layout, stages, rounded=False).values())
        for stages in plan.pipeline.stages_of_places
    ]
    assert max(needed) == needed[2] > 1.5 * sum(needed) / 4
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=0.99 * max(needed)))
    with pytest.raises(ConfigError, match=r"on rank 2 of parallel.pp=4 \(t\*4\).* a pipeline.layout that"):
        check_memory(plan, torch.device("cpu"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=max(needed)))
    check_memory(plan, torch.device("cpu"))


@pytest.mark.parametrize(
    "words, message",
    [
        ("data.seq_len=32000000 model.context_length=32000000", "data.seq_len=32000000: the hidden states"),
        ("data.prefetch=300000000", "data.prefetch=300000000: the batches that are read ahead"),
        ("train.val_batches=300000000", "train.val_batches=300000000: the batches of a validation"),
        (
            "train.log_interval=2000000000 train.steps=1000000000",
            "train.log_interval=1000000000: the metrics",
        ),
    ],
)
def test_batches_larger_than_the_memory_are_refused_with_a_size_that_fits(words, message, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**31))
    asked = config(*TINY, *words.split())
    with pytest.raises(
        ConfigError, match=rf"{message} .*alone take [\d.]+ GiB, and there are 2.0 GiB"
    ) as told:
        check_memory(plan_of(asked, 1), torch.device("cpu"))
    smaller = str(told.value).rpartition("use at most ")[2]
    whole_batches = smaller.replace("micro", "global")
    check_memory(plan_of(config(*TINY, *words.split(), smaller, whole_batches), 1), torch.device("cpu"))


def test_more_threads_or_processes_than_the_machine_can_serve_are_refused(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    check_processes(HostConfig(threads=32), 32)
    for host, nproc, named in (
        (HostConfig(threads=33), 1, "host.threads=33"),
        (HostConfig(), 33, "launch.nproc=33"),
    ):
        with pytest.raises(ConfigError, match=f"{named} is more than 16 for each CPU of .* at most 32"):
            check_processes(host, nproc)
