"""Conversion of nested state dicts to named entries and back; choice of the entries that a rank saves.

A tensor is an entry, named by its path (``model.layers.0.attn.norm.weight``), as is every other value of a
dict; a list without tensors is one value.
"""

import copy
import functools
import itertools
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from graphmoe.checkpoint.flat_shards import FlatShard, whole_shape
from graphmoe.checkpoint.folders import CheckpointError
from graphmoe.checkpoint.saver import Place
from graphmoe.runtime.ranks import Ranks

Kind = TypeVar("Kind", Tensor, FlatShard)
_PLAIN = (type(None), bool, int, float, str, bytes)
_ALIGNED = 64  # bytes between starts of copies, for any dtype and vector instructions


@dataclass
class Entries:
    """Flattened state: tensors and FlatShards by name, other values by name as (path in the state, value)."""

    tensors: dict[str, Tensor | FlatShard] = field(default_factory=dict)
    values: dict[str, tuple[tuple[str | int, ...], Any]] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return self.tensors.keys() | self.values.keys()

    def of(self, kind: type[Kind]) -> dict[str, Kind]:
        return {name: each for name, each in self.tensors.items() if isinstance(each, kind)}

    @property
    def num_bytes(self) -> int:
        return sum(local_part(tensor).nbytes for tensor in self.tensors.values())


def flatten(state: dict[str, Any]) -> Entries:
    """Return the entries of a nested state. Tensors are shared, values copied.

    *Raises* CheckpointError for values that a checkpoint cannot keep.
    """
    entries = Entries()
    _walk((), state, entries)
    return entries


def _walk(path: tuple[str | int, ...], node: Any, entries: Entries) -> None:
    name = ".".join(map(str, path))
    if isinstance(node, list) and _holds_tensor(node):
        node = dict(enumerate(node))
    if isinstance(node, dict) and (node or not path):
        for key, child in node.items():
            _walk((*path, key), child, entries)
        return
    assert name not in entries.names, f"two entries of the state are both named {name}"
    if isinstance(node, Tensor | FlatShard):
        entries.tensors[name] = node
    else:
        _require_plain(name, node)
        entries.values[name] = (path, copy.deepcopy(node))


def _holds_tensor(node: Any) -> bool:
    if isinstance(node, dict | list | tuple):
        return any(map(_holds_tensor, node.values() if isinstance(node, dict) else node))
    return isinstance(node, Tensor | FlatShard)


def _require_plain(name: str, value: Any) -> None:
    if isinstance(value, dict | list | tuple):
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            _require_plain(name, item)
    elif type(value) not in _PLAIN:
        raise CheckpointError(
            f"the state's {name} holds a {type(value).__name__}; a checkpoint keeps tensors, None, bool, "
            "int, float, str, bytes, dicts, lists and (without tensors inside) tuples"
        )


def merge(state: dict[str, Any], values: dict[str, tuple[tuple[str | int, ...], Any]]) -> None:
    """Put values into ``state`` at their paths. *Raises* CheckpointError if a value has another type."""
    for name, entry in values.items():
        path, value = _placed(name, entry)
        node: Any = state
        for key in path[:-1]:
            if isinstance(node, dict):
                node = node.setdefault(key, {})
            else:
                node = node[key] if _has_item(node, key) else None
        if not (isinstance(node, dict) or _has_item(node, path[-1])):
            raise CheckpointError(f"the checkpoint has {name}, which this run does not have")
        there = node.get(path[-1]) if isinstance(node, dict) else node[path[-1]]
        if value == {} and isinstance(there, dict):
            continue  # saved by a rank without a part of the tensors there
        if not _alike(there, value):
            theirs, ours = type(value).__name__, type(there).__name__
            raise CheckpointError(f"the checkpoint's entry {name} is a {theirs}, but here a {ours}")
        node[path[-1]] = value


def _placed(name: str, entry: Any) -> tuple[tuple[str | int, ...], Any]:
    try:
        path, value = entry
        if type(path) is tuple and ".".join(map(str, path)) == name:
            _require_plain(name, value)
            return path, value
    except (TypeError, ValueError, RecursionError):
        pass
    raise CheckpointError(f"the checkpoint's entry {name} is not of the form that graphmoe writes")


def _alike(there: Any, value: Any) -> bool:
    """Return whether a read value may replace the one in the state."""
    if type(there) in (int, float):
        return type(value) in (int, float)
    return type(there) not in (bool, str, dict) or type(value) is type(there)


def _has_item(node: Any, key: str | int) -> bool:
    return isinstance(node, list) and isinstance(key, int) and key < len(node)


def differences(wanted: Entries, saved: Metadata, all_names: set[str], *, partial: bool) -> list[str]:
    """Return why a checkpoint cannot fill ``wanted``: one line per entry.

    ``all_names``: names wanted by any rank. ``partial`` allows unused saved entries and other dtypes.
    """
    found = saved.state_dict_metadata
    lines = []
    for name, tensor in sorted(wanted.tensors.items()):
        entry, shape, dtype = found.get(name), whole_shape(tensor), local_part(tensor).dtype
        if entry is None:
            lines.append(f"missing in the checkpoint: {name} {_form(shape, dtype)}")
        elif not isinstance(entry, TensorStorageMetadata):
            lines.append(f"a tensor here, a plain value in the checkpoint: {name}")
        elif entry.size != shape or (entry.properties.dtype != dtype and not partial):
            theirs, ours = _form(entry.size, entry.properties.dtype), _form(shape, dtype)
            lines.append(f"different: {name} is {ours} here, {theirs} in the checkpoint")
    for name, (_, value) in sorted(wanted.values.items()):
        if name not in found and value != {}:
            lines.append(f"missing in the checkpoint: {name}")
        elif isinstance(found.get(name), TensorStorageMetadata):
            lines.append(f"a plain value here, a tensor in the checkpoint: {name}")
    if not partial:
        # plain values that only the checkpoint has are merged in
        for name, entry in sorted(found.items()):
            if name not in all_names and isinstance(entry, TensorStorageMetadata):
                form = _form(entry.size, entry.properties.dtype)
                lines.append(f"unexpected in the checkpoint: {name} {form}")
    return lines


