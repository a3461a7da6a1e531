"""A step that finds too little room runs again with more: everything is as if there had been enough.

The routing of these runs sends far too much to one rank in chosen micro-batches.
"""

import functools
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.runtime.ranks import Ranks
from graphmoe.training.trainer import Trainer
from tests.distributed.ranks import Job, selected
from tests.distributed.training import Change, Outcome, SignalIn, Training, on_rank
from tests.runs import assert_same_state, metrics, numbers, slow_but
from tests.tolerances import relative_error

MICRO_BATCHES = 4
WORDS = (
    "moe.dispatcher=symm", "moe.balance=none", "model.num_experts=8", "model.top_k=2", "model.num_layers=2",
    "model.num_dense_layers=1", "model.aux_loss=global_batch", "model.aux_loss_coef=0.1", "train.steps=6",
    "train.val_batches=0", "checkpoint.enabled=false", "checkpoint.interval=0", "train.log_interval=2",
)  # fmt: skip
TWO_RANKS = ("parallel.ep=2", "train.global_batch_size=16")
PLACES = frozenset[tuple[int, int]]  # steps from 1, and their micro-batches from 0


@dataclass(frozen=True)
class Skew:
    """Micro-batches in which all tokens choose the first experts, whatever the weights.

    Tokens identify a micro-batch, so a step that runs again is skewed again.
    """

    places: PLACES = frozenset()
    ranks: tuple[int, ...] | None = None  # whose tokens are skewed; None for all
    validates: bool = False  # skew validation batches instead
    layer: int | None = None  # place of the only MoE layer of the model that is skewed; None for all
    spoiled: PLACES = frozenset()  # positions at which the loss of rank 1 is not finite

    def __call__(self, trainer: Trainer) -> None:
        seen: dict[bytes, int] = {}
        start, model, whole = trainer.step * MICRO_BATCHES, trainer.model, trainer.model.stage

        def stage(pieces: StagePieces, carried: tuple[Tensor, ...], tokens: Tensor, *rest):
            trains = torch.is_grad_enabled()
            number = start + seen.setdefault(tokens.numpy().tobytes(), len(seen)) if trains else 0
            place = number // MICRO_BATCHES + 1, number % MICRO_BATCHES
            skews = place in self.places if trains else self.validates
            biases = skewed() if skews and (self.ranks is None or trainer.ranks.rank in self.ranks) else []
            kept = [bias.clone() for bias in biases]
            for bias in biases:
                bias.zero_()[: trainer.plan.model.top_k] = 9.0
            output = whole(pieces, carried, tokens, *rest)
            for bias, old in zip(biases, kept, strict=True):
                bias.copy_(old)
            spoils = trains and place in self.spoiled and on_rank(trainer, 1)
            return output._replace(total=output.total * math.nan) if spoils else output

        def skewed() -> list[Tensor]:
            places = [place for pieces in model.stages for place in model.moe_layers(pieces)]
            routers = zip(places, model.routers(), strict=True)
            return [router.selection_bias for n, router in routers if self.layer in (None, n)]

        model.stage = stage


def no_memory(trainer: Trainer) -> None:
    trainer.steps._ladder._has_memory = lambda now, then: False


def small_chunks(trainer: Trainer) -> None:
    """Let the rung without limit work on a third of the budget at a time."""
    dispatcher = trainer.steps._ladder._last
    dispatcher.chunk = type(dispatcher.chunk)(*(max(1, int(0.3 * n)) for n in dispatcher.chunk))


def hang_before_climbing(trainer: Trainer) -> None:
    """Let a rank that has found a step void say so by a file, and wait to be killed."""

    def hang(step, loads):
        (trainer.folder / f"climbs_{trainer.ranks.rank}").touch()
        time.sleep(600)

    trainer.steps._ladder.climb = hang


class Found(NamedTuple):
    ladder: Outcome
    worst: Outcome


@dataclass(frozen=True)
class Both:
    """Case of a run whose room is planned by a budget, and then of one with room for everything."""

    changes: tuple[Change, ...]
    words: tuple[str, ...] = ()
    budget: float = 1.5
    of_ladder: tuple[Change, ...] = ()  # of the first run only
    layout: tuple[str, ...] = TWO_RANKS
    runs: Training = Training(())

    def __call__(self, ranks: Ranks, folder: Path) -> Found:
        budget = f"moe.receive_budget={self.budget}"
        ladder = self.run(ranks, folder / "ladder", budget, self.of_ladder)
        key = self.changes, self.words, self.layout, self.runs
        if key not in _worst:  # cases that differ in their ladder only share one
            _worst[key] = self.run(ranks, folder / "worst", "moe.receive_budget=worst_case")
        return Found(ladder, _worst[key])

    def run(self, ranks: Ranks, folder: Path, budget: str, more: tuple[Change, ...] = ()) -> Outcome:
        def change(trainer: Trainer) -> None:
            for one in (*self.changes, *more):
                one(trainer)

        words = (*WORDS, *self.layout, *self.words, budget)
        return replace(self.runs, words=words, change=change)(ranks, folder)


