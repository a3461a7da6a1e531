"""Length of a run by tokens and epochs, and validations that are too short."""

import re
import shutil
from types import SimpleNamespace

import pytest
import yaml

from graphmoe.config.schema import ConfigError, TrainConfig
from graphmoe.data import Corpus
from graphmoe.plan.plan import plan_of
from graphmoe.training.evaluation import Validation
from graphmoe.training.log_lines import start_block
from graphmoe.training.start_checks import with_epochs
from tests.runs import TINY, command, config, metrics, summary

WORDS = tuple(word for word in TINY if not word.startswith("train.steps="))


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [
        ("64", 1),
        ("65", 2),
        ("6.4e2", 10),
        ("1k", 16),
        ("0.5M", 7813),
        ("1B", 15_625_000),
        ("1e18", 15625 * 10**12),
    ],
)
def test_steps_follow_from_tokens(tokens, steps):
    found = config(f"train.tokens={tokens}").train  # a step has 4 sequences of 16
    assert (found.steps, found.tokens) == (steps, None)


def test_steps_follow_from_epochs_of_data_whose_length_is_known(text_words, caplog):
    caplog.set_level("INFO")
    one, half = (with_epochs(config(*text_words, f"train.epochs={epochs}")).train for epochs in (1, 0.5))
    assert one.epochs is None and abs(one.steps - 2 * half.steps) <= 1 and half.steps > 1
    assert f"{one.steps} steps of 4" in caplog.text
    with pytest.raises(
        ConfigError, match="train.epochs=1.0: data=synthetic does not say how long it is; use"
    ):
        with_epochs(config("train.epochs=1"))
    with pytest.raises(ConfigError, match=f"beyond train.steps={half.steps}"):
        with_epochs(config(*text_words, "train.epochs=0.5", f"profile.steps=[{one.steps}]"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.lr=3e-3", "optim.warmup_steps=0"], "adamw, learning rate 0.003, cosine without warm-up"),
        (
            ["optim.lr=1e-4", "optim.schedule=wsd", "optim.warmup_steps=2"],
            "adamw, learning rate 0.0001, wsd after 2 steps of warm-up",
        ),
    ],
)
def test_the_first_block_of_the_log_says_how_the_run_learns(words, said):
    corpus = SimpleNamespace(counts={})
    lines = start_block(plan_of(config(*words), 1), corpus, "cpu", ["off"]).splitlines()
    assert f"  optimizer   {said}" in lines


def test_a_run_of_some_epochs_goes_on_as_one(tmp_path, text_words):
    words = (
        *WORDS,
        *text_words,
        "data.seq_len=16",
        "train.epochs=0.03",
        "hydra.run.dir=run",
        "train.val_batches=0",
    )
    run = command(tmp_path, *words)
    assert run.wait() == 0, run.err.read_text()
    folder = tmp_path / "run"
    length = yaml.safe_load((folder / "resolved.yaml").read_text())["train"]
    steps = summary(folder)["steps"]
    assert (length["steps"], length["epochs"], length["tokens"]) == (steps, None, None) and steps > 3
    rows = metrics(folder)
    assert rows[-1]["epoch"] >= 0.03 > rows[-2]["epoch"] and rows[-1]["lr"] < rows[0]["lr"] / 5
    (folder / "summary.json").unlink()
    shutil.rmtree(max((folder / "checkpoints").glob("step_*")))
    again = command(tmp_path, *words)
    assert again.wait() == 0 and "run (continued)" in again.err.read_text()
    assert [row["loss"] for row in metrics(folder)] == [row["loss"] for row in rows]


@pytest.mark.parametrize("key", ["tokens=1e6", "epochs=2"])
def test_two_lengths_on_a_command_line_are_refused(tmp_path, key):
    run = command(tmp_path, *WORDS, "train.steps=9", f"train.{key}")
    said = f"train.steps=9 and train.{key.split('=')[0]}="
    assert run.wait() == 2 and said in run.err.read_text() and "leave one out" in run.err.read_text()
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (1, "validation has 1 sample, less than train.micro_batch_size=2: some count twice"),
        (3, "validation has 1 micro-batch, less than train.val_batches=2; .* train.val_batches=1 says"),
        (4, None),
        (None, None),
    ],
)
def test_a_validation_of_less_than_is_asked_for_is_warned_of(caplog, samples, said):
    val = SimpleNamespace(num_samples=samples)
    caplog.set_level("INFO")
    Validation(config().train, Corpus(val, val), None, None, None, None)  # type: ignore[arg-type]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (said is not None)
    if said:
        assert re.search(said, caplog.text)


def test_a_default_that_validation_falls_short_of_is_no_warning(caplog):
    caplog.set_level("INFO")
    few = SimpleNamespace(num_samples=3)
    Validation(TrainConfig(), Corpus(few, few), None, None, None, None)  # type: ignore[arg-type]
    assert [record.levelname for record in caplog.records] == ["INFO"]
