"""What torch.distributed.checkpoint is told to write and to read, box by box for FlatShards."""

from __future__ import annotations

import dataclasses
import io
import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
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

from graphmoe.checkpoint.errors import CheckpointError
from graphmoe.checkpoint.flat_shards import Box, FlatShard

# torch's protocol for types of one's own is not public, and reaches only subclasses of Tensor where data are
# looked up (2.11 to 2.13). So DCP does not see the shards; the planners add what is to be done for them.


class CopiesPlanner(DefaultSavePlanner):
    """Plans by the state itself, so that sharded tensors are known as such, and writes the copies."""

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
    """Fills the tensors of the state, and the shards beside it, in place."""

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
        """Read a plain value; DCP's own way would run what a file says."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        box = self._boxes.get(index)
        return super().lookup_tensor(index) if box is None else box.view(self._shards[index.fqn].data)


def _by_index(shards: dict[str, FlatShard]) -> dict[MetadataIndex, Box]:
    return {MetadataIndex(name, box.offsets): box for name, shard in shards.items() for box in shard.boxes()}


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _require_whole(all_plans: list[SavePlan]) -> None:
    """Raise where the ranks together hold another number of a tensor's elements than it has."""
    counts: dict[str, dict[torch.Size | None, int]] = defaultdict(dict)
    sizes: dict[str, torch.Size] = {}
    for item in (item for plan in all_plans for item in plan.items):
        if item.tensor_data is not None:  # what has the same offset is the same, and is written once
            counts[item.index.fqn][item.index.offset] = math.prod(item.tensor_data.chunk.sizes)
            sizes[item.index.fqn] = item.tensor_data.size
    lines = [
        f"the ranks hold {sum(held.values())} of the {sizes[name].numel()} elements of {name}"
        for name, held in counts.items()
        if sum(held.values()) != sizes[name].numel()
    ]
    if lines:
        raise CheckpointError("; ".join(lines))
