"""Arguments of the conversion of weights: `__main__.py` is the command."""

import enum
from dataclasses import dataclass
from pathlib import Path

from graphmoe.config.schema import ConfigError, OutputFormat
from graphmoe.run.stored import FolderKind

Target = enum.StrEnum("Target", ("auto", "hf", "graphmoe"))
Quantise = enum.StrEnum("Quantise", ("none", "fp8_block"))


class WeightDtype(enum.Enum):
    """Names of torch's."""

    keep = None
    fp32 = "float32"
    bf16 = "bfloat16"
    fp16 = "float16"


@dataclass
class ConvertArgs:
    from_: Path
    """Hugging Face folder, graphmoe weights folder, run folder, or one checkpoint of a run."""
    to: Path
    """Folder that is written; it must be new or empty."""
    target: Target = Target.auto
    """Format of ``to``: hf, graphmoe, or auto: graphmoe from a Hugging Face folder, else hf."""
    dtype: WeightDtype = WeightDtype.keep
    """Weights as fp32, bf16, fp16, or keep as they are; the router's bias is always fp32."""
    quantise: Quantise = Quantise.none
    """none, or fp8_block: matrices of a Hugging Face folder as fp8, with a scale per 128 x 128 block."""
    max_shard_size: str = "5GB"
    """Largest file of weights, e.g. 5GB, 500MB or 2GiB; only a larger tensor exceeds it."""
    step: int | None = None
    """Checkpoint of a run that is taken; default: the newest."""
    attention: str | None = None
    """The model.attention of ``from`` where that is code of your own, which no file is trusted to name."""
    layer: str | None = None
    """The model.layer of ``from`` where that is code of your own, likewise."""
    name: str | None = None
    """Name of the model and of its YAML file; default: the name of ``to``."""
    overwrite: bool = False
    """Write into a folder that holds files already; weights in it are replaced."""
    format: OutputFormat = OutputFormat.text
    """text, or json: one document on stdout and nothing else there."""


def target_of(args: ConvertArgs, kind: FolderKind) -> Target:
    """Return the format to write, once ``from`` and ``to`` are found fit. *Raises* ConfigError."""
    target = args.target
    if target is Target.auto:
        target = Target.graphmoe if kind is FolderKind.hf else Target.hf
    if target.name == kind.name:
        raise ConfigError(f"{args.from_} is a {kind.value} already; use another target than {target.name}")
    if args.quantise is not Quantise.none and target is Target.graphmoe:
        instead = "convert it to graphmoe weights and these" if kind is FolderKind.hf else "use target=hf"
        raise ConfigError(
            f"quantise={args.quantise} is a form of Hugging Face folders, and to={args.to} would be graphmoe "
            f"weights of the {kind.value} {args.from_}; {instead}"
        )
    if args.step is not None and kind is not FolderKind.run:
        raise ConfigError(f"step={args.step} chooses a run's checkpoint, but {args.from_} is a {kind.value}")
    _check_output(args)
    return target


def _check_output(args: ConvertArgs) -> None:
    if args.to.resolve() == args.from_.resolve():
        raise ConfigError(f"to={args.to} is the folder to read from; use another one")
    if args.to.is_file():
        raise ConfigError(f"to={args.to} is a file; use the name of a folder")
    if args.to.is_dir() and any(args.to.iterdir()) and not args.overwrite:
        raise ConfigError(f"to={args.to} is not empty; use overwrite=true or another folder")
