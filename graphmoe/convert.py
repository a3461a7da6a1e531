"""Convert weights: Hugging Face folders to graphmoe folders, and graphmoe folders or runs to Hugging Face.

python -m graphmoe.convert from=DeepSeek-V2-Lite to=weights/lite
python -m graphmoe.convert from=outputs/tiny to=exported/tiny dtype=bf16
"""

import enum
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint import CheckpointError
from graphmoe.checkpoint.hf.families import to_hf_config
from graphmoe.checkpoint.hf.folder import entries_of, shapes_of, write_hf
from graphmoe.checkpoint.hf.names import Index, pieces
from graphmoe.checkpoint.hf.tensor_files import DEFAULT_SHARD, parse_size
from graphmoe.config.arguments import bytes_bar, emit, parse_args, run_tool
from graphmoe.config.progress import working
from graphmoe.config.schema import ConfigError, ModelConfig, OutputFormat
from graphmoe.run.stored import run_tokenizer
from graphmoe.run.weights import (
    FolderKind,
    kind_of,
    open_folder,
    option_name,
    own_pieces,
    read_run,
    train_command,
    write_weights,
)

TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG = (
    f"{name}.json" for name in ("tokenizer", "tokenizer_config", "generation_config")
)
TOKENIZER_FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "tiktoken.model", "chat_template.jinja"),
)


Target = enum.StrEnum("Target", ("auto", "hf", "graphmoe"))


class WeightDtype(enum.Enum):
    keep = None
    fp32 = torch.float32
    bf16 = torch.bfloat16
    fp16 = torch.float16


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
    max_shard_size: str = DEFAULT_SHARD
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


@dataclass(frozen=True)
class Source:
    """Weights under our names, read as they are asked for."""

    kind: FolderKind
    config: ModelConfig
    dtypes: dict[str, torch.dtype]
    read: Callable[[str, Index], Tensor]
    token_ids: dict[str, Any]
    tokenizer: Path
    """The tokenizer.json that goes along with the files beside it; it may be missing."""
    step: int | None = None
    end_token: str | None = None
    """Token that ends a document in a run's data, to be declared in the tokenizer's files."""


def convert(args: ConvertArgs) -> dict[str, Any]:
    """Write the folder ``to``; returns what the tool prints.

    Memory is that of one file of weights, or for a run that of all its weights.
    """
    started = time.monotonic()
    kind = kind_of(args.from_)
    target = _target(args, kind)
    _check_output(args)
    with working(f"reading {args.from_}"):
        source = _open(args, kind)
    named = replace(source.config, name=option_name(args.name or args.to.resolve().name))
    dtypes = {name: args.dtype.value or found for name, found in source.dtypes.items()}
    dtypes |= {name: torch.float32 for name in dtypes if name.endswith(".selection_bias")}
    shapes = shapes_of(named)
    total = sum(shapes[name].numel() * dtypes[name].itemsize for name in shapes)
    family, raw = (None, {}) if target is Target.graphmoe else to_hf_config(named)
    with bytes_bar("writing", total) as on_bytes:
        max_bytes = parse_size(args.max_shard_size)
        if family is None:
            meta = {"source": str(args.from_), "step": source.step, "token_ids": source.token_ids}
            entries = entries_of(own_pieces(shapes), shapes, dtypes, source.read)
            files = write_weights(args.to, named, entries, meta, max_bytes=max_bytes, on_bytes=on_bytes)
        else:
            entries = entries_of(pieces(family, named), shapes, dtypes, source.read)
            files = write_hf(
                args.to, raw, entries, max_bytes=max_bytes, token_ids=source.token_ids, on_bytes=on_bytes
            )
    files += _write_tokenizer(source, args.to)
    return {
        "from": str(args.from_),
        "from_kind": kind.name,
        "to": str(args.to),
        "target": target.name,
        "family": None if family is None else family.name,
        "model": named.name,
        "step": source.step,
        "parameters": sum(n.numel() for name, n in shapes.items() if not name.endswith(".selection_bias")),
        "dtypes": sorted({str(dtype).removeprefix("torch.") for dtype in dtypes.values()}),
        "bytes": sum(path.stat().st_size for path in files),
        "files": [str(path.relative_to(args.to)) for path in files],
        "seconds": round(time.monotonic() - started, 3),
        "command": train_command(args.to, named) if family is None else None,
    }


