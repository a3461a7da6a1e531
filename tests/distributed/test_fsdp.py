"""parallel.dp_shard=fsdp2: the losses and weights of one process, on ranks that each have a part of all."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.hf import save_hf
from graphmoe.config.schema import ConfigError, DpShard
from graphmoe.model.build import build_model
from graphmoe.model.sizes import state_bytes
from graphmoe.plan.layout import own_part
from graphmoe.plan.rules.check import check
from graphmoe.runtime.ranks import Ranks
from graphmoe.training.trainer import Trainer
from tests.distributed.ranks import Case, Job, selected
from tests.distributed.training import (
    Change,
    Outcome,
    Training,
    nan_gradient_in_step_2,
    quiet_trainer,
    without_rank_load,
)
from tests.runs import config, trainer_in
from tests.tolerances import assert_forward_close, assert_gradient_close

BASE = (
    "model.num_dense_layers=1", "train.steps=3", "train.log_interval=3", "train.val_batches=2",
    "train.val_interval=3", "train.global_batch_size=8", "checkpoint.interval=0",
    "checkpoint.enabled=false", "optim.schedule=constant", "compile.enabled=false",
    "model.aux_loss=micro_batch", "model.aux_loss_coef=0.1", "model.z_loss_coef=0.01",
)  # fmt: skip
FSDP = "parallel.dp_shard=fsdp2"
MTP = ("model.mtp_depth=2", "recompute.all=true")
BF16 = "precision.compute=bf16"
OF_A_FAMILY = ("model.score_function=sigmoid", "model.renormalise=true", "model.aux_loss=sequence")
"""Words of a model that a folder of Hugging Face can describe."""


@dataclass
class Found:
    """Findings of a rank at the end of a run."""

    rows: Tensor
    val_losses: list[float]
    weights: dict[str, FlatShard]
    """fp32, what this rank has."""
    kept: dict[str, int]
    """Elements between steps."""
    applied: tuple[float, float]
    """Steps that were, and that were skipped."""
    plain: list[set[str]]
    """The parameters that were whole when the second layer ran."""


@dataclass(frozen=True)
class Sharded:
    """A run with fsdp2, as a case of ``run_ranks``."""

    words: tuple[str, ...] = ()
    change: Change | None = None

    def __call__(self, ranks: Ranks, folder: Path) -> Found:
        trainer, rows, written = quiet_trainer(config(*BASE, FSDP, *self.words), folder, ranks)
        plain: list[set[str]] = []
        trainer.model.layers[1].attn.register_forward_pre_hook(lambda *_: plain.append(whole(trainer)))
        if self.change is not None:
            self.change(trainer)
        trainer.run()
        optimizer = trainer.optimizer
        kept = {
            "weights": sum(w.to_local().numel() for w in trainer.model.parameters()),
            "main": sum(main.numel() for main in optimizer.main.values()),
            "moments": sum(
                m.numel() for of in (optimizer.exp_avg, optimizer.exp_avg_sq) for m in of.values()
            ),
        }
        return Found(
            torch.stack(rows),
            [row["val_loss"] for row in written if "val_loss" in row],
            dict(optimizer.weights_to_fill()),
            kept,
            (optimizer.applied.item(), optimizer.skipped.item()),
            plain,
        )


def whole(trainer: Trainer) -> set[str]:
    return {name for name, w in trainer.model.named_parameters() if not isinstance(w, DTensor)}


def one_after_the_other(precision: str, ranks: Ranks, folder: Path) -> Outcome:
    """Two steps each with zero1, with fsdp2 and with zero1 again, from the checkpoint before."""
    words = (precision, "checkpoint.enabled=true")
    Training((*BASE, *words, "train.steps=2"))(ranks, folder / "first")
    Sharded((*words, "train.steps=4", f"checkpoint.resume_from={folder / 'first'}"))(ranks, folder / "second")
    words = (*words, "train.steps=6", f"checkpoint.resume_from={folder / 'second'}")
    return Training((*BASE, *words))(ranks, folder / "third")


def interrupted(ranks: Ranks, folder: Path) -> Found:
    """Three steps, of which the last two are another run in the same folder."""
    Sharded(("checkpoint.enabled=true", "train.steps=1"))(ranks, folder)
    return Sharded(("checkpoint.enabled=true",))(ranks, folder)


def imported(ranks: Ranks, folder: Path) -> dict[str, FlatShard]:
    """The weights of a Hugging Face folder that another process wrote."""
    run = config(*BASE, FSDP, *OF_A_FAMILY, f"checkpoint.init_from={folder.parent / 'hf'}")
    trainer, _, _ = quiet_trainer(run, folder, ranks)
    return dict(trainer.optimizer.weights_to_fill())


OF_TWO = {
    "fp32": Sharded(),
    "bf16": Sharded((BF16,)),
    "later tokens, computed again": Sharded(MTP),
    "a bad step": Sharded(change=nan_gradient_in_step_2),
    "a tied head": Sharded(("model.tie_embeddings=true",)),
    "a tied head, later tokens": Sharded(("model.tie_embeddings=true", "model.mtp_depth=1")),
}
OF_FOUR = {
    "six experts for four": Sharded(("model.num_experts=6",)),
    "ep2": Sharded(("parallel.ep=2",)),
    "tp2 ep4": Sharded(("parallel.tp=2", "parallel.ep=4")),
    "a tied head, tp2": Sharded(("model.tie_embeddings=true", "parallel.tp=2", "optim.lr=1e-3")),
}


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Findings of two ranks, and of four."""
    folder = tmp_path_factory.mktemp("ranks")
    if {*selected(request, "name")} == {"fp32"}:
        return Job(folder, {"fp32": Sharded()}).results()
    model = config(*BASE, *OF_A_FAMILY).model
    save_hf(build_model(model, seed=5), model, folder / "hf")
    cases: dict[str, Case] = {**OF_TWO, "interrupted": interrupted, "imported": imported}
    for precision in ("bf16", "fp32"):
        cases[f"resumed in {precision}"] = functools.partial(
            one_after_the_other, f"precision.compute={precision}"
        )
    two = Job(folder, cases, num_ranks=2)
    four = Job(folder, OF_FOUR, num_ranks=4)
    return {**two.results(), **four.results()}


