"""Rows that travel in 8 bits: stored numbers and the scales of their rows, as in `graphmoe.ops.fp8`.

Suffixes as in the package. Rows are rounded where they are sent, by a scale of their own, so those that
arrive have the bits that rounding at arrival would give. Sums never travel so.

A received tensor lies between two compile units, and its gradient has as many numbers of the model's dtype.
So stored rows arrive in a tensor of that dtype and shape, the **carrier**: of its bytes the first N * D are
the numbers, the next 4 * N the scales, and nothing reads the rest. A carrier is handed on whole, never added
to or cast.
"""

from typing import Any

import torch
from torch import Tensor

from graphmoe.ops.fp8 import fp8_dtype

NO_EXPERT = -1


def parts(carrier_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a contiguous carrier: numbers [N, D], and scales fp32 [N, 1]. D is a multiple of 16."""
    rows, columns = carrier_ND.shape
    assert columns % 16 == 0, columns
    flat = carrier_ND.view(-1)
    q_ND = flat.view(torch.uint8)[: rows * columns].view(fp8_dtype()).view(rows, columns)
    scales = flat.view(torch.float32)[rows * columns // 4 :]
    return q_ND, scales[:rows].view(rows, 1)


def words(q: Tensor) -> Tensor:
    """Show rows of numbers as int32: no kernel that copies them then asks what a number is."""
    return q.contiguous().view(torch.int32)


@torch.library.custom_op("graphmoe::fp8_arrived", mutates_args=())
def arrived(carrier_ND: Tensor) -> tuple[Tensor, Tensor]:
    """q [N, D] and scales fp32 [N, 1] of a carrier: copies, half as large, so that it need not be kept."""
    q_ND, scale_N1 = parts(carrier_ND.contiguous())
    return q_ND.clone(), scale_N1.clone()


@arrived.register_fake
def _(carrier_ND: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = carrier_ND.shape
    q_ND = carrier_ND.new_empty(rows, columns, dtype=fp8_dtype())
    return q_ND, carrier_ND.new_empty(rows, 1, dtype=torch.float32)


def dispatch_stored(h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *way: Any) -> tuple[Tensor, ...]:
    """Results of ``symm_dispatch`` of the same arguments with tokens in a carrier."""
    *plan, rows, experts, etp, block = way[:8]
    q_TD, scale_T1 = torch.ops.graphmoe.fp8_rows(h_TD)
    weights = torch.cat([weight_TK, scale_T1], dim=1)
    numbers = torch.nn.functional.pad(expert_TK, (0, 1), value=NO_EXPERT)
    carrier_ND, weight_NK, number_NK, arrivals_PP = torch.ops.graphmoe.symm_bring_fp8(
        q_TD, weights, numbers, *plan, rows, experts, etp, block, h_TD.dtype
    )
    return carrier_ND, weight_NK[:, :-1].contiguous(), number_NK[:, :-1].contiguous(), arrivals_PP


def combine_grad_stored(dy_TD: Tensor, *way: Any) -> Tensor:
    """``symm_combine_grad`` of the same arguments in a carrier."""
    *plan, rows, block = (*way[:4], *way[-2:])
    q_TD, scale_T1 = torch.ops.graphmoe.fp8_rows(dy_TD)
    numbers = torch.full_like(scale_T1, NO_EXPERT, dtype=torch.int32)
    carrier_ND: Tensor = torch.ops.graphmoe.symm_bring_fp8(
        q_TD, scale_T1, numbers, *plan, rows, 1, 1, block, dy_TD.dtype
    )[0]
    return carrier_ND
