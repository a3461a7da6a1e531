"""Trips of tokens to the ranks of their experts and back, as cases of `tests.distributed.ranks`.

Each dispatcher must give bitwise what ``alltoall`` gives, and that is checked by the definition of a trip.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphmoe.config.schema import ModelConfig
from graphmoe.ops import symm
from graphmoe.ops.collectives import use_groups
from graphmoe.ops.dispatch import send_plan
from graphmoe.ops.symm.collective import positions
from graphmoe.plan.experts import Load
from graphmoe.plan.layout import Layout
from graphmoe.runtime.dispatch import close_dispatcher, deepep, nvshmem, open_buffer, open_rows
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.dispatch.deepep import DeepEP
from graphmoe.runtime.dispatch.nvshmem import Nvshmem, PeerRows
from graphmoe.runtime.dispatch.symm import Symm, make_peers
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.fake_vendors import fake_exchange, fake_package

EXPERTS, SLOTS = 8, 99
PACKAGES = {
    "deepep": ("deepep", "deep_ep"),
    "turbo": ("primus_turbo", "primus_turbo.pytorch.deep_ep"),
    "turbo with another tensor": ("primus_turbo", "primus_turbo.pytorch.deep_ep", True),
}
LIKELIHOODS = {
    "natural": (3.0, 1, 1, 1, 9, 9, 1, 0),
    "all on the last two experts": (0.0, 0, 0, 0, 0, 0, 1, 1),  # ranks of other experts receive nothing
    "all to the second rank": (0.0,) * 4 + (1.0,) * 4,
    "nothing from the first rank": (1.0,) * EXPERTS,
}
Results = dict[str, Tensor]
GRADIENTS = ("out", "dh", "dweight")


@dataclass
class Exchanged:
    wanted: Results  # by AllToAll, on the host
    actual: Results  # by the dispatcher
    live_A: Tensor  # positions of the rows that arrived, in the order of arrival

    def assert_bitwise(self) -> None:
        wanted, actual, live = self.wanted, self.actual, self.live_A
        here = wanted["number"] >= 0
        assert wanted["number"].equal(actual["number"][live])
        assert wanted["received"].equal(actual["received"][live])
        assert wanted["weight"][here].equal(actual["weight"][live][here])
        for key in GRADIENTS:
            assert actual[key].dtype == wanted[key].dtype
            assert actual[key].equal(wanted[key]) and actual[key].any(), key

    def lost(self, num_rows: int) -> int:
        """Number of rows that did not fit; those that did are there, and all results are finite."""
        fits = self.live_A < num_rows
        for key in ("received", "number"):
            assert self.actual[key][self.live_A[fits]].equal(self.wanted[key][fits])
        assert all(bool(self.actual[key].isfinite().all()) for key in GRADIENTS)
        return int((~fits).sum())


@functools.cache
def _mesh_of(ranks: Ranks, layout: Layout) -> Mesh:
    # A communicator of NCCL holds some 300 MB of a GPU until its process ends.
    return Mesh(layout)


@dataclass(frozen=True)
class Trip:
    """A trip around experts that only scale, forward and backward."""

    kind: str  # symm, nvshmem, or one of PACKAGES
    layout: Layout
    routing: str = "natural"
    block: int = 0  # as Symm.block
    top_k: int = 3
    dtype: torch.dtype = torch.float32
    backend: str = "eager"  # compiler of the two halves of the dispatcher
    rows: int | None = None  # that are received; if None, all that can arrive, and a few more for symm
    tokens: int = 9
    hidden: int = 5
    device: str = "cpu"

    @property
    def size(self) -> int:
        return self.layout.size("ep_etp")

    @property
    def num_rows(self) -> int:
        if self.rows is not None:
            return self.rows
        return self.size * max(self.tokens, self.block) + (7 if self.kind == "symm" else 0)

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """h, weights, experts of each slot and the gradient of the result, of a rank or another seed."""
        generator = torch.Generator().manual_seed(rank)
        shape = self.tokens, self.hidden
        h, dy = (torch.randn(shape, generator=generator).to(self.device, self.dtype) for _ in range(2))
        weight = torch.rand(self.tokens, self.top_k, generator=generator).to(self.device)
        likelihood = torch.tensor(LIKELIHOODS[self.routing]).expand(self.tokens, -1)
        expert = torch.multinomial(likelihood, self.top_k, generator=generator).int()
        if self.routing == "nothing from the first rank" and rank % self.size == 0:
            expert = torch.arange(self.top_k, dtype=torch.int32).repeat(self.tokens, 1)
        return h.requires_grad_(), weight.requires_grad_(), expert.to(self.device), dy

    def __call__(self, ranks: Ranks, folder: Path) -> Any:
        mesh = _mesh_of(ranks, self.layout) if self.device == "cuda" else Mesh(self.layout)
        use_groups(mesh)
        with self.opened(mesh) as dispatcher:
            found = self.on_ranks(ranks, mesh, dispatcher)
        use_groups(None)
        return found

    def on_ranks(self, ranks: Ranks, mesh: Mesh, dispatcher: Any) -> Any:
        inputs = self.inputs(ranks.rank)
        wanted = self.exchange(AllToAll(mesh, EXPERTS), *inputs)
        actual = self.exchange(dispatcher if self.backend == "eager" else self.compiled(dispatcher), *inputs)
        return Exchanged(on_host(wanted), on_host(actual), self.live(actual, wanted, mesh).cpu())

    def compiled(self, dispatcher: Any) -> Any:
        torch._dynamo.reset()
        halves = dispatcher.dispatch, dispatcher.combine
        dispatch, combine = (torch.compile(half, backend=self.backend, fullgraph=True) for half in halves)
        rest = {"capacity": dispatcher.capacity, "handle": dispatcher.handle}
        return SimpleNamespace(dispatch=dispatch, combine=combine, **rest)

    def live(self, actual: Results, wanted: Results, mesh: Mesh) -> Tensor:
        if self.kind == "symm":
            return positions(actual["arrivals"], mesh.index("ep_etp"), self.block)
        return torch.arange(len(wanted["number"]))

    def exchange(self, dispatcher: Any, h: Tensor, weight: Tensor, expert: Tensor, dy: Tensor) -> Results:
        """Received and returned rows, handle and gradients. No device sync where no dispatcher waits."""
        plan = send_plan(expert, EXPERTS, self.layout.ep, self.layout.etp)
        received, of_slots, number, *rest = dispatcher.dispatch(h, weight, expert, *plan)
        room, handle = ([], rest) if dispatcher.capacity is None else (rest[:1], rest[1:])
        scale = torch.where(number >= 0, of_slots * (number + 2), 0 * of_slots).sum(1, keepdim=True)
        made = (received.to(torch.promote_types(received.dtype, torch.float32)) * scale).to(received.dtype)
        out = dispatcher.combine(made, *plan, *handle)
        dh, dweight = torch.autograd.grad(out, (h, weight), dy)
        results = {"out": out, "dh": dh, "dweight": dweight, "received": received, "weight": of_slots}
        results |= {"number": number, **dict(zip(["room"], room, strict=False))}
        results |= dict(zip(dispatcher.handle, handle, strict=True))
        return {name: tensor.detach() for name, tensor in results.items()}

    def by_definition(self, rank: int) -> Results:
        h, weight, expert, dy = (x.detach().cpu().float() for x in self.inputs(rank))
        scale = self.layout.etp * (expert % (EXPERTS // self.layout.ep) + 2)
        total = (weight * scale).sum(1, keepdim=True)
        return {"out": total * h, "dh": total * dy, "dweight": (h * dy).sum(1, keepdim=True) * scale}

    @contextmanager
    def opened(self, mesh: Mesh) -> Iterator[Any]:
        """Give the dispatcher; on a CPU with fakes of the vendors' libraries."""
        group, experts, ranks = mesh.group("ep_etp"), EXPERTS // self.layout.ep, self.size
        assert group is not None
        room, on_gpu = Load(self.num_rows, SLOTS), self.device == "cuda"
        if self.kind == "symm":
            symm.use_peers(make_peers(mesh, torch.device(self.device)))
            yield Symm(room, experts, self.layout.etp, self.block)
        elif self.kind == "nvshmem" and on_gpu:
            model = ModelConfig(hidden_size=self.hidden, num_experts=EXPERTS, top_k=self.top_k)
            device = torch.device("cuda", torch.cuda.current_device())
            open_rows(model, mesh, self.tokens, self.num_rows, self.dtype, device)
            yield Nvshmem(room, experts, self.layout.etp)
            close_dispatcher()
        elif self.kind == "nvshmem":
            with fake_exchange() as fake:
                sizes = (self.tokens, self.top_k * self.layout.etp, self.num_rows, self.hidden, self.dtype)
                size = nvshmem.bytes_of(*sizes, self.top_k, ranks)
                nvshmem.use_rows(PeerRows(group, size, torch.device("cpu")))
                yield Nvshmem(room, experts, self.layout.etp)
                nvshmem.use_rows(None)
            assert fake.exchanges
        elif on_gpu:
            open_buffer(self.kind, mesh, self.hidden)
            yield DeepEP(Load(ranks * self.tokens, SLOTS), experts)
            close_dispatcher()
        else:
            package: Any = fake_package(*PACKAGES[self.kind])
            buffer: Any = deepep.open_buffer(package, group, self.hidden)
            deepep.use_buffer(buffer)
            yield DeepEP(Load(ranks * self.tokens, SLOTS), experts)
            deepep.close_buffer()
            assert buffer.destroyed


