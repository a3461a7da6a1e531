"""Checks of operations: kernels and vendors' libraries against fp64 on the CPU.

Suffixes: T tokens, K slots, E experts, D hidden, F expert width, H = 2F, R rows, V vocabulary; of attention
B sequences, S tokens.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphmoe.config.schema import AttentionBackend, ConfigError
from graphmoe.doctor.outcome import (
    LIMITS,
    Error,
    Numbers,
    Skipped,
    compared,
    differing,
    relative_error,
    side_stream,
    unless_refused,
)
from graphmoe.ops import fp8_mlp, linear_cross_entropy, permute, router, swiglu  # noqa: F401  # registers
from graphmoe.ops.attention import choose_backend
from graphmoe.ops.delta_net import delta_net
from graphmoe.ops.formats import KERNELS
from graphmoe.ops.fp8 import reason_against
from graphmoe.ops.grouped_mlp.choice import MlpShape, choose_backends, random_inputs, random_routing
from graphmoe.ops.masked_attention import attention
from graphmoe.ops.masked_attention import reference as attention_in_full
from graphmoe.ops.short_conv import unit_norm
from graphmoe.ops.symmetric_mm import symmetric_mm
from graphmoe.runtime.capture.graphs import GraphMaker

ops = torch.ops.graphmoe
BF16, FP32 = torch.bfloat16, torch.float32
EXPERTS = MlpShape(T=700, D=512, F=384, E=12, K=4)
MLP_NAMES = "y dx dw_gate_up dw_down dweight"
MLA, EQUAL = (2, 384, 4, 4, 192, 128), (2, 384, 8, 2, 128, 128)  # B, S, heads, kv heads, sizes of q and v
SIGNAL_DB = {"rowwise": (22, 19), "tensorwise": (22, 18), "blockwise": (25, 22), "mxfp8": (20, 18)}
"""Least signal over noise of results and of gradients: a fp8 GEMM leaves 27 dB (docs/precision.md), with e5m2
gradients 24; results of experts pass two GEMMs, gradients three and a quantized h. Blockwise: one GEMM."""


def half(device: torch.device) -> torch.dtype:
    """Return the dtype of a run on the device."""
    return BF16 if device.type == "cuda" else FP32


def _normal(device: torch.device) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return lambda *size: torch.randn(size, generator=generator, device=device)


def _mlp(
    device: torch.device, dtype: torch.dtype, label: str, run: Callable[..., Tensor],
    limits: tuple[float, float] | None = None,
) -> Numbers:  # fmt: skip
    shape, generator = replace(EXPERTS, dtype=dtype), torch.Generator(device).manual_seed(0)
    weight_TK, plan = random_routing(shape, generator)
    given = random_inputs("forward", shape, weight_TK, plan, generator)
    return compared(label, MLP_NAMES, run, given, lambda *exact: ops.grouped_mlp(*exact, "torch")[0], limits)


def grouped_mlp(device: torch.device, backend: str, dtypes: Sequence[torch.dtype] = (BF16, FP32)) -> Numbers:
    """Compare a backend of the grouped MLP, all three directions."""
    numbers: Numbers = {}
    for dtype in dtypes:
        shape, label = replace(EXPERTS, dtype=dtype), str(dtype).removeprefix("torch.")
        unless_refused(functools.partial(choose_backends, backend, shape, device, None))
        numbers |= _mlp(device, dtype, label, lambda *given: ops.grouped_mlp(*given, backend)[0])
    return numbers


def fp8_recipe(device: torch.device, recipe: str) -> Numbers:
    """Compare the experts in fp8, or a dense GEMM and its gradients if the recipe has no experts."""
    if reason := reason_against(device, recipe):
        raise Skipped(f"{recipe} {reason}")
    limits = 10 ** (-SIGNAL_DB[recipe][0] / 20), 10 ** (-SIGNAL_DB[recipe][1] / 20)
    if KERNELS[recipe].experts:
        return _mlp(device, half(device), recipe, lambda *given: ops.fp8_mlp(*given, recipe), limits)
    normal = _normal(device)
    given = [normal(640, 512).to(half(device)), normal(384, 512).div(16).to(half(device))]

    def run(x: Tensor, w: Tensor) -> Any:
        return ops.fp8_linear(x, w, "fp8", recipe)

    return compared(recipe, "y dx dw", run, given, lambda x, w: x @ w.t(), limits)


def _qkv(device: torch.device, shape: tuple[int, ...]) -> list[Tensor]:
    B, S, heads, kv_heads, size, v_size = shape
    sizes = (B, S, heads, size), (B, S, kv_heads, size), (B, S, kv_heads, v_size)
    normal = _normal(device)
    return [normal(*each).to(half(device)) for each in sizes]


def attend(device: torch.device, shape: tuple[int, ...], backend: AttentionBackend) -> Numbers:
    """Compare causal attention by a backend that can run here."""
    scale = shape[4] ** -0.5
    run = functools.partial(attention, scale=scale, backend=backend)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_in_full(q, k, v, None, None, scale, 0)[0]

    return compared(backend.value, "out dq dk dv", run, _qkv(device, shape), exact)


def attention_backends(device: torch.device, backends: Sequence[AttentionBackend]) -> Numbers:
    """Compare each backend that this machine has; the others are numbers that say why not."""
    numbers: Numbers = {}
    for backend in backends:
        try:
            choose_backend(backend, device.type, *MLA[-2:])
        except ConfigError as error:
            numbers[backend.value] = f"skipped: {error}"
            continue
        numbers |= attend(device, MLA, backend)
    if not any(isinstance(each, Error) for each in numbers.values()):
        raise Skipped("; ".join(why.removeprefix("skipped: ") for why in numbers.values()))
    return numbers


def torch_attention(device: torch.device) -> Numbers:
    """Compare torch's attention, and kernels for documents and a window."""
    numbers = attention_backends(device, (AttentionBackend.sdpa, AttentionBackend.padded_flash))
    B, S, window, scale = *EQUAL[:2], 70, EQUAL[4] ** -0.5
    first_BS = (torch.arange(S, device=device, dtype=torch.int32) // 100 * 100).repeat(B, 1)

    def run(q: Tensor, k: Tensor, v: Tensor, first_BS: Tensor) -> Tensor:
        how: dict[str, Any] = {"scale": scale, "backend": AttentionBackend.sdpa}
        return attention(q, k, v, first_BS=first_BS, window=window, **how)

    def exact(q: Tensor, k: Tensor, v: Tensor, first_BS: Tensor) -> Tensor:
        return attention_in_full(q, k, v, first_BS, None, scale, window)[0]

    given = [*_qkv(device, EQUAL), first_BS]
    return numbers | compared("masked", "out dq dk dv", run, given, exact)


def aiter(device: torch.device) -> Numbers:
    """Compare AITER's attention, by Primus-Turbo or torch, and replay its forward from a graph."""
    if torch.version.hip is None:
        raise Skipped("AITER needs a ROCm build of torch")
    backend, prefer = AttentionBackend.turbo, torch.backends.cuda.preferred_rocm_fa_library
    try:
        choose_backend(backend, device.type, *EQUAL[-2:], groups=True)
    except ConfigError as error:
        if not torch.backends.cuda.is_ck_sdpa_available():
            raise Skipped(f"{error}; and this torch is built without CK and AITER") from error
        backend = AttentionBackend.sdpa
        prefer("ck")
    try:
        return {"by": backend.value} | attend(device, EQUAL, backend) | _replayed(device, backend)
    finally:
        prefer("default")


def _replayed(device: torch.device, backend: AttentionBackend) -> Numbers:
    qkv = _qkv(device, EQUAL)

    def run() -> tuple[Tensor]:
        return (attention(*qkv, scale=EQUAL[4] ** -0.5, backend=backend),)

    with side_stream(device):
        run()
        graph = GraphMaker(device).make(run)
        for each in qkv:
            each.mul_(0.5)
        return {"replay": differing(graph.replay(), run())}


def delta_rule(device: torch.device) -> Numbers:
    """Compare the gated delta rule with documents."""
    normal, dtype = _normal(device), half(device)
    B, S, heads, v_heads, size = 2, 200, 2, 4, 64
    q, k = (unit_norm(normal(B, S, heads, size)).to(dtype) for _ in range(2))
    decay, beta = (normal(B, S, v_heads).sigmoid() for _ in range(2))
    first_BS = (torch.arange(S, device=device, dtype=torch.int32) // 90 * 90).repeat(B, 1)
    given = [q, k, normal(B, S, v_heads, size).to(dtype), -decay, beta, first_BS]
    return compared("delta_net", "out dq dk dv dg dbeta", delta_net, given)


def routing(device: torch.device) -> Numbers:
    """Compare the kernels of router, routing plan, permutation, activation and loss."""
    return dict(each for part in (_router, _rows, _loss) for each in part(device))


def _router(device: torch.device) -> Iterator[tuple[str, Any]]:
    how = (None, None, 4, 8, "softmax", 1, 1, 1, True, False, 1.0, False)
    logits_TE = 2 * _normal(device)(2048, 128)
    expert_TK = ops.router(logits_TE, *how)[1].cpu().long()

    def exact(logits_TE: Tensor) -> Tensor:
        chosen_TK = logits_TE.softmax(-1).gather(1, expert_TK)
        return chosen_TK / chosen_TK.sum(-1, keepdim=True)

    def run(logits_TE: Tensor) -> Any:
        return ops.router(logits_TE, *how)[0]

    yield from compared("router", "weight dlogits", run, [logits_TE], exact).items()
    best_TK = logits_TE.cpu().double().topk(8).values
    wrong_TK = (logits_TE.cpu().double().gather(1, expert_TK) - best_TK).abs() > 1e-5
    yield "router choice", Error(float(wrong_TK.sum()), 0)


def _rows(device: torch.device) -> Iterator[tuple[str, Any]]:
    (T, K, E, D), dtype, normal = (1000, 6, 64, 256), half(device), _normal(device)
    x_TD, logits_TE = normal(T, D).to(dtype), normal(T, E)
    weight_TK, expert_TK = logits_TE.softmax(-1).topk(K)
    expert_TK = expert_TK.int()
    plans = ops.routing_plan(expert_TK, E), ops.routing_plan(expert_TK.cpu(), E)
    yield "routing plan", differing([each.cpu() for each in plans[0]], plans[1])

    def block(x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor) -> Tensor:
        _, ends_E, row_TK, slot_R = ops.routing_plan(expert_TK, E)
        h_RH = ops.permute(x_TD, slot_R, row_TK, ends_E)
        weight_R1 = ops.permute(weight_TK.reshape(-1, 1), slot_R, row_TK.reshape(-1, 1), ends_E)
        return ops.unpermute(ops.swiglu(h_RH, weight_R1, ends_E), slot_R, row_TK, ends_E, weight_TK)

    yield from compared("permute", "y dx dweight", block, [x_TD, weight_TK, expert_TK]).items()


def _loss(device: torch.device) -> Iterator[tuple[str, Any]]:
    (T, D, V), dtype, normal = (500, 256, 5003), half(device), _normal(device)
    labels_T = torch.randint(V, (T,), generator=torch.Generator().manual_seed(0)).to(device)
    labels_T[:7] = -100
    given = [normal(T, D).to(dtype), normal(V, D).mul(D**-0.5).to(dtype), labels_T]

    def run(h_TD: Tensor, w_VD: Tensor, labels_T: Tensor) -> Any:
        return ops.linear_cross_entropy(h_TD, w_VD, labels_T, -100)[0] / T

    yield from compared("loss", "total dh dw", run, given, None, LIMITS[dtype]).items()


def symmetric_products(device: torch.device) -> Numbers:
    """Compare the products of Muon's Newton-Schulz iteration, in bf16 on a GPU."""
    x_NRC = (_normal(device)(3, 264, 392) / 20).to(half(device))
    exact_NRC, numbers = x_NRC.cpu().double(), Numbers()
    for of_columns in (False, True):
        found = symmetric_mm(x_NRC, of_columns=of_columns, scale=0.5, diagonal=3.0)
        sides = (exact_NRC.mT, exact_NRC) if of_columns else (exact_NRC, exact_NRC.mT)
        exact = 0.5 * sides[0] @ sides[1] + 3 * torch.eye(found.shape[1], dtype=torch.float64)
        label = "columns" if of_columns else "rows"
        numbers[label] = Error(relative_error(found, exact), LIMITS[x_NRC.dtype][0])
    return numbers
