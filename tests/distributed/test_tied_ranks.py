"""Two ranks with a tied head train as one process does: each has the one weight, or half of its rows."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from graphmoe.model.build import build_model
from graphmoe.plan.layout import Layout, layout_of, own_part
from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import Job
from tests.distributed.training import Outcome, Training, without_rank_load
from tests.runs import COMPILED, config
from tests.tolerances import assert_forward_close, assert_gradient_close

TIED = (
    "model.tie_embeddings=true", "model.mtp_depth=1", "model.num_layers=1", "model.num_dense_layers=0",
    "model.q_lora_rank=8", "model.aux_loss=micro_batch", "model.aux_loss_coef=0.1", "model.z_loss_coef=0.1",
    "train.global_batch_size=8", "train.steps=3", "train.log_interval=3", "train.val_batches=2",
    "train.val_interval=3", "optim.lr=1e-3", "optim.schedule=constant", "optim.bucket_mb=0.001",
    "checkpoint.enabled=false",
)  # fmt: skip
"""Two micro-batches for each of two ranks, each with four uses of the weight."""
COMPILES = (*TIED, *COMPILED, "model.aux_loss=micro_batch")
CASES = {
    "dp2": Training(TIED),
    "tp2": Training((*TIED, "parallel.tp=2")),
    "dp2, compiled": Training(COMPILES, traced=True),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    return Job(tmp_path_factory.mktemp("two"), CASES).results()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Training(TIED)(Ranks(), tmp_path_factory.mktemp("one"))


@functools.cache
def tp_model(rank: int) -> torch.nn.Module:
    return build_model(config(*TIED).model, layout=Layout(tp=2), rank=rank)


def part(name: str, whole: Tensor, rank: int) -> Tensor:
    """What a rank of tp=2 has of a whole parameter."""
    return own_part(whole, layout_of(tp_model(rank).get_parameter(name)), Layout(tp=2), rank)


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_weights_of_a_tied_head_are_those_of_one_process(ranks, alone, case):
    losses = [row["val_loss"] for row in alone.written if "val_loss" in row]
    for rank, found in enumerate(ranks[case]):
        assert_forward_close(without_rank_load(found.rows), without_rank_load(alone.rows))
        assert [row["val_loss"] for row in found.written if "val_loss" in row] == pytest.approx(losses, 3e-6)
        assert found.weights.keys() == alone.weights.keys() == found.gradients.keys()
        assert "embed.weight" in found.weights and "loss_head.head.weight" not in found.weights
        for name, weight in alone.weights.items():
            whole = weight, alone.gradients[name]
            expected = [part(name, each, rank) for each in whole] if case == "tp2" else whole
            assert_gradient_close(found.weights[name], expected[0])
            assert_gradient_close(found.gradients[name], expected[1])


@pytest.mark.parametrize("case", CASES)
def test_the_state_of_a_run_has_a_tied_weight_once(ranks, case):
    for found in ranks[case]:
        assert not [name for name in found.state if "head.head" in name]
        assert {"model.embed.weight", "optimizer.exp_avg.embed.weight"} <= found.state.keys()


def test_ranks_of_tp_have_their_rows_of_the_weight_of_one_rank():
    whole = build_model(config(*TIED).model)
    for rank in (0, 1):
        model = tp_model(rank)
        assert model.loss_head.head.weight is model.embed.weight
        assert layout_of(model.embed.weight).summed_over == "dp_cp"
        assert torch.equal(model.embed.weight, whole.embed.weight.chunk(2)[rank])