def on_host(results: Results) -> Results:
    return {name: tensor.to("cpu", copy=True) for name, tensor in results.items()}


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if re.match("graphmoe::(symm|nvshmem|buffer)_", func.name()):
            self.made.append((func, args))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Checks(Trip):
    """Torch's checks of the operations of a trip: registration, fakes and, of symm, tracing."""

    def on_ranks(self, ranks: Ranks, mesh: Mesh, dispatcher: Any) -> None:
        with _Calls() as calls:
            self.exchange(dispatcher, *self.inputs(ranks.rank))
        for operation, arguments in calls.made:
            trains = self.kind == "symm" and not operation.name().endswith("_grad")
            more = ["test_autograd_registration", "test_aot_dispatch_static"] if trains else []
            given = list(arguments)
            for i, x in enumerate(given):
                if isinstance(x, Tensor) and x.is_floating_point():  # a NaN would count as changed
                    given[i] = x.detach().nan_to_num().requires_grad_(trains)
            torch.library.opcheck(operation, given, test_utils=["test_schema", "test_faketensor", *more])
        assert len(calls.made) == 4


@dataclass(frozen=True)
class GradientsOfSlots(Trip):
    """Gradients of all received weights, of slots of experts elsewhere too, which a buffer sends as 0."""

    def on_ranks(self, ranks: Ranks, mesh: Mesh, dispatcher: Any) -> None:
        h, weight, expert, _ = self.inputs(ranks.rank)
        _, received, _, room, *_ = dispatcher.dispatch(h, weight, expert)
        assert (torch.autograd.grad(received[: int(room)].sum(), weight)[0] == 1).all()


@dataclass(frozen=True)
class TooLittleRoom(Trip):
    def on_ranks(self, ranks: Ranks, mesh: Mesh, dispatcher: Any) -> None:
        room = Load(self.size * (self.tokens - 1), SLOTS)
        with pytest.raises(AssertionError, match="24 rows are not a multiple of 13 tokens"):
            dataclasses.replace(dispatcher, capacity=room).dispatch(*self.inputs(ranks.rank)[:3])
