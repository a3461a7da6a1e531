"""Convert weights: Hugging Face to graphmoe, and graphmoe folders or runs to Hugging Face.

python -m graphmoe.convert from=DeepSeek-V2-Lite to=weights/lite
python -m graphmoe.convert from=outputs/tiny to=exported/tiny dtype=bf16
"""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphmoe.checkpoint import CheckpointError
from graphmoe.config.arguments import emit, parse_args, parse_size, run_tool
from graphmoe.config.progress import counting, working
from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError, ModelConfig, OutputFormat
from graphmoe.run.stored import FolderKind, base_folder, kind_of

if TYPE_CHECKING:
    import torch

    from graphmoe.checkpoint.hf.tensor_files import Index
    from graphmoe.run.tokenizer_files import TokenizerSource

Target = enum.StrEnum("Target", ("auto", "hf", "graphmoe", "peft"))
Quantise = enum.StrEnum("Quantise", ("none", "fp8_block"))


class WeightDtype(enum.Enum):
    """Choices of a dtype, with torch's names."""

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
    """Format of ``to``: hf, graphmoe, auto (graphmoe from Hugging Face, else hf), or peft (adapters of LoRA,
    which the others merge into the weights)."""
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
    """Plug-in for model.layer of ``from``; files are not trusted to name code."""
    name: str | None = None
    """Model and YAML file name; default: that of ``to``."""
    overwrite: bool = False
    """Write into a non-empty folder, replacing its weights."""
    format: OutputFormat = OutputFormat.text
    """Output on stdout: text, or one JSON document."""


def main(argv: list[str]) -> None:
    args = parse_args(ConvertArgs, argv, prog="graphmoe.convert", places=("from", "to"))
    try:
        document = convert(args)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    what = document["family"] or "graphmoe weights"
    step = "" if document["step"] is None else f", step {document['step']}"
    text = (
        f"{document['from']} ({kind_of(args.from_).value}{step}) -> {document['to']} ({what}): "
        f"{document['parameters']:,} parameters, {', '.join(document['dtypes'])}, "
        f"{number_of(len(document['files']), 'file')}, {document['bytes']:,} bytes, "
        f"{document['seconds']:.1f} s"
    )
    if document["command"]:
        text += (
            f"\nstart a run from it: {document['command']}\n"
            "on text of yours, behind that: data=files 'data.paths=[corpus/*.jsonl]'"
        )
    emit(document, text, args.format)


