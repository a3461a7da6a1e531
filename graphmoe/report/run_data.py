"""Reader of a run folder's files for its report; most of them may be missing after a crash."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphmoe.config.arguments import near_path
from graphmoe.config.ranges import number_of, spelled
from graphmoe.config.schema import ConfigError
from graphmoe.config.untrusted import FileError, read_json, read_yaml, typed
from graphmoe.run import files
from graphmoe.run.metrics_file import Row, read_lines, steps_of, summarise, validations_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunData:
    """Contents of a run's files; empty for missing files."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    steps: list[Row]
    validations: list[Row]
    expert_loads: list[Row]
    projection: dict[str, Any]
    compiled: dict[str, Any]
    captured: dict[str, Any]
    summary: dict[str, Any]
    """Content of summary.json, with newer values from metrics.jsonl."""
    unreadable: list[str]

    @property
    def name(self) -> str:
        return str(self.of("run.name") or self.folder.resolve().name)

    @property
    def device_word(self) -> str:
        return "process" if self.of("run.device") == "cpu" else "GPU"

    @property
    def num_ranks(self) -> int:
        return int(self.environment.get("num_workers") or 1)

    @property
    def state(self) -> str:
        """Describe whether the run finished, what stopped it, and its steps."""
        done, asked = self.summary.get("steps") or 0, self.of("train.steps")
        if self.summary.get("finished"):
            return f"finished, {number_of(done, 'step')}"
        stopped = self.summary.get("stopped_by")
        return f"{f'stopped by {stopped}' if stopped else 'not finished'}, {done:,} of {asked} steps"

    def of(self, key: str) -> Any:
        """Return the value of a configuration key; None if there is none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def flat_config(self) -> dict[str, str]:
        """Return the configuration by dotted keys, spelled as on a command line."""
        return dict(_flat(self.config))

    def layout(self) -> str:
        """Return text with the axes that have more than one rank, such as 'dp 2, ep 8'."""
        axes = {axis: int(self.of(f"parallel.{axis}") or 1) for axis in ("tp", "cp", "pp", "ep", "etp")}
        dp = self.num_ranks // (axes["tp"] * axes["cp"] * axes["pp"])
        shown = [f"{axis} {size}" for axis, size in {"dp": dp, **axes}.items() if size > 1]
        return ", ".join(shown) or "one rank"

    @property
    def starts(self) -> list[float | None]:
        """Return seconds to the first step of each start, None if unknown."""
        known = [row["start_s"] for row in self.steps if row.get("start_s") is not None]
        if self.steps and self.steps[0].get("start_s") is None:  # written before starts were counted
            return [None if known else self.summary.get("time_to_first_step_s"), *known]
        return known

    def median(self, name: str) -> float | None:
        """Return the median of a number, such as mfu, over all steps but the first."""
        return self.summary.get(f"median_{name}")

    def tokens_per_s_per_rank(self) -> float | None:
        rate = self.median("tokens_per_s")
        return None if rate is None else rate / self.num_ranks


def read_run(folder: Path) -> RunData:
    """Return the contents of a run's files. *Raises* ConfigError for a folder that is no run's."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; name that of a run, e.g. run=outputs/tiny{near_path(folder)}"
        )
    if not any((folder / name).is_file() for name in (files.CONFIG_FILE, files.METRICS_FILE)):
        raise ConfigError(
            f"{folder} has no {files.CONFIG_FILE} or {files.METRICS_FILE}; name the folder of a run"
        )
    unreadable: list[str] = []

    def read(
        reader: Callable[..., Any], name: str, kind: type[Any], otherwise: Any, whole: bool = False
    ) -> Any:
        path = folder / name
        try:
            if not path.exists():
                return otherwise
            found = reader(path, dict[str, Any] if whole else kind)
            if whole:  # fields that the type does not name are kept
                typed(found, kind, str(path))
            return found
        except FileError as error:
            log.warning("the report leaves out a file: %s", error)
            unreadable.append(str(error))
            return otherwise

    rows = read(read_lines, files.METRICS_FILE, files.MetricsRow, [])
    return RunData(
        folder=folder,
        config=read(read_yaml, files.CONFIG_FILE, files.Config, {}, whole=True),
        environment=read(read_json, files.ENVIRONMENT_FILE, files.Environment, {}, whole=True),
        steps=steps_of(rows),
        validations=validations_of(rows),
        expert_loads=read(read_lines, files.EXPERT_LOADS_FILE, files.ExpertLoad, []),
        projection=read(read_json, files.PROJECTION_FILE, files.Projection, {}),
        compiled=read(read_json, files.COMPILE_FILE, files.Compiled, {}),
        captured=read(read_json, files.CAPTURE_FILE, files.Captured, {}),
        summary=_newest(read(read_json, files.SUMMARY_FILE, files.Summary, {}), _of_metrics(rows)),
        unreadable=unreadable,
    )


def _newest(summary: dict[str, Any], of_metrics: dict[str, Any]) -> dict[str, Any]:
    # after a resume the old summary gives what metrics lack, except its end
    if of_metrics["steps"] <= (summary.get("steps") or 0):
        return of_metrics | summary
    peaks = [each.get("peak_memory_gib") for each in (summary, of_metrics)]
    peak = max((each for each in peaks if each is not None), default=None)
    kept = {key: value for key, value in summary.items() if key not in ("finished", "stopped_by")}
    return {**kept, **of_metrics, "peak_memory_gib": peak}


def _of_metrics(rows: Sequence[Row]) -> dict[str, Any]:
    steps = steps_of(rows)
    peak = max((row["memory_gib"] for row in steps if row.get("memory_gib") is not None), default=None)
    return {**summarise(rows), "steps": steps[-1]["step"] if steps else 0, "peak_memory_gib": peak}


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if not isinstance(value, dict):
        return [(prefix.removesuffix("."), spelled(value))]
    return [pair for key, each in value.items() for pair in _flat(each, f"{prefix}{key}.")]
