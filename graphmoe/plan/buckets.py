"""Layout of parameters in flat buffers, by buckets; `graphmoe.optim.flat_buffers` holds the tensors."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from graphmoe.plan.layout import layout_of

if TYPE_CHECKING:
    from torch import Tensor

# elements, 128 bytes in bf16: alignment of every parameter and shard; gaps are filled with zeros
ALIGNMENT = 64


def decays(weight: Tensor) -> bool:
    """Return whether weight decay applies: to matrices and experts, not to norms and biases."""
    return weight.dim() > 1 and not layout_of(weight).is_bias


# parts of the names of parameters that are updated by element, whatever their shape
_BY_ELEMENT = ("embed.", "head.weight", "moe_router.", "shared_experts.gate.", "bias", "convs.")
BATCH_ELEMENTS = 2**26  # most elements of a batch of matrices, which bounds the memory of an update
# of ``optim.offload``
SLOTS = 3  # pieces of state on the device: one is fetched, one updated, one stored
PIECE_ELEMENTS = 2**22  # most elements of a piece, 1 ms over PCIe 5 in fp32
SLOT_SLACK = 128  # bytes of a slot beside its tensors, for their alignment
MOST_PADDING = 1.25  # padded over unpadded length, above which the experts of a weight have one owner


class Matrices(NamedTuple):
    """Shape of the equal matrices that a parameter consists of, in row-major order."""

    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns


def matrices_of(name: str, weight: Tensor) -> Matrices | None:
    """Return the matrices of a parameter, for optimizers of whole matrices; None for updates by element.

    Matrices are those of Hugging Face folders: each expert's, with stacked gate and up rows apart.
    """
    if not decays(weight) or any(part in name for part in _BY_ELEMENT):
        return None
    rows, columns = weight.shape[-2:]
    return Matrices(rows // 2 if "gate_up" in name else rows, columns)


class Kept(NamedTuple):
    """Bytes of an optimizer's state besides weights and reduced gradients."""

    main: int
    """Of an element's master weight, if weights are bf16."""
    moments: int
    """Of an element's moments."""
    row: int = 0
    """Of scales and random keys of a row: `ALIGNMENT` elements, or a row of a matrix updated whole."""
    gradient: int = 4
    """Of an element's unreduced gradient."""

    @property
    def bytes_moved(self) -> int:
        """Return bytes of memory that a compiled update reads and writes for an element, without rows."""
        # gradients are read twice; without master weights bf16 weights are read too
        return 2 * (self.main + self.moments) + 2 * 4 + (2 if self.main else 4)


class Bucket(NamedTuple):
    """Consecutive parameters that share one gradient reduction and one weight gather."""

    members: tuple[int, ...]
    whole: slice
    own: slice
    """This rank's range in unsharded buffers."""
    shard: slice
    """The same range in this rank's shard buffers."""
    owner: int | None = None
    """Index of the rank that owns all of it; None: all own equal parts."""


