"""Ranks compare what they hold alike, and name one that has a flipped bit."""

import functools
import platform
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.training.replicas import ROW, hash_of
from graphmoe.training.trainer import Trainer
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Training, on_rank
from tests.runs import assert_same_state

BASE = (
    "train.log_interval=2", "train.val_batches=1", "train.val_interval=2", "train.steps=6",
    "checkpoint.interval=2", "checkpoint.keep_last=9", "parallel.ep=2", "optim.bucket_mb=0.001",
    "train.micro_batch_size=1",
)  # fmt: skip
CHECKED = (*BASE, "checkpoint.replica_check=1")
NEVER_SAVED = ("checkpoint.interval=0",)
Which = Callable[[Trainer], Tensor]


def flip(trainer: Trainer, rank: int, step: int, which: Which) -> None:
    """Flip the lowest bit of a number after a step has read it."""
    run = trainer.steps.run

    def run_and_flip(batches):
        row = run(batches)
        if on_rank(trainer, rank) and trainer.step + 1 == step:
            flip_bit(which(trainer), bit=32)
        return row

    trainer.steps.run = run_and_flip


def flip_bit(tensor: Tensor, bit: int) -> None:
    tensor.detach().view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


def of_family(axis: str, trainer: Trainer) -> Tensor:
    (family,) = (family for family in trainer.optimizer.families if family.axis == axis)
    return family.weight


def bias(trainer: Trainer) -> Tensor:
    return next(iter(trainer.model.routers())).selection_bias


def frozen_expert(trainer: Trainer) -> Tensor:
    return next(t for name, t in trainer.optimizer.frozen.items() if name.endswith("w_down"))


def flipped(rank: int, step: int, which: Which, *words: str) -> Training:
    return Training((*CHECKED, *words), functools.partial(flip, rank=rank, step=step, which=which))


dense, experts = (functools.partial(of_family, axis) for axis in ("stage", "edp"))
# step before which it is found, and what is said
FLIPS = {
    "dense": (flipped(2, 3, dense), 3, "rank 2 ({host}) differs from 3 others in weights over stage"),
    "grad_shard": (
        flipped(0, 5, dense, "optim.grad_shard=true", "checkpoint.interval=3"), 5,
        "rank 0 ({host}) differs from 3 others in weights over stage",
    ),
    "not due": (  # a gather has replaced the weight when ranks compare
        flipped(1, 3, dense, "checkpoint.replica_check=4", *NEVER_SAVED), 4,
        "rank 1 ({host}) differs from 3 others in weights over stage",
    ),
    "before a save": (
        flipped(3, 3, dense, "checkpoint.replica_check=100"), 4,
        "rank 3 ({host}) differs from 3 others in weights over stage",
    ),
    "expert": (
        flipped(3, 4, experts), 4,
        "rank 1 ({host}), rank 3 ({host}) differ in weights over edp, and 2 copies do not tell which",
    ),
    "captured": (
        flipped(1, 5, dense, "graph.scope=full_iteration", "moe.dispatcher=symm", "graph.warmup_steps=1"), 5,
        "rank 1 ({host}) differs from 3 others in weights over stage",
    ),
    "bias": (flipped(0, 1, bias), 1, "rank 0 ({host}) differs from 3 others in selection biases"),
    "frozen": (
        flipped(2, 2, frozen_expert, "model.lora_rank=2", "checkpoint.replica_check=3", *NEVER_SAVED),
        3,
        "rank 0 ({host}), rank 2 ({host}) differ in frozen weights over edp, and 2 copies",
    ),
}  # fmt: skip
EQUAL = {"checked": Training(CHECKED), "unchecked": Training(BASE)}


@pytest.fixture(scope="module")
def ranks(folder):
    cases = {name: case for name, (case, *_) in FLIPS.items()}
    return run_ranks(folder, cases | EQUAL, 4)


@pytest.mark.parametrize("name", FLIPS)
def test_a_flipped_bit_stops_the_run_before_a_save(ranks, folder, name):
    case, step, said = FLIPS[name]
    has_saves = (folder / name / "checkpoints").exists()
    saves = CheckpointStore.open_any(folder / name).latest() if has_saves else []
    interval = case.config.checkpoint.interval
    assert sorted(saves) == [each for each in range(1, step) if interval and each % interval == 0]
    for outcome in ranks[name]:
        assert said.format(host=platform.node()) in outcome.error and outcome.step == step
        assert f"after step {step}, which is not saved" in outcome.error
    newest = f"the newest checkpoint with finite weights is {folder / name}"
    assert (newest if saves else "no step before it is saved") in ranks[name][0].error


def test_equal_replicas_train_on_with_the_same_bits(ranks):
    for checked, unchecked in zip(*(ranks[name] for name in EQUAL), strict=True):
        assert checked.error == "" and checked.step == 6
        assert_same_state({"rows": checked.rows} | checked.state, {"rows": unchecked.rows} | unchecked.state)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.int64))
def test_any_flipped_bit_and_any_other_order_change_a_hash(dtype):
    size = 8 * ROW + 5
    tensor = torch.randint(-(2**40), 2**40, (size,)).to(dtype)
    whole, bits = int(hash_of(tensor)), 8 * tensor.nbytes
    # together both bits 63 add 2^64
    for flips in ((0,), (bits - 1,), (63, 64 * ROW + 63), *torch.randint(bits, (60, 1)).tolist()):
        for is_back in (False, True):
            for bit in flips:
                flip_bit(tensor, bit)
            assert (int(hash_of(tensor)) == whole) is is_back
    rolled = tensor.roll(ROW * 8 // tensor.element_size())
    assert int(hash_of(rolled)) != int(hash_of(tensor)) == int(hash_of(tensor.clone()))
    assert int(hash_of(tensor[1:])) == int(hash_of(tensor[1:].clone())) != int(hash_of(tensor))
