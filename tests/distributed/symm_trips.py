"""Trips of tokens by the operations of symm and by `AllToAll`, as cases of `tests.distributed.ranks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.ops import symm
from graphmoe.ops.dispatch import send_plan
from graphmoe.ops.symm.collective import positions
from graphmoe.plan.layout import Layout
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.dispatch.symm import make_peers
from graphmoe.runtime.ranks import Mesh, Ranks

EXPERTS, TOKENS = 8, 9
ops = torch.ops.graphmoe

LIKELIHOODS = {
    "natural": (3.0, 1, 1, 1, 9, 9, 1, 0),
    "all on the last two experts": (0.0, 0, 0, 0, 0, 0, 1, 1),  # ranks of other experts receive nothing
}


@dataclass
class Exchanged:
    """Results of one trip, by `AllToAll` and by symm, with live rows in the order of arrival."""

    wanted: dict[str, Tensor]
    actual: dict[str, Tensor]
    number_NK: Tensor
    """Numbers of the received rows as symm gives them, with its dead rows."""
    arrivals_PP: Tensor
    live_A: Tensor
    """Positions of the rows that arrived."""


@dataclass(frozen=True)
class SymmTrip:
    """A trip around experts that are simple functions, forward and backward."""

    layout: Layout
    routing: str = "natural"
    block: int = 0
    top_k: int = 3
    dtype: torch.dtype = torch.float32
    backend: str = "eager"
    rows: int | None = None
    """Rows of the received tensors; without it, a few more than can arrive."""
    tokens: int = TOKENS
    hidden: int = 5
    device: str = "cpu"

    @property
    def size(self) -> int:
        return self.layout.size("ep_etp")

    @property
    def num_rows(self) -> int:
        return self.size * max(self.tokens, self.block) + 7 if self.rows is None else self.rows

    @property
    def experts(self) -> int:
        return EXPERTS // self.layout.ep

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """h, weights, experts of each slot and the gradient of the result, of a rank."""
        generator = torch.Generator().manual_seed(seed)
        shape = self.tokens, self.hidden
        h, dy = (torch.randn(shape, generator=generator).to(self.device, self.dtype) for _ in range(2))
        exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        weight = torch.rand(self.tokens, self.top_k, generator=generator).to(self.device, exact)
        if self.backend == "inductor":  # small integers: it adds in an order of its own
            h, dy, weight = h.round().clamp(-2, 2), dy.round().clamp(-2, 2), weight.round()
        likelihood = torch.tensor(LIKELIHOODS[self.routing]).expand(self.tokens, -1)
        expert = torch.multinomial(likelihood, self.top_k, generator=generator).int().to(self.device)
        return h.requires_grad_(), weight.requires_grad_(), expert, dy

    def __call__(self, ranks: Ranks, folder: Path) -> Exchanged:
        mesh = Mesh(self.layout)
        symm.use_peers(make_peers(mesh, torch.device(self.device)))
        by_symm = self.trip()
        if self.backend != "eager":
            by_symm = torch.compile(by_symm, fullgraph=True, backend=self.backend)
        wanted = gradients(self.by_alltoall(mesh), *self.inputs(ranks.rank))
        actual = gradients(by_symm, *self.inputs(ranks.rank))
        number_NK, arrivals_PP = actual.pop("number"), actual.pop("arrivals")
        live_A = positions(arrivals_PP, mesh.index("ep_etp"), self.block)
        for name in ("received", "received_weight"):
            actual[name] = actual[name][live_A[live_A < self.num_rows]]
        return Exchanged(*map(on_host, (wanted, actual, number_NK, arrivals_PP, live_A)))

    def trip(self) -> Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]:
        """h, weights and experts -> the result and what was received, by symm."""
        ep, etp = self.layout.ep, self.layout.etp
        rows, experts, block = self.num_rows, self.experts, self.block

        def run(h: Tensor, weight: Tensor, expert: Tensor) -> dict[str, Tensor]:
            plan = send_plan(expert, EXPERTS, ep, etp)
            received, of_slots, numbers, arrivals = ops.symm_dispatch(
                h, weight, expert, *plan, rows, experts, etp, block
            )
            out = ops.symm_combine(made(received, of_slots, numbers), *plan, arrivals, block)
            return {
                "out": out,
                "received": received,
                "received_weight": of_slots,
                "number": numbers,
                "arrivals": arrivals,
            }

        return run

    def by_alltoall(self, mesh: Mesh) -> Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]:
        dispatcher = AllToAll(mesh, EXPERTS)

        def run(h: Tensor, weight: Tensor, expert: Tensor) -> dict[str, Tensor]:
            plan = send_plan(expert, EXPERTS, self.layout.ep, self.layout.etp)
            received, of_slots, numbers, *handle = dispatcher.dispatch(h, weight, expert, *plan)
            out = dispatcher.combine(made(received, of_slots, numbers), *plan, *handle)
            return {"out": out, "received": received, "received_weight": of_slots, "number": numbers}

        return run


def on_host(results: Any) -> Any:
    """A tensor or a dictionary of tensors, on the host."""
    return {k: on_host(x) for k, x in results.items()} if isinstance(results, dict) else results.cpu()


def made(received: Tensor, of_slots: Tensor, numbers: Tensor) -> Tensor:
    """Apply the experts of a rank to rows: dead rows stay as they are."""
    factor = (of_slots * (numbers + 1)).masked_fill(numbers < 0, 0).sum(1, keepdim=True)
    return (received * factor).to(received.dtype)


def gradients(
    run: Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]],
    h: Tensor,
    weight: Tensor,
    expert: Tensor,
    dy: Tensor,
) -> dict[str, Tensor]:
    """Return the results of a trip, and its gradients."""
    results = run(h, weight, expert)
    dh, dweight = torch.autograd.grad(results["out"], (h, weight), dy)
    return {name: tensor.detach() for name, tensor in (results | {"dh": dh, "dweight": dweight}).items()}


@dataclass(frozen=True)
class Differences(SymmTrip):
    """Gradients in fp64 against the change of the loss of all ranks in one direction."""

    dtype: torch.dtype = torch.float64
    step: float = 1e-5

    def __call__(self, ranks: Ranks, folder: Path) -> tuple[float, float]:  # type: ignore[override]
        """This rank's part of the loss's change, by gradients and by differences."""
        symm.use_peers(make_peers(Mesh(self.layout), torch.device(self.device)))
        h, weight, expert, dy = self.inputs(ranks.rank)
        ep, etp, rows = self.layout.ep, self.layout.etp, self.num_rows

        def loss(h: Tensor, weight: Tensor) -> Tensor:
            plan = send_plan(expert, EXPERTS, ep, etp)
            received, of_slots, numbers, arrivals = ops.symm_dispatch(
                h, weight, expert, *plan, rows, self.experts, etp, self.block
            )
            out = ops.symm_combine(made(received, of_slots, numbers).tanh(), *plan, arrivals, self.block)
            return (out.sin() * dy).sum()

        generator = torch.Generator().manual_seed(ranks.rank)
        directions = [torch.randn(x.shape, generator=generator).to(x) for x in (h, weight)]
        found = torch.autograd.grad(loss(h, weight), (h, weight))
        change = sum(float((x * way).sum()) for x, way in zip(found, directions, strict=True))

        @torch.no_grad()
        def difference(step: float) -> float:
            up, down = (
                float(loss(*[x + sign * way for x, way in zip((h, weight), directions, strict=True)]))
                for sign in (step, -step)
            )
            return (up - down) / (2 * step)

        # extrapolated (Richardson), or the third derivative would be seen
        return change, (4 * difference(self.step / 2) - difference(self.step)) / 3


@dataclass(frozen=True)
class Checks(SymmTrip):
    """Torch's checks of registration, fakes, gradients and tracing; no row may be dead, since NaN differs."""

    def __call__(self, ranks: Ranks, folder: Path) -> int:  # type: ignore[override]
        symm.use_peers(make_peers(Mesh(self.layout), torch.device(self.device)))
        h, weight, expert, dy = self.inputs(ranks.rank)
        plan, sizes = send_plan(expert, EXPERTS, self.layout.ep, self.layout.etp), (self.num_rows, self.block)
        sent = (h, weight, expert, *plan, self.num_rows, self.experts, self.layout.etp, self.block)
        received, of_slots, _, arrivals = (x.detach() for x in ops.symm_dispatch(*sent))
        back = (*plan[1:3], arrivals, self.block)
        utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
        checks = (
            (ops.symm_dispatch_grad.default, (received, of_slots, *back)),
            (ops.symm_combine.default, (received.clone().requires_grad_(), *plan, arrivals, self.block)),
            (ops.symm_combine_grad.default, (dy, *plan, arrivals, *sizes)),
            (ops.symm_dispatch.default, sent),
        )
        for op, arguments in checks:
            torch.library.opcheck(op, arguments, test_utils=utils)
        return len(checks)
