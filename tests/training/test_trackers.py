"""Trackers of runs: rows for Weights & Biases and MLflow, and errors where they are missing, or refuse."""

import math
import sys
import types
from unittest.mock import Mock

import pytest

from graphmoe.config.schema import ConfigError
from tests.runs import metrics
from tests.training.test_metrics import row_of, writer


@pytest.fixture
def wandb(monkeypatch) -> types.SimpleNamespace:
    """A package of Weights & Biases that keeps the words of each start, and the rows."""
    fake = types.SimpleNamespace(started=[], rows=[])
    fake.log = lambda scalars, step: fake.rows.append((step, scalars["loss"]))
    fake.finish = lambda: None
    fake.init = lambda **words: fake.started.append(words) or fake
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


WANDB = {"tensorboard": False, "wandb": True}


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


def test_weights_and_biases_tells_folders_of_one_name_apart_and_finds_a_resumed_run(tmp_path, wandb):
    for step, parent in enumerate(("one", "other", "other")):
        sink = writer(tmp_path / parent / "0", 0, **WANDB, wandb_project="mine")
        sink.write([row_of(step)])
        sink.close()
    one, other, again = wandb.started
    assert one["id"] != other["id"] == again["id"]
    assert one["project"] == "mine" and one["config"]["train"]["steps"] == 6
    assert wandb.rows == [(0, 2.5), (1, 2.5), (2, 2.5)]


@pytest.fixture
def mlflow(monkeypatch) -> types.SimpleNamespace:
    """A package of MLflow that keeps the words of each start, parameters and rows."""
    fake = types.SimpleNamespace(started=[], params={}, rows=[], experiments=[], ended=0)

    def start_run(run_id: str | None, run_name: str) -> types.SimpleNamespace:
        fake.started.append((run_id, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or f"id{len(fake.started)}"))

    def log_params(params: dict[str, str]) -> None:
        assert len(params) <= 100 and not set(params) & set(fake.params)
        fake.params |= params

    fake.start_run, fake.log_params = start_run, log_params
    fake.set_experiment = fake.experiments.append
    fake.log_metrics = lambda scalars, step: fake.rows.append((step, scalars))
    fake.end_run = lambda: setattr(fake, "ended", fake.ended + 1)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


MLFLOW = {"tensorboard": False, "mlflow": True}


def test_mlflow_gets_the_names_of_metrics_jsonl_and_a_resumed_run_goes_on_in_its_own(tmp_path, mlflow):
    for step in (1, 2):
        sink = writer(tmp_path / "run", step - 1, **MLFLOW, mlflow_experiment="mine")
        sink.write([row_of(step, grad_norm=math.inf)])
        sink.close()
    assert [run_id for run_id, _ in mlflow.started] == [None, "id1"] and mlflow.ended == 2
    assert mlflow.experiments == ["mine", "mine"] and mlflow.params["train.steps"] == "6"
    assert [step for step, _ in mlflow.rows] == [1, 2]
    row = metrics(tmp_path / "run")[0]
    names = {name for name, value in row.items() if isinstance(value, int | float)}
    assert set(mlflow.rows[0][1]) == names | {f"load_max_over_mean/moe_layer_{n}" for n in (0, 1)}


def test_mlflow_that_is_not_there_or_refuses_says_what_to_do(tmp_path, monkeypatch, caplog, mlflow):
    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match=r"pip install 'graphmoe\[mlflow\]'"),
    ):
        patch.setitem(sys.modules, "mlflow", None)
        writer(tmp_path / "run", 0, **MLFLOW)
    mlflow.log_metrics = lambda *words, **named: 1 / 0
    sink = writer(tmp_path / "run", 0, **MLFLOW)
    sink.write([row_of(1), row_of(2)])
    sink.close()
    assert caplog.text.count("MLflow gets no more rows (division by zero)") == 1
    mlflow.set_experiment = lambda name: 1 / 0
    with pytest.raises(ConfigError, match=r"log.mlflow=true cannot begin \(division by zero\); set MLFLOW_"):
        writer(tmp_path / "other", 0, **MLFLOW)
