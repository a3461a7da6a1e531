"""Files of one checkpoint: written and read by torch.distributed.checkpoint (DCP), with SHA-256 sums.

DCP writes ``__<rank>_0.distcp`` per rank and ``.metadata``. Only public API of torch 2.11 to 2.15 is used.
"""

import dataclasses
import hashlib
import io
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
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
from graphmoe.checkpoint.folders import CheckpointError
from graphmoe.checkpoint.metadata_file import read_metadata, read_plain
from graphmoe.runtime.host.files import FileSum
from graphmoe.runtime.ranks import Ranks

_BUFFER_BYTES = 2**20


def write_entries(
    folder: Path, entries: Entries, copies: dict[str, Tensor], ranks: Ranks
) -> dict[str, FileSum]:
    """Write and fsync this rank's part; return checksums of its files.

    Tensors whose name is in ``copies`` are read from there.
    """
    # More threads would be faster, but DCP drops the error of all but the first and then writes
    # metadata without their entries (2.11 to 2.13). copy_ahead > 0 would wait for the GPU.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0, sync_files=True)
    files = _HashingFileSystem()
    writer.fs = files
    with _dcp_errors():
        dcp.save(
            {**entries.of(Tensor), **entries.values},
            storage_writer=writer,
            planner=CopiesPlanner(entries.of(FlatShard), copies),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    return files.sums


def value_names(saved: Metadata) -> set[str]:
    entries = saved.state_dict_metadata.items()
    return {name for name, entry in entries if isinstance(entry, BytesStorageMetadata)}


def read_entries(folder: Path, wanted: Entries, values: set[str], ranks: Ranks) -> dict[str, Any]:
    """Fill tensors and shards of ``wanted`` in place; return plain ``values`` by name. Runs no code in files.

    *Raises* CheckpointError for invalid contents.
    """
    flat: dict[str, Any] = {**wanted.of(Tensor), **dict.fromkeys(sorted(values))}
    with _dcp_errors():
        dcp.load(
            flat,
            storage_reader=_Reader(folder),
            planner=FillPlanner(wanted.of(FlatShard)),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    return {name: flat[name] for name in values}


class _Reader(FileSystemReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _ReadFileSystem()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # DCP would unpickle any class that the file names
        return read_metadata(Path(self.path))


@contextmanager
def _dcp_errors() -> Iterator[None]:
    # a filter that stays: catch_warnings swaps global state, which is not safe in a thread
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        yield
    except CheckpointException as error:
        _, (cause, _) = min(error.failures.items())
        raise cause from error


class _ReadFileSystem(FileSystem):
    """Local file system whose errors name the file."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except (CheckpointError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # torch raises a different class for each kind of invalid content
            raise CheckpointError(
                f"{path} was not written by graphmoe ({type(error).__name__}); nothing in it was run"
            ) from error


class _HashingFileSystem(FileSystem):
    """Local file system that records size and SHA-256 of written files."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with Path(path).open(mode, buffering=_BUFFER_BYTES) as stream:
            hashed = _HashingStream(stream)
            yield hashed
            hashed.raise_error()
        self.sums[Path(path).name] = hashed.sum

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _HashingStream:
    """Binary stream that hashes what DCP writes.

    A disk error is kept until DCP asks for the descriptor: raised in ``write`` it would cross torch.save's
    C++ code, which replaces it by "unexpected pos" or ends the process (2.11).
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._sha256 = hashlib.sha256()
        self._num_bytes = 0
        self._error: OSError | None = None

    @property
    def sum(self) -> FileSum:
        return FileSum(self._sha256.hexdigest(), self._num_bytes)

    def write(self, block: Any) -> int:
        self._num_bytes += len(block)
        if self._error is None:
            self._sha256.update(block)
            try:
                self._stream.write(block)
            except OSError as error:
                # its traceback would keep DCP's BytesIO view in a cycle, which crashes CPython 3.12.1's GC
                self._error = error.with_traceback(None)
        return len(block)

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        """Do nothing: DCP flushes after each tensor, and each system call releases the GIL."""

    def fileno(self) -> int:
        """Flush and return the descriptor for fsync."""
        self.raise_error()
        self._stream.flush()
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()


# torch's protocol for custom types is private and reaches only subclasses of Tensor when data are looked up
# (2.11 to 2.13). So DCP does not see the shards; the planners add their items.


class CopiesPlanner(DefaultSavePlanner):
    """DCP save planner that reads tensors from copies and adds FlatShards."""

    def __init__(self, shards: dict[str, FlatShard], copies: dict[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards, self._copies = shards, copies
        self._boxes = _by_index(shards)

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

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _require_whole(all_plans)
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        copy, box = self._copies.get(index.fqn), self._boxes.get(index)
        if box is not None:
            return box.view(self._shards[index.fqn].data if copy is None else copy)
        return super().lookup_object(index) if copy is None else copy


class FillPlanner(DefaultLoadPlanner):
    """DCP load planner that fills tensors and FlatShards in place."""

    def __init__(self, shards: dict[str, FlatShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards
        self._boxes = _by_index(shards)

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
        return dataclasses.replace(plan, items=items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read a plain value without running pickled code; DCP's own method runs it."""
        self.state_dict[read_item.dest_index.fqn] = read_plain(value.read())

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        box = self._boxes.get(index)
        return super().lookup_tensor(index) if box is None else box.view(self._shards[index.fqn].data)


def _by_index(shards: dict[str, FlatShard]) -> dict[MetadataIndex, Box]:
    return {MetadataIndex(name, box.offsets): box for name, shard in shards.items() for box in shard.boxes()}


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _require_whole(all_plans: list[SavePlan]) -> None:
    counts: dict[str, dict[torch.Size | None, int]] = defaultdict(dict)
    sizes: dict[str, torch.Size] = {}
    for item in (item for plan in all_plans for item in plan.items):
        if item.tensor_data is not None:  # items of equal offset are equal and written once
            counts[item.index.fqn][item.index.offset] = math.prod(item.tensor_data.chunk.sizes)
            sizes[item.index.fqn] = item.tensor_data.size
    lines = [
        f"the ranks hold {sum(held.values())} of the {sizes[name].numel()} elements of {name}"
        for name, held in counts.items()
        if sum(held.values()) != sizes[name].numel()
    ]
    if lines:
        raise CheckpointError("; ".join(lines))
