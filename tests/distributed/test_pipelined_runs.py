"""Training with layers shared out along pp gives what one process gives on the same global batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from graphmoe.layout import layout_of, own_part
from graphmoe.model import build_model
from graphmoe.pipeline_plan import layout_of_run, plan_of
from graphmoe.pipelined import Pipelined
from graphmoe.step_rows import RECEIVED, SCALARS
from graphmoe.trainer import Trainer
from graphmoe.world import World
from runtime.pipeline.actions import Together
from tests.distributed.ranks import Job
from tests.distributed.training import Outcome, Training, without_rank_load
from tests.tolerances import assert_forward_close, assert_gradient_close

BASE = (
    "model.num_dense_layers=1", "model.num_layers=4", "model.num_experts=4", "model.aux_loss=global_batch",
    "model.aux_loss_coef=0.1", "model.z_loss_coef=0.01", "optim.schedule=constant", "optim.bucket_mb=0.01",
    "optim.lr=1e-3", "train.steps=3", "train.log_interval=3", "train.global_batch_size=8",
    "train.micro_batch_size=1", "train.val_batches=3", "train.val_interval=3", "checkpoint.enabled=false",
)  # fmt: skip
BUDGET = ("moe.dispatcher=symm", "moe.receive_budget=1.0", "parallel.ep=2")
TURNS = (
    "pipeline.ep_overlap=true", "compile.enabled=true", "moe.dispatcher=symm",
    "moe.receive_budget=worst_case",
)  # fmt: skip
MTP, TIED, COMPILED = "model.mtp_depth=2", "model.tie_embeddings=true", "compile.enabled=true"


def check_that_units_take_turns(trainer: Trainer) -> None:
    """At the end of each step: in each pair a forward and a backward have two turns at least."""
    overlap, plan = trainer.execution.overlap, trainer.plan
    assert overlap is not None and plan is not None
    finish, own = overlap.finish, plan.table.ranks[trainer.mesh.index("pp")]

    def check() -> None:
        finish()
        directions = [direction for direction, _ in overlap.order]
        changes = sum(one != other for one, other in itertools.pairwise(directions))
        assert changes >= 3 * sum(isinstance(step, Together) for step in own) > 0, overlap.order

    overlap.finish = check  # type: ignore[method-assign]


def check_that_no_stream_waits(trainer: Trainer) -> None:
    """In steps that compile or capture; in later ones it may."""
    micro_batches = trainer.train_step.micro_batches
    assert isinstance(micro_batches, Pipelined)
    train, begun = micro_batches.pipeline.train, []

    def check() -> None:
        begun.append(micro_batches.channels.by_host)
        assert begun == [True, True, False][: len(begun)], begun  # one step warms up, one captures
        train()

    micro_batches.pipeline.train = check  # type: ignore[method-assign]


@dataclass(frozen=True)
class Case:
    """A layout of some ranks."""

    ranks: int
    pp: int
    schedule: str
    words: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    """What one process has too."""
    traced: bool = False

    @property
    def training(self) -> Training:
        own = (f"parallel.pp={self.pp}", f"pipeline.schedule={self.schedule}", *self.words)
        in_turns = "pipeline.ep_overlap=true" in self.words
        change = check_that_units_take_turns if in_turns else None
        if "graph.scope=layer" in self.words:
            change = check_that_no_stream_waits
        return Training((*BASE, *self.model, *own), change, self.traced)


CASES = {
    "gpipe": Case(2, 2, "gpipe"),
    "1f1b": Case(2, 2, "1f1b"),
    "1f1b, tied": Case(2, 2, "1f1b", model=(TIED,)),
    "1f1b, later tokens": Case(2, 2, "1f1b", model=(MTP,)),
    "1f1b, later tokens, the loss apart": Case(2, 2, "1f1b", ("pipeline.layout=Ettttmm|L",), (MTP,)),
    "1f1b, compiled": Case(2, 2, "1f1b", (COMPILED,), traced=True),
    "interleaved": Case(2, 2, "interleaved"),
    "interleaved, three stages a rank": Case(2, 2, "interleaved", ("pipeline.virtual_stages=3",)),
    "zb1p": Case(2, 2, "zb1p"),
    "zb1p, compiled": Case(2, 2, "zb1p", (COMPILED,), (MTP, TIED), traced=True),
    "zbv": Case(2, 2, "zbv", model=(TIED,)),
    "zbv, compiled": Case(2, 2, "zbv", (COMPILED,), traced=True),
    "v_half": Case(2, 2, "v_half", model=(MTP,)),
    "v_min": Case(2, 2, "v_min"),
    "more stages than micro-batches": Case(4, 4, "1f1b", ("train.micro_batch_size=4",)),
    "1f1b on four": Case(4, 4, "1f1b", model=(MTP, TIED)),
    "zb1p on four, compiled": Case(4, 4, "zb1p", (COMPILED,), traced=True),
    "zbv on four": Case(4, 4, "zbv", ("pipeline.layout=E|t|t|t|t|m|m|L",), (MTP,)),
    "interleaved beside dp": Case(4, 2, "interleaved"),
    "zb1p beside ep": Case(4, 2, "zb1p", ("parallel.ep=2",), (TIED,)),
    "1f1b beside tp": Case(4, 2, "1f1b", ("parallel.tp=2",), (MTP, TIED)),
    "1f1b in turns beside ep": Case(4, 2, "1f1b", (*TURNS, "parallel.ep=2"), traced=True),
    "interleaved in turns beside ep": Case(
        4, 2, "interleaved", (*TURNS, "parallel.ep=2"), (MTP,), traced=True
    ),
    "1f1b beside ep, room for the mean, a stage without experts": Case(
        4, 2, "1f1b", (*BUDGET, "pipeline.layout=Etttt|L")
    ),
    "zb1p on lanes": Case(2, 2, "zb1p", (COMPILED, "graph.scope=layer", "graph.warmup_steps=1"), (MTP,)),
    "zbv on lanes": Case(2, 2, "zbv", (COMPILED, "graph.scope=partial", "graph.warmup_steps=1")),
    "interleaved on lanes": Case(
        2, 2, "interleaved", (COMPILED, "graph.scope=layer", "graph.warmup_steps=1"), (TIED,)
    ),
    "1f1b in one graph": Case(2, 2, "1f1b", (COMPILED, "graph.scope=full_iteration", "graph.warmup_steps=1")),
    "1f1b beside cp and etp": Case(4, 2, "1f1b", ("parallel.cp=2", "parallel.etp=2")),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for ranks in (2, 4):
        cases = {name: case.training for name, case in CASES.items() if case.ranks == ranks}
        found |= Job(tmp_path_factory.mktemp(f"of{ranks}"), cases, num_ranks=ranks).results(seconds=500)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Outcome]:
    models = {(case.model, *(w for w in case.words if "micro_batch" in w)) for case in CASES.values()}
    return {
        of: Training((*BASE, *of[0], *of[1:]))(World(), tmp_path_factory.mktemp("alone")) for of in models
    }


def of_ranks(case: Case, whole: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """What each rank has of whole tensors by parameter name."""
    run = case.training.config
    layout = layout_of_run(run, case.ranks)
    plan = plan_of(run, layout)
    assert plan is not None
    for rank in range(case.ranks):
        stages = [*plan.own_stages(layout.index("pp", rank)).values()]
        model = build_model(run.model, device="meta", layout=layout, stages=stages)
        marks = {name: layout_of(parameter) for name, parameter in model.named_parameters()}
        yield {name: own_part(whole[name], mark, layout, rank) for name, mark in marks.items()}


def common(rows: Tensor, like: Tensor) -> Tensor:
    """What steps that count return in every layout: without what they say of the rows that arrive."""
    more = rows.shape[1] - like.shape[1]
    if more:
        rows = rows[rows[:, len(SCALARS) + RECEIVED.index("void")] == 0]
    return torch.cat([rows[:, : len(SCALARS)], rows[:, len(SCALARS) + more :]], dim=1)


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_are_those_of_one_process(outcomes, alone, name):
    case = CASES[name]
    wanted = alone[case.model, *(w for w in case.words if "micro_batch" in w)]
    parts = zip(of_ranks(case, wanted.weights), of_ranks(case, wanted.gradients), strict=True)
    for found, (weights, gradients) in zip(outcomes[name], parts, strict=True):
        assert_forward_close(
            without_rank_load(common(found.rows, wanted.rows)), without_rank_load(wanted.rows)
        )
        assert torch.equal(found.rows, outcomes[name][0].rows)
        assert_forward_close(found.val_losses, wanted.val_losses)
        assert found.weights.keys() == weights.keys() == found.gradients.keys()
        for parameter in weights:
            assert_gradient_close(found.gradients[parameter], gradients[parameter])
            assert_gradient_close(found.weights[parameter], weights[parameter])
