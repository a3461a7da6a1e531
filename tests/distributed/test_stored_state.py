"""Stored moments and bf16 weights on two ranks: the bits of one process, and resumes in other layouts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphmoe.config.schema import GradDtype, MasterDtype, MomentDtype, OptimConfig, TrainConfig
from graphmoe.optim.zero1 import Optimizer
from graphmoe.runtime.ranks import Mesh
from tests.distributed.layouts import Case, of_ranks
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded_optimizer import SHAPES, TINY, TWO, Nets
from tests.distributed.training import Outcome, shard_of


@dataclass
class StoredNets(Nets):
    """Gradients of few bits, whose sums over ranks are exact."""

    moments: MomentDtype = MomentDtype.fp32
    master: MasterDtype = MasterDtype.fp32
    gradients: GradDtype = GradDtype.fp32  # of ranks

    def train(self, rank: int | None) -> dict[str, Any]:
        self._last = None
        found = super().train(rank)
        assert self._last is not None
        optimizer, kinds = self._last, ("exp_avg", "exp_avg_sq")
        for kind in kinds:
            shards = [(family, shard_of(family, kind)) for family in optimizer.families]
            found[kind] = {
                name: each.clone()
                for family, shard in shards
                for name, each in family.gathered(shard).items()
            }
        return found

    def optimizer(self, rank: int | None) -> Optimizer:
        net = nn.ParameterDict([(name, nn.Parameter(self.start(name))) for name in SHAPES])
        named: dict[str, Any] = {"moment_dtype": self.moments, "master_dtype": self.master}
        named["grad_dtype"] = GradDtype.fp32 if rank is None else self.gradients
        optim = OptimConfig(self.rule, lr=0.1, bucket_mb=TINY, beta1=0.5, **named)
        mesh = None if rank is None else Mesh(TWO)
        self._last = Optimizer(net, optim, TrainConfig(steps=9, clip_grad_norm=0.0, seed=3), mesh)
        return self._last

    def _gradient(self, name: str, step: int, addition: int, rank: int) -> Tensor:
        return (super()._gradient(name, step, addition, rank) * 8).round() / 8


BITS = {
    "bf16": StoredNets(moments=MomentDtype.bf16),
    "int8": StoredNets(moments=MomentDtype.int8, bad=(2, 1)),
    "int8, in place": StoredNets(torch.bfloat16, moments=MomentDtype.int8, master=MasterDtype.bf16),
    "in place": StoredNets(torch.bfloat16, master=MasterDtype.bf16, bad=(2, 0)),
    "bf16 gradients": StoredNets(torch.bfloat16, "several", gradients=GradDtype.bf16, bad=(2, 1)),
}
INT8 = ("optim.moment_dtype=int8", "optim.master_dtype=bf16", "precision.compute=bf16")
SAVED = (*INT8, "checkpoint.enabled=true", "checkpoint.interval=2", "checkpoint.keep_last=9")
RESUMED = ("", "ep=2", "tp=2")


def saved(folder: Path, steps: int, layout: str = "", source: str = "") -> Case:
    start = f"checkpoint.resume_from={folder}/{source}/checkpoints/step_00000002"
    return Case(2, layout, model=(*SAVED, f"train.steps={steps}", *([start] if source else [])))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    cases = {"whole": saved(folder, 4).training, "short": saved(folder, 2).training}
    for layout in RESUMED:
        for steps in (2, 4):
            cases[f"{layout} to {steps}"] = saved(folder, steps, layout, "whole").training
    return run_ranks(folder, {**BITS, **cases})


@pytest.mark.parametrize("name", BITS)
def test_two_ranks_end_with_the_bits_of_one_process(runs, name):
    alone = BITS[name].train(None)
    for found in runs[name]:
        assert found["applied"] == alone["applied"]
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            assert found[kind].keys() == SHAPES.keys()
            for parameter, value in found[kind].items():
                assert torch.equal(value, alone[kind][parameter]), (kind, parameter)


def moments_of(outcome: Outcome, kind: str) -> dict[str, Tensor]:
    prefix = f"optimizer.{kind}."
    return {name[len(prefix) :]: each for name, each in outcome.state.items() if name.startswith(prefix)}


@pytest.mark.parametrize("layout", RESUMED)
def test_a_resume_in_another_layout_has_equal_weights_and_moments(runs, tmp_path, layout):
    short, case = runs["short"][0], saved(tmp_path, 4, layout)
    for found, weights in zip(runs[f"{layout} to 2"], of_ranks(case, short.weights), strict=True):
        assert all(torch.equal(each, weights[name]) for name, each in found.weights.items())
    for kind in ("exp_avg", "exp_avg_sq"):
        parts = of_ranks(case, moments_of(short, kind))
        for found, part in zip(runs[f"{layout} to 2"], parts, strict=True):
            assert moments_of(found, kind).keys() == part.keys()
            for name, moment in moments_of(found, kind).items():
                if layout == "tp=2":  # scales cover other elements: requantized, by half a step at most
                    assert (moment - part[name]).abs().max() <= part[name].abs().max() / 127, name
                else:
                    assert torch.equal(moment, part[name]), name
    end = runs[f"{layout} to 4"]
    assert all(each.step == 4 and each.rows.isfinite().any() for each in end)
    if not layout:
        for found, wanted in zip(end, runs["whole"], strict=True):
            assert torch.equal(found.rows, wanted.rows[2:])
            assert all(torch.equal(found.weights[name], each) for name, each in wanted.weights.items())
