"""Flat buffers of parameters whose gradients are summed over the same ranks, and the part of each rank.

Parameters lie one behind the other in the model's order, those that decay and then the others, cut into
buckets. Each of n ranks owns an n-th of every bucket, wherever that cuts a parameter; what it owns lies
in its shards one behind the other. Of three ranks, the second owns what is marked::

    whole    | bucket 0           | bucket 1     | bucket of norms |
                     ------             ----             -----
    shard    | ------ | ---- | ----- |

On one rank a shard is the whole buffer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphmoe.ops.collectives import all_gather_into, reduce_scatter_into
from graphmoe.plan.buckets import Bucket, BufferLayout
from graphmoe.plan.layout import Axis, layout_of
from graphmoe.runtime.ranks import Mesh


class Region(NamedTuple):
    """Part of a family's shards that is updated alike."""

    decays: bool
    tensors: list[Tensor]
    """Main weights, gradient, moments, and the weights that the main ones are rounded into, if any."""

    @property
    def grad(self) -> Tensor:
        return self.tensors[1]


class Family:
    """Parameters whose gradients are summed over one axis: whole buffers, and the shards of this rank.

    The parameters become views of ``weight``. Nothing changes its address.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        order: Sequence[int],
        mesh: Mesh,
        axis: Axis,
        bucket_elements: float,
        moments: Sequence[str],
    ) -> None:
        """``order`` has the places of the weights in the model, ``moments`` names of what is kept of each."""
        self.names, self.weights, self.order, self.axis = [*weights], [*weights.values()], [*order], axis
        self.group = mesh.group(axis)
        """None where this rank owns all."""
        ranks, index = (mesh.layout.size(axis), mesh.index(axis)) if self.group is not None else (1, 0)
        self.layout = BufferLayout.of(self.weights, ranks, index, bucket_elements)
        dtype, device, size = self.weights[0].dtype, self.weights[0].device, self.layout.size
        self.weight = torch.zeros(size, dtype=dtype, device=device)
        """Whole weights that the model reads, with the parts of other ranks as last gathered."""
        with torch.no_grad():  # move the parameters into it
            for weight, view in zip(self.weights, self.views(self.weight).values(), strict=True):
                view.copy_(weight)
                weight.data = view
        self.grad = torch.zeros(size, device=device)
        """fp32, whole: what this rank has computed."""
        self.weight_shard = self._own(self.weight)
        self.main = self.weight_shard.float()
        """fp32 weights; ``weight_shard`` itself where that is fp32, else that is rounded from them."""
        self.grad_shard = self.grad if self.group is None else torch.zeros_like(self.main)
        """The sum over the ranks."""
        self.moments = {name: torch.zeros_like(self.main) for name in moments}

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """Return a view of a whole buffer for each parameter, by name."""
        places = zip(self.names, self.layout.starts, self.weights, strict=True)
        return {name: whole[start : start + w.numel()].view(w.shape) for name, start, w in places}

    def owned(self, shard: Tensor) -> dict[str, tuple[int, Tensor]]:
        """Return this rank's parts of parameters: the first element of each, and the part, [N]."""
        found = {}
        for bucket in self.layout.buckets:
            for i in bucket.members:
                start = self.layout.starts[i]
                first = max(bucket.own.start, start)
                last = min(bucket.own.stop, start + self.weights[i].numel())
                if first < last:
                    to_shard = bucket.shard.start - bucket.own.start
                    found[self.names[i]] = first - start, shard[first + to_shard : last + to_shard]
        return found

    def regions(self) -> list[Region]:
        """Return the shards of what decays, and of what does not; none that is empty."""
        shards = [self.main, self.grad_shard, *self.moments.values()]
        if self.weight_shard is not self.main:
            shards.append(self.weight_shard)
        end = self.layout.decayed
        parts = {True: slice(0, end), False: slice(end, self.main.numel())}
        return [Region(d, [s[part] for s in shards]) for d, part in parts.items() if part.stop > part.start]

    def reduce(self, bucket: Bucket) -> dist.Work:
        """Start to sum a bucket's gradients over the ranks, into the shards of their owners."""
        shard, whole = self.grad_shard[bucket.shard], self.grad[bucket.whole]
        return reduce_scatter_into(shard, whole, group=self.group, async_op=True)

    def gather(self, bucket: Bucket) -> dist.Work:
        """Start to gather a bucket's weights from their owners."""
        shard, whole = self.weight_shard[bucket.shard], self.weight[bucket.whole]
        return all_gather_into(whole, shard, group=self.group, async_op=True)

    def gathered(self, shard: Tensor, into: Tensor) -> dict[str, Tensor]:
        """Gather whole tensors by parameter name from the shards of all ranks. A collective.

        They are views of ``into``, a whole buffer; on one rank of ``shard``, which is whole.
        """
        if self.group is None:
            return self.views(shard)
        for bucket in self.layout.buckets:
            all_gather_into(into[bucket.whole], shard[bucket.shard], group=self.group)
        return self.views(into)

    def shard_weights(self) -> None:
        """Take the own part of the model's weights for the shard's; the main weights stay."""
        if self.group is not None:
            self.weight_shard.copy_(self._own(self.weight))

    def _own(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a whole buffer; a copy on several ranks."""
        return whole if self.group is None else torch.cat([whole[b.own] for b in self.layout.buckets])


def families_of(model: nn.Module, mesh: Mesh, bucket_elements: float, moments: Sequence[str]) -> list[Family]:
    """Group the model's parameters by the ranks that their gradients are summed over."""
    members: dict[Any, dict[str, nn.Parameter]] = {}
    order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    for name, weight in model.named_parameters():
        members.setdefault(mesh.group(layout_of(weight).summed_over), {})[name] = weight
    found = []
    for weights in members.values():
        axis = layout_of(next(iter(weights.values()))).summed_over
        places = [order[name] for name in weights]
        found.append(Family(weights, places, mesh, axis, bucket_elements, moments))
    return found


def in_forward_order(families: Sequence[Family]) -> list[tuple[Family, Bucket]]:
    """Sort all buckets that several ranks share by the place of their first parameter in the model.

    It is the order in which a forward needs them, and the reverse of that in which a backward finishes
    them. It is the same on all ranks, as communicators want it.
    """
    buckets = [(f, bucket) for f in families if f.group is not None for bucket in f.layout.buckets]
    return sorted(buckets, key=lambda pair: min(pair[0].order[i] for i in pair[1].members))
