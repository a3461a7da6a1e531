"""Hugging Face folders (config.json and safetensors): open, read, write."""

import functools
import itertools
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.folders import shortened
from graphmoe.checkpoint.hf import mxfp4
from graphmoe.checkpoint.hf.families import FAMILIES, to_hf_config, to_model_config
from graphmoe.checkpoint.hf.family import Family, Piece
from graphmoe.checkpoint.hf.peft import merged
from graphmoe.checkpoint.hf.pieces import FUSED, pieces
from graphmoe.checkpoint.hf.tensor_files import (
    DTYPES,
    FP8,
    FP8_NAME,
    QUANTIZATIONS,
    SCALE,
    WHOLE,
    Index,
    TensorFiles,
    TensorToWrite,
    write_shards,
)
from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError, ModelConfig, MoEConfig
from graphmoe.config.untrusted import read_json
from graphmoe.data.tokenizer import TOKEN_IDS
from graphmoe.model.lora import without_adapters
from graphmoe.model.transformer import Transformer

STEM = "model"
# rotary tables, and Qwen3-Next's layer of multi-token prediction, which transformers does not read either
NO_WEIGHTS = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^mtp\.")
# Tensors that a folder may repeat; never fp8
SHARED = ("embed.weight", "loss_head.head.weight")


