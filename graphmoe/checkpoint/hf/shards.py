"""Writes tensors as safetensors files of a bounded size, holding one file's tensors at a time."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from graphmoe.config.schema import ConfigError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
DEFAULT_SHARD = "5GB"


@dataclass(frozen=True)
class Entry:
    """A tensor to write; ``make`` gives it when its file's turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(
    folder: Path,
    stem: str,
    entries: Iterable[Entry],
    max_bytes: int,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> list[Path]:
    """Write ``<stem>.safetensors``, or numbered shards and their index; the files written.

    Files of that stem that are there already are replaced once all new ones are complete. *Raises*
    ConfigError for a tensor that is not finite in its dtype, and for a disk that does not take one.
    """
    shards = plan_shards(entries, max_bytes)
    names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [f"{stem}.safetensors"]
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{stem}.tmp-{os.getpid()}"
    draft.mkdir()
    try:
        for name, shard in zip(names, shards, strict=True):
            try:
                save_file({e.name: _packed(e) for e in shard}, draft / name, metadata={"format": "pt"})
            except SafetensorError as error:
                raise ConfigError(f"{folder / name} cannot be written: {error}") from error
            on_bytes(sum(entry.num_bytes for entry in shard))
        if len(shards) > 1:
            _write_index(draft / f"{stem}.safetensors.index.json", names, shards)
        _remove_old(folder, stem)
        written = sorted(draft.iterdir())
        return [path.rename(folder / path.name) for path in written]
    finally:
        shutil.rmtree(draft)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


def plan_shards(entries: Iterable[Entry], max_bytes: int) -> list[list[Entry]]:
    """The entries in order, as many in each shard as fit; a larger one has a shard of its own."""
    shards: list[list[Entry]] = [[]]
    room = max_bytes
    for entry in entries:
        if shards[-1] and entry.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(entry)
        room -= entry.num_bytes
    return shards


def parse_size(size: int | str) -> int:
    """Bytes that '5GB', '500MB', '2GiB' or a number spell. *Raises* ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", str(size).strip(), flags=re.IGNORECASE)
    num_bytes = int(float(match[1]) * UNITS[(match[2] or "").upper()]) if match else 0
    if num_bytes < 1:
        raise ConfigError(f"max_shard_size={size} is no size; use e.g. 5GB, 500MB or 2GiB")
    return num_bytes


def _packed(entry: Entry) -> Tensor:
    tensor = entry.make().detach().to(device="cpu", dtype=entry.dtype).contiguous()
    assert tuple(tensor.shape) == entry.shape, entry.name
    if not tensor.isfinite().all():
        raise ConfigError(f"{entry.name} has values that are not finite as {entry.dtype}; nothing is written")
    return tensor


def _write_index(path: Path, names: list[str], shards: list[list[Entry]]) -> None:
    weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    total = sum(entry.num_bytes for shard in shards for entry in shard)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _remove_old(folder: Path, stem: str) -> None:
    numbered = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
    for path in list(folder.iterdir()):
        if numbered.fullmatch(path.name):
            path.unlink()