_worst: dict[object, Outcome] = {}


def at(*places: tuple[int, int], **how) -> tuple[Skew]:
    return (Skew(frozenset(places), **how),)


SAVES = ("checkpoint.enabled=true", "checkpoint.interval=2")
VALIDATES = ("train.val_batches=3", "train.val_interval=3")
FSDP, BF16 = ("parallel.dp_shard=fsdp2",), ("precision.compute=bf16",)
FULL = ("graph.scope=full_iteration", "graph.warmup_steps=1", "train.steps=9")
COMPILED = ("compile.enabled=true", "graph.warmup_steps=1", "train.steps=8", "checkpoint.interval=0")
LAYERS, TRACED = (*COMPILED, "graph.scope=layer"), Training((), traced=True)
NO_MEMORY = {"of_ladder": (no_memory,)}
OF_FOUR = ("parallel.ep=4", "train.global_batch_size=32", "model.num_experts=16", "model.top_k=4")
EP2 = ("parallel.ep=2", "train.global_batch_size=32")
PP2 = ("parallel.ep=2", "parallel.pp=2", "train.global_batch_size=16")
TWO_MOE = ("model.num_layers=3",)
CASES = {
    "the second of four micro-batches": Both(at((3, 1))),
    "tokens of one rank": Both(at((3, 1), ranks=(1,)), budget=1.3),
    "two steps in a row": Both(at((2, 1), (3, 0))),
    "the first step": Both(at((1, 0))),
    "the last step": Both(at((6, 3))),
    "before a checkpoint": Both(at((4, 2)), SAVES),
    "before a validation": Both(at((3, 2)), VALIDATES),
    "every step is logged": Both(at((3, 1)), ("train.log_interval=1",)),
    "room for both": Both(at((1, 1), (5, 1)), ("train.steps=7",)),
    "one of two layers, then the other": Both((*at((2, 1), layer=1), *at((4, 1), layer=0)), TWO_MOE),
    "little room at first": Both(at((3, 1)), TWO_MOE, budget=0.4),
    "no memory, several steps": Both(at((2, 1), (4, 1), (5, 0)), ("train.steps=9",), **NO_MEMORY),
    "not finite": Both(at((2, 1), (4, 0), spoiled=frozenset({(2, 2), (4, 3)}))),
    "a signal": Both((*at((3, 1)), SignalIn(4)), SAVES),
    "killed": Both(at((5, 1)), SAVES),
    "captured, before a checkpoint": Both(at((2, 1), (6, 1)), (*FULL, *SAVES[:1], "checkpoint.interval=3")),
    "captured, while it warms up": Both(at((1, 1)), FULL),
    "captured, one of two layers, then the other": Both(
        (*at((3, 1), layer=1), *at((6, 1), layer=0)), (*FULL, *TWO_MOE)
    ),
    "captured, no memory": Both(at((5, 1), (7, 1)), FULL, **NO_MEMORY),
    "in a validation": Both((Skew(validates=True),), VALIDATES),
    "fsdp2": Both(at((2, 1), (3, 1)), FSDP),
    "fsdp2, bf16, no memory": Both(at((3, 1)), (*FSDP, *BF16), **NO_MEMORY),
    "layers": Both(at((3, 1), (7, 1)), LAYERS, runs=TRACED),
    "four ranks": Both(at((3, 1), (4, 1)), budget=1.6, layout=OF_FOUR),
    "four ranks, a pipeline": Both((*at((2, 1), layer=1), *at((4, 1))), TWO_MOE, layout=PP2),
    "four ranks, a pipeline, captured": Both(
        at((4, 1), layer=0), (*LAYERS, *TWO_MOE), layout=PP2, runs=TRACED
    ),
    "four ranks, a pipeline, no memory": Both(at((2, 1), (4, 1)), layout=PP2, **NO_MEMORY),
    "four ranks, ep2 beside dp2": Both(at((3, 1)), layout=EP2),
    "four ranks, ep2 etp2": Both(at((3, 1)), layout=(*EP2, "parallel.etp=2"), **NO_MEMORY),
}
ROUNDED = {  # their rung without limit adds in another order: in chunks, or by other compiled units
    "chunks": Both(at((3, 1)), of_ladder=(no_memory, small_chunks)),
    "chunks, bf16": Both(at((3, 1)), BF16, of_ladder=(no_memory, small_chunks)),
    "compiled, no memory": Both(at((3, 1)), COMPILED, runs=TRACED, **NO_MEMORY),
    "layers, no memory": Both(at((3, 1), (7, 1)), LAYERS, runs=TRACED, **NO_MEMORY),
}
DEFAULT = {"captured, before a checkpoint", "the second of four micro-batches"}
# steps that ran, void ones too
LAUNCHED = {"the second of four micro-batches": 6 + 2, "the last step": 6 + 1, "every step is logged": 6 + 1}
LAUNCHED |= {"four ranks": 6 + 2, "room for both": 7 + 1, "one of two layers, then the other": 6 + 2}
LAUNCHED |= {"no memory, several steps": 9 + 2, "captured, no memory": 9 + 4}


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, folder: Path) -> dict[str, list[Found]]:
    """Findings of two ranks, and of four where any other than the default cases run."""
    is_short = {*selected(request, "name")} <= DEFAULT
    found: dict[str, list[Found]] = {}
    for count in (2, 4):
        chosen = {n: c for n, c in (CASES | ROUNDED).items() if n.startswith("four") == (count == 4)}
        if cases := {n: c for n, c in chosen.items() if n in DEFAULT or not is_short}:
            found |= Job(folder, cases, num_ranks=count).results(seconds=800)
    return found


