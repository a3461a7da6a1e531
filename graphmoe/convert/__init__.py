"""Arguments of the conversion of weights: `__main__.py` is the command."""

import enum
from dataclasses import dataclass
from pathlib import Path

from graphmoe.config.schema import OutputFormat

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
    """Arguments of the tool."""

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
