"""The backward of a micro-batch in turns with the forward of the next: bitwise one after the other."""

import gc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from graphmoe.runtime.ranks import Ranks
from graphmoe.training.trainer import Trainer
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Outcome, Training
from tests.distributed.turns import Order, num_changes, watched

pytestmark = pytest.mark.slow
BASE = (
    "model.num_dense_layers=1", "model.num_experts=8", "model.aux_loss=global_batch",
    "model.aux_loss_coef=0.1", "model.z_loss_coef=0.01", "model.selection_bias=true",
    "model.num_layers=3", "model.mtp_depth=1", "train.val_batches=1", "train.val_interval=2",
    "optim.schedule=constant", "optim.bucket_mb=0.01", "train.steps=3", "train.log_interval=1",
    "train.global_batch_size=6", "train.micro_batch_size=1", "checkpoint.enabled=false",
    "compile.enabled=true", "compile.cache=false", "parallel.ep=2", "moe.dispatcher=symm",
    "moe.receive_budget=worst_case",
)  # fmt: skip
FULL = ("graph.scope=full_iteration", "graph.warmup_steps=1")
RECOMPUTE = ("recompute.ops=[layernorm,shared_experts]", "recompute.segments=[moe_router]")


@dataclass(frozen=True)
class InTurns:
    """A run with overlap: its outcome, what its last step queued, the most units that a step has kept."""

    words: tuple[str, ...]

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
                units = [each for each in gc.get_objects() if type(each).__name__ == "_UnitFunctionBackward"]
                kept.append(len(units))
                return row

            trainer.steps.run = run
            gc.collect()
            gc.disable()  # as a run does from its second step on; it would end cycles

        words = (*self.words, "pipeline.ep_overlap=true", "host.manual_gc=true")
        outcome = Training(words, watch, traced=True)(ranks, folder)
        gc.enable()
        return outcome, orders[-1], max(kept)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    cases = {
        "one by one": Training(BASE, traced=True),
        "one by one, recompute": Training((*BASE, *RECOMPUTE), traced=True),
        "in turns": InTurns(BASE),
        "in turns, captured": InTurns((*BASE, *FULL)),
        "in turns, recompute": InTurns((*BASE, *RECOMPUTE)),
    }
    return run_ranks(tmp_path_factory.mktemp("overlap"), cases)


@pytest.mark.parametrize("case", ["", ", captured", ", recompute"])
def test_overlap_changes_no_bit(outcomes, case):
    one_by_one = outcomes[f"one by one{case.removesuffix(', captured')}"]
    for expected, (found, *_) in zip(one_by_one, outcomes[f"in turns{case}"], strict=True):
        assert found.rows.equal(expected.rows) and found.written == expected.written
        assert found.state.keys() == expected.state.keys()
        for ours, theirs in ((found.state, expected.state), (found.gradients, expected.gradients)):
            for name, value in theirs.items():
                assert not isinstance(value, torch.Tensor) or torch.equal(ours[name], value), name


def test_ranks_queue_the_same_and_a_backward_runs_inside_the_next_forward_and_leaves_nothing(outcomes):
    (_, first, kept), (_, second, of_second) = outcomes["in turns"]
    assert first == second and kept == of_second == 0
    assert num_changes(first) > 2 * 3 * 3, "three micro-batches of three MoE layers take turns more often"
    for name in ("moe_dispatch", "moe_combine"):
        assert first.count(("forward", name)) == first.count(("backward", name)) == 3 * 3