def target_of(args: ConvertArgs, kind: FolderKind) -> Target:
    """Check ``from`` and ``to``; return the format to write. *Raises* ConfigError."""
    target = args.target
    if target is Target.auto:
        target = Target.graphmoe if kind is FolderKind.hf else Target.hf
    if target.name == kind.name:
        raise ConfigError(f"{args.from_} is a {kind.value} already; use another target than {target.name}")
    if args.quantise is not Quantise.none and target is Target.peft:
        raise ConfigError(f"quantise={args.quantise} is not for adapters; use target=hf, or quantise=none")
    if args.quantise is not Quantise.none and target is Target.graphmoe:
        instead = "convert it to graphmoe weights and these" if kind is FolderKind.hf else "use target=hf"
        raise ConfigError(
            f"quantise={args.quantise} is for Hugging Face folders only, but to={args.to} would be graphmoe "
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


@dataclass(frozen=True)
class Source:
    """Weights by graphmoe name, read lazily."""

    kind: FolderKind
    config: ModelConfig
    dtypes: dict[str, torch.dtype]
    read: Callable[[str, Index], torch.Tensor]
    tokenizer: TokenizerSource
    step: int | None = None


def convert(args: ConvertArgs) -> dict[str, Any]:
    """Write ``to``; return the summary. Holds one weights file, or a whole run's weights, in memory."""
    kind = kind_of(args.from_)
    target = target_of(args, kind)
    import torch  # after the checks, whose errors need not wait for it

    from graphmoe.checkpoint.hf.families import to_hf_config
    from graphmoe.checkpoint.hf.folder import entries_of, shapes_of, write_hf
    from graphmoe.checkpoint.hf.peft import adapter_entries, merged, write_peft
    from graphmoe.checkpoint.hf.pieces import pieces
    from graphmoe.checkpoint.hf.tensor_files import in_fp8
    from graphmoe.model.lora import ADAPTER, without_adapters
    from graphmoe.run.tokenizer_files import write_tokenizer
    from graphmoe.run.weights import option_name, own_pieces, train_command, tuned, write_weights

    started = time.monotonic()
    wanted = None if args.dtype is WeightDtype.keep else getattr(torch, args.dtype.value)
    with working(f"reading {args.from_}"):
        source = _open(args, kind, wanted)
    named = replace(source.config, name=option_name(args.name or args.to.resolve().name))
    named = tuned(named) if kind is FolderKind.hf else named
    adapts, token_ids = target is Target.peft, source.tokenizer.token_ids
    if adapts and not named.lora_rank:
        raise ConfigError(f"target=peft is for adapters, and {args.from_} has none; use target=hf")
    if named.lora_rank and not adapts:
        source = replace(source, read=merged(named, source.dtypes, source.read))
        named = without_adapters(named)
    dtypes = {name: wanted or found for name, found in source.dtypes.items()}
    dtypes |= {name: torch.float32 for name in dtypes if name.endswith(".selection_bias")}
    shapes = shapes_of(named)
    family, raw = (None, {}) if target is Target.graphmoe else to_hf_config(named)
    if family is not None and adapts:
        shapes = {name: shape for name, shape in shapes.items() if ADAPTER in name}
        entries = [*adapter_entries(family, named, shapes, dtypes, source.read)]
    else:
        layout = own_pieces(shapes) if family is None else pieces(family, named)
        entries = [*entries_of(layout, shapes, dtypes, source.read)]
    if args.quantise is Quantise.fp8_block:
        if family is not None and family.quantization != "fp8":
            raise ConfigError(
                f"quantise={args.quantise} is not a form of {family.name} folders; use quantise=none"
            )
        entries = [*in_fp8(entries)]
    with counting("writing", sum(entry.num_bytes for entry in entries)) as on_bytes:
        max_bytes = parse_size("max_shard_size", args.max_shard_size, least=1)
        if family is None:
            meta = {"source": str(args.from_), "step": source.step, "token_ids": token_ids}
            files = write_weights(args.to, named, entries, meta, max_bytes=max_bytes, on_bytes=on_bytes)
        elif adapts:
            base = base_folder(args.from_)
            files = write_peft(args.to, named, entries, base=base, max_bytes=max_bytes, on_bytes=on_bytes)
        else:
            files = write_hf(
                args.to, raw, entries, max_bytes=max_bytes, token_ids=token_ids, on_bytes=on_bytes
            )
    files += write_tokenizer(source.tokenizer, args.to, named.context_length)
    return {
        "from": str(args.from_),
        "from_kind": kind.name,
        "to": str(args.to),
        "target": target.name,
        "family": None if family is None else family.name,
        "model": named.name,
        "step": source.step,
        "parameters": sum(n.numel() for name, n in shapes.items() if not name.endswith(".selection_bias")),
        "dtypes": sorted({str(entry.dtype).removeprefix("torch.") for entry in entries}),
        "bytes": sum(path.stat().st_size for path in files),
        "files": [str(path.relative_to(args.to)) for path in files],
        "seconds": round(time.monotonic() - started, 3),
        "command": train_command(args.to) if family is None else None,
    }


def _open(args: ConvertArgs, kind: FolderKind, wanted: torch.dtype | None) -> Source:
    from graphmoe.run.tokenizer_files import TOKENIZER, TokenizerSource, tokenizer_of_run
    from graphmoe.run.weights import open_folder, read_run

    folder = args.from_
    if kind is not FolderKind.run:
        found = open_folder(folder, kind, (args.attention, args.layer))
        found.check()
        own = found.dtype()
        dtypes = dict.fromkeys(found.shapes, own)  # one for all
        if kind is FolderKind.graphmoe:
            dtypes = {name: found.files.dtype([name]) for name in found.shapes}
        read = functools.partial(found.read, dtype=wanted or own)
        tokenizer = TokenizerSource(folder / TOKENIZER, found.token_ids)
        return Source(kind, found.config, dtypes, read, tokenizer)
    config, state, step = read_run(folder, args.step, (args.attention, args.layer))
    dtypes = {name: tensor.dtype for name, tensor in state.items()}
    return Source(
        kind, config, dtypes, lambda name, index: state[name][index], tokenizer_of_run(folder), step
    )


if __name__ == "__main__":
    run_tool(main)
