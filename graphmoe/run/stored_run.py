"""The ``resolved.yaml`` of a run as anybody may have written it: typed, and nothing in it is resolved."""

from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphmoe.checkpoint.folders import CHECKPOINTS, step_of
from graphmoe.config.schema import ComputeDtype, ConfigError, ModelConfig, RunConfig
from graphmoe.config.untrusted import FileError, read_yaml
from graphmoe.plan.rules.check import violations
from graphmoe.run.files import CONFIG_FILE


class StoredPrecision(msgspec.Struct):
    compute: str | None = None


class StoredData(msgspec.Struct):
    source: str | None = None
    tokenizer: str | None = None
    eod_token: str | None = None


class StoredRun(msgspec.Struct):
    """The keys that readers of another's run ask for."""

    model: dict[str, Any]
    precision: StoredPrecision = msgspec.field(default_factory=StoredPrecision)
    data: StoredData = msgspec.field(default_factory=StoredData)


def config_file(folder: Path) -> Path | None:
    """Return the resolved.yaml of a run named by its folder, its ``checkpoints`` or one of these.

    None where the folder is none of the three.
    """
    folder = folder.absolute()
    if step_of(folder) is not None:
        folder = folder.parent
    if folder.name == CHECKPOINTS:
        folder = folder.parent
    path = folder / CONFIG_FILE
    return path if path.is_file() else None


def read_stored_run(folder: Path) -> tuple[Path, StoredRun]:
    """Return a run's resolved.yaml and what it says. *Raises* ConfigError where there is none."""
    path = config_file(folder)
    if path is None:
        raise ConfigError(f"{folder} is not the folder of a run: it has no {CONFIG_FILE}")
    return path, read_yaml(path, StoredRun)


def model_of(path: Path, run: StoredRun) -> ModelConfig:
    """Return the model of a run. *Raises* ConfigError that names the file."""
    return model_from(run.model, f"{path}: model.")


def computes_in_bf16(path: Path, run: StoredRun) -> bool:
    """Tell whether the run's weights are rounded, and its optimizer has what they are rounded from."""
    compute = run.precision.compute
    if compute is not None and compute not in ComputeDtype.__members__:
        valid = ", ".join(ComputeDtype.__members__)
        raise FileError(f"{path}: precision.compute={compute} must be one of {valid}")
    return compute == ComputeDtype.bf16.name


def model_from(plain: dict[str, Any], where: str) -> ModelConfig:
    """Return the model that these keys describe. *Raises* ConfigError, with ``where`` before the key."""
    for key, value in plain.items():
        if "${" in str(value):
            raise FileError(
                f"{where}{key}={value} would be looked up on this machine, which is not done for a file that "
                "somebody else may have written; write the value itself there"
            )
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), plain))
    except (OmegaConfBaseException, ValueError, TypeError, OverflowError) as error:
        reason = str(error).strip().splitlines()[0]
        key = getattr(error, "full_key", None) or ""
        raise FileError(f"{where}{key} is of no model of this version: {reason}") from error
    assert isinstance(config, ModelConfig)
    wrong = [line for line in violations(RunConfig(model=config)) if line.startswith("model.")]
    if wrong:
        raise FileError(f"{where}* has values that cannot be: {'; '.join(wrong)}")
    return config