@dataclass(frozen=True)
class BufferLayout:
    """Offsets, in elements, of parameters in flat buffers, and of one rank's shards of them."""

    starts: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    size: int
    decayed: int
    """Length of the shards' front part, to which weight decay applies."""

    @classmethod
    def of(
        cls, weights: Sequence[Tensor], num_ranks: int, index: int, bucket_elements: float
    ) -> BufferLayout:
        """Return the layout for rank ``index``; buckets hold at most ``bucket_elements`` or one parameter."""
        starts, buckets, end, decayed = [0] * len(weights), list[Bucket](), 0, 0
        for decayed_ones in (True, False):
            members = [i for i, weight in enumerate(weights) if decays(weight) is decayed_ones]
            for group in _neighbours(members, weights, bucket_elements):
                start = end
                for i in group:
                    starts[i] = end
                    end += _aligned(weights[i].numel(), ALIGNMENT)
                length = _aligned(end - start, num_ranks * ALIGNMENT)
                part, end = length // num_ranks, start + length
                own = slice(start + index * part, start + (index + 1) * part)
                shard = slice(start // num_ranks, end // num_ranks)
                buckets.append(Bucket(tuple(group), slice(start, end), own, shard))
            if decayed_ones:
                decayed = end // num_ranks
        return cls(tuple(starts), tuple(buckets), end, decayed)

    @classmethod
    def of_matrices(cls, weights: Sequence[Tensor], num_ranks: int, index: int) -> BufferLayout:
        """Return the layout for rank ``index`` if each matrix has one owner: a bucket for each weight.

        Experts are divided evenly if they can be; other weights have one owner. The first rank has most.
        """
        starts, buckets, end, own_end = [0] * len(weights), list[Bucket](), 0, 0
        divided = {i: part for i, w in enumerate(weights) if (part := _expert_part(w, num_ranks))}
        owners = _owners({i: w.numel() for i, w in enumerate(weights) if i not in divided}, num_ranks)
        # equal shapes follow each other, so that their matrices form one batch
        for i in sorted(range(len(weights)), key=lambda i: (*weights[i].shape, i)):
            part, owner = divided.get(i, _aligned(weights[i].numel(), ALIGNMENT)), owners.get(i)
            starts[i], start = end, end
            end += part * (num_ranks if owner is None else 1)
            own = slice(start, end if owner == index else start)
            if owner is None:
                own = slice(start + index * part, start + (index + 1) * part)
            shard = slice(own_end, own_end + own.stop - own.start)
            own_end = shard.stop
            buckets.append(Bucket((i,), slice(start, end), own, shard, owner))
        return cls(tuple(starts), tuple(buckets), end, own_end)

    @property
    def shard_size(self) -> int:
        """Return the elements of this rank's shards."""
        return self.buckets[-1].shard.stop

    def own_ranges(self, weights: Sequence[Tensor]) -> Iterator[tuple[int, int, slice]]:
        """Yield this rank's part of each parameter: its index, its first element, its range in the shard."""
        for bucket in self.buckets:
            to_shard = bucket.shard.start - bucket.own.start
            for i in bucket.members:
                start = self.starts[i]
                first = max(bucket.own.start, start)
                last = min(bucket.own.stop, start + weights[i].numel())
                if first < last:
                    yield i, first - start, slice(first + to_shard, last + to_shard)


def batches(parts: Iterable[tuple[slice, Matrices]]) -> Iterator[tuple[slice, Matrices]]:
    """Join neighbouring ranges of matrices of one shape, and divide them into equal batches."""
    runs = list[tuple[slice, Matrices]]()
    for part, shape in sorted(parts, key=lambda each: each[0].start):
        if runs and runs[-1][1] == shape and runs[-1][0].stop == part.start:
            part = slice(runs.pop()[0].start, part.stop)
        runs.append((part, shape))
    for run, shape in runs:
        count = (run.stop - run.start) // shape.size
        each = -(-count // -(-count * shape.size // BATCH_ELEMENTS)) * shape.size
        for start in range(run.start, run.stop, each):
            yield slice(start, min(start + each, run.stop)), shape


def _expert_part(weight: Tensor, num_ranks: int) -> int | None:
    if weight.dim() != 3 or num_ranks == 1:
        return None
    count, size = weight.shape[0], math.prod(weight.shape[1:])
    each = _aligned(-(-count // num_ranks), ALIGNMENT // math.gcd(ALIGNMENT, size))
    return each * size if each * num_ranks <= MOST_PADDING * count else None


def _owners(sizes: Mapping[int, int], num_ranks: int) -> dict[int, int]:
    """Give each to the rank with the fewest elements so far, longest first; the first rank has most."""
    loads, found = [(0, rank) for rank in range(num_ranks)], dict[int, int]()
    for i in sorted(sizes, key=lambda i: (-sizes[i], i)):
        load, found[i] = loads[0]
        heapq.heapreplace(loads, (load + sizes[i], found[i]))
    by_load = [rank for _, rank in sorted(loads, key=lambda each: (-each[0], each[1]))]
    return {i: by_load.index(rank) for i, rank in found.items()}


def _neighbours(members: Sequence[int], weights: Sequence[Tensor], limit: float) -> list[list[int]]:
    groups: list[list[int]] = []
    room = 0.0
    # from the end, so that the first group, which every step waits for, is the small one
    for i in reversed(members):
        length = _aligned(weights[i].numel(), ALIGNMENT)
        if not groups or length > room:
            groups.insert(0, [])
            room = limit
        groups[0].insert(0, i)
        room -= length
    return groups


def _aligned(length: int, to: int) -> int:
    return -(-length // to) * to
