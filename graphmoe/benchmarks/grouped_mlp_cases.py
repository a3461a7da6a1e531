"""Cases of the routed experts: each direction alone and a training step, by backend and shape.

Suffixes: T tokens, K slots, E experts, R routed rows (T * K), D hidden, F expert width, H = 2 * F.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.benchmarks import peers
from graphmoe.benchmarks.cases import Alternative, Case, Floor, Results, Run
from graphmoe.benchmarks.routing import Routing, route

RESULTS = {
    "forward": ("y", "h"),
    "dgrad": ("dx", "dweight", "dh", "a"),
    "wgrad": ("dw_gate_up", "dw_down"),
    "forward_backward": ("y", "dx", "dweight", "dw_gate_up", "dw_down"),
}
"""Directions, and what each gives."""
OWN_BACKENDS = ("torch", "triton")
VENDORS = {"turbo": "primus_turbo", "te": "transformer_engine"}
"""Backends that need a package, by its import name."""


@dataclass(frozen=True)
class MlpShape:
    """Sizes of the routed experts of one layer."""

    T: int
    D: int
    F: int
    E: int
    K: int

    def flops(self, direction: str) -> int:
        """Of the three products of a direction; a step runs all three directions."""
        one = 2 * (self.T * self.K) * (2 * self.F * self.D + self.F * self.D)
        return 3 * one if direction == "forward_backward" else one


class Inputs(NamedTuple):
    """Tensors of one layer. No gradient is asked for."""

    x_TD: Tensor
    weight_TK: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    dy_TD: Tensor
    routing: Routing

    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four differentiable inputs, in the order of their gradients in `RESULTS`, asking for them."""
        x, weight, w_gate_up, w_down = (t.detach().requires_grad_() for t in self[:4])
        return x, weight, w_gate_up, w_down


def grouped_mlp_cases(
    shapes: dict[str, MlpShape], device: torch.device, backends: Sequence[str], peer_names: Sequence[str]
) -> Iterator[Case]:
    """Every direction at every shape, with natural routing and with one expert at 4 times the mean."""
    for label, shape in shapes.items():
        for skewed in (False, True):
            for direction, results in RESULTS.items():
                others = peer_names if direction.startswith("forward") else ()
                yield Case(
                    f"grouped_mlp/{label}{'_skewed' if skewed else ''}/{direction}",
                    asdict(shape),
                    Floor(shape.flops(direction), "FLOPs"),
                    results,
                    functools.partial(_alternatives, shape, skewed, direction, device, backends, others),
                    "kept" if direction == "forward_backward" else None,
                )


def make_inputs(shape: MlpShape, skewed: bool, device: torch.device) -> Inputs:
    """Random inputs whose activations and results are of order one."""
    T, D, F, E, K = asdict(shape).values()
    generator = torch.Generator(device).manual_seed(0)
    routing, weight_TK = route(T, E, K, generator, device, skewed=skewed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16).mul_(scale)

    x_TD, dy_TD = normal(T, D), normal(T, D)
    return Inputs(
        x_TD, weight_TK, normal(E, 2 * F, D, scale=D**-0.5), normal(E, D, F, scale=F**-0.5), dy_TD, routing
    )


def _alternatives(
    shape: MlpShape,
    skewed: bool,
    direction: str,
    device: torch.device,
    backends: Sequence[str],
    peer_names: Sequence[str],
) -> list[Alternative]:
    from graphmoe.ops import grouped_mlp  # noqa: F401  # registers the ops

    inputs = make_inputs(shape, skewed, device)
    bind = {"forward": _forward, "dgrad": _dgrad, "wgrad": _wgrad, "forward_backward": _forward_backward}
    own = [Alternative(name, functools.partial(bind[direction], inputs, name)) for name in backends]
    theirs = [
        Alternative(name, functools.partial(_peer, inputs, name, direction), is_peer=True)
        for name in peer_names
    ]
    return own + theirs


def _forward(inputs: Inputs, backend: str) -> Run:
    plan = inputs.routing.plan
    args = (inputs.x_TD, inputs.w_gate_up, inputs.w_down, inputs.weight_TK, *plan, backend)
    return Run(functools.partial(torch.ops.graphmoe.grouped_mlp, *args))


def _dgrad(inputs: Inputs, backend: str) -> Run:
    h_RH = _forward(inputs, "torch").call()[1]
    weights = (inputs.w_gate_up, inputs.w_down, inputs.weight_TK)
    args = (inputs.dy_TD, h_RH, *weights, *inputs.routing.plan, backend)
    return Run(functools.partial(torch.ops.graphmoe.grouped_mlp_dgrad, *args))


def _wgrad(inputs: Inputs, backend: str) -> Run:
    dh_RH, a_RF = _dgrad(inputs, "torch").call()[2:]
    args = (inputs.dy_TD, inputs.x_TD, dh_RH, a_RF, *inputs.routing.plan, backend)
    return Run(functools.partial(torch.ops.graphmoe.grouped_mlp_wgrad, *args))


def _forward_backward(inputs: Inputs, backend: str) -> Run:
    leaves = inputs.leaves()
    x_TD, weight_TK, w_gate_up, w_down = leaves

    def forward() -> Tensor:
        plan = inputs.routing.plan
        return torch.ops.graphmoe.grouped_mlp(x_TD, w_gate_up, w_down, weight_TK, *plan, backend)[0]

    return _training_step(forward, leaves, inputs.dy_TD)


def _peer(inputs: Inputs, name: str, direction: str) -> Run:
    tensors = inputs[:4] if direction == "forward" else inputs.leaves()
    bound = peers.GROUPED_MLP[name](*tensors, inputs.routing.expert_TK)
    if direction == "forward":
        return Run(lambda: (bound.forward(),))
    return _training_step(bound.forward, bound.leaves, inputs.dy_TD, bound.comparable)


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
