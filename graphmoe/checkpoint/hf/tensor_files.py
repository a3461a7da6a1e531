"""Reader and writer of a folder's safetensors, single or sharded: read by tensor, written by file.

Linear weights in fp8 have an fp32 scale per 128 x 128 block, as in published DeepSeek-V3: ``X.weight`` is
e4m3 [out, in]; ``X.weight_scale_inv``, which multiplies it, is fp32 [ceil(out / 128), ceil(in / 128)].
"""

import functools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from graphmoe.checkpoint.hf import mxfp4
from graphmoe.config.schema import ConfigError, ModelConfig
from graphmoe.config.untrusted import FileError, is_file_name, open_regular, read_json

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DEFAULT_SHARD = "5GB"
LARGEST_HEADER = 2**24  # bytes, of 100,000 tensors
Index = tuple[int | slice, ...]
WHOLE: Index = (slice(None),)
BLOCK = 128
FP8, FP8_NAME = torch.float8_e4m3fn, "F8_E4M3"
# Suffix of a weight's name for its scales
SCALE = "_scale_inv"
# Weights written in fp8; embedding, norms, router, head and eh_proj are published without
PRODUCTS = re.compile(r"\.(?!eh_)(\w+_proj(_with_mqa)?|w[123]|query_key_value|dense)\.weight$")
# supported quantization_config of config.json, by quant_method
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "fp8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "mxfp4": {"quant_method": "mxfp4"},
}


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class TensorHeader:
    shape: tuple[int, ...]
    dtype: str  # in safetensors' names
    file: Path


def _require_small_header(path: Path) -> None:
    """Raise FileError for a header that takes much memory: parsed, it is up to 20 times as large."""
    with open_regular(path) as file:
        size = int.from_bytes(file.read(8), "little")
    if size > LARGEST_HEADER:
        raise FileError(f"its header has {size:,} bytes; at most {LARGEST_HEADER:,} are read")


