"""Trackers of runs: rows for Weights & Biases and MLflow, and errors where they are missing, or refuse."""

import math
import sys
import types
from unittest.mock import Mock

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.training import metrics as metrics_module
from tests.runs import metrics
from tests.training.test_metrics import row_of, writer


@pytest.fixture
def wandb(monkeypatch) -> types.SimpleNamespace:
    fake = types.SimpleNamespace(started=[], rows=[])
    fake.log = lambda scalars, step: fake.rows.append((step, scalars["loss"]))
    fake.finish = lambda: None
    fake.init = lambda **words: fake.started.append(words) or fake
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


WANDB = {"tensorboard": False, "wandb": True}


def tracked(folder, done: int, *steps: int, **log) -> None:
    """A start of a run that goes on after step ``done`` and has rows of some steps."""
    sink = writer(folder, done, **log)
    sink.write([row_of(step) for step in steps])
    sink.close()


def test_weights_and_biases_that_is_not_there_or_refuses_says_what_to_do(
    tmp_path, monkeypatch, caplog, wandb
):
    refuse = Mock(side_effect=ValueError("api_key not configured\nand more"))
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"pip install 'graphmoe\[wandb\]'"):
        patch.setitem(sys.modules, "wandb", None)
        writer(tmp_path / "run", 0, **WANDB)
    assert not list(tmp_path.glob("run/*"))  # nothing that would take the folder from the next start
    wandb.log = refuse
    sink = writer(tmp_path / "run", 0, **WANDB)
    sink.write([row_of(1), row_of(2)])
    sink.close()
    assert caplog.text.count("W&B gets no more rows (api_key") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    wandb.init = refuse
    with pytest.raises(ConfigError, match=r"log.wandb=true cannot begin \(api_key not configured\); log in"):
        writer(tmp_path / "other", 0, **WANDB)
    assert not (tmp_path / "other" / "wandb_id").exists()  # a later start sends all rows


def test_weights_and_biases_tells_folders_of_one_name_apart(tmp_path, wandb):
    for done, parent in enumerate(("one", "other", "other")):
        tracked(tmp_path / parent / "0", max(done - 1, 0), done, **WANDB, wandb_project="mine")
    one, other, again = wandb.started
    assert one["id"] != other["id"] == again["id"] and one["tags"] == other["tags"] == again["tags"] is None
    assert one["project"] == "mine" and one["config"]["train"]["steps"] == 6
    assert wandb.rows == [(0, 2.5), (1, 2.5), (2, 2.5)]


@pytest.fixture
def mlflow(monkeypatch) -> types.SimpleNamespace:
    fake = types.SimpleNamespace(started=[], params={}, rows=[], experiments=[], ended=0)
    fake.entities = types.SimpleNamespace(Metric=lambda name, value, time, step: (name, value, step))

    def start_run(run_id: str | None, run_name: str, tags: dict | None) -> types.SimpleNamespace:
        fake.started.append((run_id, tags))
        if run_id is None:
            fake.params = {}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or f"id{len(fake.started)}"))

    def log_params(params: dict[str, str]) -> None:
        assert len(params) <= 100 and not set(params) & set(fake.params)
        fake.params |= params

    fake.start_run, fake.log_params = start_run, log_params
    fake.set_experiment = fake.experiments.append

    def log_batch(run_id: str, values: list) -> None:
        assert len(values) <= 1000
        by_step = {step: {} for _, _, step in values}
        for name, value, step in values:
            by_step[step][name] = value
        fake.rows += [(run_id, step, scalars) for step, scalars in by_step.items()]

    fake.MlflowClient = lambda: types.SimpleNamespace(log_batch=log_batch)
    fake.end_run = lambda: setattr(fake, "ended", fake.ended + 1)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


MLFLOW = {"tensorboard": False, "mlflow": True}


def test_mlflow_gets_the_names_of_metrics_jsonl_and_a_resumed_run_goes_on_in_its_own(tmp_path, mlflow):
    for step in (1, 2):
        sink = writer(tmp_path / "run", step - 1, **MLFLOW, mlflow_experiment="mine")
        sink.write([row_of(step, grad_norm=math.inf)])
        sink.close()
    assert mlflow.started == [(None, None), ("id1", None)] and mlflow.ended == 2
    assert mlflow.experiments == ["mine", "mine"] and mlflow.params["train.steps"] == "6"
    assert [(run_id, step) for run_id, step, _ in mlflow.rows] == [("id1", 1), ("id1", 2)]
    row = metrics(tmp_path / "run")[0]
    names = {name for name, value in row.items() if isinstance(value, int | float)}
    assert set(mlflow.rows[0][2]) == names | {f"load_max_over_mean/moe_layer_{n}" for n in (0, 1)}


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


def test_mlflow_takes_a_thousand_values_at_once(tmp_path, mlflow):
    tracked(tmp_path, 0, *range(1, 101), **MLFLOW)  # log_batch of the stand-in refuses more
    assert len({step for _, step, _ in mlflow.rows}) == 100


def test_mlflow_that_is_not_there_or_refuses_says_what_to_do(tmp_path, monkeypatch, caplog, mlflow):
    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match=r"pip install 'graphmoe\[mlflow\]'"),
    ):
        patch.setitem(sys.modules, "mlflow", None)
        writer(tmp_path / "run", 0, **MLFLOW)
    mlflow.MlflowClient = lambda: types.SimpleNamespace(log_batch=lambda *words: 1 / 0)
    sink = writer(tmp_path / "run", 0, **MLFLOW)
    sink.write([row_of(1), row_of(2)])
    sink.close()
    assert caplog.text.count("MLflow gets no more rows (division by zero)") == 1
    mlflow.set_experiment = lambda name: 1 / 0
    with pytest.raises(ConfigError, match=r"log.mlflow=true cannot begin \(division by zero\); set MLFLOW_"):
        writer(tmp_path / "other", 0, **MLFLOW)
