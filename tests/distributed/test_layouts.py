"""Training in every layout of eight ranks gives what one process gives on the same global batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from graphmoe.config.schema import ParallelConfig
from graphmoe.model.build import build_model
from graphmoe.plan.layout import Layout, layout_of, own_part
from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import Job, selected
from tests.distributed.training import Outcome, Training, without_rank_load
from tests.runs import config
from tests.tolerances import assert_forward_close, assert_gradient_close

RANKS = 8
BASE = (
    "model.num_dense_layers=1", "model.num_heads=4", "model.num_experts=8", "model.aux_loss=global_batch",
    "model.aux_loss_coef=0.1", "model.z_loss_coef=0.01", "optim.schedule=constant", "optim.bucket_mb=0.01",
    "train.steps=3", "train.log_interval=3", "train.global_batch_size=8", "train.micro_batch_size=1",
    "train.val_batches=1", "train.val_interval=3", "checkpoint.enabled=false",
)  # fmt: skip
LAYOUTS = (
    "",
    "ep=2", "ep=8", "etp=2", "ep=2 etp=2", "ep=4 etp=2",
    "tp=2", "tp=2 ep=2", "tp=2 ep=4", "tp=2 ep=8", "tp=4 ep=2 etp=2",
    "cp=2 ep=8", "cp=2 tp=2 ep=4 etp=2", "cp=4 cp_method=ring", "cp=2 tp=2 cp_method=ring ep=8",
)  # fmt: skip
"""What of ``parallel`` is not 1; the other ranks are data parallel. In those with ep * etp > dp, experts are
shared out to ranks that also share dense matrices."""
OTHERS = {
    "ep=2 etp=4": "ep=4 etp=2",
    "tp=2 ep=4 etp=2": "tp=4 ep=2 etp=2",
    "tp=4": "tp=2",
    "tp=4 ep=2": "tp=2 ep=4",
    "tp=4 ep=8": "tp=2 ep=8",
    "cp=2": "cp=2 ep=8",
}
"""More layouts, and the one above that folds the same axes in the same way with other sizes."""


def words_of(layout: str) -> tuple[str, ...]:
    return (*BASE, *(f"parallel.{word}" for word in layout.split()))


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Outcome]]:
    cases = {layout: Training(words_of(layout)) for layout in selected(request, "layout")}
    job = Job(tmp_path_factory.mktemp("eight"), {f"dp {n}": run for n, run in cases.items()}, num_ranks=RANKS)
    found = job.results(seconds=400)
    return {layout: found[f"dp {layout}"] for layout in cases}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Training(BASE)(Ranks(), tmp_path_factory.mktemp("alone"))


def parts(layout: str, whole: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """What each rank has of whole tensors by parameter name."""
    run = config(*words_of(layout))
    folded = Layout.of(ParallelConfig(**vars(run.parallel)), RANKS)
    model = build_model(run.model, device="meta", layout=folded)
    marks = {name: layout_of(parameter) for name, parameter in model.named_parameters()}
    for rank in range(RANKS):
        yield {name: own_part(tensor, marks[name], folded, rank) for name, tensor in whole.items()}


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.exhaustive) for layout in OTHERS)]
)
def test_losses_gradients_and_weights_are_those_of_one_process(outcomes, alone, layout):
    of_ranks = outcomes[layout]
    weights, gradients = parts(layout, alone.weights), parts(layout, alone.gradients)
    for found, weights_of_rank, gradients_of_rank in zip(of_ranks, weights, gradients, strict=True):
        assert_forward_close(without_rank_load(found.rows), without_rank_load(alone.rows))
        assert torch.equal(found.rows, of_ranks[0].rows)
        assert_forward_close(found.val_losses, alone.val_losses)
        assert found.weights.keys() == alone.weights.keys() == found.gradients.keys()
        for name in found.weights:
            assert_gradient_close(found.gradients[name], gradients_of_rank[name])
            assert_gradient_close(found.weights[name], weights_of_rank[name])