def main(argv: list[str]) -> None:
    args = parse_args(ConvertArgs, argv, prog="graphmoe.convert")
    try:
        document = convert(args)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    what = document["family"] or "graphmoe weights"
    step = "" if document["step"] is None else f", step {document['step']}"
    text = (
        f"{document['from']} ({kind_of(args.from_).value}{step}) -> {document['to']} ({what}): "
        f"{document['parameters']:,} parameters, {', '.join(document['dtypes'])}, "
        f"{len(document['files'])} files, {document['bytes']:,} bytes, {document['seconds']:.1f} s"
    )
    if document["command"]:
        text += (
            f"\nstart a run from it: {document['command']}\n"
            "on text of yours, behind that: data=files 'data.paths=[corpus/*.jsonl]'"
        )
    emit(document, text, args.format)


def _target(args: ConvertArgs, kind: FolderKind) -> Target:
    target = args.target
    if target is Target.auto:
        target = Target.graphmoe if kind is FolderKind.hf else Target.hf
    if target.name == kind.name:
        raise ConfigError(f"{args.from_} is a {kind.value} already; use another target than {target.name}")
    if args.step is not None and kind is not FolderKind.run:
        raise ConfigError(f"step={args.step} chooses a run's checkpoint, but {args.from_} is a {kind.value}")
    return target


def _check_output(args: ConvertArgs) -> None:
    if args.to.resolve() == args.from_.resolve():
        raise ConfigError(f"to={args.to} is the folder to read from; use another one")
    if args.to.is_file():
        raise ConfigError(f"to={args.to} is a file; use the name of a folder")
    if args.to.is_dir() and any(args.to.iterdir()) and not args.overwrite:
        raise ConfigError(f"to={args.to} is not empty; use overwrite=true or another folder")


def _open(args: ConvertArgs, kind: FolderKind) -> Source:
    folder = args.from_
    if kind is not FolderKind.run:
        found = open_folder(folder, kind, (args.attention, args.layer))
        found.check()
        dtypes = dict.fromkeys(found.shapes, found.dtype())  # one for all
        if kind is FolderKind.graphmoe:
            dtypes = {name: found.files.dtype([name]) for name in found.shapes}
        return Source(kind, found.config, dtypes, found.read, found.token_ids, folder / TOKENIZER)
    config, state, step = read_run(folder, args.step, (args.attention, args.layer))
    dtypes = {name: tensor.dtype for name, tensor in state.items()}
    path, end, token = run_tokenizer(folder)
    ids = {} if end is None else {"eos_token_id": end}
    return Source(kind, config, dtypes, lambda name, index: state[name][index], ids, path, step, token)


def _write_tokenizer(source: Source, to: Path) -> list[Path]:
    """Copy the tokenizer's files, and have transformers know where the text of a run's model ends."""
    places = {name: source.tokenizer.with_name(name) for name in TOKENIZER_FILES}
    places[TOKENIZER] = source.tokenizer
    found = {name: path for name, path in places.items() if path.is_file()}
    made: dict[str, dict[str, Any]] = {}
    if source.end_token is not None:
        # One beside the tokenizer would be of the model that the tokenizer was taken from.
        found.pop(GENERATION_CONFIG, None)
        made[GENERATION_CONFIG] = source.token_ids
        if TOKENIZER_CONFIG not in found:
            made[TOKENIZER_CONFIG] = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": source.end_token,
                "model_max_length": source.config.context_length,
                "clean_up_tokenization_spaces": False,
            }
    for name, document in made.items():
        (to / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return [
        *(Path(shutil.copyfile(path, to / name)) for name, path in found.items()),
        *(to / n for n in made),
    ]


if __name__ == "__main__":
    run_tool(main)
