"""Moments in bf16 or int8 and bf16 weights without master weights, rounded stochastically.

int8: one fp32 scale, the largest magnitude, for a row of elements (arXiv 2110.02861, section 2.1); values are
expanded by a power before rounding (arXiv 2410.19313, section 4.1), and a second moment above 0 is never
stored as 0 (arXiv 2309.01507, section 4.1). A row is 64 elements of one parameter, or a row of a matrix.

Random bits are a hash of the seed, the applied steps, and the element's position in the whole parameter. They
need no generator state, and do not depend on the number of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.config.schema import GradDtype, MasterDtype, MomentDtype, OptimConfig
from graphmoe.ops.gradients import mixed, noise, to_bf16
from graphmoe.optim import rule_of
from graphmoe.optim.rule import StepScalars, UpdateRule
from graphmoe.plan.buckets import ALIGNMENT, Kept
from graphmoe.plan.layout import Layout, ParameterLayout

ROW = ALIGNMENT  # elements with one scale; parameters and shards start at multiples of it
SMALLEST = 1e-30  # least scale, so that divisions by it are finite
EAGER_ROWS = 2**18  # rows updated at once by eager code, which bounds its temporary memory
PIECE = 2**20  # elements of a moment that a checkpoint decodes or encodes at once, in host memory
STORED = {MomentDtype.fp32: torch.float32, MomentDtype.bf16: torch.bfloat16, MomentDtype.int8: torch.int8}
Kind = tuple[Any, ...]


class Storage(NamedTuple):
    """How an optimizer stores its state."""

    moments: MomentDtype = MomentDtype.fp32
    in_place: bool = False
    """True if bf16 weights are updated in place, without fp32 master weights."""
    seed: int = 0
    offload: bool = False
    """True if master weights and moments are in host memory."""
    gradients: torch.dtype = torch.float32
    """Of unreduced gradients."""

    @property
    def is_plain(self) -> bool:
        return self.moments is MomentDtype.fp32 and not self.in_place

    @property
    def has_scales(self) -> bool:
        return self.moments is MomentDtype.int8

    def dtype(self, rule: UpdateRule, moment: str) -> torch.dtype:
        is_square = self.has_scales and moment in rule.squares
        return torch.uint8 if is_square else STORED[self.moments]


def kept_of(optim: OptimConfig) -> list[Kept]:
    """Return the bytes of state of elementwise parameters, and of whole matrices if the rule has them."""
    storage = Storage(optim.moment_dtype, optim.master_dtype is MasterDtype.bf16)
    rule = rule_of(optim.name)
    return [
        Kept(
            0 if storage.in_place else 4,
            len(own.moments) * STORED[storage.moments].itemsize,
            0 if storage.is_plain else 4 * (1 + storage.has_scales * len(own.moments)),
            2 if optim.grad_dtype is GradDtype.bf16 else 4,
        )
        for own in (rule, rule.matrices)
        if own is not None
    ]


class Region(NamedTuple):
    """Part of a rank's shards with one update: flat, or for a rule of matrices [N, rows, columns]."""

    rule: UpdateRule
    decays: bool
    main: Tensor
    """Master weights; the bf16 weights if there are none."""
    grad: Tensor
    moments: list[Tensor]
    scales: list[Tensor]
    """Of int8 moments, fp32 [..., 1]."""
    rounded: list[Tensor]
    """bf16 weights beside master weights."""
    origins: list[Tensor]
    """Random keys of rows, int32 [..., 1]; none if all state is fp32."""

    @property
    def kind(self) -> Kind:
        """Return what code of an update depends on."""
        return self.rule, self.decays, *((tuple(t.shape), t.dtype) for t in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.main, self.grad, *self.moments, *self.scales, *self.rounded, *self.origins]

    def of(self, tensors: Iterable[Tensor]) -> Region:
        """Return the region with other tensors, in the order of ``tensors``."""
        given = iter(tensors)
        main, grad = next(given), next(given)
        lists = [[next(given) for _ in each] for each in self[4:]]
        return Region(self.rule, self.decays, main, grad, *lists)


def update_stored(region: Region, scalars: StepScalars, *, eager: bool) -> None:
    """Update a region in place, in fp32 between loads and stores. No device sync.

    Compiled code is one pass over an elementwise region; ``eager`` code updates it in pieces.
    """
    pieces = [region]
    if eager and region.grad.dim() == 2:
        split = zip(*(tensor.split(EAGER_ROWS) for tensor in region.tensors), strict=True)
        pieces = [region.of(piece) for piece in split]
    for piece in pieces:
        _update(piece, scalars)