def _form(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


class HostCopies:
    """Shared host memory for copies of the state, reused for each save; pinned for sources on a GPU."""

    def __init__(self) -> None:
        self.file: IO[bytes] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] = bool

    def copy(self, tensors: Mapping[str, Tensor | FlatShard]) -> dict[str, Tensor]:
        """Return host copies of this rank's tensors, valid until the next call. One sync per device."""
        sources = {name: local_part(tensor) for name, tensor in tensors.items()}
        lengths = (-(-each.nbytes // _ALIGNED) * _ALIGNED for each in sources.values())
        starts = [0, *itertools.accumulate(lengths)]
        devices = {source.device for source in sources.values() if source.is_cuda}
        if self.file is None or starts[-1] > len(self._memory):
            self._allocate(max(starts[-1], mmap.PAGESIZE), pinned=bool(devices))
        copies = {}
        for start, (name, source) in zip(starts, sources.items(), strict=False):
            part = self._memory[start : start + source.nbytes]
            copies[name] = part.view(source.dtype).view(source.shape)
            if (encoded := getattr(tensors[name], "encoded", None)) is not None:
                encoded.decode(copies[name])
            else:
                copies[name].copy_(source, non_blocking=source.is_cuda)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def place(self, tensor: Tensor) -> Place:
        """Return the place of a view of a copy, whose elements follow in row-major order."""
        length, loops = tensor.element_size(), list[tuple[int, int]]()
        if not tensor.numel():
            return Place(0, 0)
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            stride *= tensor.element_size()
            if size == 1 or (not loops and stride == length):
                length *= size
            else:
                loops.insert(0, (size, stride))
        return Place(tensor.data_ptr() - self._memory.data_ptr(), length, loops)

    def close(self) -> None:
        self._unpin()
        self.file, self._memory, self._unpin = None, self._memory.new_empty(0), bool

    def _allocate(self, num_bytes: int, *, pinned: bool) -> None:
        self._unpin()
        if self.file is None:  # not limited by /dev/shm, which has 64 MB in many containers
            self.file = os.fdopen(os.memfd_create("graphmoe-checkpoint"), "wb")
        os.ftruncate(self.file.fileno(), num_bytes)
        self._memory = torch.frombuffer(mmap.mmap(self.file.fileno(), num_bytes), dtype=torch.uint8)
        self._unpin = bool
        if pinned:
            runtime, address = torch.cuda.cudart(), self._memory.data_ptr()
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, num_bytes, 0)))
            self._unpin = functools.partial(runtime.cudaHostUnregister, address)


def local_part(tensor: Tensor | FlatShard) -> Tensor:
    """Return this rank's part of a tensor, detached, sharing its memory."""
    return (tensor.data if isinstance(tensor, FlatShard) else tensor).detach()


def own_share(entries: Entries, ranks: Ranks) -> Entries:
    """Return the entries that this rank saves; one that several ranks hold is saved by one. Collective."""
    keys = {n: (n, t.place if isinstance(t, FlatShard) else ()) for n, t in entries.tensors.items()}
    mine = 1 << ranks.rank
    held = {key: (local_part(entries.tensors[name]).nbytes, mine) for name, key in keys.items()}
    everywhere = ranks.merged(held | {(name, None): (0, mine) for name in entries.values}, _joined)
    writers = ranks.on_first(lambda: assign(everywhere or {}, ranks.size))
    return Entries(
        {n: t for n, t in entries.tensors.items() if writers.get(keys[n], ranks.rank) == ranks.rank},
        {n: value for n, value in entries.values.items() if writers.get((n, None), ranks.rank) == ranks.rank},
    )


Held = dict[Any, tuple[int, int]]
"""Bytes of entries, and the ranks that hold them as bits."""


def _joined(held: Held, more: Held) -> Held:
    for key, (num_bytes, ranks) in more.items():
        held[key] = num_bytes, ranks | held.get(key, (0, 0))[1]
    return held


def assign(held: Held, size: int) -> dict[Any, int]:
    """Return the rank that writes each key that several of ``size`` ranks hold, with balanced bytes."""
    loads, several = [0] * size, Held()
    for key, (num_bytes, ranks) in held.items():
        if ranks & (ranks - 1):
            several[key] = num_bytes, ranks
        else:
            loads[ranks.bit_length() - 1] += num_bytes
    writers = {}
    # greedily from the largest, each to the rank with the least, the first of equal ones; plain values, which
    # have no bytes, to their first rank
    for key, (num_bytes, ranks) in sorted(several.items(), key=lambda item: -item[1][0]):
        holders = [rank for rank in range(size) if ranks >> rank & 1]
        writers[key] = min(holders, key=loads.__getitem__) if num_bytes else holders[0]
        loads[writers[key]] += num_bytes
    return writers
