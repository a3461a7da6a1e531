"""Ranks compare what they hold alike and how long they work: one that differs is named."""

import functools
import platform
import random
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.plan.layout import Layout
from graphmoe.run.metrics_file import IN_A_ROW
from graphmoe.training.replicas import ROW, hash_of
from graphmoe.training.slow_ranks import SlowRanks
from graphmoe.training.trainer import Trainer
from tests.distributed.ranks import run_ranks, selected
from tests.distributed.training import Training, on_rank
from tests.runs import assert_same_state, metrics, slow_but

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


SLEEP_S, STEPS = 0.2, 13


def sleep_on(trainer: Trainer, rank: int) -> None:
    step = trainer._train_step

    def late_step():
        time.sleep(SLEEP_S)
        step()

    if on_rank(trainer, rank):
        trainer._train_step = late_step


def slow(rank: int, *words: str) -> Training:
    words = ("train.log_interval=1", f"train.steps={STEPS}", "train.val_batches=0", *words)
    return Training((*words, "checkpoint.enabled=false"), functools.partial(sleep_on, rank=rank))


SLOW = {
    "slow": (slow(3, "parallel.ep=2", "train.micro_batch_size=1"), 3),
    "slow in a pipeline": (slow(1, "parallel.pp=2", "model.num_layers=4", "parallel.ep=2"), 1),
}


@pytest.fixture(scope="module")
def ranks(request, folder):
    cases = {name: (FLIPS | SLOW)[name][0] for name in selected(request, "name")}
    return run_ranks(folder, cases | EQUAL, 4)


@pytest.mark.parametrize("name", slow_but([*SLOW], "slow"))
def test_a_slow_rank_is_named_after_ten_logged_steps(ranks, folder, name):
    rows, (_, slow_rank) = metrics(folder / name), SLOW[name]
    assert ranks[name][0].error == "" and "slowest_rank" not in rows[0]  # which compiles
    assert [row["slowest_rank"] for row in rows[1:]] == [slow_rank] * (STEPS - 1)
    assert [row.get("slow_ranks") for row in rows] == [None] * IN_A_ROW + [[slow_rank]] * (STEPS - IN_A_ROW)
    assert min(row["slowest_own_s"] - row["median_own_s"] for row in rows[1:]) > SLEEP_S / 2
    (log,) = folder.glob("ranks_*/0.log")
    named = f"rank {slow_rank} ({platform.node()}) is slow: without waits for others a step takes it 0."
    assert log.read_text().count(named) == 1


@pytest.mark.parametrize("name", slow_but([*FLIPS], "dense", "before a save", "expert"))
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


class _Told:
    """Ranks that have told each other these seconds."""

    size = 6

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def gather(self, item):
        return [*self.seconds] if isinstance(item, float) else [f"host {rank}" for rank in range(self.size)]


def test_a_rank_is_slow_among_those_of_its_stage_in_ten_logged_steps_in_a_row(caplog):
    told = _Told()
    watch = SlowRanks(told, Layout(dp=3, pp=2), torch.device("cpu"))  # stages of ranks 0 to 2, 3 to 5
    found = []
    for step in range(1, 40):
        # those of the second stage have more work, and rank 1 is late but for step 5
        told.seconds = [0.1, 0.1 if step == 5 else 0.125, 0.1, 0.3, 0.34, 0.3]
        told.seconds = [seconds * random.uniform(1, 1.01) for seconds in told.seconds]
        told.seconds[1] *= step < 30
        found.append(watch.add(step, told.seconds[0]))
    assert [step for step, each in enumerate(found, 1) if each.get("slow_ranks")] == [*range(15, 30)]
    assert all(each["slow_ranks"] == [1] and each["slowest_rank"] == 1 for each in found[14:29])
    assert all(0.1 <= each["median_own_s"] <= 0.101 < 0.125 <= each["slowest_own_s"] for each in found[14:29])
    (record,) = caplog.records
    assert record.getMessage().startswith("rank 1 (host 1) is slow") and "step 15" in record.getMessage()


def test_equal_and_very_short_steps_name_no_slow_rank(caplog):
    told = _Told()
    for layout, seconds in (
        (Layout(dp=6), [0.2] * 6),
        (Layout(dp=6), [0.004] * 5 + [0.001]),
        (Layout(pp=6), []),
    ):
        watch = SlowRanks(told, layout, torch.device("cpu"))
        for step in range(30):
            told.seconds = [each * random.uniform(1, 1.15) for each in seconds] or [*range(1, 7)]
            assert "slow_ranks" not in watch.add(step, 0.2)
            assert (watch.add(step, 0.2) == {}) is (layout.pp == 6)
    assert caplog.records == []
