"""The backward of a micro-batch in turns with the forward of the next: bitwise one after the other."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from graphmoe.runtime.ranks import Ranks
from graphmoe.training.trainer import Trainer
from tests.distributed.ranks import Job, selected
from tests.distributed.skewed import ONE_LAYER, TWO_RANKS, WORDS
from tests.distributed.training import Outcome, Training
from tests.distributed.turns import Order, num_changes, watched

pytestmark = pytest.mark.slow
BASE = (
    "model.num_layers=2", "model.num_dense_layers=1", "model.num_experts=8", "model.aux_loss=global_batch",
    "model.aux_loss_coef=0.1", "model.z_loss_coef=0.01", "model.selection_bias=true",
    "optim.schedule=constant", "optim.bucket_mb=0.01", "train.steps=3", "train.log_interval=1",
    "train.global_batch_size=6", "train.micro_batch_size=1", "train.val_batches=0",
    "checkpoint.enabled=false", "compile.enabled=true", "parallel.ep=2", "moe.dispatcher=symm",
    "moe.receive_budget=worst_case",
)  # fmt: skip
MTP = ("model.num_layers=3", "model.mtp_depth=1", "train.val_batches=1", "train.val_interval=2")
COMPILED = (
    *WORDS, *TWO_RANKS, *ONE_LAYER, "moe.receive_budget=worst_case", "train.steps=2", "train.log_interval=1",
)  # fmt: skip
CASES = {
    "three micro-batches": (*BASE, *MTP),
    "full_iteration": (*BASE, *MTP, "graph.scope=full_iteration", "graph.warmup_steps=1"),
    "recompute": (*BASE, *MTP, "recompute.ops=[layernorm,shared_experts]", "recompute.segments=[moe_router]"),
}
"""Units run as they were traced."""
BY_INDUCTOR = {"compiled": COMPILED}
SAME = {"full_iteration": "three micro-batches"}
"""One by one what is captured computes what is not, bit by bit."""


@dataclass(frozen=True)
class InTurns:
    """A run with overlap: its outcome, what its last step queued, the most units that a step has kept."""

    words: tuple[str, ...]
    traced: bool

    def __call__(self, ranks: Ranks, folder: Path) -> tuple[Outcome, Order, int]:
        orders: list[Order] = []
        kept: list[int] = []

        def watch(trainer: Trainer) -> None:
            step, overlap = trainer.steps.run, trainer.execution.overlap
            assert overlap is not None

            queued = watched(overlap)

            def run(batches):
                queued.clear()
                row = step(batches)
                orders.append(list(queued))
                kept.append(
                    sum(type(found).__name__ == "_UnitFunctionBackward" for found in gc.get_objects())
                )
                return row

            trainer.steps.run = run
            gc.collect()
            gc.disable()  # as a run does from its second step on; it would end cycles

        words = (*self.words, "pipeline.ep_overlap=true", "host.manual_gc=true")
        outcome = Training(words, watch, self.traced)(ranks, folder)
        gc.enable()
        return outcome, orders[-1], max(kept)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    cases: dict[str, Training | InTurns] = {}
    for name in CASES | dict.fromkeys(selected(request, "case")):
        traced = name in CASES
        words = (*(CASES | BY_INDUCTOR)[name], f"compile.cache={not traced}")
        cases[f"{name} in turns"] = InTurns(words, traced)
        if name not in SAME:
            cases[name] = Training(words, traced=traced)
    return Job(tmp_path_factory.mktemp("overlap"), cases, num_ranks=2).results(seconds=600)


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in BY_INDUCTOR)]
)
def test_overlap_changes_no_bit(outcomes, case):
    one_by_one: list[Outcome] = outcomes[SAME.get(case, case)]
    in_turns: list[Outcome] = [outcome for outcome, _, _ in outcomes[f"{case} in turns"]]
    for expected, found in zip(one_by_one, in_turns, strict=True):
        assert found.rows.equal(expected.rows) and found.written == expected.written
        assert found.state.keys() == expected.state.keys()
        for name, value in expected.state.items():
            same = torch.equal(found.state[name], value) if isinstance(value, torch.Tensor) else True
            assert same, name
        for name, gradient in expected.gradients.items():
            assert torch.equal(found.gradients[name], gradient), name


def test_ranks_queue_the_same_and_the_backward_runs_inside_the_next_forward(outcomes):
    (_, first, _), (_, second, _) = outcomes["three micro-batches in turns"]
    assert first == second
    assert num_changes(first) > 2 * 3 * 3, "three micro-batches of three MoE layers take turns more often"
    for name in ("moe_dispatch", "moe_combine"):
        assert first.count(("forward", name)) == first.count(("backward", name)) == 3 * 3


def test_nothing_that_a_backward_has_read_stays(outcomes):
    assert [kept for _, _, kept in outcomes["three micro-batches in turns"]] == [0, 0]