@dataclass(frozen=True)
class OpenFolder:
    """Opened folder of safetensors: configuration and headers are read, weights are not."""

    config: ModelConfig
    files: TensorFiles
    # of our tensors
    shapes: dict[str, torch.Size]
    pieces: list[Piece]
    token_ids: dict[str, Any]
    # config.json declares weights in fp8 with block scales, or in MXFP4
    is_quantized: bool = False

    def dtype(self) -> torch.dtype:
        """Return the dtype of weights in no format of 4 or 8 bits, and without selection biases (fp32)."""
        headers = self.files.headers
        weights = (piece.theirs for piece in self.pieces if not piece.ours.endswith(".selection_bias"))
        return self.files.dtype(n for n in weights if n in headers and headers[n].dtype in DTYPES)

    def fill(self, state: Mapping[str, Tensor | FlatShard]) -> None:
        """Copy the files' tensors into those of ``state`` in place; for a shard, only its part is read."""
        with torch.no_grad():
            for piece in self.pieces:
                ours = None if piece.repeats else state.get(piece.ours)
                if isinstance(ours, FlatShard):
                    for part, index in ours.within(piece.index):
                        self._copy(piece, part, index)
                elif ours is not None:
                    self._copy(piece, ours[piece.index], WHOLE)

    def _copy(self, piece: Piece, part: Tensor, index: Index) -> None:
        if piece.form is None:
            part.copy_(self._read(piece, index))
            return
        if not piece.form.of_experts:
            part.copy_(piece.form.to_ours(self._read(piece, index[:1]))[(..., *index[1:])])
            return
        assert isinstance(index[0], slice)
        rows, size = range(self.shapes[piece.ours][0])[index[0]], piece.form.block
        for start in range(rows.start // size * size, rows.stop, size):
            block = piece.form.to_ours(self.files.read(piece.theirs, (slice(start, start + size),)))
            own = range(max(start, rows.start), min(start + size, rows.stop))
            found = block[(slice(own.start - start, own.stop - start), *index[1:])]
            part[own.start - rows.start : own.stop - rows.start] = found

    def _read(self, piece: Piece, index: Index = WHOLE) -> Tensor:
        if piece.rows is not None and isinstance(index[0], slice):
            rows = range(piece.rows.start, piece.rows.stop)[index[0]]
            index = (slice(rows.start, rows.stop), *index[1:])
        return self.files.read(piece.theirs, index)

    def read(self, name: str, index: Index, dtype: torch.dtype) -> Tensor:
        """Return ``[index]`` of our tensor ``name``. If several tensors store it, join them in ``dtype``."""
        mine = self._pieces_of[name]
        if len(mine) == 1 and mine[0].form is None:
            return self._read(mine[0], index)
        whole = torch.empty(self.shapes[name], dtype=dtype)
        for piece in mine:
            self._copy(piece, whole[piece.index], WHOLE)
        return whole[index]

    @functools.cached_property
    def _pieces_of(self) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            if piece.repeats is None:
                found.setdefault(piece.ours, []).append(piece)
        return found

    def check(self) -> None:
        """Raise ConfigError with the first ten tensors that are missing, extra, not float or mis-shaped."""
        problems = self._undeclared() or self._differences()
        if problems:
            head = f"{self.files.folder} does not fit the model in {number_of(len(problems), 'tensor')}:"
            raise ConfigError(f"{head}\n  {shortened(problems)}")

    def _differences(self) -> list[str]:
        assert {piece.ours for piece in self.pieces} == self.shapes.keys()
        headers, problems = self.files.headers, []
        ours = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        known = {piece.theirs for piece in self.pieces}
        for piece in self.pieces:
            wanted = tuple(piece.theirs_of(ours[piece.ours][piece.index]).shape)
            wanted = (piece.num_rows or wanted[0], *wanted[1:])
            header = headers.get(piece.theirs)
            if header is None:
                if piece.form and (wrong := self.files.wrong_pack(piece.theirs, wanted)):
                    problems.append(wrong)
                    known |= {piece.theirs + each for each in (mxfp4.BLOCKS, mxfp4.SCALES)}
                elif piece.repeats is None:
                    problems.append(f"missing: {piece.theirs} {list(wanted)}")
            elif header.shape != wanted:
                plain = f"mis-shaped: {piece.theirs} is {list(header.shape)}, not {list(wanted)}"
                problems.append(piece.form and self.files.wrong_pack(piece.theirs, wanted) or plain)
            elif header.dtype == FP8_NAME and len(wanted) == 2 and piece.ours not in SHARED:
                problems += self.files.wrong_scale(piece.theirs)
            elif header.dtype not in (*DTYPES, *([mxfp4.NAME] if piece.form else [])):
                problems.append(f"wrong dtype: {piece.theirs} is {header.dtype}, not {'/'.join(DTYPES)}")
            elif piece.repeats in headers and not self._equal(piece.theirs, piece.repeats):
                problems.append(f"different: {piece.theirs} must equal {piece.repeats}: the model ties them")
        known |= {name + SCALE for name in known & headers.keys() if headers[name].dtype.startswith("F8")}
        for name, header in headers.items():
            if name not in known and not NO_WEIGHTS.search(name) and 0 not in header.shape:
                problems.append(f"extra: {self.files.as_stored(name)}")
        return [*dict.fromkeys(problems)]  # several pieces may be of one tensor

    def _equal(self, *names: str) -> bool:
        is_float = all(self.files.headers[name].dtype in DTYPES for name in names)
        return not is_float or torch.equal(*map(self.files.read, names))

    def _undeclared(self) -> list[str]:
        if self.is_quantized:
            return []
        of_type = {name: header.dtype for name, header in self.files.headers.items()}
        quantized = [n for n, kind in of_type.items() if kind.startswith("F8") or n.endswith("_scale_inv")]
        packed = [name for name, kind in of_type.items() if kind == mxfp4.NAME]
        return [
            f"{len(names)} are {what}, {names[0]} for one; they are read if config.json has "
            f"quantization_config={json.dumps(wanted)}"
            for names, what, wanted in (
                (quantized, "fp8 weights or their scales", QUANTIZATIONS["fp8"]),
                (packed, "MXFP4 weights", QUANTIZATIONS["mxfp4"]),
            )
            if names
        ]


def read_hf_config(folder: Path) -> tuple[Family, ModelConfig, dict[str, Any]]:
    """Read config.json. *Raises* ConfigError listing all keys with unsupported values."""
    path = folder / "config.json"
    raw = read_json(path, dict[str, Any])
    text, known = raw.get("text_config"), [family.multimodal for family in FAMILIES]
    if isinstance(text, dict) and any(each and each.name == raw.get("model_type") for each in known):
        raw = raw | {"architectures": None} | text
    return *to_model_config(raw, str(path), folder_name(folder)), raw


def open_hf(folder: Path) -> OpenFolder:
    """Read a folder's config and headers, no weights. *Raises* ConfigError."""
    family, config, raw = read_hf_config(folder)
    files = TensorFiles(folder, STEM)
    fused = any(name.endswith(FUSED) for name in files.headers)
    files.require_parts(config, str(folder / "config.json"), *([] if fused else ["num_experts"]))
    if not any(name.startswith(f"model.layers.{config.num_layers}.") for name in files.headers):
        config = replace(config, mtp_depth=0)  # transformers writes the depth without the layer
    ids, is_quantized = {key: raw.get(key) for key in TOKEN_IDS}, bool(raw.get("quantization_config"))
    layout = pieces(family, config, fused=fused)
    if (whole := family.multimodal) and any(name.startswith(whole.prefix) for name in files.headers):
        layout = [
            replace(p, theirs=whole.renamed(p.theirs), repeats=p.repeats and whole.renamed(p.repeats))
            for p in layout
        ]
        files.headers = {n: header for n, header in files.headers.items() if not n.startswith(whole.others)}
    return OpenFolder(config, files, shapes_of(config), layout, ids, is_quantized)


def entries_of(
    found: Iterable[Piece],
    shapes: Mapping[str, torch.Size],
    dtypes: Mapping[str, torch.dtype],
    read: Callable[[str, Index], Tensor],
) -> Iterator[TensorToWrite]:
    """Yield the tensors to write to a folder; each is sliced from our tensor when it is written."""
    ours = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    written = (piece for piece in found if piece.written)
    for theirs, grouped in itertools.groupby(written, operator.attrgetter("theirs")):
        group = [*grouped]
        piece = group[0]

        def make(group: list[Piece] = group) -> Tensor:
            parts = [piece.theirs_of(read(piece.ours, piece.index)) for piece in group]
            # safetensors rejects shared memory
            return torch.cat(parts) if len(parts) > 1 or group[0].repeats else parts[0]

        shape = tuple(piece.theirs_of(ours[piece.ours][piece.index]).shape)
        yield TensorToWrite(theirs, (piece.num_rows or shape[0], *shape[1:]), dtypes[piece.ours], make)


def hf_entries(
    config: ModelConfig, dtypes: Mapping[str, torch.dtype], read: Callable[[str, Index], Tensor]
) -> tuple[Family, dict[str, Any], list[TensorToWrite]]:
    """Return family, config.json and tensors of a folder; LoRA adapters are merged into their matrices.

    ``dtypes`` by our names; ``read`` gives a part of one of our tensors, when it is written. *Raises*
    ConfigError naming keys that no family can express.
    """
    model = without_adapters(config)
    family, raw = to_hf_config(model)
    if config.lora_rank:
        read = merged(config, dtypes, read)
    return family, raw, [*entries_of(pieces(family, model), shapes_of(model), dtypes, read)]


def write_hf(
    folder: Path,
    raw: dict[str, Any],
    entries: Iterable[TensorToWrite],
    *,
    max_bytes: int,
    token_ids: Mapping[str, Any] | None = None,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> list[Path]:
    """Write weights, then config.json (with quantization_config for fp8); return the files."""
    planned = list(entries)
    plain = [entry.dtype for entry in planned if entry.dtype != FP8 and not entry.name.endswith(SCALE)]
    common = Counter(plain).most_common(1)[0][0]
    ids = {key: (token_ids or {}).get(key) for key in TOKEN_IDS}
    document = raw | ids | {"torch_dtype": str(common).removeprefix("torch.")}
    if any(entry.dtype == FP8 for entry in planned):
        document["quantization_config"] = QUANTIZATIONS["fp8"]
    written = write_shards(folder, STEM, planned, max_bytes, on_bytes)
    path = folder / "config.json"
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [path, *written]


def shapes_of(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shapes of the model's weights by our names. *Raises* ConfigError."""
    try:
        with torch.device("meta"):
            model = Transformer(config, MoEConfig())
    except (RuntimeError, OverflowError, TypeError) as error:  # the number of elements overflows
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.name={config.name}: no model has such sizes ({reason})") from error
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def folder_name(folder: Path) -> str:
    """Return the folder's name, or the repository's name for a snapshot in the hub's cache."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.split("--")[-1]
    return folder.name or "imported"
