"""Ranks that reduce gradients after each micro-batch to shards (ZeRO-2) train as one process does."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphmoe.runtime.ranks import Ranks
from graphmoe.training.trainer import Trainer
from tests.distributed import test_layouts as of_layouts
from tests.distributed.layouts import REPLICAS, Case, assert_same
from tests.distributed.ranks import Job
from tests.distributed.test_layouts import (
    ADAPTED,
    ALL_MOE,
    CLIP,
    FULL,
    LAYERS,
    MASK,
    MTP,
    ROOM,
    TIED,
    TURNS,
    nan_gradient_in_step_2,
)  # fmt: skip
from tests.distributed.training import Outcome
from tests.runs import assert_same_state, slow_but

SHARD = "optim.grad_shard=true"


def check_slots(trainer: Trainer, change=None) -> None:
    """Check that buckets share slots, and that these are smaller than whole gradients."""
    if change is not None:
        change(trainer)
    if not trainer.plan.optim.grad_shard:
        return
    sharded = [family for family in trainer.optimizer.families if family.group is not None]
    storages = [g.untyped_storage() for f in sharded for g in f.gradient_views().values()]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert held < sum(4 * family.layout.size for family in sharded)
    queue = trainer.optimizer._slot_reduction._queue
    assert len(queue) >= 2 * len({id(bucket._slot) for bucket in queue}) > 0


def case(ranks: int, layout: str, schedule="", overrides=(), model=(), mode="eager", change=None) -> Case:
    watch = functools.partial(check_slots, change=change)
    watch.__name__ = change.__name__ if change else "grad_shard"
    deep = ("model.num_layers=8",) if schedule else ("model.num_layers=6",)
    return Case(ranks, layout, schedule, (SHARD, *overrides), (*deep, *model), mode, watch)


ONE_EACH = tuple(f"train.global_batch_size={count}" for count in (4, 2))
CASES = (  # with seed 0 and so many layers some differ by 1.1e-5 of a gradient, with whole gradients too
    case(4, "pp=2 ep=2", "zb1p", (*ROOM, *LAYERS), (MTP, TIED), "traced"),
    case(4, "ep=2", "", (*TURNS, *FULL), CLIP, "traced"),
    case(4, "tp=2 ep=2", "", ONE_EACH[:1], ("train.seed=1",), change=of_layouts.labels_ignored),
    case(4, "pp=2 ep=2", "1f1b", TURNS, (ALL_MOE, "train.seed=1"), "traced"),
    case(4, "ep=2", "", (*REPLICAS, TURNS[-1]), (MTP, *MASK, "train.seed=1"), "traced"),
    case(4, "ep=2", "", (*REPLICAS, TURNS[-1], *LAYERS), (ALL_MOE,), "traced"),
    case(4, "pp=2", "interleaved", LAYERS, MASK, "traced"),
    case(4, "pp=2", "zbv", model=(TIED, "model.num_layers=8")),
    case(4, "pp=2 cp=2", "dualpipe_v"),
    case(2, "", model=ADAPTED),
    case(2, "", "", LAYERS, mode="traced", change=of_layouts.an_expert_without_tokens),
    case(4, "", model=("optim.name=muon",), change=nan_gradient_in_step_2),
)
BITWISE = (  # a micro-batch for each rank
    case(4, "ep=2", "", ONE_EACH[:1], (MTP, TIED), "traced"),
    case(4, "pp=2", "zb1p", ONE_EACH[1:], mode="traced"),
    case(2, "", "", ONE_EACH[1:], ("optim.name=muon",)),
)
WHOLE = {each: replace(each, overrides=each.overrides[1:]) for each in BITWISE}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory):
    return functools.cache(lambda case: _run(tmp_path_factory.mktemp("ranks"), case))


def _run(folder: Path, each: Case) -> list[Outcome]:
    (found,) = Job(folder, {"run": each.training}, each.ranks).results().values()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    return functools.cache(lambda training: training(Ranks(), tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("case", slow_but({str(each): each for each in CASES}, *map(str, CASES[:2])))
def test_losses_gradients_and_weights_are_those_of_one_process(on_ranks, alone, case):
    assert_same(case, on_ranks(case), alone(case.alone))


@pytest.mark.parametrize("case", slow_but({str(each): each for each in BITWISE}, str(BITWISE[0])))
def test_one_micro_batch_a_rank_has_the_bits_of_whole_gradients(on_ranks, case):
    for found, wanted in zip(on_ranks(case), on_ranks(WHOLE[case]), strict=True):
        assert torch.equal(found.rows, wanted.rows)
        assert_same_state(found.state, wanted.state)
        assert_same_state(found.gradients, wanted.gradients)


@pytest.mark.slow
def test_a_resume_with_another_grad_shard_has_the_same_bits(tmp_path):
    saves = ("checkpoint.enabled=true", "checkpoint.interval=2", "checkpoint.keep_last=9", "train.steps=4")
    first = case(2, "", "", ONE_EACH[1:], (*saves, MTP))

    def run(name: str, *words: str, shards: bool) -> list[Outcome]:
        own = replace(first, overrides=first.overrides[not shards :], model=(*first.model, *words))
        return _run(tmp_path / name, own)

    whole = run("whole", shards=False)
    (saved,) = (tmp_path / "whole").glob("run/checkpoints/step_00000002")
    resumed = f"checkpoint.resume_from={saved}"
    for shards in (True, False):
        for found, wanted in zip(run(f"resumed {shards}", resumed, shards=shards), whole, strict=True):
            assert torch.equal(found.rows, wanted.rows[2:])
            assert_same_state(found.state, wanted.state)
