"""Launches of the kernels of the routing plan and of row movement, which are compiled without a GPU."""

from __future__ import annotations

from graphmoe.ops import permute_kernels as permute
from graphmoe.ops import routing_plan_kernels as plan


def ahead_of_time_cases():
    return [*row_cases(), *plan_cases()]


def row_cases():
    """Rows of bf16 for 6, 16 and 64 slots, and weights (rows of one column)."""
    common = {"row_TK": "*i32:16", "tokens": "i32"}
    wide = {"x_TD": "*bf16:16", "y_RD": "*bf16:16", "columns": "i32:16", **common}
    single = {"x_TD": "*fp32:16", "y_RD": "*fp32:16", **common}
    weighted = wide | {"weight_TK": "*fp32:16"}
    tile = {"TOKENS": 1, "COLUMNS": permute.TILE}
    column = {"TOKENS": permute.MAX_TOKENS, "COLUMNS": 1, "columns": 1}
    shapes = {
        "6": (wide, {"K": 6, "weight_TK": None, **tile}),
        "16 weighted": (weighted, {"K": 16, **tile}),
        "64 weighted": (weighted, {"K": 64, **tile}),
        "64 of narrow rows": (weighted, {"K": 64, "TOKENS": permute.MAX_TOKENS, "COLUMNS": 8}),
        "weights": (single, {"K": 1, "weight_TK": None, **column}),
    }
    launches = [
        (f"{name} {label}", kernel, signature, constexprs)
        for name, kernel in (("spread", permute._spread_kernel), ("sum", permute._sum_kernel))
        for label, (signature, constexprs) in shapes.items()
    ]
    dot = {"dx_TD": "*bf16:16", "y_RD": "*bf16:16", "dot_TK": "*fp32:16", "columns": "i32:16", **common}
    for slots, padded, width in ((6, 8, 512), (64, 64, 64)):
        tile = {"K": slots, "SLOTS": padded, "TOKENS": 1, "COLUMNS": width}
        launches.append((f"dot {slots}", permute._dot_kernel, dot, tile))
    names = ("name", "kernel", "signature", "constexprs")
    return [dict(zip(names, launch, strict=True), threads=permute.THREADS) for launch in launches]


def plan_cases():
    """64 experts and 512."""
    numbers, pointer = {"slots": "i32", "num_experts": "i32:16"}, "*i32:16"
    counts = {"counts_CB": pointer, "counts_E": pointer, "chunks": "i32", "num_experts": "i32:16"}
    tile = {"ROWS": plan.SCAN_CHUNKS, "COLUMNS": plan.SCAN_BUCKETS}
    launches = [("offset", plan._offset_kernel, counts, tile)]
    for buckets in (128, 1024):
        sizes = {"BLOCK": plan.BLOCK, "BUCKETS": buckets}
        counted = {"expert_N": pointer, "counts_CB": pointer, **numbers}
        ranked = dict.fromkeys(plan._rank_kernel.arg_names[:6], pointer) | numbers
        launches.append((f"count {buckets}", plan._count_kernel, counted, sizes))
        launches.append((f"rank {buckets}", plan._rank_kernel, ranked, sizes | {"STEP": plan.STEP}))
    names = ("name", "kernel", "signature", "constexprs")
    return [dict(zip(names, launch, strict=True), threads=plan.THREADS) for launch in launches]
