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
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphmoe.ops.collectives import all_gather_into, reduce_scatter_into
from graphmoe.optim.offload import host_zeros
from graphmoe.optim.rule import UpdateRule
from graphmoe.optim.storage import PIECE, ROW, SMALLEST, EncodedRows, Region, Storage, origins_of
from graphmoe.plan.buckets import Bucket, BufferLayout, batches, matrices_of
from graphmoe.plan.layout import Axis, layout_of
from graphmoe.plan.slots import gradient_slots
from graphmoe.runtime.ranks import Mesh

PLAIN = Storage()
Fill = Callable[[Collection[Tensor]], object]
"""Sets the first values of parameters, in place."""


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
        shares_slots: bool = False,
        fill: Fill | None = None,
    ) -> None:
        """``order``: each weight's index in ``model.parameters()``.

        With ``shares_slots`` and a group `share_memory` allocates the gradients; with ``fill``, which sets
        weights without memory, the weights too.
        """
        self.mesh, self.storage = mesh, storage
        self.rule, self.of_matrices = rule, of_matrices
        self.names, self.weights, self.order, self.axis = [*weights], [*weights.values()], [*order], axis
        self.group = mesh.shard_group(axis)  # None if this rank owns everything
        self.replicas = mesh.replica_group(axis)  # ranks with the same shards; None: none has
        ranks, index = mesh.layout.num_shards(axis), mesh.shard_index(axis)
        self.num_replicas = mesh.layout.size(axis) // ranks
        if of_matrices:
            self.layout = BufferLayout.of_matrices(self.weights, ranks, index)
        else:
            self.layout = BufferLayout.of(self.weights, ranks, index, bucket_elements)
        dtype, device, size = self.weights[0].dtype, self.weights[0].device, self.layout.size
        self.device, self.fill = device, fill
        self._wholes: dict[int, list[Tensor]] = {}  # weights of buckets by their start, if in slots
        # unsharded weights that the model reads; None if they are in slots
        in_slots = fill is not None and self.group is not None
        self.weight = None if in_slots else torch.zeros(size, dtype=dtype, device=device)
        if self.weight is not None:
            with torch.no_grad():  # move the parameters into it
                for weight, view in zip(self.weights, self.views(self.weight).values(), strict=True):
                    view.copy_(weight)
                    weight.data = view
                if fill is not None:
                    fill({*self.weights})
        # this rank's unreduced gradients; None if they are in slots
        self.grad: Tensor | None = None
        if not shares_slots or self.group is None:
            self.grad = torch.zeros(size, dtype=storage.gradients, device=device)
        self.staging: Staging | None = None  # if they are bf16 and reduced
        self._gradients: dict[int, Tensor] = {}  # of buckets, by their start
        if self.grad is not None:
            self._gradients = {b.whole.start: self.grad[b.whole] for b in self.layout.buckets}
        if self.weight is None:
            self.weight_shard = torch.zeros(self.layout.shard_size, dtype=dtype, device=device)
        else:
            self.weight_shard = self._own(self.weight)
        zeros = functools.partial(host_zeros if storage.offload else torch.zeros, device=device)
        # master weights; ``weight_shard`` itself if that is fp32 or there are none
        self.main = self.weight_shard
        if dtype != torch.float32 and not storage.in_place:
            self.main = zeros(self.layout.shard_size, dtype=torch.float32).copy_(self.weight_shard)
        if self.group is None:
            assert self.grad is not None
            self.grad_shard = self.grad
        else:
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

    def gradient(self, bucket: Bucket) -> Tensor:
        """Return this rank's unreduced gradients of a bucket, with the gaps between them."""
        return self._gradients[bucket.whole.start]

    def place_gradient(self, bucket: Bucket, at: Tensor) -> None:
        """Let the front of ``at`` [N] hold this rank's unreduced gradients of a bucket."""
        self._gradients[bucket.whole.start] = at[: bucket.whole.stop - bucket.whole.start]

    @torch.no_grad()
    def place_weights(self, bucket: Bucket, at: Sequence[Tensor]) -> None:
        """Let the fronts of ``at`` hold a bucket's weights, parameters in the first; set their values."""
        assert self.fill is not None
        start = bucket.whole.start
        wholes = self._wholes[start] = [each[: bucket.whole.stop - start] for each in at]
        wholes[0].zero_()
        for i in bucket.members:
            self.weights[i].data = self.weight_in(bucket, 0, i)
        self.fill({self.weights[i] for i in bucket.members})
        self.weight_shard[bucket.shard].copy_(wholes[0][bucket.own.start - start : bucket.own.stop - start])
        if self.main is not self.weight_shard:
            self.main[bucket.shard].copy_(self.weight_shard[bucket.shard])

    @property
    def wholes(self) -> list[Tensor]:
        """Return the memory of unsharded weights: the whole buffer, or each bucket's in its slots."""
        return [each for of in self._wholes.values() for each in of] if self.weight is None else [self.weight]

    def weight_in(self, bucket: Bucket, place: int, i: int) -> Tensor:
        """Return parameter ``i`` in the bucket's slot number ``place``."""
        start, weight = self.layout.starts[i] - bucket.whole.start, self.weights[i]
        return self._wholes[bucket.whole.start][place][start : start + weight.numel()].view(weight.shape)

    def gradient_views(self) -> dict[str, Tensor]:
        """Return this rank's unreduced gradients by parameter name."""
        found: dict[str, Tensor] = {}
        for bucket in self.layout.buckets:
            for i in bucket.members:
                weight, start = self.weights[i], self.layout.starts[i] - bucket.whole.start
                view = self.gradient(bucket)[start : start + weight.numel()]
                found[self.names[i]] = view.view(weight.shape)
        return found

    def seeds(self) -> dict[str, int]:
        """Return a number for each parameter, another on each rank that adds to the same sum."""
        index = 0 if self.group is None else self.mesh.index(self.axis)
        seed = self.storage.seed & 0xFFFFFFFF
        return {name: zlib.crc32(f"{name} {index}".encode()) ^ seed for name in self.names}

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

    def encoded(self, name: str) -> dict[str, EncodedRows]:
        """Return this rank's part of each parameter's moment, by its name; none if they are in fp32."""
        found, moment = defaultdict[str, EncodedRows](EncodedRows), self.moments.get(name)
        if moment is None or moment.dtype == torch.float32:
            return found
        for number, (part, (*_, row)) in enumerate(self._parts()):
            scales = [self.rows[f"scales of {name} {number}"].view(-1, 1)] if self.storage.has_scales else []
            rows, step = [moment[part].view(-1, row), *scales], max(PIECE // row, 1) * row
            for i, _, own in self.layout.own_ranges(self.weights):
                end = min(own.stop, part.stop)
                for start in range(max(own.start, part.start), end, step):
                    at = slice((start - part.start) // row, -(-(min(start + step, end) - part.start) // row))
                    found[self.names[i]].append((start - own.start, [each[at] for each in rows]))
        return found

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
        # on the device: hashes of 16B elements take a CPU minutes
        row, found = shape[-1], torch.zeros((*shape[:-1], 1), dtype=torch.int32, device=self.device)
        for i, first, part in self.layout.own_ranges(self.weights):
            start, stop = max(part.start, region.start), min(part.stop, region.stop)
            if start < stop:
                elements = torch.arange(
                    first + start - part.start, first + stop - part.start, row, device=self.device
                )
                weight, (layout, rank) = self.weights[i], (self.mesh.layout, self.mesh.rank)
                keys = (self.names[i], elements, weight.shape, layout_of(weight), layout, rank)
                at = (start - region.start) // row
                found.view(-1)[at : at + len(elements)] = origins_of(*keys, self.storage.seed)
        return found

    def reduce(self, bucket: Bucket, release: Callable[[], None]) -> dist.Work:
        """Start the reduction of a bucket's gradients, in fp32, to ``grad_shard``.

        ``release`` must wait for it; it is called if another bucket needs the memory.
        """
        shard, whole = self.grad_shard[bucket.shard], self._in_fp32(bucket, release)
        if bucket.owner is None:
            return reduce_scatter_into(shard, whole, group=self.group, async_op=True)
        if shard.numel():
            shard.copy_(whole)  # apart, since later gradients may be added to ``whole`` and reduced again
        elif whole.device.type == "cpu":
            shard = whole.clone()  # gloo overwrites the tensors of all ranks
        else:
            shard = whole
        return dist.reduce(shard, group_dst=bucket.owner, group=self.group, async_op=True)

    def reduce_in_place(self, bucket: Bucket, release: Callable[[], None]) -> tuple[dist.Work, Tensor]:
        """Start the reduction of a bucket's gradients to this rank's part of them; return that part too."""
        whole, start = self._in_fp32(bucket, release), bucket.whole.start
        part = whole[bucket.own.start - start : bucket.own.stop - start]
        if bucket.owner is None:
            return reduce_scatter_into(part, whole, group=self.group, async_op=True), part
        return dist.reduce(whole, group_dst=bucket.owner, group=self.group, async_op=True), part

    def _in_fp32(self, bucket: Bucket, release: Callable[[], None]) -> Tensor:
        whole = self.gradient(bucket)
        return whole if self.staging is None else self.staging.copy(whole, release)

    def sum_replicas(self) -> None:
        """Add up the reduced gradients of the ranks with the same shards."""
        if self.replicas is not None:
            dist.all_reduce(self.grad_shard, group=self.replicas)

    def gather(self, bucket: Bucket, place: int = 0) -> dist.Work:
        """Start the gather of a bucket's weights; if they are in slots, into number ``place`` of them."""
        if self.weight is None:
            return self._gather(bucket, self.weight_shard, self._wholes[bucket.whole.start][place])
        return self._gather(bucket, self.weight_shard, self.weight[bucket.whole])

    def _gather(self, bucket: Bucket, shards: Tensor, whole: Tensor) -> dist.Work:
        shard = shards[bucket.shard].to(whole.device)
        if bucket.owner is None:
            return all_gather_into(whole, shard, group=self.group, async_op=True)
        if shard.numel():
            whole.copy_(shard)
        return dist.broadcast(whole, group_src=bucket.owner, group=self.group, async_op=True)

    def gathered(self, shard: Tensor, into: Tensor | None = None) -> dict[str, Tensor]:
        """Gather tensors by parameter name, as views of ``into`` or new memory; if alone, of ``shard``."""
        if self.group is None:
            return self.views(shard)
        if into is None:
            into = torch.zeros(self.layout.size, dtype=shard.dtype, device=self.device)
        for bucket in self.layout.buckets:
            self._gather(bucket, shard, into[bucket.whole]).wait()
        return self.views(into)

    def shard_weights(self) -> None:
        if self.group is not None and self.weight is not None:
            self.weight_shard.copy_(self._own(self.weight))

    def _own(self, whole: Tensor) -> Tensor:
        return whole if self.group is None else torch.cat([whole[b.own] for b in self.layout.buckets])


class Staging:
    """Memory for bf16 gradients of one bucket at a time in fp32, so that ranks add them up in fp32."""

    def __init__(self, families: Sequence[Family]) -> None:
        lengths = [b.whole.stop - b.whole.start for f in families for b in f.layout.buckets]
        self.memory = torch.empty(max(lengths), device=families[0].device)
        self._release: Callable[[], None] | None = None

    def copy(self, gradients: Tensor, release: Callable[[], None]) -> Tensor:
        """Return an fp32 copy, after the last reduction; ``release`` must wait for the next one."""
        if self._release is not None:
            self._release()
        self._release = release
        return self.memory[: len(gradients)].copy_(gradients)


def families_of(
    model: nn.Module, mesh: Mesh, bucket_elements: float, rule: UpdateRule, storage: Storage = PLAIN,
    *, shares_slots: bool = False, fill: Fill | None = None,
) -> list[Family]:  # fmt: skip
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
        named = {"of_matrices": is_matrix, "storage": storage, "shares_slots": shares_slots, "fill": fill}
        found.append(Family(weights, places, mesh, axis, bucket_elements, own, **named))
    reduced = [family for family in found if family.group is not None]
    if reduced and storage.gradients != torch.float32:
        staging = Staging(reduced)
        for family in reduced:
            family.staging = staging
    return found


def in_forward_order(families: Sequence[Family]) -> list[tuple[Family, Bucket]]:
    """Return the sharded buckets in the order of their first parameters in the model."""
    # the forward's order, reversed in the backward; communicators need one order on all ranks
    buckets = [(f, bucket) for f in families if f.group is not None for bucket in f.layout.buckets]
    return sorted(buckets, key=lambda pair: min(pair[0].order[i] for i in pair[1].members))


SharedSlots = Sequence[Sequence[tuple[Family, Bucket]]]
"""The buckets of each slot that several have."""


def share_memory(families: Sequence[Family], names: Iterable[str], num_places: int = 1) -> SharedSlots:
    """Allocate gradients, and weights, of sharded families in slots; ``names`` of all parameters.

    ``num_places``: slots of weights for each slot of gradients.
    """
    sharded = [family for family in families if family.grad is None]
    buffers = [(f.layout, dict(zip(f.names, f.weights, strict=True))) for f in sharded]
    buckets = [(family, bucket) for family in sharded for bucket in family.layout.buckets]
    slots = gradient_slots(buffers, names)
    device, dtype = families[0].device, families[0].storage.gradients
    memory = [torch.zeros(length, dtype=dtype, device=device) for length in slots.lengths]
    weights: dict[int, list[Tensor]] = {}
    shared: dict[int, list[tuple[Family, Bucket]]] = {}
    for number, (family, bucket) in enumerate(buckets):
        slot, is_shared = slots.of_buckets[number], slots.is_shared(number)
        family.place_gradient(bucket, memory[slot])
        if family.weight is None:
            empty = functools.partial(torch.zeros, slots.lengths[slot], dtype=family.weight_shard.dtype)
            if slot not in weights:
                weights[slot] = [empty(device=device) for _ in range(num_places if is_shared else 1)]
            family.place_weights(bucket, weights[slot])
        if is_shared:
            shared.setdefault(slot, []).append((family, bucket))
    return [*shared.values()]
