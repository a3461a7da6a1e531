"""Tokens there and back by the dispatchers of vendors, as cases of `tests.distributed.ranks`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from graphmoe.ops.dispatch import send_plan
from graphmoe.plan.experts import Load
from graphmoe.plan.layout import Layout
from graphmoe.runtime.dispatch import deepep, nvshmem
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.dispatch.deepep import DeepEP
from graphmoe.runtime.dispatch.nvshmem import Nvshmem, PeerRows
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.buffer_fakes import fake_package
from tests.distributed.exchange_fakes import fake_exchange

TOKENS, EXPERTS, TOP_K = 13, 8, 3
PACKAGES = {
    "deepep": ("deepep", "deep_ep"),
    "turbo": ("primus_turbo", "primus_turbo.pytorch.deep_ep"),
    "turbo with another tensor": ("primus_turbo", "primus_turbo.pytorch.deep_ep", True),
}
LIKELIHOODS = {
    "natural": (1.0,) * EXPERTS,
    "all to the second rank": (0.0,) * 4 + (1.0,) * 4,
    "nothing from the first rank": (1.0,) * EXPERTS,
}


class Travels(Protocol):
    """Common part of both kinds of dispatchers."""

    capacity: Any

    def dispatch(self, h: Tensor, weight: Tensor, expert: Tensor, *plan: Tensor) -> tuple[Tensor, ...]: ...

    def combine(self, sums: Tensor, *plan_and_handle: Tensor) -> Tensor: ...


@dataclass
class Problem:
    """Tokens of one rank with their experts, and the gradient of what comes back."""

    h: Tensor
    weight: Tensor
    expert: Tensor
    dy: Tensor
    layout: Layout

    @classmethod
    def of(cls, routing: str, layout: Layout, rank: int, device: str, hidden: int, tokens: int) -> Problem:
        generator = torch.Generator().manual_seed(5 + rank)
        likelihood = torch.tensor(LIKELIHOODS[routing]).expand(tokens, -1)
        expert = torch.multinomial(likelihood, TOP_K, generator=generator).int()
        if routing == "nothing from the first rank" and rank == 0:
            expert = torch.arange(TOP_K, dtype=torch.int32).repeat(tokens, 1)
        h, dy = (torch.randn(tokens, hidden, generator=generator).bfloat16() for _ in range(2))
        weight = torch.rand(tokens, TOP_K, generator=generator)
        return cls(*(x.to(device) for x in (h, weight, expert, dy)), layout)

    def plan(self) -> tuple[Tensor, ...]:
        return send_plan(self.expert, EXPERTS, self.layout.ep, self.layout.etp)


@dataclass
class Trip:
    """Received rows of a rank, returned rows, and gradients."""

    received: Tensor
    weight: Tensor
    number: Tensor
    y: Tensor
    dh: Tensor
    dweight: Tensor
    room: Tensor | None = None

    def cpu(self) -> Trip:
        found = copy.copy(self)
        for name, value in vars(found).items():
            setattr(found, name, None if value is None else value.detach().to("cpu", copy=True))
        return found


def experts_of(received: Tensor, weight: Tensor, number: Tensor) -> Tensor:
    """A sum over the experts here, each of which only scales; NaN in a dead row stays there."""
    scale = weight * (number + 2)
    scale = torch.where(number >= 0, scale, 0 * weight).sum(1, keepdim=True)
    return (received.float() * scale).to(received.dtype)


def travel(dispatcher: Travels, problem: Problem) -> Trip:
    h, weight = (x.detach().clone().requires_grad_() for x in (problem.h, problem.weight))
    plan = problem.plan()
    received, of_slots, number, *rest = dispatcher.dispatch(h, weight, problem.expert, *plan)
    room, handle = (None, rest) if dispatcher.capacity is None else (rest[0], rest[1:])
    kept = [tensor.clone() for tensor in handle]
    y = dispatcher.combine(experts_of(received, of_slots, number), *plan, *handle)
    dh, dweight = torch.autograd.grad(y, (h, weight), problem.dy)
    for now, before in zip(handle, kept, strict=True):
        assert now.equal(before), "a handle has changed"
    return Trip(received, of_slots, number, y, dh, dweight, room)


def reference(problem: Problem, mesh: Mesh) -> Trip:
    """Trip of a problem by `AllToAll`."""
    dispatcher = AllToAll(mesh, EXPERTS)
    dispatcher.capacity = None  # type: ignore[attr-defined]
    return travel(dispatcher, problem)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Buffered:
    """A trip by a buffer, eager and compiled, and the same by ``alltoall``."""

    package: str
    routing: str

    def __call__(self, ranks: Ranks, folder: Path) -> tuple[Trip, Trip, Trip]:
        layout = Layout(dp=ranks.size, ep=ranks.size)
        mesh = Mesh(layout)
        group = mesh.group("ep_etp")
        assert group is not None
        buffer = deepep.open_buffer(fake_package(*PACKAGES[self.package]), group, 16)  # type: ignore[arg-type]
        problem = Problem.of(self.routing, layout, ranks.rank, "cpu", hidden=16, tokens=TOKENS)
        dispatcher = DeepEP.of(ranks.size, TOKENS, EXPERTS // ranks.size, slots=99)
        deepep.use_buffer(buffer)
        eager = travel(dispatcher, problem)
        compiled = travel(_Compiled(dispatcher), problem)
        deepep.close_buffer()
        assert buffer.destroyed
        return eager.cpu(), compiled.cpu(), reference(problem, mesh).cpu()


class _Compiled:
    """A dispatcher whose two halves are traced without a break."""

    def __init__(self, dispatcher: Any) -> None:
        torch._dynamo.reset()
        self.capacity = dispatcher.capacity
        self.dispatch = torch.compile(dispatcher.dispatch, backend="aot_eager", fullgraph=True)
        self.combine = torch.compile(dispatcher.combine, backend="aot_eager", fullgraph=True)


@dataclass(frozen=True)
class Symmetric:
    """A trip by NVSHMEM's exchange, eager and compiled, and the same by ``alltoall``."""

    routing: str
    etp: int = 1
    room: int | None = None
    """Rows that there is room for, or the worst case."""

    def __call__(self, ranks: Ranks, folder: Path) -> tuple[Trip, Trip, Trip]:
        layout = Layout(dp=ranks.size, ep=ranks.size // self.etp, etp=self.etp)
        mesh = Mesh(layout)
        problem = Problem.of(self.routing, layout, ranks.rank, "cpu", hidden=10, tokens=TOKENS)
        rows = ranks.size * TOKENS if self.room is None else self.room
        dispatcher = Nvshmem(Load(rows, 99), EXPERTS // layout.ep, layout.etp)
        with fake_exchange() as fake:
            nvshmem.use_rows(peer_rows(mesh, rows, 10))
            eager = travel(dispatcher, problem)
            compiled = travel(_Compiled(dispatcher), problem)
            nvshmem.use_rows(None)
        assert fake.exchanges == 8  # four of each trip
        return eager.cpu(), compiled.cpu(), reference(problem, mesh).cpu()


def peer_rows(mesh: Mesh, rows: int, hidden: int, tokens: int = TOKENS, device: str = "cpu") -> PeerRows:
    """Symmetric memory for bf16 tokens."""
    group, places = mesh.group("ep_etp"), TOP_K * mesh.layout.etp
    assert group is not None
    size = nvshmem.bytes_of(tokens, places, rows, hidden, torch.bfloat16, TOP_K, group.size())
    return PeerRows(group, size, torch.device(device))


def checked_operations(ranks: Ranks, folder: Path) -> None:
    """Schemas and fakes of the operations say what these do."""
    mesh = Mesh(Layout(dp=ranks.size, ep=ranks.size))
    problem = Problem.of("natural", mesh.layout, ranks.rank, "cpu", hidden=16, tokens=TOKENS)
    ops, rows, experts = torch.ops.graphmoe, ranks.size * TOKENS, EXPERTS // ranks.size
    tokens = problem.h, problem.weight, problem.expert
    with _buffer_of(mesh):
        received, weight, number, _, *handle = _checked(ops.buffer_dispatch, *tokens, rows, experts)
        received, weight = received.nan_to_num(), weight.nan_to_num()
        _checked(ops.buffer_combine, received, *handle)
        _checked(ops.buffer_combine_grad, problem.dy, *handle)
        _checked(ops.buffer_dispatch_grad, received, weight, number, *handle)
    plan = problem.plan()
    with fake_exchange():
        nvshmem.use_rows(peer_rows(mesh, rows, 16))
        arguments = (*tokens, *plan, rows, experts, 1)
        received, weight, _, _, arrivals = _checked(ops.nvshmem_dispatch, *arguments)
        _checked(ops.nvshmem_combine, received, *plan, arrivals)
        _checked(ops.nvshmem_combine_grad, problem.dy, *plan, arrivals, rows)
        _checked(ops.nvshmem_dispatch_grad, received, weight, *plan, arrivals)
        nvshmem.use_rows(None)


def _checked(operation: Any, *arguments: Any) -> Any:
    torch.library.opcheck(operation, arguments, test_utils=("test_schema", "test_faketensor"))
    return operation(*arguments)


@contextmanager
def _buffer_of(mesh: Mesh) -> Iterator[None]:
    group = mesh.group("ep_etp")
    assert group is not None
    deepep.use_buffer(deepep.open_buffer(fake_package(*PACKAGES["deepep"]), group, 16))  # type: ignore[arg-type]
    try:
        yield
    finally:
        deepep.use_buffer(None)


def gradients_of_slots(ranks: Ranks, folder: Path) -> Tensor:
    """Gradients of all received weights, of slots of experts elsewhere too, which a buffer sends as 0."""
    mesh = Mesh(Layout(dp=ranks.size, ep=ranks.size))
    problem = Problem.of("natural", mesh.layout, ranks.rank, "cpu", hidden=16, tokens=TOKENS)
    weight = problem.weight.requires_grad_()
    with _buffer_of(mesh):
        dispatcher = DeepEP.of(ranks.size, TOKENS, EXPERTS // ranks.size, slots=99)
        _, received, _, room, *_ = dispatcher.dispatch(problem.h, weight, problem.expert)
        return torch.autograd.grad(received[: int(room)].sum(), weight)[0]


def too_little_room(ranks: Ranks, folder: Path) -> str:
    """Return the error of ranks that have more tokens than there is room for."""
    mesh = Mesh(Layout(dp=ranks.size, ep=ranks.size))
    problem = Problem.of("natural", mesh.layout, ranks.rank, "cpu", hidden=16, tokens=TOKENS)
    small = DeepEP.of(ranks.size, TOKENS - 1, EXPERTS // ranks.size, slots=99)
    with _buffer_of(mesh):
        try:
            small.dispatch(problem.h, problem.weight, problem.expert)
        except AssertionError as error:
            return str(error)
    return ""
