"""Folders of the Hugging Face hub (config.json and safetensors): opened, read and written."""

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.hf.families import to_model_config
from graphmoe.checkpoint.hf.names import Index, Piece, pieces
from graphmoe.checkpoint.hf.tensor_files import DTYPES, TensorFiles, TensorToWrite, write_shards
from graphmoe.config.schema import ConfigError, ModelConfig, MoEConfig
from graphmoe.config.untrusted import read_json
from graphmoe.model.transformer import Transformer

STEM = "model"
NO_WEIGHTS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class OpenFolder:
    """A folder of safetensors, opened: what it holds is known, nothing of it is read yet."""

    config: ModelConfig
    files: TensorFiles
    shapes: dict[str, torch.Size]
    """Shapes of our tensors, to which the pieces belong."""
    pieces: list[Piece]
    token_ids: dict[str, Any]

    def dtype(self) -> torch.dtype:
        """The dtype of the weights; the router's bias, which is fp32 everywhere, does not count."""
        weights = (piece.theirs for piece in self.pieces if not piece.ours.endswith(".selection_bias"))
        return self.files.dtype(name for name in weights if name in self.files.headers)

    def fill(self, state: Mapping[str, Tensor | FlatShard]) -> None:
        """Copy the tensors of the files into ours, in place; of a shard only what it covers is read."""
        with torch.no_grad():
            for piece in self.pieces:
                ours = None if piece.repeats else state.get(piece.ours)
                if isinstance(ours, FlatShard):
                    for part, index in ours.within(piece.index):
                        part.copy_(self.files.read(piece.theirs, index))
                elif ours is not None:
                    ours[piece.index].copy_(self.files.read(piece.theirs))

    def read(self, name: str, index: Index) -> Tensor:
        """Part of one of our tensors; of one that is several in the files all are read."""
        mine = self._pieces_of[name]
        if len(mine) == 1:
            return self.files.read(mine[0].theirs, index)
        whole = torch.empty(self.shapes[name], dtype=self.files.dtype(piece.theirs for piece in mine))
        for piece in mine:
            whole[piece.index] = self.files.read(piece.theirs)
        return whole[index]

    @functools.cached_property
    def _pieces_of(self) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            if piece.repeats is None:
                found.setdefault(piece.ours, []).append(piece)
        return found

    def check(self, hints: Iterable[str] = ()) -> None:
        """Raise ConfigError with ``hints`` and all tensors missing, extra, mis-shaped or no float."""
        problems = self._fp8() or self._differences()
        if problems:
            head = f"{self.files.folder} does not fit the model in {len(problems)} tensors:"
            raise ConfigError("\n  ".join([*hints, head, *problems]))

    def _differences(self) -> list[str]:
        assert {piece.ours for piece in self.pieces} == self.shapes.keys()
        headers, problems = self.files.headers, []
        ours = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        for piece in self.pieces:
            wanted = tuple(ours[piece.ours][piece.index].shape)
            header = headers.get(piece.theirs)
            if header is None:
                if piece.repeats is None:
                    problems.append(f"missing: {piece.theirs} {list(wanted)}")
            elif header.shape != wanted:
                problems.append(f"mis-shaped: {piece.theirs} is {list(header.shape)}, not {list(wanted)}")
            elif header.dtype not in DTYPES:
                problems.append(f"no float tensor: {piece.theirs} is {header.dtype}, not {'/'.join(DTYPES)}")
            elif piece.repeats in headers and not torch.equal(
                *map(self.files.read, (piece.theirs, piece.repeats))
            ):
                problems.append(f"different: {piece.theirs} must equal {piece.repeats}; the model has one")
        known = {piece.theirs for piece in self.pieces}
        for name, header in headers.items():
            if name not in known and not NO_WEIGHTS.search(name) and 0 not in header.shape:
                problems.append(f"extra: {name} {list(header.shape)}")
        return problems

    def _fp8(self) -> list[str]:
        of_type = {name: header.dtype for name, header in self.files.headers.items()}
        quantized = [n for n, kind in of_type.items() if kind.startswith("F8") or n.endswith("_scale_inv")]
        if not quantized:
            return []
        return [
            f"{len(quantized)} are fp8 weights or their scales, {quantized[0]} for one; fp8 checkpoints are "
            "not read: cast them to bf16 first (DeepSeek-V3 ships inference/fp8_cast_bf16.py)"
        ]


def open_hf(folder: Path, shaped_as: ModelConfig | None = None) -> OpenFolder:
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
    shaped_as, ids = shaped_as or config, {key: raw.get(key) for key in TOKEN_IDS}
    return OpenFolder(config, files, shapes_of(shaped_as), pieces(family, shaped_as), ids)


def entries_of(
    found: Iterable[Piece],
    shapes: Mapping[str, torch.Size],
    dtypes: Mapping[str, torch.dtype],
    read: Callable[[str, Index], Tensor],
) -> Iterator[TensorToWrite]:
    """The tensors of a folder that is written, cut out of ours as their turn comes."""
    ours = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    for piece in found:
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
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
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
