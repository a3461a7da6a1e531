"""Flat buffers of parameters whose gradients are reduced over the same ranks.

Parameters are in model order, decayed ones first. Each rank owns an equal part of every bucket, regardless of
parameter boundaries. Rank 1 of 3 owns::

    whole    | bucket 0           | bucket 1     | bucket of norms |
                     ------             ----             -----
    shard    | ------ | ---- | ----- |
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
    decays: bool
    tensors: list[Tensor]
    """Master weights, gradient, moments, rounded weights if any."""

    @property
    def grad(self) -> Tensor:
        return self.tensors[1]


class Family:
    """Flat buffers and shards of parameters reduced over one axis; parameters become views of ``weight``."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        order: Sequence[int],
        mesh: Mesh,
        axis: Axis,
        bucket_elements: float,
        moments: Sequence[str],
    ) -> None:
        """``order``: each weight's index in ``model.parameters()``."""
        self.names, self.weights, self.order, self.axis = [*weights], [*weights.values()], [*order], axis
        self.group = mesh.group(axis)  # None if this rank owns everything
        ranks, index = (mesh.layout.size(axis), mesh.index(axis)) if self.group is not None else (1, 0)
        self.layout = BufferLayout.of(self.weights, ranks, index, bucket_elements)
        dtype, device, size = self.weights[0].dtype, self.weights[0].device, self.layout.size
        self.weight = torch.zeros(size, dtype=dtype, device=device)  # unsharded weights that the model reads
        with torch.no_grad():  # move the parameters into it
            for weight, view in zip(self.weights, self.views(self.weight).values(), strict=True):
                view.copy_(weight)
                weight.data = view
        self.grad = torch.zeros(size, device=device)  # this rank's unreduced fp32 gradients
        self.weight_shard = self._own(self.weight)
        self.main = self.weight_shard.float()  # master weights; ``weight_shard`` itself if that is fp32
        self.grad_shard = self.grad if self.group is None else torch.zeros_like(self.main)
        self.moments = {name: torch.zeros_like(self.main) for name in moments}

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        places = zip(self.names, self.layout.starts, self.weights, strict=True)
        return {name: whole[start : start + w.numel()].view(w.shape) for name, start, w in places}

    def owned(self, shard: Tensor) -> dict[str, tuple[int, Tensor]]:
        """Return, by name, offset and values [N] of this rank's part of each parameter."""
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
        shards = [self.main, self.grad_shard, *self.moments.values()]
        if self.weight_shard is not self.main:
            shards.append(self.weight_shard)
        end = self.layout.decayed
        parts = {True: slice(0, end), False: slice(end, self.main.numel())}
        return [Region(d, [s[part] for s in shards]) for d, part in parts.items() if part.stop > part.start]

    def reduce(self, bucket: Bucket) -> dist.Work:
        shard, whole = self.grad_shard[bucket.shard], self.grad[bucket.whole]
        return reduce_scatter_into(shard, whole, group=self.group, async_op=True)

    def gather(self, bucket: Bucket) -> dist.Work:
        shard, whole = self.weight_shard[bucket.shard], self.weight[bucket.whole]
        return all_gather_into(whole, shard, group=self.group, async_op=True)

    def gathered(self, shard: Tensor, into: Tensor) -> dict[str, Tensor]:
        """Gather tensors by parameter name, as views of ``into``; on a single rank, of ``shard``."""
        if self.group is None:
            return self.views(shard)
        for bucket in self.layout.buckets:
            all_gather_into(into[bucket.whole], shard[bucket.shard], group=self.group)
        return self.views(into)

    def shard_weights(self) -> None:
        if self.group is not None:
            self.weight_shard.copy_(self._own(self.weight))

    def _own(self, whole: Tensor) -> Tensor:
        return whole if self.group is None else torch.cat([whole[b.own] for b in self.layout.buckets])


def families_of(model: nn.Module, mesh: Mesh, bucket_elements: float, moments: Sequence[str]) -> list[Family]:
    """Group the model's parameters by the ranks that reduce their gradients."""
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
    """Return the sharded buckets in the order of their first parameters in the model."""
    # the forward's order, reversed in the backward; communicators need one order on all ranks
    buckets = [(f, bucket) for f in families if f.group is not None for bucket in f.layout.buckets]
    return sorted(buckets, key=lambda pair: min(pair[0].order[i] for i in pair[1].members))