def _update(region: Region, scalars: StepScalars) -> None:
    rule, main, (origin,) = region.rule, region.main.float(), region.origins
    scales: list[Tensor | None] = [*region.scales] or [None] * len(region.moments)
    held = [*zip(region.moments, scales, strict=True)]
    decayed = main * (1 - scalars.lr * scalars.weight_decay) if region.decays else main
    moments = [decode(values, scale) for values, scale in held]
    weight, *found = rule.update(decayed, region.grad.float() / scalars.shrink, moments, scalars)

    def store(old: Tensor, new: Tensor) -> None:
        old.copy_(torch.where(scalars.ok, new, old))

    for stream, ((values, scale), moment) in enumerate(zip(held, found, strict=True), 1):
        if scale is not None:
            new, largest = encode(moment, values.dtype, noise(origin, moment.shape[-1], scalars.done, stream))
            store(scale, largest)
        elif values.dtype == torch.bfloat16:
            new = to_bf16(moment, noise(origin, moment.shape[-1], scalars.done, stream))
        else:
            new = moment
        store(values, new)
    if region.main.dtype == torch.bfloat16:
        weight = to_bf16(weight, noise(origin, weight.shape[-1], scalars.done, 0))
    store(region.main, weight)
    for rounded in region.rounded:
        rounded.copy_(region.main)


def encode(x: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize fp32 rows [..., L] to codes [..., L] and fp32 scales [..., 1]; with ``noise`` unbiased.

    ``dtype``: int8, or uint8 for values that are never negative. Without ``noise`` values are rounded to the
    nearest, which changes no value that ``decode`` returned.
    """
    size = x.abs()
    scale = size.amax(-1, keepdim=True).clamp_min(SMALLEST)
    share = size / scale
    root, top = (share.sqrt().sqrt(), 255) if dtype == torch.uint8 else (share.sqrt(), 127)
    low = (root * top).floor()
    below, above = _value(low, dtype), _value(low + 1, dtype)
    draw = 0.5 if noise is None else (noise + 0.5) / 65536
    code = low + ((share - below) / (above - below) > draw)
    if dtype == torch.uint8:  # a zero would divide the first moment by eps alone
        return torch.where(x > 0, code.clamp_min(1), code).to(dtype), scale
    return (code * x.sign()).to(dtype), scale


def decode(values: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return stored values in fp32."""
    return values.float() if scale is None else _value(values.float(), values.dtype) * scale


class EncodedRows(list[tuple[int, Sequence[Tensor]]]):
    """Pieces of a parameter's moment by first element: values [N, L], and scales [N, 1] if in int8.

    Zeros follow the last element. Temporary memory is in proportion to a piece.
    """

    def decode(self, flat: Tensor) -> None:
        for start, rows in self:
            part = flat[start : start + rows[0].numel()]
            part.copy_(decode(*(each.cpu() for each in rows)).view(-1)[: len(part)])

    def encode(self, flat: Tensor) -> None:
        for start, (values, *scales) in self:
            new, part = torch.zeros(values.shape), flat[start : start + values.numel()]
            new.view(-1)[: len(part)] = part
            if scales:
                new, largest = encode(new, values.dtype)
                scales[0].copy_(largest)
            values.copy_(new)

    def bounds(self) -> list[Tensor]:
        return [rows[-1] for _, rows in self]


def _value(code: Tensor, dtype: torch.dtype) -> Tensor:
    # the largest code is exactly 1
    if dtype == torch.uint8:
        return (code / 255).square().square()
    return code / 127 * (code / 127).abs()


def origins_of(
    name: str, first: Tensor, shape: torch.Size, parallel: ParameterLayout, layout: Layout, rank: int,
    seed: int,
) -> Tensor:  # fmt: skip
    """Return a hash, int32 [N], of a parameter's elements ``first``, int64 [N] in a rank's part of it."""
    whole, stride = torch.zeros_like(first), 1
    for dim in reversed(range(len(shape))):
        at, size = first % shape[dim], shape[dim]
        first = first // shape[dim]
        for cut in reversed([cut for cut in parallel.cuts if cut.dim == dim]):
            part, count = size // cut.pieces, layout.size(cut.axis)
            at = (at // part * count + layout.index(cut.axis, rank)) * part + at % part
            size *= count
        whole += at * stride
        stride *= size
    key = torch.tensor([zlib.crc32(name.encode()) ^ (seed & 0xFFFFFFFF)]).to(first.device, torch.int32)
    return mixed(mixed((whole >> 31).to(torch.int32) ^ mixed(key)) + (whole & 0x7FFFFFFF).to(torch.int32))
