"""Muon on several ranks: the run of one process, the same bits each time, and a resume in any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphmoe.optim.zero1 import Optimizer
from graphmoe.runtime.ranks import Ranks
from graphmoe.training.trainer import Trainer
from tests.distributed.layouts import Case, assert_same, of_ranks
from tests.distributed.ranks import Job
from tests.distributed.training import Outcome, nan_gradient_in_step_2
from tests.runs import assert_same_state
from tests.tolerances import assert_gradient_close

MUON = ("optim.name=muon",)
CLIP = (*MUON, "optim.qk_clip=3", "model.init_std=0.3")
GQA = (
    *("model.attention=gqa", "model.num_kv_heads=2", "model.head_dim=6", "model.attention_bias=qkv"),
    # AdamW would divide noise by noise in the biases of keys, whose gradients are small
    *("model.attention_gate=true", "optim.eps=1e-2"),
)
FULL = ("graph.scope=full_iteration", "graph.warmup_steps=1")
AGAIN_ALL = ("recompute.all=true",)
SAVED = (*MUON, "checkpoint.enabled=true", "checkpoint.interval=2", "checkpoint.keep_last=9")


def shares_matrices_out(trainer: Trainer) -> None:
    """Check that no rank owns much more of the matrices than others, and the first has most."""
    optimizer = trainer.optimizer
    assert isinstance(optimizer, Optimizer)
    sizes = trainer.ranks.gather([family.main.numel() for family in optimizer.families])
    for family, own in zip(optimizer.families, zip(*sizes, strict=True), strict=True):
        assert not family.of_matrices or own[0] == max(own) < 1.25 * sum(own) / len(own)


CASES = {
    "dp": Case(2, "", model=MUON, change=shares_matrices_out),
    "ep": Case(2, "ep=2", model=MUON),
    "pp": Case(2, "pp=2", "zb1p", model=MUON),
    "captured": Case(2, "", model=MUON, overrides=FULL),
    "a bad gradient": Case(2, "", model=MUON, change=nan_gradient_in_step_2),
    "dp of four": Case(4, "", model=MUON),
    "fewer experts than ranks": Case(4, "", model=(*MUON, "model.num_experts=2", "model.top_k=1")),
    "ep, dp": Case(4, "ep=2", model=MUON),
    "pp, ep": Case(4, "pp=2 ep=2", "1f1b", model=MUON),
    "cp, ep": Case(4, "cp=2 ep=4", model=MUON),
    "clips": Case(2, "", model=(*CLIP, *GQA), overrides=FULL),
    "clips, bad gradient": Case(2, "ep=2", model=CLIP, change=nan_gradient_in_step_2),
    "clips, pp, ep": Case(4, "pp=2 ep=2", "1f1b", model=(*CLIP, "model.mtp_depth=1"), overrides=AGAIN_ALL),
    "clips, cp, ep": Case(4, "cp=2 ep=4", model=(*CLIP, *GQA, "model.attention_sinks=true")),
    "clips, ring": Case(2, "cp=2 cp_method=ring", model=CLIP),
}
AGAIN = ("dp", "pp", "ep, dp")
RESUMED = {(2, ""), (2, "ep=2"), (2, "pp=2"), (4, "ep=2")}


def saved(folder: Path, steps: int, ranks: int = 2, layout: str = "", source: str = "") -> Case:
    start = f"checkpoint.resume_from={folder}/{source}/checkpoints/step_00000002"
    return Case(ranks, layout, model=(*SAVED, f"train.steps={steps}", *([start] if source else [])))


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[Outcome]]:
    cases: dict[str, Case] = CASES | {f"{name} again": CASES[name] for name in AGAIN}
    cases |= {"whole": saved(folder, 5), "short": saved(folder, 2)}
    for ranks, layout in sorted(RESUMED):
        for steps in (2, 5):
            cases[f"{ranks} {layout} to {steps}"] = saved(folder, steps, ranks, layout, "whole")

    found: dict[str, list[Any]] = {}
    for ranks in (2, 4):
        own = {name: case.training for name, case in cases.items() if case.ranks == ranks}
        found |= Job(folder, own, ranks).results()
    return found


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one_process_does(runs, tmp_path, name):
    assert_same(CASES[name], runs[name], CASES[name].alone(Ranks(), tmp_path))


@pytest.mark.parametrize("name", AGAIN)
def test_a_layout_gives_the_same_bits_each_time(runs, name):
    for found, wanted in zip(runs[f"{name} again"], runs[name], strict=True):
        assert torch.equal(found.rows, wanted.rows)
        assert_same_state(found.state, wanted.state)


def momenta(outcome: Outcome) -> dict[str, Tensor]:
    prefix = "optimizer.momentum."
    return {name[len(prefix) :]: each for name, each in outcome.state.items() if name.startswith(prefix)}


@pytest.mark.parametrize("ranks, layout", sorted(RESUMED))
def test_a_run_goes_on_in_any_layout_with_the_same_momentum(runs, tmp_path, ranks, layout):
    short, whole = runs["short"][0], runs["whole"][0]
    case, name = saved(tmp_path, 5, ranks, layout), f"{ranks} {layout} to"
    for found, part in zip(runs[f"{name} 2"], of_ranks(case, short.weights | momenta(short)), strict=True):
        assert momenta(found)
        for parameter, momentum in momenta(found).items():
            assert torch.equal(momentum, part[parameter]), parameter
    for found, part in zip(runs[f"{name} 5"], of_ranks(case, whole.weights), strict=True):
        assert found.step == 5
        for parameter, weight in found.weights.items():
            assert_gradient_close(weight, part[parameter])
    if (ranks, layout) == (2, ""):
        for found, wanted in zip(runs[f"{name} 5"], runs["whole"], strict=True):
            assert torch.equal(found.rows, wanted.rows[2:])
            assert_same_state(found.state, wanted.state)
