"""TensorBoard, Weights & Biases and MLflow, which receive the scalars of metrics.jsonl.

A failed tracker receives no more rows, and the run continues. A file in the run's folder stores the tracker's
run id for resuming. W&B and MLflow can't delete rows, so a resume that drops steps begins a new tracker run,
tagged with the old one, and sends the earlier rows again.
"""

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ConfigError
from graphmoe.plan.plan import Plan
from graphmoe.run.files import METRICS_FILE
from graphmoe.run.metrics_file import Row, read_rows
from graphmoe.runtime.host.files import dispensable

log = logging.getLogger(__name__)

MLFLOW_PARAMS = 100
MLFLOW_METRICS = 1000  # MLflow's limits of parameters and of values per call
MLFLOW_LETTERS = 500  # length of a parameter that every MLflow store accepts

Point = tuple[int, dict[str, float]]


class Tracker(NamedTuple):
    title: str
    draw: Callable[[list[Point]], object]
    close: Callable[[], object]
    errors: tuple[type[Exception], ...] = (Exception,)  # errors after which the tracker is dropped
    is_empty: bool = False  # True if it needs the earlier steps' rows


class Trackers:
    def __init__(self, folder: Path, plan: Plan, done: int) -> None:
        """Continue after step ``done``. Call before metrics.jsonl is truncated. *Raises* ConfigError."""
        rows = read_rows(folder / METRICS_FILE) if plan.log.wandb or plan.log.mlflow else []
        kept = [row for row in rows if row["step"] <= done]
        after = done if len(kept) < len(rows) else None
        wanted = [
            (plan.log.wandb, lambda: _wandb(folder, plan, after)),
            (plan.log.mlflow, lambda: _mlflow(folder, plan, after)),
            (plan.log.tensorboard, lambda: _tensorboard(folder, done)),
        ]
        self._trackers = [begin() for is_wanted, begin in wanted if is_wanted]
        self._send(kept, [tracker for tracker in self._trackers if tracker.is_empty])

    def draw(self, rows: list[Row]) -> None:
        self._send(rows, list(self._trackers))

    def _send(self, rows: list[Row], trackers: list[Tracker]) -> None:
        points = [(row["step"], _scalars(row)) for row in rows]
        for tracker in trackers:
            try:
                tracker.draw(points)
            except tracker.errors as error:
                self._trackers.remove(tracker)
                why = getattr(error, "strerror", None) or error
                log.warning("%s receives no more rows (%s); the run continues", tracker.title, why)

    def close(self) -> None:
        for tracker in self._trackers:
            with dispensable(f"{tracker.title}'s last rows"):
                tracker.close()


def _scalars(row: Row) -> dict[str, float]:
    loads = enumerate(row.get("load_max_over_mean", []))
    scalars = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return scalars | {f"load_max_over_mean/moe_layer_{index}": value for index, value in loads}


def _tensorboard(folder: Path, done: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else 0)

    def draw(points: list[Point]) -> None:
        for step, scalars in points:
            for name, value in scalars.items():
                board.add_scalar(name, value, step)

    return Tracker("TensorBoard", draw, board.close, (OSError,))  # its thread has ended


def _wandb(folder: Path, plan: Plan, after: int | None) -> Tracker:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("log.wandb=true needs the extra: pip install 'graphmoe[wandb]'") from error
    id_file = folder / "wandb_id"
    earlier = _text_of(id_file)
    run_id = earlier if earlier and after is None else secrets.token_hex(8)
    try:
        run = wandb.init(
            project=plan.log.wandb_project,
            name=plan.run.name,
            dir=str(folder),
            config=to_plain(plan.config),
            id=run_id,
            resume="allow",
            tags=None if earlier in (None, run_id) else [f"{earlier} up to step {after}"],
        )
    except Exception as error:
        raise _cannot_begin("wandb", error, "log in with wandb login, set WANDB_MODE=offline") from error
    id_file.write_text(run_id, encoding="utf-8")

    def draw(points: list[Point]) -> None:
        for step, scalars in points:
            run.log(scalars, step=step)

    return Tracker("W&B", draw, run.finish, is_empty=run_id != earlier)


def _mlflow(folder: Path, plan: Plan, after: int | None) -> Tracker:
    try:
        import mlflow
    except ImportError as error:
        raise ConfigError("log.mlflow=true needs the extra: pip install 'graphmoe[mlflow]'") from error
    id_file = folder / "mlflow_id"
    earlier = _text_of(id_file)
    run_id = earlier if after is None else None
    tags = None if earlier == run_id else {"graphmoe.continues": f"{earlier} up to step {after}"}
    try:
        mlflow.set_experiment(plan.log.mlflow_experiment)
        run = mlflow.start_run(run_id=run_id, run_name=plan.run.name, tags=tags)
        if run_id is None:
            pairs = list(_flat(to_plain(plan.config)))
            for start in range(0, len(pairs), MLFLOW_PARAMS):
                mlflow.log_params(dict(pairs[start : start + MLFLOW_PARAMS]))
            id_file.write_text(run.info.run_id, encoding="utf-8")
        client = mlflow.MlflowClient()
    except Exception as error:
        instead = "set MLFLOW_TRACKING_URI to a server or sqlite:///FILE"
        raise _cannot_begin("mlflow", error, instead) from error

    def draw(points: list[Point]) -> None:
        now = time.time_ns() // 1_000_000
        values = [
            mlflow.entities.Metric(name, float(value), now, step)
            for step, scalars in points
            for name, value in scalars.items()
            if math.isfinite(value)
        ]
        for start in range(0, len(values), MLFLOW_METRICS):
            client.log_batch(run.info.run_id, values[start : start + MLFLOW_METRICS])

    return Tracker("MLflow", draw, mlflow.end_run, is_empty=run_id is None)


def _text_of(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _cannot_begin(name: str, error: Exception, instead: str) -> ConfigError:
    why = str(error).partition("\n")[0]
    return ConfigError(f"log.{name}=true cannot begin ({why}); {instead}, or use log.{name}=false")


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield key, str(value)[:MLFLOW_LETTERS]
        return
    for name, inner in value.items():
        yield from _flat(inner, f"{key}.{name}" if key else str(name))
