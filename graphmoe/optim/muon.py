"""Muon with Moonlight's update scale (arXiv 2502.16982, section 2.2): the nearest orthogonal matrix."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from graphmoe.config.schema import OptimConfig
from graphmoe.ops.symmetric_mm import symmetric_mm
from graphmoe.optim.rule import ADAMW, StepScalars, UpdateRule

STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # keeps a zero gradient zero, such as that of an expert without tokens
RMS = 0.2  # root mean square of an update, which AdamW's has too: both use one learning rate


def orthogonalize(x_NRC: Tensor) -> Tensor:
    """Return matrices with the singular vectors of ``x`` and singular values near 1, in its dtype.

    Newton-Schulz iteration, batched over N. No device sync.
    """
    norm = torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True, dtype=torch.float32)
    return _iterate(x_NRC / (norm + EPS).to(x_NRC.dtype))


# one node in a compiled update: its products are library calls or kernels in any case
@torch.library.custom_op("graphmoe::newton_schulz", mutates_args=())
def _iterate(x_NRC: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    is_tall = x_NRC.shape[1] > x_NRC.shape[2]
    for _ in range(STEPS):
        gram = symmetric_mm(x_NRC, of_columns=is_tall)
        polynomial = symmetric_mm(gram, scale=c, add=b, diagonal=a)
        x_NRC = torch.bmm(x_NRC, polynomial) if is_tall else torch.bmm(polynomial, x_NRC)
    return x_NRC


_iterate.register_fake(lambda x_NRC: x_NRC.new_empty(x_NRC.shape))


def orthogonalize_flops(rows: int, columns: int) -> int:
    m, n = sorted((rows, columns))
    return STEPS * (4 * m * m * n + 2 * m**3)


def _numbers(config: OptimConfig) -> tuple[float, ...]:
    return (config.momentum,)


def _update(
    decayed: Tensor, g: Tensor, moments: Sequence[Tensor], scalars: StepScalars
) -> tuple[Tensor, Tensor]:
    (momentum,), (kept,) = moments, scalars.numbers
    m = kept * momentum + g
    nesterov = g + kept * m
    # on a CPU bf16 products are slower than those in fp32
    own = orthogonalize(nesterov if g.device.type == "cpu" else nesterov.bfloat16()).float()
    return decayed - scalars.lr * RMS * math.sqrt(max(g.shape[1:])) * own, m


MUON = dataclasses.replace(
    ADAMW, matrices=UpdateRule(("momentum",), _numbers, _update, flops=orthogonalize_flops)
)
