"""Which rank saves what several ranks hold alike.

torch.distributed.checkpoint would find out too, but only once every rank has copied all of it to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor

from graphmoe.checkpoint.entries import Entries
from graphmoe.world import World


def own_share(entries: Entries, world: World) -> Entries:
    """What this rank saves: its parts of sharded tensors, and its share of the rest. A collective.

    What only it names is in its share; plain values that several name are the first such rank's.
    """
    if world.size == 1:
        return entries
    sizes = {n: t.nbytes for n, t in entries.tensors.items() if not isinstance(t, DTensor)}
    named = world.gather((sizes, list(entries.values)))
    writers = assign([sizes for sizes, _ in named])
    values = [set(names) for _, names in named]
    earlier = set().union(*values[: world.rank])
    return Entries(
        {n: t for n, t in entries.tensors.items() if writers.get(n, world.rank) == world.rank},
        {n: value for n, value in entries.values.items() if n not in earlier},
    )


def assign(sizes: Sequence[dict[str, int]]) -> dict[str, int]:
    """The rank that writes each name, from the bytes of what each rank names: so that shares are even.

    The largest come first, each to the rank that has the least so far.
    """
    largest = {name: num_bytes for named in sizes for name, num_bytes in named.items()}
    loads, writers = [0] * len(sizes), {}
    for name in sorted(largest, key=lambda name: (-largest[name], name)):
        rank = min((r for r, named in enumerate(sizes) if name in named), key=loads.__getitem__)
        writers[name] = rank
        loads[rank] += largest[name]
    return writers
