"""Folders of the Hugging Face hub (config.json and safetensors): opened, read and written."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.hf.families import Family, to_model_config
from graphmoe.checkpoint.hf.names import Index, Piece, pieces
from graphmoe.checkpoint.hf.tensor_files import TensorFiles, TensorToWrite, write_shards
from graphmoe.config.schema import ConfigError, ModelConfig, MoEConfig
from graphmoe.config.untrusted import read_json
from graphmoe.model.transformer import Transformer

STEM = "model"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
Progress = Callable[[int], None]


@dataclass(frozen=True)
class HfFolder:
    """An opened folder: what it holds is known, nothing of it is read yet."""

    raw: dict[str, Any]
    family: Family
    config: ModelConfig
    files: TensorFiles
    pieces: list[Piece]

    def dtype(self) -> torch.dtype:
        """The dtype of the weights; the router's bias, which is fp32 everywhere, does not count."""
        weights = (piece.theirs for piece in self.pieces if not piece.ours.endswith(".selection_bias"))
        return self.files.dtype(name for name in weights if name in self.files.headers)


def open_hf(folder: Path, shaped_as: ModelConfig | None = None) -> HfFolder:
    """Read the headers of a folder; no weights yet.

    *Raises* ConfigError that lists all keys with unsupported values. shaped_as: another
    configuration than the folder's own to lay out the pieces by.
    """
    path = folder / "config.json"
    raw = read_json(path, dict[str, Any])
    family, config = to_model_config(raw, str(path), folder_name(folder))
    files = TensorFiles(folder, STEM)
    files.require_parts(config, str(path), "num_experts")
    if not any(name.startswith(f"model.layers.{config.num_layers}.") for name in files.headers):
        config = replace(config, mtp_depth=0)  # transformers writes the depth, but no such layer
    return HfFolder(raw, family, config, files, pieces(family, shaped_as or config))


def fill(
    state: Mapping[str, Tensor | FlatShard],
    files: TensorFiles,
    found: list[Piece],
    on_bytes: Progress = lambda num_bytes: None,
) -> None:
    """Copy the tensors of the files into ours, in place; of a shard only what it covers is read."""
    with torch.no_grad():
        for piece in found:
            ours = state[piece.ours]
            if piece.repeats is None and isinstance(ours, FlatShard):
                for part, index in ours.within(piece.index):
                    part.copy_(files.read(piece.theirs, index))
                    on_bytes(part.nbytes)
            elif piece.repeats is None and isinstance(ours, Tensor):
                tensor = files.read(piece.theirs)
                ours[piece.index].copy_(tensor)
                on_bytes(tensor.nbytes)


def hf_entries(
    family: Family,
    config: ModelConfig,
    dtypes: dict[str, torch.dtype],
    read: Callable[[str, Index], Tensor],
) -> Iterator[TensorToWrite]:
    """The tensors of a published folder, cut out of ours as they are written."""
    ours = {name: torch.empty(shape, device="meta") for name, shape in shapes_of(config).items()}
    for piece in pieces(family, config):
        if not piece.written:
            continue

        def make(piece: Piece = piece) -> Tensor:
            part = read(piece.ours, piece.index)
            return part.clone() if piece.repeats else part  # a file must not hold one memory twice

        shape = tuple(ours[piece.ours][piece.index].shape)
        yield TensorToWrite(piece.theirs, shape, dtypes[piece.ours], make)


def write_hf(
    folder: Path,
    raw: dict[str, Any],
    entries: Iterator[TensorToWrite],
    *,
    max_bytes: int,
    token_ids: Mapping[str, Any] | None = None,
    on_bytes: Progress = lambda num_bytes: None,
) -> list[Path]:
    """Write weights and then config.json; the files written."""
    planned = list(entries)
    common = Counter(entry.dtype for entry in planned).most_common(1)[0][0]
    ids = {key: (token_ids or {}).get(key) for key in TOKEN_IDS}
    document = raw | ids | {"torch_dtype": str(common).removeprefix("torch.")}
    written = write_shards(folder, STEM, planned, max_bytes, on_bytes)
    path = folder / "config.json"
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [path, *written]


def shapes_of(config: ModelConfig) -> dict[str, torch.Size]:
    """Shape of each weight of the model by our name, without allocating it. *Raises* ConfigError."""
    try:
        with torch.device("meta"):
            model = Transformer(config, MoEConfig())
    except (RuntimeError, OverflowError, TypeError) as error:  # more elements than there are numbers
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.name={config.name}: no model has such sizes ({reason})") from error
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def folder_name(folder: Path) -> str:
    """The folder's name, or the repository's for a snapshot in the hub's cache."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.split("--")[-1]
    return folder.name or "imported"
