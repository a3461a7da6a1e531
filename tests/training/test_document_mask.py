"""Runs with data.document_mask: rates, validation, capture, compiled units, resume."""

import pytest
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.data import first_batches
from graphmoe.model.build import build_model
from graphmoe.model.sizes import flops_per_token
from tests.runs import COMPILED, assert_parts_are_the_whole, assert_same_runs, metrics, train_in, trainer_in

MASK = ("data.document_mask=true", "data.document_length=5")
QUIET = ("train.val_batches=0", "checkpoint.interval=0")
GQA = ("model.attention=gqa", "model.num_kv_heads=1", "model.head_dim=4", "model.qk_norm=true")


def pairs_of(tokens) -> int:
    """Attended pairs of rows of tokens, counted one by one."""
    total = 0
    for row in tokens.tolist():
        length = 0
        for token in row:
            length += 1
            total += length
            length *= token != 0
    return total


def test_rates_count_attended_pairs_of_the_step(tmp_path):
    words = (*MASK, *QUIET, "log.peak_tflops=0.5", "model.num_layers=3", "model.mtp_depth=1")
    trainer = trainer_in(tmp_path, *words)
    model, samples = trainer.plan.model, trainer.corpus.train
    assert trainer.run() and "8 keys" in trainer.throughput.describe()
    scores = 3 * 4 * 2 * 2 * (8 + 4)  # backward too, layers, heads, sizes of a query and of a value
    for row in metrics(tmp_path):
        batch = torch.from_numpy(samples.reader().read(4 * row["step"] - 4, 4))[:, :-1]
        keys = pairs_of(batch) / batch.numel()
        assert row["attended_keys"] == pytest.approx(keys, rel=1e-6) and 2 < keys < 6
        flops = flops_per_token(model, 0) + scores * keys
        rates = [row["tokens_per_s"] * flops / 1e12, row["tflops"] / 0.5]
        assert [row["tflops"], row["mfu"]] == pytest.approx(rates, rel=1e-6)
    assert flops_per_token(model, 16) - flops_per_token(model, 0) == scores * 16 / 2


def test_a_validation_is_masked(tmp_path):
    trained = train_in(tmp_path / "run", *MASK, "train.steps=1")
    trained.optimizer.gather()
    plain = build_model(trained.plan.model, execution=trained.plan.moe)
    plain.load_state_dict(trained.model.state_dict())
    losses = []
    for model in (trained.model, plain):
        with torch.no_grad():
            batch = torch.cat([*first_batches(trained.corpus.val, 2, 2)])
            losses.append(model.loss(batch[:, :-1], batch[:, 1:]).cross_entropy.item())
    masked, unmasked = losses
    (row,) = (row for row in metrics(tmp_path / "run") if "val_loss" in row)
    assert row["val_loss"] == pytest.approx(masked, rel=1e-6) and abs(masked - unmasked) > 1e-4


CAPTURES = {
    "step": ((), ("graph.scope=full_iteration",)),
    "step, gqa": (GQA, ("graph.scope=full_iteration",)),
    "recomputed": (("model.mtp_depth=1",), ("recompute.all=true",)),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_a_run_captured_or_recomputed_is_bitwise_the_plain_one(tmp_path, name):
    words, other = CAPTURES[name]
    assert_same_runs(tmp_path, (*MASK, "graph.warmup_steps=1", *words), (), other)


@pytest.mark.parametrize("scope", ["partial", pytest.param("layer", marks=pytest.mark.slow)])
def test_units_that_replay_from_graphs_are_bitwise_the_compiled_ones(tmp_path, as_traced, scope):
    words = (*MASK, *QUIET, *COMPILED, "compile.cache=false", "graph.warmup_steps=1", "train.steps=4")
    assert_same_runs(tmp_path, words, (), (f"graph.scope={scope}",))


@pytest.mark.parametrize(
    ("words", "way"),
    [((), "as_traced"), (GQA, "as_traced"), pytest.param((), "unmeasured", marks=pytest.mark.slow)],
    ids=["mla", "gqa", "mla by Inductor"],
)
def test_compiled_units_have_the_losses_of_the_plain_model(request, tmp_path, words, way):
    request.getfixturevalue(way)
    compiled = ("compile.enabled=true", f"compile.cache={way != 'as_traced'}")
    losses = []
    for name, more in (("plain", ()), ("compiled", compiled)):
        train_in(tmp_path / name, *MASK, *QUIET, *words, *more)
        losses.append([row["loss"] for row in metrics(tmp_path / name)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len({*losses[0]}) == 6


def test_a_resumed_run_is_the_one_that_never_stopped(tmp_path):
    words = (*MASK, "optim.schedule=constant")
    assert_parts_are_the_whole(tmp_path, *words)
    with pytest.raises(ConfigError, match="the data is not that of the checkpoint"):
        trainer_in(tmp_path / "parts", *words, "data.document_length=6")
