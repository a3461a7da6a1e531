"""Conversion of weights between Hugging Face folders, graphmoe folders and runs."""

import functools
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint.hf.families import to_hf_config
from graphmoe.checkpoint.hf.folder import entries_of, in_fp8, shapes_of, write_hf
from graphmoe.checkpoint.hf.names import Index, pieces
from graphmoe.config.arguments import parse_size
from graphmoe.config.progress import counting, working
from graphmoe.config.schema import ModelConfig
from graphmoe.convert import ConvertArgs, Quantise, Target, WeightDtype, target_of
from graphmoe.run.stored import FolderKind, kind_of, run_tokenizer
from graphmoe.run.weights import (
    open_folder,
    option_name,
    own_pieces,
    read_run,
    start_token_ids,
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


@dataclass(frozen=True)
class Source:
    """Weights by graphmoe name, read lazily."""

    kind: FolderKind
    config: ModelConfig
    dtypes: dict[str, torch.dtype]
    read: Callable[[str, Index], Tensor]
    token_ids: dict[str, Any]
    tokenizer: Path  # tokenizer.json, possibly missing; its other files are beside it
    step: int | None = None
    end_token: str | None = None  # end-of-document token of a run's data, for the tokenizer's files


def convert(args: ConvertArgs) -> dict[str, Any]:
    """Write ``to``; return the summary. Holds one weights file, or a whole run's weights, in memory."""
    started = time.monotonic()
    kind = kind_of(args.from_)
    target = target_of(args, kind)
    wanted = None if args.dtype is WeightDtype.keep else getattr(torch, args.dtype.value)
    with working(f"reading {args.from_}"):
        source = _open(args, kind, wanted)
    named = replace(source.config, name=option_name(args.name or args.to.resolve().name))
    dtypes = {name: wanted or found for name, found in source.dtypes.items()}
    dtypes |= {name: torch.float32 for name in dtypes if name.endswith(".selection_bias")}
    shapes = shapes_of(named)
    family, raw = (None, {}) if target is Target.graphmoe else to_hf_config(named)
    layout = own_pieces(shapes) if family is None else pieces(family, named)
    entries = [*entries_of(layout, shapes, dtypes, source.read)]
    if args.quantise is Quantise.fp8_block:
        entries = [*in_fp8(entries)]
    with counting("writing", sum(entry.num_bytes for entry in entries)) as on_bytes:
        max_bytes = parse_size("max_shard_size", args.max_shard_size, least=1)
        if family is None:
            meta = {"source": str(args.from_), "step": source.step, "token_ids": source.token_ids}
            files = write_weights(args.to, named, entries, meta, max_bytes=max_bytes, on_bytes=on_bytes)
        else:
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
        "dtypes": sorted({str(entry.dtype).removeprefix("torch.") for entry in entries}),
        "bytes": sum(path.stat().st_size for path in files),
        "files": [str(path.relative_to(args.to)) for path in files],
        "seconds": round(time.monotonic() - started, 3),
        "command": train_command(args.to) if family is None else None,
    }


def _open(args: ConvertArgs, kind: FolderKind, wanted: torch.dtype | None) -> Source:
    folder = args.from_
    if kind is not FolderKind.run:
        found = open_folder(folder, kind, (args.attention, args.layer))
        found.check()
        own = found.dtype()
        dtypes = dict.fromkeys(found.shapes, own)  # one for all
        if kind is FolderKind.graphmoe:
            dtypes = {name: found.files.dtype([name]) for name in found.shapes}
        read = functools.partial(found.read, dtype=wanted or own)
        return Source(kind, found.config, dtypes, read, found.token_ids, folder / TOKENIZER)
    config, state, step = read_run(folder, args.step, (args.attention, args.layer))
    dtypes = {name: tensor.dtype for name, tensor in state.items()}
    path, end, token = run_tokenizer(folder)
    ids = start_token_ids(folder) | ({} if end is None else {"eos_token_id": end})
    return Source(kind, config, dtypes, lambda name, index: state[name][index], ids, path, step, token)


def _write_tokenizer(source: Source, to: Path) -> list[Path]:
    places = {name: source.tokenizer.with_name(name) for name in TOKENIZER_FILES}
    places[TOKENIZER] = source.tokenizer
    found = {name: path for name, path in places.items() if path.is_file()}
    made: dict[str, dict[str, Any]] = {}
    if source.end_token is not None:
        # A file beside the tokenizer would describe the model that the tokenizer is from.
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
    copied = (Path(shutil.copyfile(path, to / name)) for name, path in found.items())
    return [*copied, *(to / name for name in made)]
