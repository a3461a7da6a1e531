"""Launches of the SwiGLU kernels, which are compiled without a GPU."""

from __future__ import annotations

from graphmoe.ops import swiglu_kernels as kernels


def ahead_of_time_cases():
    """bf16 rows whose width is a multiple of 16."""
    numbers = {"ends_E": "*i32:16", "experts": "i32:16", "rows": "i32", "width": "i32:16"}
    rows = {"h_RH": "*bf16:16", "weight_R": "*fp32:16", **numbers}
    tile = {"ROWS": kernels.TILE // kernels.WIDTH, "COLUMNS": kernels.WIDTH}
    common = {"constexprs": tile, "threads": kernels.THREADS}
    gradients = {"da_RF": "*bf16:16", "dh_RH": "*bf16:16", "dweight_R": "*fp32:16"}
    return [
        {"kernel": kernels._forward_kernel, "signature": rows | {"a_RF": "*bf16:16"}, **common},
        {"kernel": kernels._backward_kernel, "signature": rows | gradients, **common},
    ]
