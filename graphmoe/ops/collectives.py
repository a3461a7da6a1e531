"""Collectives along an axis of the layout. With NCCL the host never waits."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.ops import HALF_DTYPES, IN_USE, register_gradient
from graphmoe.ops.waits import waiting
from graphmoe.plan.layout import Axis

# public names since torch 2.13, which warns of the private ones
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
SUMMED_DTYPES = (torch.float32, *HALF_DTYPES)  # by kernels that read peers
Reduction = Literal["sum", "max"]
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Groups(Protocol):
    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """Return this rank's process group along an axis; None if it has one rank."""


def use_groups(groups: Groups | None) -> None:
    """Set the process groups of this process's collectives; None clears them."""
    IN_USE.groups = groups
    IN_USE.shared.clear()  # of other groups


def group_of(axis: Axis, size: int | None = None) -> dist.ProcessGroup:
    """Return the process group of an axis. Raises RuntimeError if it is missing or not of ``size``."""
    group = None if IN_USE.groups is None else IN_USE.groups.group(axis)
    if group is None:
        raise RuntimeError(
            f"this process has no process group for a collective along {axis}; call "
            f"graphmoe.ops.collectives.use_groups with the Mesh of a layout that has it"
        )
    if size not in (None, group.size()):
        raise RuntimeError(
            f"a collective along {axis} expects {size} ranks, but its process group has {group.size()}: "
            f"the model was built for another layout than use_groups received"
        )
    return group


def all_gather(x: Tensor, axis: Axis, size: int, dim: int) -> Tensor:
    """Concatenate the ranks' tensors along ``dim``; the gradient is a ``reduce_scatter``."""
    return x if size == 1 else torch.ops.graphmoe.all_gather(x, axis, size, dim)


def reduce_scatter(x: Tensor, axis: Axis, size: int, dim: int) -> Tensor:
    """Return this rank's part of the sum along ``dim``; the gradient is an ``all_gather``."""
    return x if size == 1 else torch.ops.graphmoe.reduce_scatter(x, axis, size, dim)


def all_reduce(x: Tensor, axis: Axis, size: int, reduction: Reduction = "sum") -> Tensor:
    """Return the elementwise sum or maximum of the ranks' tensors. A maximum has no gradient."""
    return x if size == 1 else torch.ops.graphmoe.all_reduce(x, axis, reduction)


def all_to_all(x: Tensor, axis: Axis, size: int, split: int, join: int) -> Tensor:
    """Send part i along dim ``split`` to rank i, concatenate along ``join``. The gradient swaps both."""
    return x if size == 1 else torch.ops.graphmoe.all_to_all(x, axis, size, split, join)


def transfer(
    x: Tensor, sent: Sequence[int], arrived: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Send ``sent[p]`` rows to rank p and receive ``arrived[p]``, in rank order; copy without a group."""
    if group is None:
        return x.clone()
    received = x.new_empty(sum(arrived), *x.shape[1:])
    with waiting():
        dist.all_to_all_single(received, x.contiguous(), list(arrived), list(sent), group=group)
    return received


def sums_over(axis: Axis, size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the sum of each tensor over the axis, by one ``all_reduce``; they have the same dtype."""
    if size == 1:
        return tensors
    total = all_reduce(torch.cat([tensor.flatten() for tensor in tensors]), axis, size)
    parts = total.split([tensor.numel() for tensor in tensors])
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))


def index_along(axis: Axis, like: Tensor) -> Tensor:
    """Return this rank's index in its group, int64 [] on the device of ``like``."""
    # an operation, so that the graphs of all ranks are equal and share compiled code
    return torch.ops.graphmoe.index_along(like, axis)


class Part(NamedTuple):
    """A rank's part of a vocabulary, from label ``first`` on."""

    first: int
    whole: int  # labels of all ranks
    group: dist.ProcessGroup | None


def part_of(axis: str, size: int) -> Part:
    """Return this rank's part if it has ``size`` labels, as all ranks of the axis; "" is no axis."""
    if not axis:
        return Part(0, size, None)
    group = group_of(axis)  # type: ignore[arg-type]
    return Part(dist.get_rank(group) * size, group.size() * size, group)