@functools.cache
def alone(words: tuple[str, ...] = (), change: Change | None = None) -> Outcome:
    """The same run in this process."""
    return Training((*BASE, *words), change)(Ranks(), Path(alone.folder))  # type: ignore[attr-defined]


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    alone.folder = tmp_path_factory.mktemp("alone")  # type: ignore[attr-defined]


def assert_parts_of(shards: dict[str, FlatShard], weights: dict[str, Tensor]) -> None:
    """Check each part of a rank against the same part of one process."""
    assert shards.keys() == weights.keys()
    for name, shard in shards.items():
        own = own_part(weights[name], shard.parallel, shard.layout, shard.rank)
        assert own.shape == shard.shape
        flat = own.reshape(-1)[shard.start : shard.start + shard.data.numel()]
        if flat.numel():
            assert_gradient_close(shard.data, flat)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "fp32")) for n in (*OF_TWO, *OF_FOUR, "interrupted")],
)
def test_losses_norms_and_weights_are_those_of_one_process(ranks, name):
    case = {**OF_TWO, **OF_FOUR}.get(name, Sharded())
    dense = tuple(word for word in case.words if "parallel" not in word)
    expected, found = alone(dense, case.change), ranks[name]
    val_losses = [row["val_loss"] for row in expected.written if "val_loss" in row]
    for rank in found:
        of_rank, of_one = (without_rank_load(run.rows) for run in (rank, expected))
        rows, steps = of_one[-len(of_rank) :], len(of_rank)
        assert torch.equal(of_rank.isnan(), rows.isnan())
        assert_forward_close(of_rank.nan_to_num(), rows.nan_to_num())
        assert rank.val_losses == pytest.approx(val_losses[-len(rank.val_losses) :], rel=3e-6)
        assert rank.applied == ((2, 1) if case.change else (3, 0)) and steps >= 2
        if BF16 not in case.words:
            assert_parts_of(rank.weights, expected.weights)
    for one in found[1:]:
        assert torch.equal(one.rows.nan_to_num(), found[0].rows.nan_to_num())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_TWO, *OF_FOUR])
def test_a_rank_keeps_its_share_of_weights_and_moments_and_has_one_layer_whole(ranks, name):
    found = ranks[name]
    run = config(*BASE, *{**OF_TWO, **OF_FOUR}[name].words)
    layout = next(iter(found[0].weights.values())).layout
    expected = state_bytes(run.model, layout, dp_shard=DpShard.fsdp2)
    for kind, num_bytes in (("weights", 4), ("main", 4), ("moments", 4)):
        mean = num_bytes * sum(rank.kept[kind] for rank in found) / len(found)
        assert mean == expected["moments_fp32" if kind == "moments" else "main_weights_fp32"]
    for rank in found:
        own = {name for name in rank.weights if name.startswith("layers.1.")}
        assert rank.plain and all(names == own for names in rank.plain)
        uneven = "experts" in name
        assert rank.kept["main"] < (1.6 if uneven else 1.1) * expected["main_weights_fp32"] / 4


@pytest.mark.slow
def test_each_element_is_owned_once_where_ranks_have_unequal_parts_or_none(ranks):
    held: dict[str, Tensor] = {}
    sizes = [
        rank.weights["layers.1.moe_experts.w_down"].data.numel() for rank in ranks["six experts for four"]
    ]
    assert sizes[0] == sizes[1] == sizes[2] > 0 == sizes[3]
    for rank in ranks["six experts for four"]:
        for name, shard in rank.weights.items():
            count = held.setdefault(name, torch.zeros(shard.shape.numel()))
            count[shard.start : shard.start + shard.data.numel()] += 1
    assert all(bool((count == 1).all()) for count in held.values())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_run_goes_on_from_zero1_with_fsdp2_and_back(ranks, precision):
    expected = alone((f"precision.compute={precision}", "train.steps=6"))
    for found in ranks[f"resumed in {precision}"]:
        assert found.step == 6 and found.state["optimizer.counters.applied"] == 6
        assert_forward_close(found.rows, expected.rows[4:])
        if precision == "fp32":
            for name, weight in found.weights.items():
                assert_gradient_close(weight, expected.weights[name])


@pytest.mark.slow
def test_each_rank_takes_its_part_of_the_weights_of_a_folder(ranks):
    weights = dict(build_model(config(*BASE, *OF_A_FAMILY).model, seed=5).named_parameters())
    for shards in ranks["imported"]:
        for name, shard in shards.items():
            flat = weights[name].detach().reshape(-1)[shard.start : shard.start + shard.data.numel()]
            assert torch.equal(shard.data, flat)


def test_keys_that_fsdp2_does_not_go_with_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"graph.scope=layer replays.*use graph.scope=none"):
        check(config(FSDP, "compile.enabled=true", "graph.scope=layer"))
    with pytest.raises(ConfigError, match=r"dp_shard=fsdp2 shares .* use parallel.dp_shard=zero1"):
        trainer_in(tmp_path, FSDP)
