"""Steps of small MoE models on ranks that share the experts, as cases of `tests.distributed.ranks`."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphmoe.config.schema import RunConfig
from graphmoe.model.build import build_model
from graphmoe.model.transformer import Transformer
from graphmoe.ops.dispatch import send_plan
from graphmoe.passes.table import PassRunner, select_passes
from graphmoe.plan.layout import ALONE, Layout, ParameterLayout, layout_of, own_part
from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.cache.turns import CompileTurns
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.training import as_traced
from tests.runs import config

EXPERTS, TOP_K = 8, 2
MODEL = (
    f"model.num_experts={EXPERTS}",
    f"model.top_k={TOP_K}",
    "model.num_layers=3",
    "model.num_dense_layers=1",
    "model.aux_loss=micro_batch",
    "model.aux_loss_coef=0.1",
    "model.z_loss_coef=0.1",
    "model.init_std=0.2",
)


@dataclass(frozen=True)
class Routing:
    """Bias that is added to the scores of experts before they are chosen."""

    bias: tuple[float, ...] = (0.0,) * EXPERTS
    words: tuple[str, ...] = ()

    def apply(self, model: Transformer) -> None:
        for router in model.routers():
            router.selection_bias.copy_(torch.tensor(self.bias))


NATURAL = Routing()
ROUTINGS = {
    "natural": NATURAL,
    "an expert without tokens": Routing((0.0, 0.0, 0.0, -9.0, 0.0, 0.0, 0.0, 0.0)),
    "all on two experts of one rank": Routing((0.0, 0.0, 0.0, 0.0, 9.0, 9.0, 0.0, 0.0)),
    "forced balance": Routing(words=("moe.force_balance=true",)),
}


@dataclass
class Outcome:
    """Loss, loads and gradients of one micro-batch, as one rank has them."""

    total: Tensor
    counts_LE: Tensor
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, model: Transformer, tokens: Tensor, *execute: CompiledSegments) -> Outcome:
        """A forward and backward from nothing; the results are on the host."""
        model.zero_grad()
        tokens = tokens.to(next(model.parameters()).device)
        output = model.loss(tokens[:, :-1], tokens[:, 1:], *execute)
        output.total.backward()
        gradients = {name: p.grad.to("cpu", copy=True) for name, p in model.named_parameters()}
        return cls(output.total.detach().cpu(), output.counts_LE.cpu(), gradients)


def micro_batch(number: int) -> Tensor:
    """Token ids [2, 13]."""
    return torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(number))


def executor(*words: str) -> CompiledSegments:
    run = config(*MODEL, "compile.enabled=true", *words)
    passes = run.passes
    return CompiledSegments(
        lambda trains: PassRunner(select_passes(passes, {"fuse_loss": {"needs_grad": trains}})),
        recompute=Recompute.of(run.recompute),
    )


@dataclass(frozen=True)
class Step:
    """A forward and backward of one micro-batch on each rank."""

    layout: Layout
    routing: Routing = NATURAL
    words: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    swapped: bool = False
    """True where the first two ranks hold each other's experts, of which the dispatcher knows nothing."""

    def model(self, layout: Layout, rank: int, dispatcher: AllToAll | None) -> tuple[RunConfig, Transformer]:
        run = config(*MODEL, *self.words, *self.routing.words)
        model = build_model(
            run.model,
            device=self.device,
            dtype=self.dtype,
            execution=run.moe,
            layout=layout,
            rank=rank,
            dispatcher=dispatcher,
        )
        self.routing.apply(model)
        return run, model

    def __call__(self, ranks: Ranks, folder: Path) -> list[Outcome]:
        """The same step twice."""
        holder = {0: 1, 1: 0}.get(ranks.rank, ranks.rank) if self.swapped else ranks.rank
        _, model = self.model(self.layout, holder, AllToAll(Mesh(self.layout), EXPERTS))
        return [Outcome.of(model, micro_batch(ranks.rank)) for _ in range(2)]

    def alone(self) -> list[Outcome]:
        """Run each rank's micro-batch in one process that holds all experts."""
        _, model = self.model(ALONE, 0, None)
        return [Outcome.of(model, micro_batch(rank)) for rank in range(self.layout.size("world"))]

    def expected(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """The part of a parameter's tensor that a rank should have."""
        return own_part(whole, self._marks[name], self.layout, rank)

    def summed(self, outcomes: list[Outcome], name: str, rank: int) -> Tensor:
        """A gradient, summed over the ranks that hold the same part."""
        group = self.layout.group(self._marks[name].summed_over, rank)
        return torch.stack([outcomes[r].gradients[name] for r in group]).sum(0)

    @functools.cached_property
    def _marks(self) -> dict[str, ParameterLayout]:
        model = build_model(config(*MODEL, *self.words).model, device="meta")
        return {name: layout_of(parameter) for name, parameter in model.named_parameters()}


class CountedAllToAll(AllToAll):
    """Dispatcher that counts its dispatches."""

    dispatched = 0

    def dispatch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.dispatched += 1
        return super().dispatch(*tensors)


@dataclass(frozen=True)
class Compiled:
    """Findings of a compiled run of two micro-batches."""

    outcomes: list[Outcome]
    units: list[str]
    """Names of what was compiled."""
    recompiled: int
    dispatched: int


@dataclass(frozen=True)
class CompiledStep(Step):
    """The same by compiled segments: two micro-batches with other loads."""

    traced: bool = False
    """True where units run as they were traced."""

    def __call__(self, ranks: Ranks, folder: Path) -> Compiled:
        with as_traced() if self.traced else contextlib.nullcontext():
            return self._run(ranks, folder)

    def _run(self, ranks: Ranks, folder: Path) -> Compiled:
        dispatcher = CountedAllToAll(Mesh(self.layout), EXPERTS)
        _, model = self.model(self.layout, ranks.rank, dispatcher)
        execute = executor(*self.words)
        execute.turns = CompileTurns(folder)  # what one rank compiles the other loads
        size = self.layout.size("world")
        outcomes = [Outcome.of(model, micro_batch(ranks.rank + i * size), execute) for i in (1, 0)]
        units = [report.unit for report in execute.reports]
        return Compiled(outcomes[::-1], units, execute.recompiled, dispatcher.dispatched)


@dataclass(frozen=True)
class RoundTrip:
    """Tokens to ranks and back, where every expert is the identity."""

    layout: Layout
    dtype: torch.dtype = torch.float32

    def __call__(self, ranks: Ranks, folder: Path) -> dict[str, Tensor]:
        layout = self.layout
        dispatcher = AllToAll(Mesh(layout), EXPERTS)
        h, weight, expert, dy = self.inputs(ranks.rank)
        plan = send_plan(expert, EXPERTS, layout.ep, layout.etp)
        received, of_slots, numbers, sent, arrived = dispatcher.dispatch(h, weight, expert, *plan)
        made = received * of_slots.masked_fill(numbers < 0, 0).sum(1, keepdim=True) / layout.etp
        out = dispatcher.combine(made.to(h.dtype), *plan, sent, arrived)
        dh, dweight = torch.autograd.grad(out, (h, weight), dy)
        results = {"out": out, "dh": dh, "dweight": dweight, "sent": sent, "arrived": arrived}
        return {name: tensor.detach() for name, tensor in (results | {"numbers": numbers}).items()}

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """h, weights, experts of each slot and the gradient of the result, of a rank."""
        generator = torch.Generator().manual_seed(rank)
        h, dy = (torch.randn(9, 5, generator=generator).to(self.dtype) for _ in range(2))
        weight = torch.rand(9, 3, generator=generator)
        likelihood = torch.tensor([3.0, 1, 1, 1, 9, 9, 1, 0]).expand(9, -1)
        expert = torch.multinomial(likelihood, 3, generator=generator).int()
        return h.requires_grad_(), weight.requires_grad_(), expert, dy
