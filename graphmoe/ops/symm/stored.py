"""Rows sent in fp8: quantized values and row scales, bitwise as if quantized on arrival.

Autograd needs received tensors in the model's dtype. So fp8 rows are in a tensor of that dtype, the
**carrier**: N * D bytes of values, then 4 * N of scales. Never add or cast it.
"""

from typing import Any

import torch
from torch import Tensor

from graphmoe.ops.fp8 import fp8_dtype

NO_EXPERT = -1


def parts(carrier_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a contiguous carrier: values [N, D], scales fp32 [N, 1]. D is a multiple of 16."""
    rows, columns = carrier_ND.shape
    assert columns % 16 == 0, columns
    flat = carrier_ND.view(-1)
    q_ND = flat.view(torch.uint8)[: rows * columns].view(fp8_dtype()).view(rows, columns)
    scales = flat.view(torch.float32)[rows * columns // 4 :]
    return q_ND, scales[:rows].view(rows, 1)


def words(q: Tensor) -> Tensor:
    # int32, so that copy kernels need no fp8 type
    return q.contiguous().view(torch.int32)


@torch.library.custom_op("graphmoe::fp8_arrived", mutates_args=())
def arrived(carrier_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of a carrier's q [N, D] and scales fp32 [N, 1] to save: half as large as the carrier."""
    q_ND, scale_N1 = parts(carrier_ND.contiguous())
    return q_ND.clone(), scale_N1.clone()


@arrived.register_fake
def _(carrier_ND: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = carrier_ND.shape
    q_ND = carrier_ND.new_empty(rows, columns, dtype=fp8_dtype())
    return q_ND, carrier_ND.new_empty(rows, 1, dtype=torch.float32)


def dispatch_stored(h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *way: Any) -> tuple[Tensor, ...]:
    *plan, rows, experts, etp, block = way[:8]
    q_TD, scale_T1 = torch.ops.graphmoe.fp8_rows(h_TD)
    weights = torch.cat([weight_TK, scale_T1], dim=1)
    numbers = torch.nn.functional.pad(expert_TK, (0, 1), value=NO_EXPERT)
    carrier_ND, weight_NK, number_NK, arrivals_PP = torch.ops.graphmoe.symm_bring_fp8(
        q_TD, weights, numbers, *plan, rows, experts, etp, block, h_TD.dtype
    )
    return carrier_ND, weight_NK[:, :-1].contiguous(), number_NK[:, :-1].contiguous(), arrivals_PP


def combine_grad_stored(dy_TD: Tensor, *way: Any) -> Tensor:
    *plan, rows, block = (*way[:4], *way[-2:])
    q_TD, scale_T1 = torch.ops.graphmoe.fp8_rows(dy_TD)
    numbers = torch.full_like(scale_T1, NO_EXPERT, dtype=torch.int32)
    sizes = rows, 1, 1, block
    return torch.ops.graphmoe.symm_bring_fp8(q_TD, scale_T1, numbers, *plan, *sizes, dy_TD.dtype)[0]
