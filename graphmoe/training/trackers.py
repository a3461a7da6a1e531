"""Trackers of runs: TensorBoard, Weights & Biases and MLflow, which get the scalars of metrics.jsonl.

A tracker that fails gets no more rows, and the run goes on. An id in the run's folder leads a resumed run to
what it wrote before.
"""

import logging
import math
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.runtime.host.files import dispensable

log = logging.getLogger(__name__)

MLFLOW_PARAMS = 100
"""Parameters that MLflow takes at once."""
MLFLOW_LETTERS = 500
"""Letters of a parameter's value that each of its stores takes."""


class Tracker(NamedTuple):
    """One place that scalars go to."""

    title: str
    draw: Callable[[dict[str, float], int], object]
    """Take scalars by name, and their step."""
    close: Callable[[], object]
    errors: tuple[type[Exception], ...] = (Exception,)
    """Errors at which it gets no more rows."""


class Trackers:
    """Trackers that a configuration names."""

    def __init__(self, folder: Path, config: RunConfig, done: int) -> None:
        """Go on after step ``done``. *Raises* ConfigError where one that is asked for cannot begin."""
        wanted = [
            (config.log.wandb, lambda: _wandb(folder, config)),
            (config.log.mlflow, lambda: _mlflow(folder, config)),
            (config.log.tensorboard, lambda: _tensorboard(folder, done)),
        ]
        self._trackers = [begin() for is_wanted, begin in wanted if is_wanted]

    def draw(self, row: dict[str, Any]) -> None:
        """Send a row of metrics.jsonl to all of them."""
        scalars = {name: value for name, value in row.items() if isinstance(value, int | float)}
        loads = enumerate(row.get("load_max_over_mean", []))
        scalars |= {f"load_max_over_mean/moe_layer_{index}": value for index, value in loads}
        for tracker in list(self._trackers):
            try:
                tracker.draw(scalars, row["step"])
            except tracker.errors as error:
                self._trackers.remove(tracker)
                why = getattr(error, "strerror", None) or error
                log.warning("%s gets no more rows (%s); the run goes on", tracker.title, why)

    def close(self) -> None:
        for tracker in self._trackers:
            with dispensable(f"{tracker.title}'s last rows"):
                tracker.close()


def _tensorboard(folder: Path, done: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else 0)

    def draw(scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            board.add_scalar(name, value, step)

    return Tracker("TensorBoard", draw, board.close, (OSError,))  # its thread has ended and takes no more


def _wandb(folder: Path, config: RunConfig) -> Tracker:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("log.wandb=true needs the extra: pip install 'graphmoe[wandb]'") from error
    id_file = folder / "wandb_id"
    if not id_file.exists():
        id_file.write_text(secrets.token_hex(8), encoding="utf-8")
    try:
        run = wandb.init(
            project=config.log.wandb_project,
            name=config.run.name,
            dir=str(folder),
            config=to_plain(config),
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
        )
    except Exception as error:
        raise _cannot_begin("wandb", error, "log in with wandb login, set WANDB_MODE=offline") from error
    return Tracker("W&B", lambda scalars, step: run.log(scalars, step=step), run.finish)


def _mlflow(folder: Path, config: RunConfig) -> Tracker:
    """Open an MLflow run where MLFLOW_TRACKING_URI says; a resume finds its id in the folder."""
    try:
        import mlflow
    except ImportError as error:
        raise ConfigError("log.mlflow=true needs the extra: pip install 'graphmoe[mlflow]'") from error
    id_file = folder / "mlflow_id"
    run_id = id_file.read_text(encoding="utf-8") if id_file.exists() else None
    try:
        mlflow.set_experiment(config.log.mlflow_experiment)
        run = mlflow.start_run(run_id=run_id, run_name=config.run.name)
        if run_id is None:
            pairs = list(_flat(to_plain(config)))
            for start in range(0, len(pairs), MLFLOW_PARAMS):
                mlflow.log_params(dict(pairs[start : start + MLFLOW_PARAMS]))
            id_file.write_text(run.info.run_id, encoding="utf-8")
    except Exception as error:
        raise _cannot_begin("mlflow", error, "set MLFLOW_TRACKING_URI to a server or folder") from error

    def draw(scalars: dict[str, float], step: int) -> None:
        finite = {name: float(value) for name, value in scalars.items() if math.isfinite(value)}
        mlflow.log_metrics(finite, step=step)

    return Tracker("MLflow", draw, mlflow.end_run)


def _cannot_begin(name: str, error: Exception, instead: str) -> ConfigError:
    why = str(error).partition("\n")[0]
    return ConfigError(f"log.{name}=true cannot begin ({why}); {instead}, or use log.{name}=false")


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a configuration, dotted, with their values as texts that are not too long."""
    if not isinstance(value, dict):
        yield key, str(value)[:MLFLOW_LETTERS]
        return
    for name, inner in value.items():
        yield from _flat(inner, f"{key}.{name}" if key else str(name))
