"""Files of one checkpoint, planned by torch.distributed.checkpoint (DCP), with SHA-256 sums.

A rank writes ``__<rank>_0.distcp``, its tensors and plain values one after the other, and rank 0 DCP's
``.metadata``: names, shapes, dtypes and places.
"""

import dataclasses
import io
import math
import operator
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from graphmoe.checkpoint.entries import Entries
from graphmoe.checkpoint.flat_shards import Box, FlatShard
from graphmoe.checkpoint.folders import METADATA, CheckpointError
from graphmoe.checkpoint.metadata_file import StoredPart, read_part, read_plain, read_tensor, some_overlap
from graphmoe.checkpoint.saver import write_file
from graphmoe.runtime.host.files import FileSum
from graphmoe.runtime.ranks import Ranks
from graphmoe.runtime.torch_compat import storage_info

Part = bytes | Tensor
Write = Callable[[Path, Iterable[Part]], FileSum]
"""Writes a file of these parts, each before the next is made."""


def write_entries(
    folder: Path, entries: Entries, copies: dict[str, Tensor], ranks: Ranks, write: Write
) -> dict[str, FileSum]:
    """Write and fsync this rank's files by ``write``; return their checksums. Collective.

    Tensors whose name is in ``copies`` are read from there.
    """
    planner, sums = CopiesPlanner(entries.of(FlatShard), copies), dict[str, FileSum]()
    own, written, name = list[bytes](), list[tuple[WriteItem, Any]](), f"__{ranks.rank}_0.distcp"

    def parts() -> Iterator[Part]:
        start = 0
        for item in planner.create_local_plan().items:
            data = planner.resolve_data(item)
            part = data.detach() if isinstance(data, Tensor) else data.getvalue()
            length = part.nbytes if isinstance(part, Tensor) else len(part)
            written.append((item, storage_info(name, start, length)))
            yield part
            start += length

    def write_own() -> None:
        planner.set_up_planner({**entries.of(Tensor), **entries.values}, is_coordinator=ranks.is_first)
        sums[name] = write(folder / name, parts())
        own.append(pickle.dumps(written))  # each rank's by itself: to load all at once would hold the GIL

    # DCP's own save gathers plans, sends them back, gathers results, and sends the metadata to all ranks
    ranks.on_each(write_own)
    pickled = ranks.merged(own, operator.add)

    def write_metadata() -> None:
        # ranks may hold equal parts
        written = {item.index: (item, at) for each in pickled or [] for item, at in pickle.loads(each)}
        metadata = _checked_metadata(item for item, _ in written.values())
        metadata.storage_data = {index: at for index, (_, at) in written.items()}
        content = io.BytesIO()
        _Preemptible(content).dump(metadata)
        sums[METADATA] = write(folder / METADATA, [content.getvalue()])

    ranks.on_first(write_metadata)
    return sums


def write_here(path: Path, parts: Iterable[bytes | Tensor]) -> FileSum:
    """Write and fsync a file in this process. *Raises* OSError."""
    bytes_of = (part if isinstance(part, bytes) else memoryview(_bytes_of(part)) for part in parts)
    return FileSum(*write_file(str(path), bytes_of))


def _bytes_of(tensor: Tensor) -> Any:
    whole = tensor.cpu().contiguous()  # of one element with any stride
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()


class _Preemptible(pickle.Pickler):
    # calling Python for each object lets other threads have the GIL, which a whole dump in C holds
    def reducer_override(self, obj: Any) -> Any:
        return NotImplemented


def value_names(saved: Metadata) -> set[str]:
    entries = saved.state_dict_metadata.items()
    return {name for name, entry in entries if isinstance(entry, BytesStorageMetadata)}