class TensorFiles:
    """Tensors in ``<stem>.safetensors`` or its indexed shards, memory-mapped. *Raises* ConfigError.

    Blocks and scales of `mxfp4` have one header, of the tensor that they store.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self.headers: dict[str, TensorHeader] = {}
        problems = []
        for path in _paths(folder, stem):
            try:
                _require_small_header(path)
                self._open[path] = safe_open(path, framework="pt")
            except (OSError, FileError, SafetensorError) as error:
                problems.append(f"{path.name}: {error}")
                continue
            for name in self._open[path].keys():  # noqa: SIM118 (not a dict)
                part = self._open[path].get_slice(name)
                self.headers[name] = TensorHeader(tuple(part.get_shape()), part.get_dtype(), path)
        if problems:
            raise ConfigError("\n  ".join([f"{folder} has unreadable weights:", *problems]))
        self._packed = dict(self._find_packed())

    def _find_packed(self) -> Iterator[tuple[str, tuple[TensorHeader, TensorHeader]]]:
        for blocks in [name for name in self.headers if name.endswith(mxfp4.BLOCKS)]:
            name = blocks.removesuffix(mxfp4.BLOCKS)
            pair = [self.headers[each] for each in (blocks, name + mxfp4.SCALES) if each in self.headers]
            shape = mxfp4.shape_of(*(header.shape for header in pair if header.dtype == "U8"))
            if shape is not None and name not in self.headers:
                yield name, (self.headers.pop(blocks), self.headers.pop(name + mxfp4.SCALES))
                self.headers[name] = TensorHeader(shape, mxfp4.NAME, pair[0].file)

    def read(self, name: str, index: Index = WHOLE) -> Tensor:
        """Return ``tensor[index]`` on the CPU; an fp8 tensor, indexed by slices only, dequantized to fp32.

        An MXFP4 tensor, whose first index is a slice, is dequantized to bf16.
        """
        header = self.headers[name]
        if header.dtype == mxfp4.NAME:
            stored = zip(self._packed[name], (mxfp4.BLOCKS, mxfp4.SCALES), strict=True)
            parts = [self._open[h.file].get_slice(name + suffix)[index[:1]] for h, suffix in stored]
            where = f"{name}{mxfp4.SCALES} in {self._packed[name][1].file}"
            return mxfp4.unpacked(where, *parts)[(slice(None), *index[1:])]
        part = self._open[header.file].get_slice(name)[index]
        if header.dtype != FP8_NAME:
            return part
        slices = [each for each in (*index, *WHOLE) if isinstance(each, slice)]
        rows, columns = (range(size)[each] for size, each in zip(header.shape, slices, strict=False))
        return dequantised(part, self.read(name + SCALE), rows, columns)

    def wrong_pack(self, name: str, shape: Sequence[int]) -> str | None:
        """Return an error line if there are blocks or scales that do not store a tensor [E, in, out]."""
        names = name + mxfp4.BLOCKS, name + mxfp4.SCALES
        parts = dict(zip(names, self._packed.get(name) or map(self.headers.get, names), strict=True))
        if len(shape) != 3 or not any(parts.values()):
            return None
        stored = ((part, f"{h.dtype} {list(h.shape)}" if h else "missing") for part, h in parts.items())
        found = " and ".join(f"{part} is {what}" for part, what in stored)
        needed = " and ".join(f"U8 {each}" for each in mxfp4.stored_shapes(shape))
        return f"{found}; {mxfp4.NAME} needs {needed}"

    def as_stored(self, name: str) -> str:
        """Return a tensor's name and shape; of an MXFP4 tensor those of its blocks."""
        header = self._packed.get(name, [self.headers[name]])[0]
        return f"{name}{mxfp4.BLOCKS * (name in self._packed)} {list(header.shape)}"

    def dtype(self, names: Iterable[str]) -> torch.dtype:
        """Return the narrowest dtype that holds all these tensors exactly; none may be fp8."""
        return functools.reduce(torch.promote_types, {DTYPES[self.headers[name].dtype] for name in names})

    def wrong_scale(self, name: str) -> list[str]:
        """Return an error line if an fp8 tensor's scales are missing, mis-shaped or invalid, else no line."""
        weight, found = self.headers[name], self.headers.get(name + SCALE)
        wanted = list(scale_shape(weight.shape))
        if found is None:
            return [f"no scale: {name} in {weight.file.name} is fp8, and needs {name}{SCALE}, F32 {wanted}"]
        where = f"{name}{SCALE} in {found.file.name}"
        if (found.dtype, list(found.shape)) != ("F32", wanted):
            return [f"mis-shaped: {where} is {found.dtype} {list(found.shape)}, not F32 {wanted}"]
        scale = self.read(name + SCALE)
        return [
            f"wrong scale: {where} has {scale[tuple(at)].item()} at {at}; it must be finite and not negative"
            for at in (~(scale.isfinite() & (scale >= 0))).nonzero()[:1].tolist()
        ]

    def require_parts(self, config: ModelConfig, where: str, *keys: str) -> None:
        """Raise ConfigError if num_layers, mtp_depth or one of ``keys`` exceeds the number of tensors."""
        # building the shapes of such a model would take forever
        for key in ("num_layers", "mtp_depth", *keys):
            if (asked := getattr(config, key)) > len(self.headers):
                raise ConfigError(
                    f"{where}: model.{key}={asked}, but the weights have {len(self.headers)} tensors"
                )


