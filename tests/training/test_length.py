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
        ("64", 1), ("65", 2), ("6.4e2", 10), ("1k", 16), ("0.5M", 7813), ("1B", 15_625_000),
        ("1e18", 15625 * 10**12),
    ],
)  # fmt: skip
def test_steps_follow_from_tokens(tokens, steps):
    found = config(f"train.tokens={tokens}").train  # a step has 4 sequences of 16
    assert (found.steps, found.tokens) == (steps, None)


def test_steps_follow_from_epochs_of_data_whose_length_is_known(text_words, caplog):
    caplog.set_level("INFO")
    one, half = (with_epochs(config(*text_words, f"train.epochs={epochs}")).train for epochs in (1, 0.5))
    assert one.epochs is None and abs(one.steps - 2 * half.steps) <= 1 and half.steps > 1
    assert f"{one.steps} steps of 4" in caplog.text
    unknown = "train.epochs=1.0: data=synthetic does not say how long it is; use"
    with pytest.raises(ConfigError, match=unknown):
        with_epochs(config("train.epochs=1"))
    with pytest.raises(ConfigError, match=f"beyond train.steps={half.steps}"):
        with_epochs(config(*text_words, "train.epochs=0.5", f"profile.steps=[{one.steps}]"))


def test_the_first_block_of_the_log_says_how_the_run_learns():
    for words, said in {
        "optim.lr=3e-3 optim.warmup_steps=0": "learning rate 0.003, cosine without warm-up",
        "optim.lr=1e-4 optim.schedule=wsd optim.warmup_steps=2":
            "learning rate 0.0001, wsd after 2 steps of warm-up",
    }.items():  # fmt: skip
        plan, corpus = plan_of(config(*words.split()), 1), SimpleNamespace(counts={})
        assert f"\n  optimizer   adamw, {said}\n" in start_block(plan, corpus, "cpu", ["off"])


def test_a_run_of_some_epochs_goes_on_as_one(tmp_path, text_words):
    words = (
        *WORDS, *text_words, "data.seq_len=16", "train.epochs=0.03", "hydra.run.dir=run",
        "train.val_batches=0",
    )  # fmt: skip
    run, folder = command(tmp_path, *words), tmp_path / "run"
    assert run.wait() == 0, run.err.read_text()
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


FEW = "validation has 1 micro-batch, less than train.val_batches=2; .* train.val_batches=1 says"


@pytest.mark.parametrize(
    ("train", "samples", "level", "said"),
    [
        (config().train, 1, "WARNING", "has 1 sample, less than train.micro_batch_size=2: some count twice"),
        (config().train, 3, "WARNING", FEW), (config().train, 4, None, ""), (config().train, None, None, ""),
        (TrainConfig(micro_batch_size=4), 3, "INFO", ""),  # nobody has asked for so much
    ],
)  # fmt: skip
def test_a_validation_of_less_than_is_asked_for_is_said(caplog, train, samples, level, said):
    val = SimpleNamespace(num_samples=samples)
    caplog.set_level("INFO")
    plan = SimpleNamespace(train=train, ignores_labels=False)
    Validation(plan, Corpus(val, val), None, None, None, None)  # type: ignore[arg-type]
    assert [record.levelname for record in caplog.records] == [level] * (level is not None)
    assert re.search(said, caplog.text)
