"""Layouts of ranks that train, and the run of one process that each is compared with."""

import functools
import gc
import itertools
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphmoe.model.build import build_model
from graphmoe.plan.layout import layout_of, own_part
from graphmoe.plan.pipeline import Together
from graphmoe.plan.plan import plan_of
from graphmoe.runtime.overlap import Overlap
from graphmoe.runtime.pipeline.engine import Stage
from graphmoe.segments import FULL_ITERATION
from graphmoe.training.step_rows import MASKED, RECEIVED, REPLICATED, SCALARS, TRAINED
from graphmoe.training.trainer import Trainer
from tests.distributed.training import Change, Outcome, Training, without_rank_load
from tests.tolerances import assert_forward_close, assert_gradient_close, relative_error

BASE = (
    "model.num_dense_layers=1", "model.num_layers=3", "model.num_heads=4", "model.num_experts=8",
    "model.aux_loss=global_batch", "model.aux_loss_coef=0.1", "model.z_loss_coef=0.01",
    "optim.schedule=constant", "optim.bucket_mb=0.01", "optim.lr=1e-3", "train.steps=3",
    "train.log_interval=3", "train.global_batch_size=8", "train.micro_batch_size=1", "train.val_batches=3",
    "train.val_interval=3", "checkpoint.enabled=false",
)  # fmt: skip
PIPELINE = ("model.num_layers=4",)
FSDP = "dp_shard=fsdp2"
REPLICAS = ("moe.dispatcher=symm", "moe.balance=replicas")


@dataclass(frozen=True)
class Case:
    """A layout of some ranks, how they run it, and the model of it and of the one process beside it."""

    ranks: int
    layout: str  # words of parallel; the other ranks are data parallel
    schedule: str = ""
    overrides: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    # or traced, traced by each rank: compiled units run as they were traced; inductor: they are compiled
    mode: str = "eager"
    change: Change | None = None  # of the trainers of both

    def __str__(self) -> str:
        change = self.change.__name__ if self.change else ""
        words = (self.layout or "dp", self.schedule, *self.overrides, *self.model, self.mode, change)
        kept = (word.rpartition(".")[2] for word in words if word not in ("", "eager"))
        text = f"{self.ranks} ranks: {', '.join(kept)}"
        # a folder has this name, of at most 255 characters
        return text if len(text) < 240 else f"{text[:230]} {zlib.crc32(text.encode()):08x}"

    @property
    def training(self) -> Training:
        own = [f"parallel.{word}" for word in self.layout.split()]
        if self.schedule:
            own.append(f"pipeline.schedule={self.schedule}")
        compiled = () if self.mode == "eager" else ("compile.enabled=true",)
        words = (*self.alone.words, *own, *compiled, *self.overrides)
        change = functools.partial(check, self.change)
        return Training(words, change, self.mode.startswith("traced"), self.mode.endswith("by each rank"))

    @property
    def alone(self) -> Training:
        sizes = [word for word in self.overrides if "batch" in word or "precision" in word]
        replays = self.mode != "eager" or any(word.startswith("graph.") for word in self.overrides)
        least = (*BASE, *(() if replays or self.change else ("train.steps=2",)))
        return Training((*least, *(PIPELINE if self.schedule else ()), *self.model, *sizes), self.change)


def assert_same(case: Case, found: Sequence[Outcome], wanted: Outcome) -> None:
    """Rows of metrics, losses, gradients and weights of every rank are those of one process."""
    parts = zip(of_ranks(case, wanted.weights), of_ranks(case, wanted.gradients), strict=True)
    trained = [row.get("trained_tokens") for row in wanted.written]
    expected = without_rank_load(_without_trained(case, wanted.rows)).nan_to_num(9.0)
    for of_rank, (weights, gradients) in zip(found, parts, strict=True):
        rows = _without_trained(case, _common(case, of_rank.rows, wanted.rows))
        rows = without_rank_load(rows).nan_to_num(9.0)
        assert_forward_close(rows, expected)
        assert torch.equal(of_rank.rows.nan_to_num(9.0), found[0].rows.nan_to_num(9.0))
        assert [row.get("trained_tokens") for row in of_rank.written] == trained
        assert_forward_close(of_rank.val_losses, wanted.val_losses)
        for own, of_one in ((of_rank.weights, weights), (of_rank.gradients, gradients)):
            assert own.keys() == of_one.keys()
            for parameter, value in own.items():
                assert_gradient_close(value, of_one[parameter])


def gradient_errors(case: Case, found: Sequence[Outcome], wanted: Outcome) -> dict[str, float]:
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for of_rank, expected in zip(found, of_ranks(case, wanted.gradients), strict=True):
        for name, gradient in of_rank.gradients.items():
            parts.setdefault(name, []).append((gradient.flatten(), expected[name].flatten()))
    assert parts.keys() == wanted.gradients.keys()
    return {name: relative_error(*map(torch.cat, zip(*of, strict=True))) for name, of in parts.items()}


def all_on_two_experts(trainer: Trainer) -> None:
    for router in trainer.model.routers():
        router.selection_bias[4:6] = 9.0


