"""Shares of ranks in saving what several of them hold alike.

torch.distributed.checkpoint would find out too, but only once every rank has copied all of it to the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from graphmoe.checkpoint.entries import Entries, local_part
from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.runtime.ranks import Ranks

Key = TypeVar("Key", str, tuple[str, tuple[int, ...]])
"""Key of what several ranks hold alike: a name, or a name and the place of a part of what it names."""


def own_share(entries: Entries, ranks: Ranks) -> Entries:
    """Return the entries that this rank saves: shards of DTensors, and its share of the rest. A collective.

    What only it holds is in its share; plain values that several name are the first such rank's.
    """
    if ranks.size == 1:
        return entries
    keys = {n: (n, _place(t)) for n, t in entries.tensors.items() if not isinstance(t, DTensor)}
    sizes = {key: local_part(entries.tensors[name]).nbytes for name, key in keys.items()}
    named = ranks.gather((sizes, list(entries.values)))
    writers = assign([sizes for sizes, _ in named])
    values = [set(names) for _, names in named]
    earlier = set().union(*values[: ranks.rank])
    return Entries(
        {n: t for n, t in entries.tensors.items() if n not in keys or writers[keys[n]] == ranks.rank},
        {n: value for n, value in entries.values.items() if n not in earlier},
    )


def assign(sizes: Sequence[Mapping[Key, int]]) -> dict[Key, int]:
    """The rank that writes each key, from the bytes of what each rank holds: so that shares are even.

    What one rank alone holds comes first. Of the rest the largest come first, each to the rank that has
    the least so far.
    """
    holders: dict[Key, list[int]] = defaultdict(list)
    largest: dict[Key, int] = {}
    for rank, held in enumerate(sizes):
        for key, num_bytes in held.items():
            holders[key].append(rank)
            largest[key] = num_bytes
    loads, writers = [0] * len(sizes), {}
    for key in sorted(largest, key=lambda key: (len(holders[key]) > 1, -largest[key], key)):
        rank = min(holders[key], key=loads.__getitem__)
        writers[key] = rank
        loads[rank] += largest[key]
    return writers


def _place(tensor: Tensor | FlatShard) -> tuple[int, ...]:
    """Return the place of a part in its whole; empty for a tensor that is the whole."""
    return tensor.place if isinstance(tensor, FlatShard) else ()
