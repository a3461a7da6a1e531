"""A run that is killed, stopped or finds damage goes on bitwise as if nothing had happened."""

import os
import random
import re
import signal
from pathlib import Path

import pytest

from graphmoe.config.masking import to_plain
from graphmoe.plan.forced_loads import load
from graphmoe.report.questions import NO_TRACE, times
from graphmoe.report.run_data import read_run
from graphmoe.run.files import EXPERT_LOADS_FILE, ExpertLoad
from graphmoe.run.folder import write_config
from graphmoe.run.metrics_file import read_lines
from tests.damage import flip_bit
from tests.runs import (
    COMPILED,
    SAVE,
    STEP,
    TINY,
    Command,
    assert_same_state,
    command,
    config,
    final_state,
    metrics,
    numbers,
    summary,
    train_in,
    trainer_in,
)

LONG = ("train.steps=40", "train.val_interval=5", "train.log_interval=4", "checkpoint.interval=2")


def words(name: str, *overrides: str) -> tuple[str, ...]:
    return (*TINY, *LONG, f"hydra.run.dir={name}", *overrides)


def row_keys(folder: Path) -> list[tuple[int, bool]]:
    return [(row["step"], "val_loss" in row) for row in metrics(folder)]


VALIDATED = 1, *range(5, 41, 5)
ALL_ROWS = [(step, row) for step in range(1, 41) for row in (False, True)[: 1 + (step in VALIDATED)]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert command(folder, *words("run")).wait() == 0
    assert row_keys(folder / "run") == ALL_ROWS
    return folder / "run"


def kill_once(folder: Path, overrides: tuple[str, ...], delay: float | None) -> tuple[bool, bool]:
    """Start the command and kill it -9; whether it was alive then, and whether it was saving.

    The moment is ``delay`` seconds after its first new row, or for None when it starts to save.
    """
    rows, checkpoints = folder / "run" / "metrics.jsonl", folder / "run" / "checkpoints"
    before = rows.stat().st_mtime_ns if rows.exists() else 0
    run = Command(folder, words("run", *overrides), slow={SAVE: 0.02} if delay is None else {STEP: 0.02})

    def is_saving() -> bool:
        # the part before "tmp": pruning renames a whole checkpoint so too, but that one has a manifest
        found = checkpoints.glob(f"*.tmp-{run.pid}")
        return any(not (path / "manifest.json").exists() for path in found)

    if delay is None:
        run.wait_until(is_saving)
    else:
        run.wait_until(lambda: rows.exists() and rows.stat().st_mtime_ns != before)
        run.process.join(delay)
    run.kill(signal.SIGKILL)
    status = run.wait()
    assert status in (0, -signal.SIGKILL), run.err.read_text()
    return status != 0, is_saving()


@pytest.mark.slow
@pytest.mark.parametrize("async_save", ["true", "false"])
def test_killed_at_any_moment_the_same_command_gives_bitwise_the_same_run(tmp_path, undisturbed, async_save):
    delays, killed_saving = random.Random(async_save), 0
    overrides = (f"checkpoint.async_save={async_save}",)
    for attempt in range(6):
        alive, saving = kill_once(tmp_path, overrides, None if attempt % 2 else delays.uniform(0, 0.15))
        killed_saving += saving
        if not alive:
            break
    assert attempt > 1 and killed_saving
    end = command(tmp_path, *words("run", *overrides))
    assert end.wait() == 0, end.err.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run"]
    assert numbers(tmp_path / "run") == numbers(undisturbed) and summary(tmp_path / "run")["finished"]
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps == ["step_00000038", "step_00000040"]
    killed = final_state(tmp_path / "run", tmp_path / "a", *LONG)
    assert_same_state(killed, final_state(undisturbed, tmp_path / "b", *LONG))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compiled", "text"])
def test_a_run_of_any_kind_that_is_killed_is_bitwise_the_whole_one(tmp_path, text_words, kind):
    model = {"compiled": COMPILED, "text": (*text_words, "log.sample_tokens=4")}[kind]
    overrides = (*model, "train.steps=12")
    whole = command(tmp_path, *words("whole", *overrides), seconds=600)
    assert whole.wait() == 0, whole.err.read_text()
    killed = Command(tmp_path, words("run", *overrides), slow={STEP: 0.1})
    checkpoints = tmp_path / "run" / "checkpoints"
    killed.wait_until(lambda: len(list(checkpoints.glob("step_*[0-9]"))) > 1, seconds=600)
    killed.kill(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    again = command(tmp_path, *words("run", *overrides), seconds=600)
    assert again.wait() == 0 and "continuing after step" in again.err.read_text()
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    rest = (*LONG, *model, "compile.enabled=false")
    assert_same_state(*(final_state(tmp_path / n, tmp_path / f"{n}_state", *rest) for n in ("run", "whole")))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_cleanly_and_the_same_command_goes_on(tmp_path, undisturbed, number):
    run, folder = Command(tmp_path, words("run", "checkpoint.interval=0"), slow={STEP: 0.1}), tmp_path / "run"
    run.wait_for_rows(folder, 6)
    run.kill(number)
    assert run.wait() == 128 + number, run.err.read_text()
    stopped = summary(folder)
    assert not stopped["finished"] and 0 < stopped["steps"] < 40
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step_{stopped['steps']:08d}"]
    assert metrics(folder)[-1]["step"] == stopped["steps"]
    said = f"{number.name}: stopped after step {stopped['steps']}, which is saved in run: the same command"
    assert said in run.err.read_text()
    again = command(tmp_path, *words("run", "checkpoint.interval=0"))
    assert again.wait() == 0 and "(continued)" in again.err.read_text()
    assert summary(folder)["finished"] and numbers(folder) == numbers(undisturbed)
    logged = [int(step) for step in re.findall(r"step +(\d+)/40  loss", again.err.read_text())]
    first, *rest = range(stopped["steps"] + 1, 41)
    assert logged == [first, *(n for n in rest if n % 4 == 0 or n % 5 == 0)]
    assert [row["step"] for row in metrics(folder) if row.get("start_s")] == [1, stopped["steps"] + 1]
    loads = read_lines(folder / EXPERT_LOADS_FILE, ExpertLoad)
    assert sum(row["steps"] for row in loads) == 40
    said = " ".join(times(read_run(folder), NO_TRACE)[1])
    assert re.search(r"up to the first steps of its 2 starts, .*\d% validation, \d+% checkpoints\.", said)


def test_a_stopped_run_without_checkpoints_says_that_nothing_is_saved(tmp_path):
    folder = tmp_path / "run"
    run = Command(tmp_path, words("run", "checkpoint.enabled=false"), slow={STEP: 0.1})
    run.wait_for_rows(folder, 3)
    run.kill(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert "; nothing is saved (checkpoint.enabled=false)" in run.err.read_text()
    other = command(tmp_path, *words("run", "checkpoint.enabled=false", "train.steps=2"))
    assert "another configuration (train.steps=40, here 2); it saved nothing" in other.err.read_text()
    again = command(tmp_path, *words("run", "checkpoint.enabled=false"))
    assert "(again: it saved nothing)" in again.err.read_text() and summary(folder)["finished"]


def test_a_run_stops_after_its_hours_with_status_0_and_is_continued(tmp_path, undisturbed):
    folder, limit = tmp_path / "run", "train.max_hours=0.00305"  # 11 s, start included
    run = Command(tmp_path, words("run", "checkpoint.interval=0", limit), slow={STEP: 0.5})
    assert run.wait() == 0, run.err.read_text()
    stopped = summary(folder)
    assert (stopped["stopped_by"], stopped["finished"]) == ("train.max_hours=0.00305", False)
    assert (
        f"train.max_hours=0.00305: stopped after step {stopped['steps']}, which is saved"
        in run.err.read_text()
    )
    again = command(tmp_path, *words("run", "checkpoint.interval=0", "train.max_hours=1"))
    assert again.wait() == 0 and "(continued)" in again.err.read_text()
    assert summary(folder)["finished"] and numbers(folder) == numbers(undisturbed)


def test_a_signal_in_the_first_validation_leaves_one(tmp_path, monkeypatch):
    folder, overrides = tmp_path / "run", ("train.steps=2", "train.val_interval=0")
    stopped = trainer_in(folder, *overrides)
    validate = stopped._validate
    monkeypatch.setattr(stopped, "_validate", lambda: (validate(), os.kill(os.getpid(), signal.SIGTERM)))
    assert not stopped.run() and stopped.step == 1
    train_in(folder, *overrides)
    assert row_keys(folder) == [(1, False), (1, True), (2, False), (2, True)]


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_used(tmp_path, undisturbed, caplog):
    folder = tmp_path / "run"
    trainer = trainer_in(folder, *LONG)
    step = trainer._train_step
    trainer._train_step = lambda: step() if trainer.step < 11 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    victim = next((folder / "checkpoints" / "step_00000010").glob("*.distcp"))
    flip_bit(victim)
    caplog.set_level("INFO")
    train_in(folder, *LONG)
    assert "step_00000010 is damaged" in caplog.text
    assert "continuing after step 8 of" in caplog.text
    assert numbers(folder) == numbers(undisturbed)


TIED, BF16 = ("model.tie_embeddings=true", "model.mtp_depth=1"), "precision.compute=bf16"


@pytest.mark.parametrize("model", [(), TIED, (*TIED, BF16)], ids=["fp32", "tied", "tied bf16"])
def test_resume_from_takes_the_whole_state_of_another_run(tmp_path, model):
    six = (*model, "train.steps=6", "checkpoint.interval=3", "optim.schedule=constant")
    train_in(tmp_path / "first", *six)
    train_in(tmp_path / "whole", *six, "train.steps=9")
    resumed = (*six, "train.steps=9", f"checkpoint.resume_from={tmp_path}/first")
    second = train_in(tmp_path / "second", *resumed)
    assert numbers(tmp_path / "second") == [row for row in numbers(tmp_path / "whole") if row["step"] > 6]
    states = [final_state(tmp_path / name, tmp_path / f"of {name}", *model) for name in ("whole", "second")]
    assert_same_state(*states)
    tied = second.model.loss_head.head.weight is second.model.embed.weight
    with pytest.raises(ValueError, match=r"train.steps=3, but .* is at step 6 already; use more steps"):
        trainer_in(tmp_path / "third", *resumed, "train.steps=3")
    assert tied == bool(model) != any(name.endswith("loss_head.head.weight") for name in states[0])


def test_resume_from_a_run_whose_model_computes_otherwise_is_logged(tmp_path, caplog):
    six = ("train.steps=6", "checkpoint.interval=3")
    train_in(tmp_path / "first", *six)
    write_config(tmp_path / "first", to_plain(config(*six)))
    trainer_in(tmp_path / "same", *six, f"checkpoint.resume_from={tmp_path}/first")
    assert not [text for text in caplog.messages if "this run's value" in text]
    trainer_in(tmp_path / "other", *six, "model.rope_theta=99", f"checkpoint.resume_from={tmp_path}/first")
    (line,) = [text for text in caplog.messages if "rope_theta" in text]
    assert line.startswith("model.rope_theta=99.0, not 10000.0 as in") and "this run's value" in line


def test_each_step_has_the_load_that_is_forced_also_where_a_run_goes_on(tmp_path):
    words = ("moe.expert_load=rotating", "train.log_interval=1", "train.val_batches=0", "model.num_layers=3")
    train_in(tmp_path, *words, "train.steps=3")
    train_in(tmp_path, *words, "train.steps=5")
    rows = read_lines(tmp_path / EXPERT_LOADS_FILE, ExpertLoad)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        for layer, loads in enumerate(row["load"]):
            share = load("rotating", row["step"], layer, 4, 2, 1)
            assert loads == pytest.approx([2 * each for each in share], abs=0.2)
