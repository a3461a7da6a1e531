"""Flat range of a sharded parameter's elements, as boxes (hyperrectangles) of the whole parameter.

Checkpoints hold whole parameters, so they do not depend on the parallel layout.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from graphmoe.plan.layout import Axis, Layout, ParameterLayout, layout_of


class Box(NamedTuple):
    """Hyperrectangle of a whole parameter, and the offset and strides of its elements in a shard's data."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int
    strides: tuple[int, ...]

    def view(self, data_N: Tensor) -> Tensor:
        """Return the box as a view of a shard's data."""
        return data_N.as_strided(self.sizes, self.strides, data_N.storage_offset() + self.first)


class Encoded(Protocol):
    """fp32 values [N] in another form."""

    def decode(self, flat: Tensor) -> None: ...  # fills a tensor [N] in host memory
    def encode(self, flat: Tensor) -> None: ...  # stores its values
    def bounds(self) -> Sequence[Tensor]: ...  # finite if all values are


@dataclass(frozen=True, eq=False)
class FlatShard:
    """Elements [start, start + len(data)) of a rank's part of a parameter, in row-major order."""

    # [N], contiguous; filled in place when loading; a meta tensor if the values are ``encoded``
    data: Tensor
    start: int
    # of the rank's part (`graphmoe.plan.layout.own_part`)
    shape: torch.Size
    parallel: ParameterLayout
    layout: Layout
    rank: int
    encoded: Encoded | None = None

    def __post_init__(self) -> None:
        assert self.data.dim() == 1 and self.data.is_contiguous()
        assert self.start >= 0 and self.start + self.data.numel() <= self.shape.numel()
        assert all(self.shape[cut.dim] % cut.pieces == 0 for cut in self.parallel.cuts)

    @classmethod
    def from_part(cls, part: Tensor, parallel: ParameterLayout, layout: Layout, rank: int) -> FlatShard:
        """Return a part's whole content as a shard, without copy. *Raises* RuntimeError if not contiguous."""
        return cls(part.detach().view(-1), 0, part.shape, parallel, layout, rank)

    @property
    def whole_shape(self) -> torch.Size:
        sizes = list(self.shape)
        for cut in self.parallel.cuts:
            sizes[cut.dim] *= self.layout.size(cut.axis)
        return torch.Size(sizes)

    @property
    def place(self) -> tuple[int, ...]:
        """This rank's indices along sharding axes, start, length; equal if shards hold the same elements."""
        indices = (_index(self.layout, cut.axis, self.rank) for cut in self.parallel.cuts)
        return (*indices, self.start, self.data.numel())

    def boxes(self) -> list[Box]:
        """Return the fewest boxes that make up the shard."""
        return self._boxes

    @functools.cached_property
    def _boxes(self) -> list[Box]:
        if self.shape.numel() == 0:
            # one box for a parameter without elements, so that its name and shape are saved
            return [Box((0,) * len(self.shape), tuple(self.whole_shape), 0, (0,) * len(self.shape))]
        strides = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        runs = [self._runs(dim) for dim in range(len(self.shape))]
        boxes = []
        for offsets, sizes in _rectangles(tuple(self.shape), self.start, self.start + self.data.numel()):
            along = [_take(*args) for args in zip(runs, offsets, sizes, strict=True)]
            for parts in itertools.product(*along):
                own = sum(at * stride for (at, _), stride in zip(parts, strides, strict=True))
                starts, lengths = tuple(r.start for _, r in parts), tuple(len(r) for _, r in parts)
                boxes.append(Box(starts, lengths, own - self.start, strides))
        return boxes

    def within(self, index: tuple[int | slice, ...]) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """Yield the parts of ``whole[index]`` in this shard: (view of its data, slices in the result)."""
        given = [*index, *[slice(None)] * (len(self.shape) - len(index))]
        kept = [isinstance(each, slice) for each in given]
        kept_of_part = tuple(slice(None) if keep else 0 for keep in kept)
        slices = [each if isinstance(each, slice) else slice(each, each + 1) for each in given]
        regions = [range(size)[each] for size, each in zip(self.whole_shape, slices, strict=True)]
        for box in self.boxes():
            view, there = box.view(self.data), []
            for dim, (region, offset) in enumerate(zip(regions, box.offsets, strict=True)):
                start = max(region.start, offset)
                stop = max(min(region.stop, offset + view.shape[dim]), start)
                view = view.narrow(dim, start - offset if stop > start else 0, stop - start)
                there.append(slice(start - region.start, stop - region.start))
            if view.numel():
                yield view[kept_of_part], tuple(itertools.compress(there, kept))

    def _runs(self, dim: int) -> list[range]:
        # indices of the whole dimension in the part, split into maximal runs
        indices = np.arange(self.whole_shape[dim])
        for cut in (cut for cut in self.parallel.cuts if cut.dim == dim):
            parts = indices.reshape(cut.pieces, self.layout.size(cut.axis), -1)
            indices = parts[:, _index(self.layout, cut.axis, self.rank)].reshape(-1)
        runs = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
        return [range(int(run[0]), int(run[-1]) + 1) for run in runs]


def shards_of(
    model: nn.Module, layout: Layout, rank: int, instead: Mapping[str, Tensor | FlatShard] | None = None
) -> dict[str, Tensor | FlatShard]:
    """Return the model's state dict, sharded parameters as FlatShards; all share the model's memory.

    ``instead`` replaces tensors by name, e.g. by fp32 master weights.
    """
    found: dict[str, Tensor | FlatShard] = {}
    for name, own in model.state_dict(keep_vars=True).items():
        tensor, parallel = (instead or {}).get(name, own), layout_of(own)
        if isinstance(tensor, FlatShard):
            found[name] = tensor
            continue
        is_cut = any(layout.size(cut.axis) > 1 for cut in parallel.cuts)
        found[name] = FlatShard.from_part(tensor, parallel, layout, rank) if is_cut else tensor.detach()
    return found


def whole_shape(tensor: Tensor | FlatShard) -> torch.Size:
    """Return the unsharded shape of a tensor, as in a checkpoint."""
    return tensor.whole_shape if isinstance(tensor, FlatShard) else tensor.shape


@lru_cache(maxsize=4096)
def _index(layout: Layout, axis: Axis, rank: int) -> int:
    return layout.index(axis, rank)  # cached: it enumerates all ranks of the job


def _rectangles(
    shape: tuple[int, ...], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offsets, sizes) of the boxes that make up elements [start, stop) of a tensor, in order."""
    # at most 2 * N - 1 of N dimensions: parts of the first and the last row, and the rows between
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows

    def part_of(number: int, start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        found = _rectangles(shape[1:], start - number * row, stop - number * row)
        return [((number, *offsets), (1, *sizes)) for offsets, sizes in found]

    if first > last:
        return part_of(last, start, stop)
    rows = ((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    middle = [rows] if last > first else []
    return [*part_of(first - 1, start, first * row), *middle, *part_of(last, last * row, stop)]


def _take(runs: Sequence[range], start: int, length: int) -> list[tuple[int, range]]:
    """Return the parts of concatenated ``runs`` within [start, start + length), each with its position."""
    found, at = [], 0
    for run in runs:
        part = run[max(start - at, 0) : max(start + length - at, 0)]
        if part:
            found.append((max(start, at), part))
        at += len(run)
    return found
