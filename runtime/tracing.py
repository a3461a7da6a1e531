"""A function of tensors as a graph of functional ATen operations, which passes can rewrite.

The forward is traced first and on its own: a pass that puts an operation with a gradient of its own in
place of a pattern there need not find the pattern's backward. The joint graph is traced from the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from graphmoe.torch_compat import FakeTensorMode, fake_mode, make_fx


def fakes_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Leaves with the shapes, strides, dtypes, devices and ``requires_grad`` of the tensors, without data."""
    mode = fake_mode()
    with mode:
        return [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).requires_grad_(
                t.requires_grad
            )
            for t in tensors
        ]


def trace_in_place(run: Callable[..., Sequence[Tensor]], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """The ATen graph of ``run(*tensors)`` without gradients; it ends in copies into what ``run`` changes."""
    mode: FakeTensorMode = fakes[0].fake_mode  # type: ignore[attr-defined]
    with mode, torch.no_grad():
        return make_fx(torch.func.functionalize(run, remove="mutations"))(*fakes)


def trace_forward(run: Callable[..., tuple[Tensor, ...]], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """The functional ATen graph of ``run(*tensors)``: no mutation, no autograd, one output tuple.

    Composite operations appear as what they consist of, our operations and the attention kernels as
    themselves, a custom autograd function as its forward. ``node.meta["val"]`` holds each fake value,
    ``node.meta["custom"]`` what ``torch.fx.traceback.annotate`` said.
    """
    mode: FakeTensorMode = fakes[0].fake_mode  # type: ignore[attr-defined]
    with mode, torch.enable_grad(), fx.traceback.preserve_node_meta():
        traced = make_fx(run)(*fakes)  # with gradients: attention keeps what its backward will need

    def again(*tensors: Tensor) -> tuple[Tensor, ...]:
        return fx.Interpreter(traced).run(*tensors)

    with mode, torch.no_grad(), fx.traceback.preserve_node_meta():
        functional = make_fx(torch.func.functionalize(again, remove="mutations"))(*fakes)
    functional.graph.eliminate_dead_code()
    functional.recompile()
    return functional
