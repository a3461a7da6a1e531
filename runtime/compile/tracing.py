"""Tracing: a function of tensors as a graph of functional ATen operations, which passes can rewrite.

The forward is traced first: a pass can replace a pattern by an operation with its own gradient without
matching the pattern's backward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from graphmoe.runtime.torch_compat import (
    FakeTensorMode,
    custom_function_of,
    fake_mode,
    make_fx,
    set_grad_enabled,
    tree_map_only,
)


def fakes_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    mode = fake_mode()
    with mode:
        return [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).requires_grad_(
                t.requires_grad
            )
            for t in tensors
        ]


def trace_in_place(run: Callable[..., Sequence[Tensor]], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """Trace ``run(*tensors)`` without gradients; mutations become copies at the end of the graph."""
    mode: FakeTensorMode = fakes[0].fake_mode  # type: ignore[attr-defined]
    with mode, torch.no_grad():
        return make_fx(torch.func.functionalize(run, remove="mutations"))(*fakes)


def trace_forward(run: Callable[..., tuple[Tensor, ...]], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """Trace ``run(*tensors)`` into a functional ATen graph: no mutation, no autograd, one output tuple.

    Composite operations are decomposed, ours and attention kernels are not; a custom autograd function is its
    forward. ``node.meta["val"]`` has the fake value, ``node.meta["custom"]`` the annotation.
    """
    mode: FakeTensorMode = fakes[0].fake_mode  # type: ignore[attr-defined]

    def detaching(*tensors: Tensor) -> tuple[Tensor, ...]:
        with _DetachWithoutGradients():
            return run(*tensors)

    with mode, torch.enable_grad(), fx.traceback.preserve_node_meta():
        traced = make_fx(detaching)(*fakes)  # grad mode: attention saves what its backward reads

    def again(*tensors: Tensor) -> tuple[Tensor, ...]:
        return fx.Interpreter(traced).run(*tensors)

    with mode, torch.no_grad(), fx.traceback.preserve_node_meta():
        functional = make_fx(torch.func.functionalize(again, remove="mutations"))(*fakes)
    functional.graph.eliminate_dead_code()
    functional.recompile()
    return functional


class _DetachWithoutGradients(TorchFunctionMode):
    """Detaches results under ``torch.no_grad()``: a graph has no gradient mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        before = [a._version if isinstance(a, Tensor) and a.requires_grad else None for a in args]
        result = func(*args, **(kwargs or {}))
        if func is set_grad_enabled:
            self.stopped = not args[0]
        elif self.stopped or torch.is_inference_mode_enabled():
            if any(v is not None and a._version != v for a, v in zip(args, before, strict=True)):
                raise TypeError("a tensor with a gradient is changed in place under torch.no_grad()")
            result = tree_map_only(Tensor, torch.detach, result)
        return result


def refuse_custom_gradients(outputs: Sequence[Tensor]) -> None:
    """Raise TypeError if a custom function behind the outputs may have a backward of its own.

    A trace differentiates its forward instead, which ``gradient_of_forward = True`` allows.
    """
    todo, seen = [output.grad_fn for output in outputs], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [earlier for earlier, _ in node.next_functions]
        function = custom_function_of(node)
        if function is not None and not getattr(function, "gradient_of_forward", False):
            name = function.__name__
            raise TypeError(
                f"the backward of the torch.autograd.Function {name} cannot be compiled; make it a "
                f"torch.library operation with register_autograd, or set {name}.gradient_of_forward = True "
                f"if it is just the gradient of the forward"
            )
