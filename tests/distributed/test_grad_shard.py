"""Ranks with shards of gradients (ZeRO-2), and of weights (ZeRO-3), train as one process does."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphmoe.plan.slots import layers_of
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

SHARD, WEIGHTS = "optim.grad_shard=true", "parallel.dp_shard=fsdp2"


def check_slots(trainer: Trainer, change=None) -> None:
    """Check that buckets share slots, and that these are smaller than whole gradients, or weights."""
    if change is not None:
        change(trainer)
    shards_weights = trainer.plan.parallel.dp_shard == "fsdp2"
    if not (trainer.plan.optim.grad_shard or shards_weights):
        return
    sharded = [family for family in trainer.optimizer.families if family.group is not None]
    kinds = [[g for f in sharded for g in f.gradient_views().values()]]
    if shards_weights:
        check_gathers(trainer)
        wholes = [each for family in sharded for each in family._wholes.values()]
        places = max(map(len, wholes))
        assert places == 1 + trainer.plan.ep_overlap and all(family.weight is None for family in sharded)
        kinds += [[each[i % len(each)] for each in wholes] for i in range(places)]
    for tensors in kinds:
        storages = [tensor.untyped_storage() for tensor in tensors]
        held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        assert held < sum(tensors[0].itemsize * family.layout.size for family in sharded)
    queue = trainer.optimizer._slot_reduction._queue
    assert len(queue) >= 2 * len({id(bucket._slot) for bucket in queue}) > 0


def check_gathers(trainer: Trainer) -> None:
    """Check that each bucket is gathered twice for a micro-batch at most, and mostly before it is needed."""
    run, now, ahead, slots = trainer.steps.run, list[int](), list[bool](), trainer.optimizer._weight_slots
    layers = layers_of(name for name, _ in trainer.model.named_parameters())

    def noting(call, use):
        now[:] = call.args[1:]
        call(use)

    for gradient in slots._gradients.values():
        gradient.gathers = functools.partial(noting, gradient.gathers)

    def gather(family, whole, bucket, place=0):
        if id(family.weights[bucket.members[0]]) in slots._gradients:
            ahead.append(now[0] not in {layers[family.names[i]] for i in bucket.members})
        return whole(bucket, place)

    for family in trainer.optimizer.families:
        family.gather = functools.partial(gather, family, family.gather)
    count = len(trainer.optimizer._slot_reduction._queue) * trainer.plan.num_micro_batches

    def counting(batches):
        ahead.clear()
        row = run(batches)
        assert ahead
        if trainer.plan.pipeline is None:
            assert len(ahead) <= 2 * count
            assert trainer.step == 0 or sum(ahead) > len(ahead) / 2
        return row

    trainer.steps.run = counting


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
BLOCKS = "dp_shard=fsdp2 dp_shard_size=2"  # each block holds all shards
HYBRID = (
    Case(4, BLOCKS, overrides=("optim.offload=true",), model=("model.num_layers=6",)),
    Case(4, f"ep=2 {BLOCKS}", model=(MTP, TIED, "train.seed=1"), mode="traced"),
)
BITWISE = (  # a micro-batch for each rank
    case(4, "ep=2", "", ONE_EACH[:1], (MTP, TIED), "traced"),
    case(4, "pp=2", "zb1p", ONE_EACH[1:], mode="traced"),
    case(2, "", "", ONE_EACH[1:], ("optim.name=muon",)),
)
WHOLE = {each: replace(each, overrides=each.overrides[1:]) for each in BITWISE}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory):
    both = functools.cache(lambda case: _run_both(tmp_path_factory.mktemp("ranks"), case, with_weights(case)))
    whole = functools.cache(lambda case: _run_both(tmp_path_factory.mktemp("ranks"), case))
    shards = lambda case: case.overrides[:1] == (SHARD,) and "lora" not in str(case)  # noqa: E731
    return lambda case, i=0: (both if shards(case) else whole)(case)[i]


def with_weights(each: Case) -> Case:
    own = (WEIGHTS, *each.overrides[1:])
    return replace(each, overrides=own)


def _run(folder: Path, each: Case) -> list[Outcome]:
    return _run_both(folder, each)[0]


def _run_both(folder: Path, *cases: Case) -> list[list[Outcome]]:
    runs = {f"run{'s' * number}": each.training for number, each in enumerate(cases)}
    return [*Job(folder, runs, cases[0].ranks).results().values()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    return functools.cache(lambda training: training(Ranks(), tmp_path_factory.mktemp("alone")))


SUMMED = {str(each): each for each in (*CASES, *HYBRID)}


@pytest.mark.parametrize("case", slow_but(SUMMED, *map(str, CASES[:2])))
def test_losses_gradients_and_weights_are_those_of_one_process(on_ranks, alone, case):
    assert_same(case, on_ranks(case), alone(case.alone))


HALVES = case(2, "", "", (*LAYERS, "precision.compute=bf16", "optim.grad_dtype=bf16"), (MTP,), "traced")
OF_WEIGHTS = {str(each): each for each in (*CASES, HALVES) if "lora" not in str(each)}


@pytest.mark.parametrize("case", slow_but(OF_WEIGHTS, *map(str, CASES[:2])))
def test_shards_of_weights_have_the_bits_of_whole_ones(on_ranks, case):
    for found, wanted in zip(on_ranks(case, 1), on_ranks(case), strict=True):
        assert torch.equal(found.rows.nan_to_num(9.0), wanted.rows.nan_to_num(9.0))
        assert torch.equal(found.val_losses, wanted.val_losses)
        assert_same_state(found.state, wanted.state)
        assert_same_state(found.gradients, wanted.gradients)


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