def read_entries(folder: Path, saved: Metadata, wanted: Entries, values: set[str]) -> dict[str, Any]:
    """Fill tensors and shards of ``wanted`` in place; return plain ``values`` by name. Runs no code in files.

    ``saved``: what the folder has. *Raises* CheckpointError for invalid contents.
    """
    flat: dict[str, Any] = {**wanted.of(Tensor), **dict.fromkeys(sorted(values))}
    planner = FillPlanner(wanted.of(FlatShard))
    planner.set_up_planner(flat, saved)
    for item in planner.create_local_plan().items:
        part: StoredPart = saved.storage_data[item.storage_index]
        path = folder / part.relative_path
        with _errors_of(path), open(path, "rb") as file:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(read_part(file, part)))
                continue
            about = saved.state_dict_metadata[item.storage_index.fqn]
            assert isinstance(about, TensorStorageMetadata) and item.storage_index.index is not None
            sizes = about.chunks[item.storage_index.index].sizes
            tensor = read_tensor(file, part, about.properties.dtype, sizes)
            for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, start, size)
            target = planner.resolve_tensor(item).detach()
            assert target.shape == tensor.shape
            target.copy_(tensor)
            planner.commit_tensor(item, target)
            del tensor  # before the next is read
    return {name: flat[name] for name in values}


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # torch raises a different class for each kind of invalid content
        raise CheckpointError(
            f"{path} was not written by graphmoe ({type(error).__name__}); nothing in it was run"
        ) from error


# torch's protocol for custom types is private and reaches only subclasses of Tensor when data are looked up
# (2.11 to 2.13). So DCP does not see the shards; the planners add their items.


class CopiesPlanner(DefaultSavePlanner):
    """DCP save planner that reads tensors from copies and adds FlatShards."""

    def __init__(self, shards: dict[str, FlatShard], copies: dict[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards, self._copies = shards, copies
        self._boxes, self._data, self._decoded = _by_index(shards), _data_of(shards) | copies, ""

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, box in self._boxes.items():
            shard = self._shards[index.fqn]
            about = TensorProperties.create_from_tensor(shard.data)
            data = TensorWriteData(chunk=_chunk(box), properties=about, size=shard.whole_shape)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        data, box = self._data.get(name := index.fqn), self._boxes.get(index)
        if box is None or data is None:
            return super().lookup_object(index) if data is None else data
        encoded = None if name in self._copies else self._shards[name].encoded
        if encoded and name != self._decoded:
            encoded.decode(data)
            self._decoded = name
        return box.view(data)


class FillPlanner(DefaultLoadPlanner):
    """DCP load planner that fills tensors and FlatShards in place."""

    def __init__(self, shards: dict[str, FlatShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards, self._boxes, self._data = shards, _by_index(shards), _data_of(shards)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        plan, chunks = super().create_local_plan(), defaultdict(list)
        for index, box in self._boxes.items():
            chunks[index.fqn].append(_chunk(box))
        items = list(plan.items)
        for name, wanted in chunks.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, wanted)
        self._last = {item.dest_index.fqn: item for item in items}
        return dataclasses.replace(plan, items=items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read a plain value without running pickled code; DCP's own method runs it."""
        self.state_dict[read_item.dest_index.fqn] = read_plain(value.read())

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        box = self._boxes.get(index)
        return super().lookup_tensor(index) if box is None else box.view(self._data[index.fqn])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        shard = self._shards.get(name := read_item.dest_index.fqn)
        if shard and shard.encoded and read_item == self._last[name]:
            shard.encoded.encode(self._data[name])


def _data_of(shards: dict[str, FlatShard]) -> dict[str, Tensor]:
    # one memory for encoded shards, which are decoded one after the other
    sizes = {name: each.data.numel() for name, each in shards.items() if each.encoded}
    memory = torch.empty(max(sizes.values(), default=0))
    return {name: memory[: sizes[name]] if each.encoded else each.data for name, each in shards.items()}


def _by_index(shards: dict[str, FlatShard]) -> dict[MetadataIndex, Box]:
    return {MetadataIndex(name, box.offsets): box for name, shard in shards.items() for box in shard.boxes()}


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _checked_metadata(items: Iterable[WriteItem]) -> Metadata:
    # not by DCP's planner, which compares n^2 parts of a weight with fewer rows than columns
    _, metadata = create_default_global_save_plan([SavePlan([*items])])
    lines = []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if held != entry.size.numel():
                lines.append(f"the ranks hold {held} of the {entry.size.numel()} elements of {name}")
            elif some_overlap(entry.chunks):
                lines.append(f"the ranks hold some elements of {name} twice, and others not")
    if lines:
        raise CheckpointError("; ".join(lines))
    return metadata
