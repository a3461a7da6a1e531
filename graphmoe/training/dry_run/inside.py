"""Memory that the project's own operations take on a GPU while they run: nobody sees its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from graphmoe.ops.linear_cross_entropy import rows_per_chunk


def bytes_inside(func: Any, args: tuple[Any, ...]) -> int:
    """The largest sum of such tensors in a call of an operation; 0 for one that is not known to have any."""
    namespace, _, name = func.name().partition("::")
    return _OF_OURS[name](*args) if namespace == "graphmoe" and name in _OF_OURS else 0


def _logits(h_TD: Tensor, w_VD: Tensor, *_: Any) -> int:
    """The logits of a chunk (graphmoe/ops/linear_cross_entropy_kernels.py)."""
    tokens, vocabulary, size = h_TD.shape[0], w_VD.shape[0], h_TD.element_size()
    return min(rows_per_chunk(tokens, vocabulary, size), tokens) * vocabulary * size


def _expert_rows(x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, _: Tensor, slot_R: Tensor, *__: Any) -> int:
    """Activations and results of the rows, before their sum (graphmoe/ops/grouped_mlp/triton_steps.py)."""
    return slot_R.shape[0] * (w_down.shape[1] + w_down.shape[2]) * x_TD.element_size()


def _expert_row_gradients(dy_TD: Tensor, h_RH: Tensor, *_: Any) -> int:
    """Gradients of the rows, before their sum."""
    return h_RH.shape[0] * dy_TD.shape[1] * dy_TD.element_size()


def _gathered(x: Tensor, axis: str, size: int, dim: int) -> int:
    """The parts one behind the other, where they do not lie so in the result."""
    return size * _bytes(x) if math.prod(x.shape[:dim]) > 1 else 0


def _scattered(x: Tensor, axis: str, size: int, dim: int) -> int:
    """The same of a sum."""
    return _bytes(x) if math.prod(x.shape[:dim]) > 1 else 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_OF_OURS: dict[str, Callable[..., int]] = {
    "linear_cross_entropy": _logits,
    "grouped_mlp": _expert_rows,
    "grouped_mlp_dgrad": _expert_row_gradients,
    "all_gather": _gathered,
    "reduce_scatter": _scattered,
}
