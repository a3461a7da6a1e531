"""Launches of the grouped MLP's kernels, which are compiled without a GPU."""

from __future__ import annotations

from typing import Any

import torch

from graphmoe.ops.grouped_mlp import rows_kernel as rows
from graphmoe.ops.grouped_mlp.triton_steps import (
    INTO_BLOCK,
    TABLE_BLOCK,
    rows_constants,
    weight_grad_constants,
)
from graphmoe.ops.grouped_mlp.tuning import STEPS, Config, default
from graphmoe.ops.grouped_mlp.weight_grad_kernel import into_kernel, weight_grad_kernel

TARGETS = {"hopper": ("sm_90", "sm_100"), "instinct": ("gfx942", "gfx950"), "small": ("sm_90",)}
"""Targets on which the table of a kind of device is compiled."""
SHAPES = {"wide": (2048, 1408, 64, 6), "odd": (200, 72, 12, 3)}
"""D, F, E, K: DeepSeek-V2-Lite, and one with a tail in each axis."""


def ahead_of_time_cases() -> list[dict[str, Any]]:
    """Every step in the default configs of every kind of device: bf16, many and few rows, and fp32."""
    cases = [
        {
            "kernel": rows.tiles_kernel,
            "signature": {"ends_ptr": "*i32:16", "table_ptr": "*i32:16", "max_tiles": "i32"},
            "constexprs": {"E": 512, "BLOCK_E": 512, "BLOCK_M": 128, "BLOCK": TABLE_BLOCK},
            "threads": 256,
        },
        {
            "kernel": rows.weight_sums_kernel,
            "signature": {
                **{"partial_ptr": "*fp32:16", "row_ptr": "*i32:16", "sum_ptr": "*fp32:16"},
                **{"num_slots": "i32", "num_rows": "i32"},
            },
            "constexprs": {"PARTS": 6, "BLOCK": 256},
        },
        {
            "kernel": into_kernel,
            "signature": {"gradient_ptr": "*bf16:16", "total_ptr": "*fp32:16", "size": "i32"},
            "constexprs": {"ADD": True, "BLOCK": INTO_BLOCK},
            "threads": 256,
        },
    ]
    for kind, targets in TARGETS.items():
        for step in STEPS:
            many, few = (default(step, kind, torch.bfloat16, rows) for rows in (1 << 20, 20))
            named = {("wide", "bf16", "many"): many, ("odd", "bf16", "many"): many}
            if step in ("up", "down_dgrad"):
                named["wide", "bf16", "few"] = few
            if kind == "small":
                named = {("odd", "fp32", "many"): default(step, kind, torch.float32, 1 << 20)}
            for (shape, dtype, count), config in named.items():
                name = f"{step} {kind} {shape} {dtype} {count}"
                cases.append(step_case(step, config, SHAPES[shape], dtype) | {"name": name, "only": targets})
                if step == "up":
                    case = step_case("hidden", config, SHAPES[shape], dtype)
                    cases.append(case | {"name": f"hidden {name}", "only": targets})
                if step.endswith("wgrad"):
                    kept = torch.bfloat16 if dtype == "bf16" else torch.float32
                    config = default(f"{step}_into", kind, kept, 1 << 20)
                    case = step_case(step, config, SHAPES[shape], dtype, into=True)
                    cases.append(case | {"name": f"{name} into", "only": targets})
    return cases


def step_case(
    step: str, config: Config, shape: tuple[int, int, int, int], dtype: str, *, into: bool = False
) -> dict[str, Any]:
    """One launch of a step as a case of tests/ops/ahead_of_time.py; ``into`` adds to fp32 gradients."""
    options = {"threads": config.threads, "num_stages": config.stages}
    if step.endswith("wgrad"):
        return _weight_grad(step, config, shape, f"*{dtype}:16", into) | options
    return _rows(step, config, shape, f"*{dtype}:16") | options


def _weight_grad(
    step: str, config: Config, shape: tuple[int, int, int, int], pointer: str, into: bool
) -> dict[str, Any]:
    D, F, E, K = shape
    M, N = (D, F) if step == "down_wgrad" else (2 * F, D)
    rows = F if step == "down_wgrad" else 2 * F
    flags = {"DESCRIPTOR": config.descriptors != "none" and rows % 8 == 0, "ADD": into, "UPCAST": False}
    return {
        "kernel": weight_grad_kernel,
        "signature": {
            **dict.fromkeys(("left_ptr", "right_ptr"), pointer),
            "out_ptr": "*fp32:16" if into else pointer,
            **dict.fromkeys(("slot_ptr", "ends_ptr"), "*i32:16"),
        },
        "constexprs": weight_grad_constants(step, config, (E, M, N), K) | flags,
    }


def _rows(step: str, config: Config, shape: tuple[int, int, int, int], pointer: str) -> dict[str, Any]:
    D, F, _, K = shape
    sizes = {"down": (F, D), "up_dgrad": (2 * F, D)}.get(step, (D, F))
    routed, aligned = step in ("up", "hidden", "down_dgrad"), all(size % 8 == 0 for size in sizes)
    load_w = config.descriptors != "none" and aligned
    load_x = config.descriptors == "both" and aligned and not routed
    m, n, k, element = config.block_m, config.block_n, config.block_k, pointer[1:-3]
    pair = f"2, {n // 2}, {k}"
    block = {"up": pair, "hidden": pair, "down": f"1, {n}, {k}"}.get(step, f"1, {k}, {n}")
    weights = f"tensordesc<{element}[{block}]>" if load_w else pointer
    signature = {
        "x_ptr": f"tensordesc<{element}[{m}, {k}]>" if load_x else pointer,
        **{"w_ptr": weights, "ends_ptr": "*i32:16", "table_ptr": "*i32:16"},
        **{"max_tiles": "i32", "num_rows": "i32"},
    }
    if routed:
        signature |= {"h_ptr": pointer, "slot_ptr": "*i32:16"}
    if step in ("up", "down_dgrad"):
        signature |= {"a_ptr": pointer, "weight_ptr": "*fp32:16"}
    if step not in ("up", "hidden"):
        signature["out_ptr"] = pointer
    if step == "down_dgrad":
        signature["partial_ptr"] = "*fp32:16"
    absent = {name: None for name in rows.rows_kernel.arg_names if name.endswith("_ptr")}
    constants = rows_constants(step, config, sizes, load_w)
    flags = {"K": K if routed else 1, "X_DESCRIPTOR": load_x, "UPCAST": False}
    return {
        "kernel": rows.rows_kernel,
        "signature": signature,
        "constexprs": {name: None for name in absent if name not in signature} | constants | flags,
    }
