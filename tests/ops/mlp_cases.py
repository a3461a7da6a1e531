"""Routings, inputs and checks for the grouped MLP: for the op, for kernels in the interpreter, on a GPU.

Suffixes as in graphmoe/ops/grouped_mlp. Expected values: fp64, expert by expert, without a plan.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from graphmoe.ops import grouped_mlp
from tests.ops.interpreted import INTERPRETING
from tests.ops.row_cases import NAN, brute_force_plan, fresh_memory_is_nan, pattern_of_experts, values
from tests.tolerances import TOLERANCES, relative_error

CASES = {  # name: (pattern, T, D, F, E, K, dead rows)
    "random": ("random", 15, 40, 24, 5, 3, 0),
    "odd sizes": ("random", 13, 37, 19, 4, 2, 3),
    "skewed, dead rows": ("skewed", 33, 24, 40, 4, 2, 9),
    "empty experts": ("half of the experts", 19, 16, 16, 24, 4, 0),
    "all tokens on one expert": ("one expert", 23, 32, 16, 7, 2, 2),
    "some slots are not routed here": ("unrouted", 27, 20, 12, 8, 4, 5),
    "no slot is routed here": ("nothing", 5, 8, 8, 4, 3, 4),
    "one token, one slot": ("random", 1, 9, 5, 2, 1, 0),
    "one slot": ("random", 29, 16, 8, 2, 1, 1),
    "16 slots of 512 experts": ("random", 3, 8, 8, 512, 16, 0),
    "no token": ("random", 0, 8, 8, 3, 2, 0),
}
COUNTS = [(f"{live} live slots", 8, 24, 16, 5, 4, 7) for live in (0, 1, 15, 16, 17, 32)]
"""Any number of live rows in a buffer of 39."""
IMPORTANT = ("skewed, dead rows", "empty experts", "some slots are not routed here")
"""Cases that meet every value of the other axes of a table."""
NAMES = ("y", "dx", "dw_gate_up", "dw_down", "dweight", "db_gate_up")


class Problem(NamedTuple):
    x_TD: torch.Tensor
    w_gate_up: torch.Tensor
    w_down: torch.Tensor
    weight_TK: torch.Tensor
    dy_TD: torch.Tensor
    expert_TK: torch.Tensor
    plan: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """slot_R, row_TK, ends_E."""
    live: int
    b_gate_up: torch.Tensor | None = None
    limit: float = 0.0

    @property
    def clamps(self) -> dict[str, Any]:
        """Arguments of an op behind those of replicas."""
        return {"b_gate_up": self.b_gate_up, "limit": self.limit} if self.limit else {}

    @property
    def names(self) -> tuple[str, ...]:
        """Of y and the gradients of the leaves."""
        return NAMES[: 1 + len(self.leaves)]

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.inputs if self.b_gate_up is None else (*self.inputs, self.b_gate_up)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.x_TD, self.w_gate_up, self.w_down, self.weight_TK

    @property
    def has_none_E(self) -> torch.Tensor:
        """Experts without rows."""
        return torch.diff(self.plan[2], prepend=self.plan[2].new_zeros(1)) == 0


class Directions(NamedTuple):
    """Calls of a backend, with the arguments of the ops but no backend."""

    forward: Callable[..., Any]
    dgrad: Callable[..., Any]
    hidden: Callable[..., Any]
    wgrad_into: Callable[..., Any]
    wgrad: Callable[..., Any] | None = None


if INTERPRETING:
    grouped_mlp.BACKENDS["interpreted"] = grouped_mlp.triton_backend  # "triton" is torch on a CPU


def ops_of(backend: str) -> Directions:
    """The registered ops with one backend."""
    ops, name = torch.ops.graphmoe, {"plain": "torch", "cuda": "triton"}.get(backend, backend)
    return Directions(
        lambda *args, **clamps: ops.grouped_mlp(*args, name, **clamps),
        lambda *args, **clamps: ops.grouped_mlp_dgrad(*args, name, **clamps),
        lambda *args: ops.grouped_mlp_hidden(*args, name),
        lambda *args: ops.grouped_mlp_wgrad_into(*args[:-1], name, args[-1]),
        lambda *args: ops.grouped_mlp_wgrad(*args, name),
    )


def make_problem(case, dtype, device="cpu", limit=0.0):
    """``case`` is a name or a row of `CASES`; weights of slots that are not routed here, and tokens without a
    slot that is, are NaN. With a ``limit`` experts have biases."""
    pattern, T, D, F, E, K, dead = CASES.get(case, case)
    expert_TK = pattern_of_experts(pattern, T, K, E)
    plan = brute_force_plan(expert_TK, E, dead, device)
    sizes = ((T, D), (E, 2 * F, D), (E, D, F), (T, D))
    x, w_gate_up, w_down, dy = (values(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate(sizes))
    unrouted_TK = (expert_TK < 0).to(device)
    wide = torch.promote_types(dtype, torch.float32)
    weight_TK = values(T, K, dtype=wide, device=device, seed=9).abs().masked_fill(unrouted_TK, NAN)
    x[unrouted_TK.all(dim=1)] = NAN
    routed = (plan.slot_R, plan.row_TK, plan.ends_E)
    bias = 3 * values(E, 2 * F, dtype=dtype, device=device, seed=7) if limit else None
    return Problem(x, w_gate_up, w_down, weight_TK, dy, expert_TK.to(device), routed, plan.live, bias, limit)


def leaves_of(p, wanted=(True,) * 4):
    """Inputs as leaves of autograd, of which some want gradients."""
    return [t.detach().requires_grad_(wants) for t, wants in zip(p.inputs, wanted, strict=True)]


def exact_result(p):
    """y and the gradients in fp64; NaN in the inputs belongs to no live row, and counts as 0."""
    leaves = [t.detach().double().nan_to_num(0.0).requires_grad_() for t in p.leaves]
    y_TD = written_out(p, *leaves)
    return y_TD, torch.autograd.grad(y_TD, leaves, p.dy_TD.double(), materialize_grads=True)


def written_out(p, x_TD, w_gate_up, w_down, weight_TK, b_gate_up=None):
    y_TD, steep = x_TD * 0, 1.702 if p.limit else 1.0
    for expert in p.expert_TK[p.expert_TK >= 0].unique().tolist():
        h_TH = x_TD @ w_gate_up[expert].T
        if p.limit:  # the op rounds h, which decides what is clamped
            h_TH = h_TH + (h_TH.to(p.x_TD.dtype) - h_TH).detach() + b_gate_up[expert]
        gate_TF, up_TF = h_TH.chunk(2, dim=1)
        if p.limit:
            gate_TF, up_TF = gate_TF.clamp(max=p.limit), up_TF.clamp(-p.limit, p.limit) + 1
        out_TD = (gate_TF / (1 + torch.exp(-steep * gate_TF)) * up_TF) @ w_down[expert].T
        share_T1 = (weight_TK * (p.expert_TK == expert)).sum(1, keepdim=True)
        y_TD = y_TD + share_T1 * out_TD
    return y_TD


def until_wgrad(run: Directions, p: Problem) -> tuple[torch.Tensor, ...]:
    """y, h, dx, dweight, dh and a, with NaN in all dead rows between the directions."""
    with fresh_memory_is_nan():
        y_TD, h_RH = run.forward(*p.inputs, *p.plan, **p.clamps)
        poison(p, h_RH)
        of_rows = run.dgrad(p.dy_TD, h_RH, *p.inputs[1:], *p.plan, **p.clamps)
    poison(p, *of_rows[2:])
    return y_TD, h_RH, *of_rows


def assert_directions_match(run: Directions, p: Problem, slack: float = 1.0) -> None:
    """Run the three directions one by one and compare with fp64; h computed alone has the same bits."""
    y_TD, h_RH, dx_TD, dweight_TK, *made = until_wgrad(run, p)
    with fresh_memory_is_nan():
        alone_RH = run.hidden(*p.inputs[:2], *p.plan)
    assert alone_RH.shape == h_RH.shape and torch.equal(alone_RH[: p.live], h_RH[: p.live])
    dw_gate_up, dw_down = run.wgrad(p.dy_TD, p.x_TD, *made, *p.plan)
    if p.x_TD.dtype == torch.bfloat16:  # totals of this dtype get these bits
        totals = [torch.full_like(dw, NAN) for dw in (dw_gate_up, dw_down)]
        run.wgrad_into(p.dy_TD, p.x_TD, *made, *p.plan, *totals, False)
        assert torch.equal(totals[0], dw_gate_up) and torch.equal(totals[1], dw_down)
    gradients = [dx_TD, dw_gate_up, dw_down, dweight_TK]
    if p.b_gate_up is not None:
        sums_EH = torch.ops.graphmoe.expert_sums(made[0], p.plan[2])
        gradients.append(sums_EH.to(p.x_TD.dtype))
        assert not bool(sums_EH[p.has_none_E].any())
    for name, source, actual in zip(p.names, (p.x_TD, *p.leaves), (y_TD, *gradients), strict=True):
        assert (actual.shape, actual.dtype) == (source.shape, source.dtype), name
        assert actual.is_contiguous(), name
    assert_results_match(p, y_TD, gradients, slack)
    assert not any(bool(dw[p.has_none_E].any()) for dw in (dw_gate_up, dw_down))


def assert_results_match(p: Problem, y_TD, gradients, slack: float = 1.0) -> None:
    """Compare y and the gradients with fp64, by the tolerances of x's dtype times ``slack``."""
    expected, expected_gradients = exact_result(p)
    limits = TOLERANCES[p.x_TD.dtype]
    errors = {"y": (relative_error(y_TD, expected), limits.forward * slack)}
    for name, actual, wanted in zip(p.names[1:], gradients, expected_gradients, strict=True):
        errors[name] = (relative_error(actual, wanted), limits.gradient * slack)
    bad = {n: f"{error:.1e} is over {most:.1e}" for n, (error, most) in errors.items() if not error <= most}
    assert not bad, bad


def poison(p: Problem, *buffers: torch.Tensor) -> None:
    for buffer in buffers:
        assert len(buffer) == len(p.plan[0])
        buffer[p.live :] = NAN


def interpreter_slack(dtype: torch.dtype) -> float:
    """Triton's interpreter cuts fp32 to bf16, where devices round: a bias, in each of four steps."""
    return 5.0 if dtype == torch.bfloat16 and INTERPRETING else 1.0
