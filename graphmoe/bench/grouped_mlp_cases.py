"""Cases of the routed experts: each direction alone and a training step, by backend and shape.

Suffixes: T tokens, K slots, E experts, R routed rows (T * K), D hidden, F expert width, H = 2 * F.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from graphmoe.bench import peers
from graphmoe.bench.cases import Alternative, Case, Floor, Results, Run
from graphmoe.bench.routing import route
from graphmoe.ops.grouped_mlp.choice import MlpShape, call_op, choose_backends, random_inputs

RESULTS = {
    "forward": ("y", "h"),
    "dgrad": ("dx", "dweight", "dh", "a"),
    "wgrad": ("dw_gate_up", "dw_down"),
    "forward_backward": ("y", "dx", "dw_gate_up", "dw_down", "dweight"),
}
"""Directions, and what each gives."""
OWN_BACKENDS = ("torch", "triton")


def grouped_mlp_cases(
    shapes: dict[str, MlpShape], device: torch.device, backends: Sequence[str], peer_names: Sequence[str]
) -> Iterator[Case]:
    """Every direction at every shape, with natural routing and with one expert at 4 times the mean.

    A training step is timed with the mix of backends that ``moe.experts=auto`` takes, too.
    """
    for label, shape in shapes.items():
        sizes = {name: size for name, size in asdict(shape).items() if name != "dtype"}
        for skewed in (False, True):
            for direction, results in RESULTS.items():
                others = peer_names if direction.startswith("forward") else ()
                yield Case(
                    f"grouped_mlp/{label}{'_skewed' if skewed else ''}/{direction}",
                    sizes,
                    Floor(_flops(shape) * (3 if direction == "forward_backward" else 1), "FLOPs"),
                    results,
                    functools.partial(_alternatives, shape, skewed, direction, device, backends, others),
                    "kept" if direction == "forward_backward" else None,
                )


def _flops(shape: MlpShape) -> int:
    """Of the three products of a direction: gate, up and down."""
    return 3 * 2 * (shape.T * shape.K) * shape.F * shape.D


def _alternatives(
    shape: MlpShape,
    skewed: bool,
    direction: str,
    device: torch.device,
    backends: Sequence[str],
    peer_names: Sequence[str],
) -> list[Alternative]:
    generator = torch.Generator(device).manual_seed(0)
    routing, weight_TK = route(shape.T, shape.E, shape.K, generator, device, skewed=skewed)
    dy_TD, names = None, {name: name for name in backends}
    if direction == "forward_backward":
        dy_TD = torch.randn(shape.T, shape.D, generator=generator, device=device, dtype=shape.dtype)
        chosen = choose_backends("auto", shape, device, None)
        names[f"auto={chosen}"], direction = chosen, "forward"
    inputs = random_inputs(direction, shape, weight_TK, routing.plan, generator)
    own = [
        Alternative(name, functools.partial(_own, direction, inputs, dy_TD, backend))
        for name, backend in names.items()
    ]
    theirs = [
        Alternative(name, functools.partial(_peer, inputs, routing.expert_TK, dy_TD, name), is_peer=True)
        for name in peer_names
    ]
    return own + theirs


def _own(direction: str, inputs: Sequence[Tensor], dy_TD: Tensor | None, backend: str) -> Run:
    if dy_TD is None:
        return Run(functools.partial(call_op, direction, *inputs, backend))
    leaves, plan = _leaves(inputs), inputs[4:]
    return _training_step(lambda: call_op(direction, *leaves, *plan, backend)[0], leaves, dy_TD)


def _peer(inputs: Sequence[Tensor], expert_TK: Tensor, dy_TD: Tensor | None, name: str) -> Run:
    leaves = inputs[:4] if dy_TD is None else _leaves(inputs)
    bound = peers.GROUPED_MLP[name](*[*leaves, expert_TK])
    if dy_TD is None:
        return Run(lambda: (bound.forward(),))
    return _training_step(bound.forward, bound.leaves, dy_TD, bound.comparable)


def _leaves(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The four differentiable inputs of the forward, asking for their gradients."""
    return [tensor.detach().requires_grad_() for tensor in inputs[:4]]


def _training_step(
    forward: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    dy_TD: Tensor,
    comparable: Sequence[bool] = (True,) * 4,
) -> Run:
    def call() -> Results:
        y_TD = forward()
        gradients = torch.autograd.grad(y_TD, leaves, dy_TD)
        return y_TD.detach(), *(g if same else None for g, same in zip(gradients, comparable, strict=True))

    return Run(call, forward)
