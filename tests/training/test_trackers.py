"""Trackers of runs: rows for Weights & Biases and MLflow, and errors where they are missing, or refuse."""

import math
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.training import metrics as metrics_module
from tests.runs import metrics
from tests.training.test_metrics import row_of, writer, written


@pytest.fixture
def wandb(monkeypatch) -> SimpleNamespace:
    fake = SimpleNamespace(started=[], rows=[])
    fake.log = lambda scalars, step: fake.rows.append((step, scalars["loss"]))
    fake.finish = lambda: None
    fake.init = lambda **words: fake.started.append(words) or fake
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


WANDB = {"tensorboard": False, "wandb": True}


def tracked(folder, done: int, *steps: int, **log) -> None:
    written(folder, done, *map(row_of, steps), **log)


def test_weights_and_biases_tells_folders_of_one_name_apart(tmp_path, wandb):
    for done, parent in enumerate(("one", "other", "other")):
        tracked(tmp_path / parent / "0", max(done - 1, 0), done, **WANDB, wandb_project="mine")
    one, other, again = wandb.started
    assert one["id"] != other["id"] == again["id"] and one["tags"] == other["tags"] == again["tags"] is None
    assert one["project"] == "mine" and one["config"]["train"]["steps"] == 6
    assert wandb.rows == [(0, 2.5), (1, 2.5), (2, 2.5)]


@pytest.fixture
def mlflow(monkeypatch) -> SimpleNamespace:
    fake = SimpleNamespace(started=[], params={}, rows=[], experiments=[], ended=0)
    fake.entities = SimpleNamespace(Metric=lambda name, value, time, step: (name, value, step))

    def start_run(run_id: str | None, run_name: str, tags: dict | None) -> SimpleNamespace:
        fake.started.append((run_id, tags))
        if run_id is None:
            fake.params = {}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or f"id{len(fake.started)}"))

    def log_params(params: dict[str, str]) -> None:
        assert len(params) <= 100 and not set(params) & set(fake.params)
        fake.params |= params

    fake.start_run, fake.log_params = start_run, log_params
    fake.set_experiment = fake.experiments.append

    def log_batch(run_id: str, values: list) -> None:
        assert len(values) <= 1000
        steps = dict.fromkeys(step for *_, step in values)
        fake.rows += [(run_id, step, {name for name, _, of in values if of == step}) for step in steps]

    fake.MlflowClient = lambda: SimpleNamespace(log_batch=log_batch)
    fake.end_run = lambda: setattr(fake, "ended", fake.ended + 1)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


MLFLOW = {"tensorboard": False, "mlflow": True}


def test_mlflow_gets_the_names_of_metrics_jsonl_and_a_resumed_run_goes_on_in_its_own(tmp_path, mlflow):
    for step in (1, 2):
        row = row_of(step, grad_norm=math.inf)
        written(tmp_path / "run", step - 1, row, **MLFLOW, mlflow_experiment="mine")
    assert mlflow.started == [(None, None), ("id1", None)] and mlflow.ended == 2
    assert mlflow.experiments == ["mine", "mine"] and mlflow.params["train.steps"] == "6"
    assert [(run_id, step) for run_id, step, _ in mlflow.rows] == [("id1", 1), ("id1", 2)]
    row = metrics(tmp_path / "run")[0]
    names = {name for name, value in row.items() if isinstance(value, int | float)}
    assert mlflow.rows[0][2] == names | {f"load_max_over_mean/moe_layer_{n}" for n in (0, 1)}
    tracked(tmp_path / "long", 0, *range(1, 101), **MLFLOW)  # log_batch takes a thousand values at once
    assert len({step for _, step, _ in mlflow.rows}) == 100


@pytest.mark.parametrize(("done", "sent"), [(2, [1, 2]), (0, [])])
def test_steps_that_a_resume_takes_back_begin_a_run_of_trackers(tmp_path, wandb, mlflow, done, sent):
    log = {**WANDB, "mlflow": True}
    tracked(tmp_path, 0, 1, 2, 3, 4, **log)
    first, mlflow.rows, wandb.rows = wandb.started[0]["id"], [], []
    with pytest.MonkeyPatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(metrics_module, "cut_metrics", Mock(side_effect=KeyboardInterrupt))
        writer(tmp_path, done, **log)
    tracked(tmp_path, done, done + 1, **log)
    tracked(tmp_path, done + 1, done + 2, **log)  # nothing is taken back
    _, killed, new, again = (words["id"] for words in wandb.started)
    assert wandb.started[1]["tags"] == [f"{first} up to step {done}"]
    assert new not in (first, killed) and again == new
    rest = [done + 1, done + 2]
    assert [step for step, _ in wandb.rows] == sent + sent + rest
    of_mlflow = [(run_id, step) for run_id, step, _ in mlflow.rows]
    assert mlflow.started[1] == (None, {"graphmoe.continues": f"id1 up to step {done}"})
    assert of_mlflow == [("id2", n) for n in sent] + [("id3", n) for n in sent + rest]
    assert [row["step"] for row in metrics(tmp_path)] == sent + rest


@pytest.mark.parametrize(
    ("name", "title", "advice"), [("wandb", "W&B", "log in"), ("mlflow", "MLflow", "set MLFLOW_")]
)
def test_a_tracker_that_is_not_there_or_refuses_says_what_to_do(
    tmp_path, monkeypatch, caplog, wandb, mlflow, name, title, advice
):
    log, refuse = {"tensorboard": False, name: True}, Mock(side_effect=ValueError("no api_key\nand more"))
    missing = rf"pip install 'graphmoe\[{name}\]'"
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=missing):
        patch.setitem(sys.modules, name, None)
        writer(tmp_path / "run", 0, **log)
    assert not list(tmp_path.glob("run/*"))  # nothing that would take the folder from the next start
    wandb.log, mlflow.MlflowClient = refuse, lambda: SimpleNamespace(log_batch=refuse)
    tracked(tmp_path / "run", 0, 1, 2, **log)
    assert caplog.text.count(f"{title} receives no more rows (no api_key") == 1
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
    wandb.init = mlflow.set_experiment = refuse
    with pytest.raises(ConfigError, match=rf"log.{name}=true cannot begin \(no api_key\); {advice}"):
        writer(tmp_path / "other", 0, **log)
    assert not (tmp_path / "other" / f"{name}_id").exists()  # a later start sends all rows
