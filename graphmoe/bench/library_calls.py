"""Operations of Primus-Turbo and Transformer Engine that ``suite=ops`` times beside ours.

A function makes the call of one result from the inputs of our operation. Suffixes as in `ops_suite`.
Primus-Turbo was not run yet: its calls follow commit a6a16cdc.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphmoe.bench.cases import Call, normal
from graphmoe.config import packages
from graphmoe.config.formats import FORMATS
from graphmoe.ops import fp8, fp8_choice
from graphmoe.ops import transformer_engine as te
from graphmoe.ops.grouped_mlp.vendor import turbo_config


def reason_against(library: str, device: torch.device) -> str | None:
    """Return why a library's operations are not timed; None if they are."""
    if device.type != "cuda" or library == "turbo" and torch.version.hip is None:
        return f"{library} needs a {'ROCm build of torch' if device.type == 'cuda' else 'GPU'}"
    return packages.reason_against(packages.VENDORS[library], library)


def alternatives(part: str, device: torch.device, *inputs: Any) -> dict[str, Call]:
    """Return the calls ``LIBRARY/RESULT`` of a part of the suite, of libraries that the device runs."""
    found = {}
    for library, parts in PARTS.items():
        if part in parts and reason_against(library, device) is None:
            make, *results = parts[part]
            for result in results:
                if result != "mxfp8" or result in fp8.recipes_of(device):
                    found[f"{library}/{result}"] = lazily(make, result, *inputs)
    return found


def lazily(make: Callable[..., Call], *inputs: Any) -> Call:
    """Return the call that ``make`` makes when it first runs: a library's error fails its own row alone."""
    made = functools.cache(functools.partial(make, *inputs))
    return lambda: made()()


def either(direction: str, forward: Callable[..., Tensor], d_out: Tensor, *inputs: Tensor) -> Call:
    """Return a call of ``forward``, or of its backward alone."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    if direction == "forward":
        return lambda: forward(*leaves).detach()
    out = forward(*leaves)
    return functools.partial(torch.autograd.grad, out, leaves, d_out.to(out.dtype), retain_graph=True)


def _uncompared(make: Callable[..., Call], *inputs: Any) -> Call:  # it rounds or chooses otherwise
    call = make(*inputs)
    return lambda: (call(), ())[1]


def _te_rows(result: str, x_TD: Tensor, y_RD: Tensor, expert_TK: Tensor, weight_TK: Tensor, E: int) -> Call:
    run, at = te(".permutation"), (1, expert_TK.long())
    chosen_TE = torch.zeros(len(x_TD), E, dtype=torch.int32, device=x_TD.device).scatter_(*at, 1)
    weight_TE = torch.zeros_like(chosen_TE, dtype=weight_TK.dtype).scatter_(*at, weight_TK)

    def rows() -> tuple[Tensor, ...]:  # makes its own plan from the map of experts
        return run.moe_permute_with_probs(x_TD, weight_TE, chosen_TE, len(y_RD))[:3]

    if result == "permute":
        return lambda: rows()[:1]
    weights_TE = weight_TE if result == "unpermute_weighted" else None
    return functools.partial(run.moe_unpermute, y_RD, rows()[2], weights_TE, x_TD.shape)


def _te_router(result: str, logits_TE: Tensor, dweight_TE: Tensor, bias_E: Any, *choice: Any) -> Call:
    # without statistics of balance losses, and weights as [T, E]
    run, (K, groups, score, scale) = te(".router").fused_topk_with_score_function, choice
    how = K, groups[0] == 1, *(groups if groups[0] > 1 else (None, None)), scale, score, bias_E
    return either(result, lambda x_TE: run(x_TE, *how)[0], dweight_TE, logits_TE)


def _te_loss(_: str, step: Callable[..., Any], h_TD: Tensor, w_VD: Tensor, labels_T: Tensor) -> Call:
    run = te(".cross_entropy").parallel_cross_entropy  # of logits in memory
    return lambda: step(run((h_TD @ w_VD.t())[None], labels_T[None]).sum())


def _turbo() -> Any:
    from primus_turbo.pytorch import ops  # type: ignore[import-not-found]

    return ops


def _turbo_rows(result: str, x_TD: Tensor, y_RD: Tensor, expert_TK: Tensor, _: Tensor, E: int) -> Call:
    def rows() -> Any:  # makes its own plan from the experts; without a number of rows it waits for the host
        how = {"num_topk": expert_TK.shape[1], "num_permuted_tokens": len(y_RD)}
        return _turbo().moe_permute(x_TD, expert_TK, num_local_experts=E, **how)

    if result == "permute":
        return lambda: rows()[:1]
    plan, tokens, to = rows()[1], rows()[4], {"restore_shape": x_TD.shape, "num_local_experts": E}
    return lambda: _turbo().moe_unpermute(y_RD, plan, tokens, **to)[:1]


def _turbo_router(result: str, logits_TE: Tensor, dweight_TE: Tensor, _: Any, *choice: Any) -> Call:
    # without a bias, weights as [T, E], and with scores for a balance loss in place of their sums
    run, (K, groups, score, scale) = _turbo().fused_group_topk_routing_with_aux_score, choice
    return either(result, lambda x_TE: run(x_TE, K, *groups, score, scale)[1], dweight_TE, logits_TE)


def _turbo_swiglu(result: str, h_RH: Tensor, weight_R: Tensor, da_RF: Tensor) -> Call:
    run = _turbo().swiglu_with_probs
    return either(result, lambda h_RH, weight_R: run(h_RH, weight_R, None), da_RF, h_RH, weight_R)


def _turbo_attention(_: str, direction: str, scale: float, *tensors: Tensor) -> Call:
    run = functools.partial(_turbo().flash_attn_fp8_func, softmax_scale=scale, causal=True)
    return either(direction, run, *tensors)


def _turbo_linear(result: str, generator: torch.Generator, of: fp8_choice.Dense) -> Call:
    sizes = (of.R, of.K), (of.N, of.K), (of.R, of.N)
    x_RK, w_NK, dy_RN = (normal(generator, *size).requires_grad_() for size in sizes)
    run = _turbo().gemm
    if result in FORMATS:  # quantizes both operands and their transposes in each call
        run = functools.partial(_turbo().gemm_fp8, config=turbo_config(FORMATS[result].turbo))

    def call() -> tuple[Tensor, ...]:
        y_RN = run(x_RK, w_NK, trans_b=True)
        return y_RN.detach(), *torch.autograd.grad(y_RN, (x_RK, w_NK), dy_RN)

    return call


def _turbo_experts(result: str, generator: torch.Generator, of: fp8_choice.Experts) -> Call:
    return dataclasses.replace(of, backends=f"turbo.{result}").calls(generator.device)["plain"]


_BOTH = ("forward", "backward")
PARTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "turbo": {
        "rows": (_turbo_rows, "permute", "unpermute"),
        "router": (functools.partial(_uncompared, _turbo_router), *_BOTH),
        "swiglu": (_turbo_swiglu, *_BOTH),
        "attention": (functools.partial(_uncompared, _turbo_attention), "fp8"),
        "fp8_linear": (_turbo_linear, "bf16", *FORMATS),
        "fp8_mlp": (_turbo_experts, *FORMATS),
    },
    "te": {
        "rows": (_te_rows, "permute", "unpermute", "unpermute_weighted"),
        "router": (functools.partial(_uncompared, _te_router), *_BOTH),
        "loss": (_te_loss, "forward_backward"),
    },
}
"""By library and part: the function that makes a call, and the results that it makes one for."""