def over_ranks(part: Part, lse_C: Tensor, at_label_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-sum-exps over the whole vocabulary, and the logits of labels, 0 on all ranks but one."""
    if part.group is None:
        return lse_C, at_label_C
    own_2C = torch.stack([lse_C, at_label_C])
    all_P2C = own_2C.new_empty(part.group.size(), *own_2C.shape)
    with waiting():
        all_gather_into(all_P2C.view(-1), own_2C.view(-1), group=part.group)
    return all_P2C[:, 0].logsumexp(dim=0), all_P2C[:, 1].sum(dim=0)


@torch.library.custom_op("graphmoe::all_gather", mutates_args=())
def _all_gather(x: Tensor, axis: str, size: int, dim: int) -> Tensor:
    whole = x.new_empty(_exchanged(x, size, join=dim))
    if shared := IN_USE.shared.get(axis):
        return shared.exchange(x, whole, None, dim)
    group = group_of(axis, size)  # type: ignore[arg-type]
    if math.prod(x.shape[:dim]) == 1:  # the parts are contiguous in memory
        with waiting():
            all_gather_into(whole.view(-1), x.flatten(), group=group)
        return whole
    parts = x.new_empty(size, *x.shape)
    with waiting():
        all_gather_into(parts.view(-1), x.flatten(), group=group)
    whole.unflatten(dim, (size, -1)).copy_(parts.movedim(0, dim))
    return whole


@torch.library.custom_op("graphmoe::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, axis: str, size: int, dim: int) -> Tensor:
    part = x.new_empty(_exchanged(x, size, split=dim))
    if (shared := IN_USE.shared.get(axis)) and x.dtype in SUMMED_DTYPES:
        return shared.reduce(x, part, dim)
    if math.prod(x.shape[:dim]) > 1:
        x = x.unflatten(dim, (size, -1)).movedim(dim, 0)
    with waiting():
        reduce_scatter_into(part.view(-1), x.flatten(), group=group_of(axis, size))  # type: ignore[arg-type]
    return part


@torch.library.custom_op("graphmoe::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, axis: str, size: int, split: int, join: int) -> Tensor:
    whole = x.new_empty(_exchanged(x, size, split, join))
    if shared := IN_USE.shared.get(axis):
        return shared.exchange(x, whole, split, join)
    parts = x.unflatten(split, (size, -1)).movedim(split, 0).contiguous()
    received = torch.empty_like(parts)
    with waiting():
        dist.all_to_all_single(received, parts, group=group_of(axis, size))  # type: ignore[arg-type]
    whole.unflatten(join, (size, -1)).copy_(received.movedim(0, join))
    return whole


@torch.library.custom_op("graphmoe::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, axis: str, op: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    with waiting():
        dist.all_reduce(total, _REDUCTIONS[op], group=group_of(axis))  # type: ignore[arg-type]
    return total


@torch.library.custom_op("graphmoe::index_along", mutates_args=())
def _index_along(like: Tensor, axis: str) -> Tensor:
    index = dist.get_rank(group_of(axis))  # type: ignore[arg-type]
    return torch.full((), index, dtype=torch.int64, device=like.device)


def _keep_reduction(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    if inputs[2] != "sum":
        ctx.mark_non_differentiable(output)


# sizes are arguments, so a trace needs no group
_all_gather.register_fake(lambda x, axis, size, dim: x.new_empty(_exchanged(x, size, join=dim)))
_reduce_scatter.register_fake(lambda x, axis, size, dim: x.new_empty(_exchanged(x, size, split=dim)))
_all_to_all.register_fake(lambda x, axis, *sizes: x.new_empty(_exchanged(x, *sizes)))
_all_reduce.register_fake(lambda x, axis, op: x.new_empty(x.shape))
_index_along.register_fake(lambda like, axis: like.new_empty((), dtype=torch.int64))
register_gradient(_all_gather, _reduce_scatter, lambda inputs, _: inputs[1:])
register_gradient(_reduce_scatter, _all_gather, lambda inputs, _: inputs[1:])
register_gradient(_all_to_all, _all_to_all, lambda inputs, _: (*inputs[1:3], inputs[4], inputs[3]))
# All ranks compute the same from the sum, so each addend's gradient is that of the result.
_all_reduce.register_autograd(lambda ctx, d_total: (d_total, None, None), setup_context=_keep_reduction)


def _exchanged(x: Tensor, size: int, split: int | None = None, join: int | None = None) -> list[int]:
    lengths = [*x.shape]
    if split is not None:
        if lengths[split] % size:
            raise ValueError(f"shape {lengths} cannot be cut into {size} equal parts along dim {split}")
        lengths[split] //= size
    if join is not None:
        lengths[join] *= size
    return lengths
