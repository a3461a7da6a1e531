"""Arguments of weight conversion."""

import enum
from dataclasses import dataclass
from pathlib import Path

from graphmoe.config.schema import ConfigError, OutputFormat
from graphmoe.run.stored import FolderKind

Target = enum.StrEnum("Target", ("auto", "hf", "graphmoe"))
Quantise = enum.StrEnum("Quantise", ("none", "fp8_block"))


class WeightDtype(enum.Enum):
    """Names of torch dtypes."""

    keep = None
    fp32 = "float32"
    bf16 = "bfloat16"
    fp16 = "float16"


@dataclass
class ConvertArgs:
    from_: Path
    """Hugging Face or graphmoe weights folder, run folder, or a run's checkpoint."""
    to: Path
    """Output folder, new or empty."""
    target: Target = Target.auto
    """Format of ``to``: hf, graphmoe, or auto (graphmoe from Hugging Face, else hf)."""
    dtype: WeightDtype = WeightDtype.keep
    """fp32, bf16, fp16, or keep; the router's bias is always fp32."""
    quantise: Quantise = Quantise.none
    """none, or fp8_block: matrices of a Hugging Face folder in fp8, one scale per 128 x 128 block."""
    max_shard_size: str = "5GB"
    """Largest weights file, e.g. 5GB, 500MB or 2GiB; only a larger tensor exceeds it."""
    step: int | None = None
    """Checkpoint step of a run; default: the newest."""
    attention: str | None = None
    """Plug-in for model.attention of ``from``; files are not trusted to name code."""
    layer: str | None = None
    """Plug-in for model.layer of ``from``, likewise."""
    name: str | None = None
    """Model and YAML file name; default: that of ``to``."""
    overwrite: bool = False
    """Write into a non-empty folder, replacing its weights."""
    format: OutputFormat = OutputFormat.text
    """Output on stdout: text, or one JSON document."""


def target_of(args: ConvertArgs, kind: FolderKind) -> Target:
    """Check ``from`` and ``to``; return the format to write. *Raises* ConfigError."""
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
