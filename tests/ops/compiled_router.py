"""Launches of the router's kernels, which are compiled without a GPU."""

from __future__ import annotations

import triton

from graphmoe.ops import router_backward_kernels as backward
from graphmoe.ops import router_kernels as router


def ahead_of_time_cases():
    return [*forward_cases(), *backward_cases()]


def forward_cases():
    f32, i32 = "*fp32:16", "*i32:16"
    signature = {
        **dict.fromkeys(("logits", "bias", "weight", "partial"), f32),
        **dict.fromkeys(("S", "programs"), "i32:16"),
        "expert": i32,
        "steps": "i32",
        "scale": "fp32",
    }
    cases = []
    for E, K, sigmoid, groups, limit, best in (
        (64, 6, False, 1, 1, 1),
        (256, 8, True, 8, 4, 2),
        (160, 6, False, 8, 3, 1),
        (512, 16, True, 1, 1, 1),
    ):
        sizes = (triton.next_power_of_2(groups), triton.next_power_of_2(E // groups))
        experts = {"E": E, "K": K, "SLOTS": triton.next_power_of_2(K)}
        switches = {"SIGMOID": sigmoid, "RENORMALISE": sigmoid, "AFTER_TOPK": False, "chosen": None}
        switches["COUNT_SCORES"] = sigmoid
        limits = {"GROUPS": groups, "TOPK_GROUPS": limit, "GROUP_TOP": best}
        padded = {"PADDED_GROUPS": sizes[0], "PADDED_SIZE": sizes[1]}
        tokens = router.tokens_of_block(sizes[0] * sizes[1], 4096)
        cases.append(
            {
                "name": f"{E} experts, {groups} groups",
                "kernel": router._forward_kernel,
                "signature": signature,
                "constexprs": {**experts, **switches, **limits, **padded, "TOKENS": tokens},
            }
        )
    after = {**cases[0]["constexprs"], "AFTER_TOPK": True, "bias": None}
    unbiased = {name: kind for name, kind in signature.items() if name != "bias"}
    cases.append({**cases[0], "name": "after top-k", "signature": unbiased, "constexprs": after})
    given = {name: value for name, value in cases[0]["constexprs"].items() if name != "chosen"}
    with_chosen = {**signature, "chosen": i32}
    cases.append({**cases[0], "name": "given", "signature": with_chosen, "constexprs": given})
    ones = dict.fromkeys(("S", "programs", "steps"), 1)  # Triton makes a constant of an argument that is 1
    rest = {name: kind for name, kind in cases[0]["signature"].items() if name not in ones}
    constexprs = {**cases[0]["constexprs"], **ones}
    cases.append({**cases[0], "name": "one token", "signature": rest, "constexprs": constexprs})
    outputs = dict.fromkeys(("partial", "counts", "share", "z_sum", "entropy_sum"), f32)
    cases.append(
        {
            "kernel": router._sum_kernel,
            "signature": {**outputs, **dict.fromkeys(("programs", "all_programs"), "i32:16")},
            "constexprs": {"E": 64, "ROWS": router.SUMMED_ROWS, "COLUMNS": router.SUMMED_COLUMNS},
        }
    )
    return cases


def backward_cases():
    floats = ("dweight", "dshare_sum", "dz_sum", "dentropy_sum", "logits", "dlogits")
    signature = {
        **dict.fromkeys(floats, "*fp32:16"),
        "expert": "*i32:16",
        **dict.fromkeys(("T", "S"), "i32:16"),
        "scale": "fp32",
    }
    cases = []
    for E, K, sigmoid, after in ((64, 6, False, False), (60, 4, False, True), (512, 16, True, False)):
        width = triton.next_power_of_2(E)
        sizes = {"E": E, "K": K, "WIDTH": width, "TOKENS": router.tokens_of_block(width, 4096)}
        switches = {"SIGMOID": sigmoid, "RENORMALISE": sigmoid, "AFTER_TOPK": after}
        cases.append(
            {
                "name": f"gradient of {E} experts",
                "kernel": backward._backward_kernel,
                "signature": signature,
                "constexprs": {**sizes, **switches},
            }
        )
    ones = {"T": 1, "S": 1}  # Triton makes a constant of an argument that is 1
    rest = {name: kind for name, kind in signature.items() if name not in ones}
    constexprs = {**cases[0]["constexprs"], **ones}
    cases.append({**cases[0], "name": "gradient of one token", "signature": rest, "constexprs": constexprs})
    return cases
