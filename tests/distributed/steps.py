"""A forward and backward of a tiny model on however many ranks, as a case of `tests.distributed.ranks`."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from graphmoe.config.schema import RunConfig
from graphmoe.model.blocks import IGNORED
from graphmoe.model.build import build_model
from graphmoe.model.rope import own_positions
from graphmoe.model.transformer import LossOutput
from graphmoe.ops.collectives import use_groups
from graphmoe.ops.ring_attention import ring_attention
from graphmoe.passes.table import PassRunner, select_passes
from graphmoe.plan.layout import ALONE, Layout, ParameterLayout, layout_of, own_part
from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.compile.code import CompileTurns
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.compile.recompute import RecomputedSegments
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.training import as_traced
from tests.runs import config
from tests.tolerances import assert_forward_close, assert_gradient_close


@dataclass
class Outcome:
    """Findings of a rank after its micro-batches."""

    outputs: dict[int, LossOutput]
    """Outputs by number of the micro-batch."""
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """Gradients, summed over the rank's micro-batches."""
    parallel: dict[str, ParameterLayout]
    dispatched: int = 0
    units: list[str] = field(default_factory=list)
    """Names of what was compiled."""
    recompiled: int = 0
    graphs: list[str] = field(default_factory=list)
    """The code of all compiled graphs."""
    matches: dict[tuple[str, str], int] = field(default_factory=dict)
    """Matches by compiled unit and pass."""
    left: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)


class CountedAllToAll(AllToAll):
    """Dispatcher that counts its dispatches."""

    dispatched = 0

    def dispatch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.dispatched += 1
        return super().dispatch(*tensors)


@dataclass(frozen=True)
class Step:
    """Loss and gradients of some micro-batches, without an optimizer."""

    words: tuple[str, ...]
    layout: Layout = ALONE
    count: int = 2
    """Micro-batches of all ranks together; each has those of its place along dp."""
    mode: str = "eager"
    """eager; traced: compiled units run as the graphs that were traced; inductor: they are compiled."""
    dtype: torch.dtype = torch.float32
    ignored: str = "none"
    """Labels that are ignored: none, some, or all."""
    bias: tuple[float, ...] = ()
    """Bias that is added to the scores of experts before they are chosen; random where there is none."""
    device: str = "cpu"

    def __call__(self, ranks: Ranks, folder: Path) -> Outcome:
        with as_traced() if self.mode == "traced" else contextlib.nullcontext():
            return self._run(folder)

    def _run(self, folder: Path) -> Outcome:
        run, mesh = config(*self.words), Mesh(self.layout)
        use_groups(mesh)
        shares = self.layout.size("ep_etp") > 1
        dispatcher = CountedAllToAll(mesh, run.model.num_experts) if shares else None
        model = build_model(
            run.model,
            device=self.device,
            dtype=self.dtype,
            seed=0,
            execution=run.moe,
            layout=self.layout,
            rank=mesh.rank,
            dispatcher=dispatcher,
        )
        for i, router in enumerate(model.routers()):
            if run.model.selection_bias:
                drawn = torch.randn(run.model.num_experts, generator=_seeded(i))
                router.selection_bias.copy_(torch.tensor(self.bias) if self.bias else drawn)
        execute = compiling(run, folder) if self.mode != "eager" else eagerly(run)
        outputs = {}
        for number in range(mesh.index("dp"), self.count, self.layout.dp):
            tokens, labels = batch(number, run.model.vocab_size, self.ignored)
            output = model.loss(tokens.to(self.device), labels.to(self.device), execute)
            output.total.backward()
            outputs[number] = LossOutput(*(None if x is None else _copied(x) for x in output[:-1]))
            counted_LE = output.counts_LE if output.counted_LE is None else output.counted_LE
            for router, counts_E in zip(model.routers(), counted_LE, strict=True):
                if router.reads_earlier:  # as a training step tells them
                    router.earlier_counts += counts_E
        parameters = dict(model.named_parameters())
        outcome = Outcome(
            outputs,
            {name: _copied(p) for name, p in parameters.items()},
            {
                name: _copied(torch.zeros_like(p) if p.grad is None else p.grad)
                for name, p in parameters.items()
            },
            {name: layout_of(p) for name, p in parameters.items()},
            dispatcher.dispatched if dispatcher else 0,
        )
        if isinstance(execute, CompiledSegments):
            describe(execute, outcome)
        use_groups(None)
        return outcome

    @functools.cached_property
    def expected(self) -> Outcome:
        """The same by one process, eagerly."""
        return self.alone()

    def alone(self, dtype: torch.dtype = torch.float32) -> Outcome:
        return dataclasses.replace(self, layout=Layout(), mode="eager", dtype=dtype)(Ranks(), Path())


def batch(number: int, vocab_size: int, ignored: str) -> tuple[Tensor, Tensor]:
    """Two sequences of 16 tokens and their labels."""
    tokens = torch.randint(0, vocab_size, (2, 17), generator=_seeded(number))
    labels = tokens[:, 1:].clone()
    if ignored == "some":
        labels[0, 3:11] = labels[1, -1] = IGNORED
    elif ignored == "all":
        labels[:] = IGNORED
    return tokens[:, :-1].contiguous(), labels


