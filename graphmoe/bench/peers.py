"""Other projects' fused kernels for the same operations, where they are installed and known.

A peer is used only if its functions have the arguments that their sources had when the binding was written:
at SonicMoE 8565e84, ScatterMoE 47b5e15, Liger-Kernel ead96b6, QuACK c8ec317 and cut-cross-entropy d42911f.
What it computes is compared with our own result before it is timed. Kernels that tune themselves do so at
their first call, which is not timed but takes its while.

Suffixes: T tokens, K slots, E experts, R routed rows (T * K), D hidden, F expert width, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class PeerUnusable(Exception):
    """Why a peer is left out."""


@dataclass(frozen=True)
class Function:
    """A public function of a peer, and the first of its arguments as they were read."""

    module: str
    name: str
    arguments: tuple[str, ...]

    def load(self) -> Any:
        """The function, or the class of a ``torch.autograd.Function``. *Raises* PeerUnusable."""
        try:
            found = getattr(importlib.import_module(self.module), self.name)
        except Exception as error:  # a native module may raise anything
            raise PeerUnusable(f"does not load: {type(error).__name__}: {error}".splitlines()[0]) from error
        checked: Any = getattr(found, "forward", found)
        arguments = tuple(inspect.signature(checked).parameters)
        if arguments[: len(self.arguments)] != self.arguments:
            raise PeerUnusable(
                f"{self.module}.{self.name} takes ({', '.join(arguments)}), not ({', '.join(self.arguments)})"
            )
        return found


SONIC = Function(
    "sonicmoe.functional",
    "moe_general_routing_inputs",
    ("x", "router_scores", "token_indices", "expert_indices", "w1", "b1", "w2", "b2", "E", "stream_id")
    + ("activation_type", "is_inference_mode_enabled"),
)
SCATTER_SORT = Function("scattermoe", "flatten_sort_count", ("expert_idxs", "num_experts"))
SCATTER_LINEAR = Function(
    "scattermoe",
    "parallel_linear",
    ("inputs", "expert_weights", "k", "sorted_expert_idxs", "sorted_scattered_idxs", "expert_offsets")
    + ("expert_biases", "gates", "grouped_in", "grouped_out"),
)
LIGER_MOE = Function(
    "liger_kernel.ops",
    "LigerFusedMoEFunction",
    ("ctx", "x", "gate_up_proj", "down_proj", "top_k_index", "top_k_weights"),
)
LIGER_LOSS = Function(
    "liger_kernel.transformers.functional",
    "liger_fused_linear_cross_entropy",
    ("input", "weight", "target", "bias", "ce_weight", "ignore_index", "lse_square_scale", "label_smoothing")
    + ("reduction", "softcap", "return_z_loss", "accum_dtype"),
)
QUACK_LOSS = Function(
    "quack.linear_cross_entropy",
    "chunked_linear_cross_entropy",
    ("x", "weight", "target", "chunk_size", "ignore_index", "reduction", "tuned"),
)
CUT_LOSS = Function(
    "cut_cross_entropy",
    "linear_cross_entropy",
    (
        "e",
        "c",
        "targets",
        "bias",
        "ignore_index",
        "softcap",
        "reduction",
        "shift",
        "return_lse",
        "filter_eps",
    ),
)
FUNCTIONS = {
    "sonicmoe": (SONIC,),
    "scattermoe": (SCATTER_SORT, SCATTER_LINEAR),
    "liger_kernel": (LIGER_MOE, LIGER_LOSS),
    "quack": (QUACK_LOSS,),
    "cut_cross_entropy": (CUT_LOSS,),
}
"""What is called of each package."""


@dataclass(frozen=True)
class BoundMlp:
    """A peer's routed experts with their inputs, and what gradients are taken of."""

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, Tensor, Tensor, Tensor]
    """x, the weights of gate and up and of down, and the routing weights."""
    comparable: tuple[bool, bool, bool, bool] = (True, True, True, True)
    """Whether a leaf has our layout, so that its gradient can be compared."""