@pytest.mark.slow
def test_a_run_that_is_killed_between_a_void_step_and_the_next_try_goes_on_bitwise(ranks, folder):
    run = functools.partial(CASES["killed"].run, budget="moe.receive_budget=1.5")
    job = Job(folder / "kill", {"run": functools.partial(run, more=(hang_before_climbing,))})
    job.wait_until(lambda: len([*folder.glob("kill/run/climbs_*")]) == 2)
    # The checkpoint of step 4 is written by a thread, beside the step that is found void.
    job.wait_until(lambda: CheckpointStore.open_any(folder / "kill" / "run").latest() == [4, 2])
    job.kill()
    resumed = Job(folder / "kill", {"run": run}).results()["run"]
    for after, whole in zip(resumed, ranks["killed"], strict=True):
        assert after.step == whole.worst.step
        assert_same_state(after.state, whole.worst.state)
    assert numbers(folder / "kill" / "run") == numbers(folder / "killed" / "worst")


@pytest.mark.parametrize("name", slow_but([*CASES], *DEFAULT))
def test_state_metrics_and_steps_are_those_of_a_run_with_room_for_everything(ranks, name):
    for found in ranks[name]:
        launched = len(found.ladder.rows)
        assert launched == LAUNCHED.get(name, launched)
        assert launched > len(found.worst.rows) or "validation" in name or "signal" in name
        for part in ("step", "written", "state", "stopped_by"):
            assert_same_state(getattr(found.ladder, part), getattr(found.worst, part), part)


@pytest.mark.slow
def test_checkpoints_and_metrics_files_know_nothing_of_void_steps(ranks, folder):
    for run in ("ladder", "worst"):
        saved = folder / "before a checkpoint" / run
        assert CheckpointStore.open_any(saved).latest() == [6, 4]
        assert [row["step"] for row in metrics(saved)] == [1, 2, 3, 4, 5, 6]
        signalled = folder / "a signal" / run
        assert CheckpointStore.open_any(signalled).latest()[0] == ranks["a signal"][0].ladder.step
    assert [found.ladder.stopped_by for found in ranks["a signal"]] == ["SIGTERM", "SIGTERM"]


@pytest.mark.slow
def test_a_void_step_that_is_not_finite_is_skipped_once(ranks):
    for found in ranks["not finite"]:
        assert [row["skipped"] for row in found.ladder.written] == [False, True, False, True, False, False]
        assert found.ladder.state["optimizer.counters.skipped"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDED)
def test_a_rung_that_adds_in_another_order_differs_by_rounding_only(ranks, name):
    """Compare loosely: six steps of Adam amplify a difference in the last bit of a gradient near zero."""
    for found in ranks[name]:
        before = [[row for row in run.written if row["step"] < 3] for run in (found.ladder, found.worst)]
        assert repr(before[0]) == repr(before[1]) and len(found.ladder.rows) > len(found.worst.rows)
        for key in ("loss", "grad_norm"):
            ladder, worst = ([row[key] for row in run.written] for run in (found.ladder, found.worst))
            assert ladder == pytest.approx(worst, rel=1e-3)
        for weight, value in found.worst.weights.items():
            assert relative_error(found.ladder.weights[weight], value) < 4e-3, weight
