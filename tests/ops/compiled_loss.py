"""Launches of the kernels of linear cross-entropy, which are compiled without a GPU."""

from __future__ import annotations

from graphmoe.ops import linear_cross_entropy_kernels as kernels


def ahead_of_time_cases():
    outputs = dict.fromkeys(("rows", "total", "cross_entropy", "z_sum"), "*fp32:16")
    cases = [
        {
            "kernel": kernels._total_kernel,
            "signature": {**outputs, "count": "*i64:16", "T": "i32:16", "z_loss_coef": "fp32"},
            "constexprs": {"BLOCK": kernels.TOTAL_BLOCK},
        }
    ]
    integers = {
        **dict.fromkeys(("start", "V", "stride", "T", "seq_len"), "i32:16"),
        **dict.fromkeys(("ignore_index", "label_shift"), "i32"),
    }
    pointers = {"rows": "*fp32:16", "labels": "*i64:16"}
    vendors = {64: ("gfx942", "gfx950"), 32: ("sm_90", "sm_100")}  # by the threads of a warp
    for dtype, group, gradient in (("bf16", 8, True), ("bf16", 8, False), ("fp32", 4, True)):
        sizes = {"BLOCK": kernels.BLOCK, "GROUP": group, "STAGES": kernels.STAGES}
        for warp, targets in vendors.items():
            cases.append(
                {
                    "name": f"{dtype}{', gradient' if gradient else ''}, warps of {warp}",
                    "kernel": kernels._rows_kernel,
                    "signature": {"logits": f"*{dtype}:16", **pointers, **integers, "z_loss_coef": "fp32"},
                    "constexprs": {"WITH_GRADIENT": gradient, **sizes},
                    "num_warps": kernels.THREADS // warp,
                    "only": targets,
                }
            )
    ones = dict.fromkeys(("V", "T", "seq_len", "label_shift"), 1)  # Triton makes constants of them
    for case in cases[1:3]:
        rest = {name: kind for name, kind in case["signature"].items() if name not in ones}
        constexprs = {**case["constexprs"], **ones, "BLOCK": 256}
        cases.append(
            {**case, "name": "sizes of 1", "signature": rest, "constexprs": constexprs, "num_warps": 1}
        )
    return cases
