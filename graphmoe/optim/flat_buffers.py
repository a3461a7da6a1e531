"""Flat buffers of parameters whose gradients are reduced over the same ranks.

Parameters are in model order, decayed ones first. Each rank owns an equal part of every bucket, regardless of
parameter boundaries. Rank 1 of 3 owns::

    whole    | bucket 0           | bucket 1     | bucket of norms |
                     ------             ----             -----
    shard    | ------ | ---- | ----- |

If the rule updates whole matrices, these have buffers of their own, in which each matrix has one owner.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphmoe.ops.collectives import all_gather_into, reduce_scatter_into
from graphmoe.optim.offload import host_zeros
from graphmoe.optim.rule import UpdateRule
from graphmoe.optim.storage import ROW, SMALLEST, Region, Storage, decode, encode, origins_of
from graphmoe.plan.buckets import Bucket, BufferLayout, batches, matrices_of
from graphmoe.plan.layout import Axis, layout_of
from graphmoe.runtime.ranks import Mesh

PLAIN = Storage()


class Family:
    """Flat buffers and shards of parameters reduced over one axis; parameters become views of ``weight``."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        order: Sequence[int],
        mesh: Mesh,
        axis: Axis,
        bucket_elements: float,
        rule: UpdateRule,
        *,
        of_matrices: bool = False,
        storage: Storage = PLAIN,
    ) -> None:
        """``order``: each weight's index in ``model.parameters()``."""
        self.mesh, self.storage = mesh, storage
        self.rule, self.of_matrices = rule, of_matrices
        self.names, self.weights, self.order, self.axis = [*weights], [*weights.values()], [*order], axis
        self.group = mesh.group(axis)  # None if this rank owns everything
        ranks, index = (mesh.layout.size(axis), mesh.index(axis)) if self.group is not None else (1, 0)
        if of_matrices:
            self.layout = BufferLayout.of_matrices(self.weights, ranks, index)
        else:
            self.layout = BufferLayout.of(self.weights, ranks, index, bucket_elements)
        dtype, device, size = self.weights[0].dtype, self.weights[0].device, self.layout.size
        self.weight = torch.zeros(size, dtype=dtype, device=device)  # unsharded weights that the model reads
        with torch.no_grad():  # move the parameters into it
            for weight, view in zip(self.weights, self.views(self.weight).values(), strict=True):
                view.copy_(weight)
                weight.data = view
        self.grad = torch.zeros(size, device=device)  # this rank's unreduced fp32 gradients
        self.weight_shard = self._own(self.weight)
        zeros = functools.partial(host_zeros if storage.offload else torch.zeros, device=device)
        # master weights; ``weight_shard`` itself if that is fp32 or there are none
        self.main = self.weight_shard
        if dtype != torch.float32 and not storage.in_place:
            self.main = zeros(self.layout.shard_size, dtype=torch.float32).copy_(self.weight_shard)
        self.grad_shard = self.grad
        if self.group is not None:
            self.grad_shard = torch.zeros(self.layout.shard_size, device=device)
        self.moments = {
            name: zeros(self.layout.shard_size, dtype=storage.dtype(rule, name)) for name in rule.moments
        }
        # tensors of each region's rows, apart since graphs copy inputs whose addresses are not aligned
        self.rows: dict[str, Tensor] = {}
        for number, (part, shape) in enumerate([] if storage.is_plain else self._parts()):
            rows = (*shape[:-1], 1)
            origins = zeros(math.prod(rows), dtype=torch.int32).view(rows)
            self.rows[f"origins {number}"] = origins.copy_(self._origins(part, shape))
            for name in rule.moments if storage.has_scales else ():
                scales = zeros(math.prod(rows), dtype=torch.float32).view(rows)
                self.rows[f"scales of {name} {number}"] = scales.fill_(SMALLEST)

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        places = zip(self.names, self.layout.starts, self.weights, strict=True)
        return {name: whole[start : start + w.numel()].view(w.shape) for name, start, w in places}

    def owned(self, shard: Tensor) -> dict[str, tuple[int, Tensor]]:
        """Return, by name, offset and values [N] of this rank's part of each parameter."""
        ranges = self.layout.own_ranges(self.weights)
        return {self.names[i]: (first, shard[part]) for i, first, part in ranges}

    def regions(self) -> list[Region]:
        found, rounds = [], self.weight_shard is not self.main
        for number, (part, shape) in enumerate(self._parts()):
            own = [each[part].view(shape) for each in (self.main, self.grad_shard, *self.moments.values())]
            scales = [self.rows[f"scales of {n} {number}"] for n in self.moments if self.storage.has_scales]
            origins = [] if self.storage.is_plain else [self.rows[f"origins {number}"]]
            rounded = [self.weight_shard[part].view(shape)] if rounds else []
            decays = self.of_matrices or part.start < self.layout.decayed
            found.append(Region(self.rule, decays, own[0], own[1], own[2:], scales, rounded, origins))
        return found

    def moment(self, name: str) -> Tensor:
        """Return this rank's shard of a moment in fp32; a copy in host memory if it is stored otherwise."""
        held = self.moments[name]
        if held.dtype == torch.float32:
            return held
        found = torch.zeros(held.shape)
        for part, values, scale in self._stored(name):
            found[part] = decode(values.cpu(), None if scale is None else scale.cpu()).view(-1)
        return found

    def store_moment(self, name: str, shard: Tensor) -> None:
        """Set a moment that is not stored in fp32, rounded to the nearest; ``shard`` is in host memory."""
        for part, values, scale in self._stored(name):
            new = shard[part].view(values.shape)
            if scale is not None:
                new, largest = encode(new, values.dtype)
                scale.copy_(largest)
            values.copy_(new)

    def _stored(self, name: str) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        for number, (part, shape) in enumerate(self._parts()):
            yield part, self.moments[name][part].view(shape), self.rows.get(f"scales of {name} {number}")

    def _parts(self) -> list[tuple[slice, tuple[int, ...]]]:
        """Return the range of each region in this rank's shards, and its shape."""
        if self.of_matrices:
            own = self.layout.own_ranges(self.weights)
            shapes = [(part, matrices_of(self.names[i], self.weights[i])) for i, _, part in own]
            found = batches((part, shape) for part, shape in shapes if shape is not None)
            return [(part, ((part.stop - part.start) // shape.size, *shape)) for part, shape in found]
        end, size = self.layout.decayed, self.layout.shard_size
        parts = [part for part in (slice(0, end), slice(end, size)) if part.stop > part.start]
        row = () if self.storage.is_plain else (ROW,)
        return [(part, ((part.stop - part.start) // math.prod(row), *row)) for part in parts]

    def _origins(self, region: slice, shape: Sequence[int]) -> Tensor:
        row, found = shape[-1], torch.zeros((*shape[:-1], 1), dtype=torch.int32)
        for i, first, part in self.layout.own_ranges(self.weights):
            start, stop = max(part.start, region.start), min(part.stop, region.stop)
            if start < stop:
                elements = torch.arange(first + start - part.start, first + stop - part.start, row)
                weight, (layout, rank) = self.weights[i], (self.mesh.layout, self.mesh.rank)
                keys = (self.names[i], elements, weight.shape, layout_of(weight), layout, rank)
                at = (start - region.start) // row
                found.view(-1)[at : at + len(elements)] = origins_of(*keys, self.storage.seed)
        return found

    def reduce(self, bucket: Bucket) -> dist.Work:
        shard, whole = self.grad_shard[bucket.shard], self.grad[bucket.whole]
        if bucket.owner is None:
            return reduce_scatter_into(shard, whole, group=self.group, async_op=True)
        if shard.numel():
            shard.copy_(whole)  # apart, since later gradients may be added to ``whole`` and reduced again
        elif whole.device.type == "cpu":
            shard = whole.clone()  # gloo overwrites the tensors of all ranks
        else:
            shard = whole
        return dist.reduce(shard, group_dst=bucket.owner, group=self.group, async_op=True)

    def gather(self, bucket: Bucket) -> dist.Work:
        return self._gather(bucket, self.weight_shard, self.weight)

    def _gather(self, bucket: Bucket, shards: Tensor, into: Tensor) -> dist.Work:
        shard, whole = shards[bucket.shard].to(into.device), into[bucket.whole]
        if bucket.owner is None:
            return all_gather_into(whole, shard, group=self.group, async_op=True)
        if shard.numel():
            whole.copy_(shard)
        return dist.broadcast(whole, group_src=bucket.owner, group=self.group, async_op=True)

    def gathered(self, shard: Tensor, into: Tensor) -> dict[str, Tensor]:
        """Gather tensors by parameter name, as views of ``into``; on a single rank, of ``shard``."""
        if self.group is None:
            return self.views(shard)
        for bucket in self.layout.buckets:
            self._gather(bucket, shard, into).wait()
        return self.views(into)

    def shard_weights(self) -> None:
        if self.group is not None:
            self.weight_shard.copy_(self._own(self.weight))

    def _own(self, whole: Tensor) -> Tensor:
        return whole if self.group is None else torch.cat([whole[b.own] for b in self.layout.buckets])


def families_of(
    model: nn.Module, mesh: Mesh, bucket_elements: float, rule: UpdateRule, storage: Storage = PLAIN
) -> list[Family]:
    """Group the model's trained parameters by the ranks that reduce their gradients, and by update."""
    members: dict[Any, dict[str, nn.Parameter]] = {}
    order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        is_matrix = rule.matrices is not None and matrices_of(name, weight) is not None
        members.setdefault((mesh.group(layout_of(weight).summed_over), is_matrix), {})[name] = weight
    found = []
    for (_, is_matrix), weights in members.items():
        axis = layout_of(next(iter(weights.values()))).summed_over
        places = [order[name] for name in weights]
        own = rule.matrices if rule.matrices and is_matrix else rule
        found.append(
            Family(weights, places, mesh, axis, bucket_elements, own, of_matrices=is_matrix, storage=storage)
        )
    return found


def in_forward_order(families: Sequence[Family]) -> list[tuple[Family, Bucket]]:
    """Return the sharded buckets in the order of their first parameters in the model."""
    # the forward's order, reversed in the backward; communicators need one order on all ranks
    buckets = [(f, bucket) for f in families if f.group is not None for bucket in f.layout.buckets]
    return sorted(buckets, key=lambda pair: min(pair[0].order[i] for i in pair[1].members))
