"""Runs with data=chat: by the command line, captured, compiled, resumed, and their validation."""

import pytest
import torch

from graphmoe.command.hydra import compose_config
from graphmoe.config.schema import ConfigError
from graphmoe.config.token_flags import NO_LABEL
from graphmoe.data import first_batches
from tests.data.chats import conversations, write_rows, write_tokenizer
from tests.runs import (
    COMPILED,
    assert_parts_are_the_whole,
    assert_same_runs,
    command,
    config,
    metrics,
    train_in,
    trainer_in,
)

QUIET = ("train.val_batches=0", "checkpoint.interval=0")


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Words of a run on conversations, whose model has room for a small vocabulary."""
    folder = tmp_path_factory.mktemp("chat")
    rows = write_rows(folder / "rows.jsonl", conversations(60, longest=2))
    return (
        "data.source=chat", f"data.paths=[{rows}]", f"data.tokenizer={write_tokenizer(folder / 'tokenizer')}",
        f"data.cache_dir={folder / 'cache'}", "data.val_fraction=0.2", "data.seq_len=48",
        "model.context_length=48", "model.vocab_size=368", "data.document_mask=true",
    )  # fmt: skip


def test_the_mask_of_conversations_cannot_be_switched_off(chat):
    assert compose_config("model=tiny", "data=chat", *chat[1:6], "run.device=cpu").data.document_mask
    with pytest.raises(ConfigError, match="=false has no effect on data.source=chat.*mask=true$"):
        config(*chat, "data.document_mask=false")
    with pytest.raises(ConfigError, match="use smaller heads$"):
        config(*chat, "model.qk_nope_head_dim=512")


def test_twenty_steps_by_the_command_line_learn_the_answers(tmp_path, chat):
    words = ("model=tiny", "data=chat", *chat[1:6], "train.steps=20", "train.val_interval=10")
    words += ("optim.warmup_steps=2", "compile=none", "train.global_batch_size=8", "run.device=cpu")
    command(tmp_path, *words, "hydra.run.dir=run", seconds=300)
    losses = [row["loss"] for row in metrics(tmp_path / "run") if "loss" in row]
    assert len(losses) == 20 and losses[-1] < 0.8 * losses[0]
    log = (tmp_path / "stderr.txt").read_text() + (tmp_path / "stdout.txt").read_text()
    assert "data=chat: 60 conversations with" in log and "documents masked" in log


def test_a_validation_loss_is_the_mean_over_labels(tmp_path, chat):
    trained = train_in(tmp_path / "run", *chat, "train.steps=1", "train.val_batches=3")
    trained.optimizer.gather()
    batches = [*first_batches(trained.corpus.val, 3, 2)]
    counts = [(batch[:, 1:] & NO_LABEL == 0).sum().item() for batch in batches]
    with torch.no_grad():
        found = [trained.model.loss(batch[:, :-1], batch[:, 1:]).cross_entropy.item() for batch in batches]
    (row,) = (row for row in metrics(tmp_path / "run") if "val_loss" in row)
    mean = sum(loss * count for loss, count in zip(found, counts, strict=True)) / sum(counts)
    assert row["val_loss"] == pytest.approx(mean, rel=1e-6) and len({*counts}) > 1


@pytest.mark.parametrize(
    ("words", "other"),
    [((), ("graph.scope=full_iteration",)), (("model.mtp_depth=1",), ("recompute.all=true",))],
    ids=["captured", "recomputed"],
)
def test_a_run_captured_or_recomputed_is_bitwise_the_plain_one(tmp_path, chat, words, other):
    assert_same_runs(tmp_path, (*chat, "graph.warmup_steps=1", *words), (), other)


@pytest.mark.slow
def test_compiled_units_have_the_losses_of_the_plain_model(tmp_path, chat, as_traced):
    losses = []
    for name, more in (("plain", ()), ("compiled", (*COMPILED, "compile.cache=false"))):
        train_in(tmp_path / name, *chat, *QUIET, *COMPILED[1:], *more)
        losses.append([row["loss"] for row in metrics(tmp_path / name)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len({*losses[0]}) == 6


def test_a_resumed_run_is_the_one_that_never_stopped(tmp_path, chat):
    words = (*chat, "optim.schedule=constant")
    assert_parts_are_the_whole(tmp_path, *words)


def test_a_sample_prompt_is_text(tmp_path, chat):
    from graphmoe.training.evaluation import prompt_of

    trainer = trainer_in(tmp_path, *chat)
    assert prompt_of(trainer.corpus, trainer.corpus.tokenizer).startswith("user\n")