def why_unusable(package: str) -> str | None:
    """Why none of a package's kernels is measured, or None if they are. Imports it if it is installed."""
    if importlib.util.find_spec(package) is None:
        return "not installed"
    try:
        for function in FUNCTIONS[package]:
            function.load()
    except PeerUnusable as error:
        return str(error)
    return None


def sonicmoe(
    x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, weight_TK: Tensor, expert_TK: Tensor
) -> BoundMlp:
    """SonicMoE's experts for any routing; each call makes its plan. Gate and up rows alternate there."""
    layer = SONIC.load()
    swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    (T, K), E = expert_TK.shape, len(w_gate_up)
    paired = torch.stack(w_gate_up.detach().chunk(2, dim=1), dim=2).flatten(1, 2)
    paired.requires_grad_(w_gate_up.requires_grad)
    token_R = torch.arange(T, device=x_TD.device, dtype=torch.int32).repeat_interleave(K)
    stream = torch.cuda.current_stream().cuda_stream if x_TD.is_cuda else 0

    def forward() -> Tensor:
        w1, w2 = paired.permute(1, 2, 0), w_down.permute(1, 2, 0)
        experts = expert_TK.flatten()
        return layer(
            x_TD, weight_TK.flatten(), token_R, experts, w1, None, w2, None, E, stream, swiglu, False
        )[0]

    return BoundMlp(forward, (x_TD, paired, w_down, weight_TK), (True, False, True, True))


def scattermoe(
    x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, weight_TK: Tensor, expert_TK: Tensor
) -> BoundMlp:
    """ScatterMoE's grouped products around a SwiGLU in plain PyTorch; the routing plan is made beforehand."""
    linear = SCATTER_LINEAR.load()
    order = SCATTER_SORT.load()(expert_TK.long(), len(w_gate_up))
    slots = expert_TK.shape[1]

    def forward() -> Tensor:
        h_RH = linear(x_TD, w_gate_up.mT, slots, *order, grouped_out=True)
        gate_RF, up_RF = h_RH.chunk(2, dim=-1)
        a_RF = torch.nn.functional.silu(gate_RF) * up_RF
        weights = weight_TK.to(x_TD.dtype)
        return linear(a_RF, w_down.mT, 1, *order, grouped_in=True, gates=weights)

    return BoundMlp(forward, (x_TD, w_gate_up, w_down, weight_TK))


def liger_mlp(
    x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, weight_TK: Tensor, expert_TK: Tensor
) -> BoundMlp:
    """Liger-Kernel's experts; each call makes its routing plan, and waits for the device to size it."""
    layer = LIGER_MOE.load()

    def forward() -> Tensor:
        return layer.apply(x_TD, w_gate_up, w_down, expert_TK, weight_TK)

    return BoundMlp(forward, (x_TD, w_gate_up, w_down, weight_TK))


def liger_loss(h_TD: Tensor, w_VD: Tensor, labels_T: Tensor) -> Callable[[], Tensor]:
    """Liger-Kernel's head and loss, the gradient of the weight summed in fp32 as ours is."""
    loss = LIGER_LOSS.load()
    return functools.partial(loss, h_TD, w_VD, labels_T, reduction="sum", accum_dtype=torch.float32)


def quack_loss(h_TD: Tensor, w_VD: Tensor, labels_T: Tensor) -> Callable[[], Tensor]:
    """QuACK's head and loss in chunks, without its search for tile sizes, which would take minutes."""
    return functools.partial(QUACK_LOSS.load(), h_TD, w_VD, labels_T, reduction="sum", tuned=False)


def cut_loss(h_TD: Tensor, w_VD: Tensor, labels_T: Tensor) -> Callable[[], Tensor]:
    """Apple's head and loss; its default drops small probabilities from the gradients, this does not."""
    return functools.partial(CUT_LOSS.load(), h_TD, w_VD, labels_T, reduction="sum", filter_eps=None)


GROUPED_MLP = {"sonicmoe": sonicmoe, "scattermoe": scattermoe, "liger_kernel": liger_mlp}
LINEAR_CROSS_ENTROPY = {"liger_kernel": liger_loss, "quack": quack_loss, "cut_cross_entropy": cut_loss}