def has_weights(folder: Path) -> bool:
    """Return whether the folder has weights of any format."""
    patterns = ("*.safetensors*", "*model*.bin", "*.pt", "*.pth")
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def _paths(folder: Path, stem: str) -> list[Path]:
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if index.is_file():
        names = sorted(set(read_json(index, _Index).weight_map.values()))
        if not names or not all(map(is_file_name, names)):
            raise ConfigError(f"{index}: weight_map must name files of its folder, and names {names[:3]}")
        if single.is_file() and single.name not in names:
            raise ConfigError(
                f"{folder} has two sets of weights, {single.name} and the {len(names)} files of {index.name} "
                f"({names[0]} for one); remove the older set, since programs differ in which they read"
            )
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    found = f"; it has {', '.join(others)}, which are not read: save them as safetensors" if others else ""
    raise ConfigError(f"{folder} has neither {single.name} nor {index.name}{found}")


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor that ``make`` computes when its file is written."""

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
    entries: Iterable[TensorToWrite],
    max_bytes: int,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> list[Path]:
    """Write ``<stem>.safetensors``, or numbered shards and an index; return the files.

    Existing files of the stem are replaced once all new ones are complete. *Raises* ConfigError for
    non-finite tensors and for write errors.
    """
    by_name = {entry.name: entry for entry in entries}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda entry: entry.num_bytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=max_bytes,
    )
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{stem}.tmp-{os.getpid()}"
    draft.mkdir()
    try:
        for file, names in split.filename_to_tensors.items():
            try:
                packed = {name: _packed(by_name[name]) for name in names}
                (draft / file).touch()
                mode = (draft / file).stat().st_mode  # safetensors would make it readable by the owner only
                save_file(packed, draft / file, metadata={"format": "pt"})
                (draft / file).chmod(mode)
            except SafetensorError as error:
                raise ConfigError(f"{folder / file} cannot be written: {error}") from error
            on_bytes(sum(by_name[name].num_bytes for name in names))
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
            path = draft / f"{stem}.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        numbered = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
        for path in [path for path in folder.iterdir() if numbered.fullmatch(path.name)]:
            path.unlink()
        written = sorted(draft.iterdir())
        return [path.rename(folder / path.name) for path in written]
    finally:
        shutil.rmtree(draft)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


def _packed(entry: TensorToWrite) -> Tensor:
    tensor = entry.make().detach().to(device="cpu", dtype=entry.dtype).contiguous()
    assert tuple(tensor.shape) == entry.shape, entry.name
    if not (tensor.float() if tensor.dtype == FP8 else tensor).isfinite().all():
        raise ConfigError(f"{entry.name} has values that are not finite as {entry.dtype}; nothing is written")
    return tensor


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def in_fp8(entries: Iterable[TensorToWrite]) -> Iterator[TensorToWrite]:
    """Yield the entries, with each linear weight replaced by its fp8 values and block scales."""
    for entry in entries:
        if not PRODUCTS.search(entry.name):
            yield entry
            continue
        numbers = functools.partial(lambda make: quantised(make()), entry.make)
        scales = functools.partial(lambda make: scales_of(make()), entry.make)
        yield TensorToWrite(entry.name, entry.shape, FP8, numbers)
        yield TensorToWrite(entry.name + SCALE, scale_shape(entry.shape), torch.float32, scales)


def scales_of(weight: Tensor) -> Tensor:
    """Return fp32 block scales of a weight [out, in]: largest magnitude m / 448; 1 if m is below 5e-36.

    Quantizing dequantized values again is exact.
    """
    by_column = torch.stack([rows.abs().amax(0).float() for rows in weight.split(BLOCK)])
    largest = torch.stack([columns.amax(1) for columns in by_column.split(BLOCK, dim=1)], dim=1)
    scale = largest / torch.finfo(FP8).max
    return scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 1.0)  # subnormal scales lose digits


def quantised(weight: Tensor) -> Tensor:
    """Return the fp8 values of a weight [out, in], scaled by `scales_of`."""
    found = torch.empty(weight.shape, dtype=FP8)
    by_column = scales_of(weight).repeat_interleave(BLOCK, dim=1)[:, : weight.shape[1]]
    for into, rows, scales in zip(found.split(BLOCK), weight.split(BLOCK), by_column, strict=True):
        into.copy_(rows.float() / scales)
    return found


def dequantised(part: Tensor, scale: Tensor, rows: range, columns: range) -> Tensor:
    """Return ``part`` in fp32: the given rows and columns of a weight whose block scales are ``scale``."""
    assert part.shape == (len(rows), len(columns))
    values = part.float()
    by_column = scale.repeat_interleave(BLOCK, dim=1)[:, columns.start : columns.stop]
    for block in range(rows.start // BLOCK, -(-rows.stop // BLOCK)):
        within = slice(max(block * BLOCK - rows.start, 0), (block + 1) * BLOCK - rows.start)
        values[within] *= by_column[block]
    return values