def whole(
    name: str, outcomes: Sequence[Outcome], layout: Layout, like: Tensor, kind: str = "gradients"
) -> Tensor:
    """A whole parameter, or by the contract its gradient: sums over ``summed_over``, put together."""
    parallel, parts = outcomes[0].parallel[name], [getattr(outcome, kind)[name] for outcome in outcomes]
    place = torch.arange(like.numel()).view(like.shape)
    found = torch.full_like(like, torch.nan, dtype=torch.float32).flatten()
    for rank in range(layout.size("world")):
        group = layout.group(parallel.summed_over, rank) if kind == "gradients" else (rank,)
        part = torch.stack([parts[other] for other in group]).float().sum(dim=0)  # as the optimizer does
        found[own_part(place, parallel, layout, rank).flatten()] = part.flatten()
    return found.view_as(like)


def assert_that_of_one_process(step: Step, outcomes: list[Outcome]) -> None:
    """Losses and statistics on each rank, loads summed over ranks that share sequences, every gradient."""
    expected = step.expected
    for rank, outcome in enumerate(outcomes):
        assert list(outcome.outputs) == [*range(step.layout.index("dp", rank), step.count, step.layout.dp)]
        for number, output in outcome.outputs.items():
            for key in ("total", "cross_entropy", "mtp", "stats_L3"):
                assert_forward_close(getattr(output, key), getattr(expected.outputs[number], key))
            group = [outcomes[other].outputs[number] for other in step.layout.group("cp_tp", rank)]
            assert all(other.total.equal(output.total) for other in group)
            counts_LE = torch.stack([other.counts_LE for other in group]).sum(dim=0)
            assert counts_LE.equal(expected.outputs[number].counts_LE)
    assert set().union(*(outcome.gradients for outcome in outcomes)) == expected.gradients.keys()
    for parameter, gradient in expected.gradients.items():
        found = whole(parameter, outcomes, step.layout, gradient)
        try:
            assert_gradient_close(found, gradient)
        except AssertionError as error:
            raise AssertionError(f"{parameter}: {error}") from error


def eagerly(run: RunConfig) -> RecomputedSegments:
    """Recompute without the parts that only compiled graphs choose."""
    return RecomputedSegments(dataclasses.replace(Recompute.of(run.recompute), parts=frozenset()))


def compiling(run: RunConfig, folder: Path | None = None) -> CompiledSegments:
    """An executor; ranks whose graphs are equal compile each once, with a folder that they share."""
    made = CompiledSegments(
        lambda trains: PassRunner(select_passes(run.passes, {"fuse_loss": {"needs_grad": trains}})),
        recompute=Recompute.of(run.recompute),
    )
    made.turns = None if folder is None else CompileTurns(folder)
    return made


def describe(execute: CompiledSegments, outcome: Outcome) -> None:
    """Add the graphs and matches of what was compiled."""
    outcome.units = [report.unit for report in execute.reports]
    outcome.recompiled = execute.recompiled
    for code, report in execute._codes.values():
        split = code.graphs.backward
        modules = [code.graphs.forward, *((split.inputs, split.weights) if split else ())]
        outcome.graphs += [str(module.graph) for module in modules if isinstance(module, nn.Module)]
        for row in report.passes:
            outcome.matches[report.unit, row.name] = row.matches
            outcome.left[report.unit, row.name] = row.left


SCALE = 0.3


@dataclass(frozen=True)
class Ring:
    """Output and gradients of ring attention, for the positions of a rank."""

    layout: Layout
    heads: tuple[int, int] = (2, 2)
    """Numbers of heads of queries, and of keys and values."""
    sizes: tuple[int, int] = (8, 8)
    """Sizes of a query or key head, and of a value head."""
    dtype: torch.dtype = torch.float32
    seq_len: int = 32
    device: str = "cpu"

    def __call__(self, ranks: Ranks, folder: Path) -> list[Tensor]:
        use_groups(Mesh(self.layout))
        *tensors, d_out = (own_positions(x.to(self.device), self.layout, dim=1) for x in self.whole())
        q, k, v = (x.requires_grad_() for x in tensors)
        out = ring_attention(q, k, v, scale=SCALE, axis="cp", size=self.layout.cp)
        results = [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]
        use_groups(None)
        return [result.cpu() for result in results]

    def whole(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, over whole sequences."""
        generator = torch.Generator().manual_seed(0)
        (of_queries, of_keys), (query, value) = self.heads, self.sizes
        shapes = ((of_queries, query), (of_keys, query), (of_keys, value), (of_queries, value))
        return [torch.randn(2, self.seq_len, *each, generator=generator).to(self.dtype) for each in shapes]

    def expected(self) -> list[Tensor]:
        """The same over whole sequences in fp64, by the definition."""
        *tensors, d_out = (x.double() for x in self.whole())
        q, k, v = (x.requires_grad_() for x in tensors)
        groups = self.heads[0] // self.heads[1]
        keys, values = (x.repeat_interleave(groups, dim=2) for x in (k, v))
        scores = torch.einsum("bqhe,bkhe->bhqk", q, keys) * SCALE
        future = torch.ones(self.seq_len, self.seq_len, dtype=torch.bool).triu(1)
        out = torch.einsum("bhqk,bkhv->bqhv", scores.masked_fill(future, -torch.inf).softmax(-1), values)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]

    def joined(self, results: list[list[Tensor]]) -> list[Tensor]:
        """Results over whole sequences, from those of all ranks in zigzag order."""
        found = []
        for parts in zip(*results, strict=True):
            chunks = {}
            for rank, part in enumerate(parts):
                place, last = self.layout.index("cp", rank), 2 * self.layout.cp - 1
                chunks[place], chunks[last - place] = part.chunk(2, dim=1)
            found.append(torch.cat([chunks[i] for i in sorted(chunks)], dim=1))
        return found


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