def check(change: Change | None, trainer: Trainer) -> None:
    """Change a run, and watch it for what is to be seen while it trains only."""
    if change is not None:
        change(trainer)
    overlap = trainer.execution.overlap
    if trainer.plan.pipeline is not None:
        check_who_carries_messages(trainer)
        if overlap is not None:
            check_that_units_take_turns(trainer)
    elif overlap is not None and trainer.plan.graph.scope != FULL_ITERATION:
        check_that_backwards_run_inside_forwards(trainer, overlap)


def watched(overlap: Overlap) -> list[tuple[str, str]]:
    """Directions and names of units, as they are queued."""
    order, run_unit, back = list[tuple[str, str]](), overlap.run_unit, overlap._back

    def run_and_note(unit, read, call):
        def note_and_call(own, later):
            order.append(("forward", unit.name))
            return call(own, later)

        return run_unit(unit, read, note_and_call)

    def note_and_back(backward, number):
        order.append(("backward", backward.units[number].name))
        return back(backward, number)

    overlap.run_unit, overlap._back = run_and_note, note_and_back
    return order


def num_changes(order: list[tuple[str, str]]) -> int:
    return sum(one != other for (one, _), (other, _) in itertools.pairwise(order))


def check_that_backwards_run_inside_forwards(trainer: Trainer, overlap: Overlap) -> None:
    """Check that all ranks queue the same in each step, in many turns, and that no unit is left then."""
    step, queued = trainer.steps.run, watched(overlap)
    layers = trainer.model.num_moe_layers * trainer.plan.global_micro_batches // trainer.plan.layout.dp

    def run(batches):
        gc.collect()
        gc.disable()  # as a run does from its second step on; it would end cycles
        queued.clear()
        row = step(batches)
        left = [each for each in gc.get_objects() if type(each).__name__ == "UnitFunctionBackward"]
        gc.enable()
        assert not left and trainer.ranks.gather(queued) == [queued] * trainer.ranks.size
        assert num_changes(queued) > 2 * layers, "the MoE layers of each micro-batch take turns more often"
        for name in ("moe_dispatch", "moe_combine"):
            assert queued.count(("forward", name)) == queued.count(("backward", name)) == layers
        return row

    trainer.steps.run = run


def check_that_units_take_turns(trainer: Trainer) -> None:
    """Check that in each pair of stages with experts a forward and a backward have two turns at least.

    Where one of the two has none, nothing of it is sent, and it has one turn.
    """
    overlap, plan = trainer.execution.overlap, trainer.plan.pipeline
    micro_batches = trainer.steps.step.micro_batches
    own = plan.table.ranks[trainer.steps.step.mesh.index("pp")]
    stages = micro_batches.pipeline._stages
    with_experts = [stages[n] for n, each in micro_batches.stages.items() if trainer.model.moe_layers(each)]
    queued, found = watched(overlap), list[tuple[int, bool]]()

    def in_turns(stage, micro_batch, received, other, *backward, **named):
        queued.clear()
        results = Stage.together(stage, micro_batch, received, other, *backward, **named)
        found.append((num_changes(queued), stage in with_experts and other in with_experts))
        return results

    for stage in stages.values():
        stage.together = functools.partial(in_turns, stage)
    train = micro_batches.pipeline.train

    def check():
        train()
        assert len(found) == sum(isinstance(step, Together) for step in own)
        assert any(both for _, both in found)
        assert all(num >= (3 if both else 1) for num, both in found), found
        found.clear()

    micro_batches.pipeline.train = check


def check_who_carries_messages(trainer: Trainer) -> None:
    """The hosts, in a program's steps that compile, warm up or capture units: there no stream may wait."""
    micro_batches = trainer.steps.step.micro_batches
    captures_units = trainer.plan.graph.scope not in ("none", FULL_ITERATION)
    by_host = [True, captures_units, False]  # each program's first steps, with graph.warmup_steps=1
    train, begun = micro_batches.pipeline.train, Counter()

    def check():
        program = micro_batches.model.dispatchers
        assert micro_batches.channels.by_host == by_host[min(begun[program], 2)], begun
        begun[program] += 1
        train()

    micro_batches.pipeline.train = check


def of_ranks(case: Case, whole: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    plan = plan_of(case.training.config, case.ranks)
    layout = plan.layout
    for rank in range(case.ranks):
        stages = plan.own_stages(layout.index("pp", rank))
        model = build_model(plan.model, device="meta", layout=layout, stages=stages)
        marks = {name: layout_of(parameter) for name, parameter in model.named_parameters()}
        marks = {name: mark for name, mark in marks.items() if name in whole}  # frozen ones have no gradient
        yield {name: own_part(whole[name], mark, layout, rank) for name, mark in marks.items()}


def _without_trained(case: Case, rows: Tensor) -> Tensor:
    # compared exactly; so large a number would hide errors of the others
    if not case.training.config.data.document_mask:
        return rows
    place = len(SCALARS) + len(MASKED)
    return torch.cat([rows[:, :place], rows[:, place + len(TRAINED) :]], dim=1)


def _common(case: Case, rows: Tensor, like: Tensor) -> Tensor:
    received = len(RECEIVED) * (rows.shape[1] > like.shape[1])
    if received:
        rows = rows[rows[:, len(SCALARS) + RECEIVED.index("void")] == 0]
        received += len(REPLICATED) * ({*REPLICAS} <= {*case.overrides})
    end = len(SCALARS)
    return torch.cat([rows[:, :end], rows[:, end + received : like.shape[1] + received]], 1)
