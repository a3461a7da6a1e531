"""A forward and backward of a tiny model on however many ranks, as a case of `tests.distributed.ranks`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from graphmoe.config.schema import RunConfig
from graphmoe.model.blocks import IGNORED
from graphmoe.model.build import build_model
from graphmoe.model.transformer import LossOutput, Transformer
from graphmoe.ops.collectives import use_groups
from graphmoe.passes.table import PassRunner, select_passes
from graphmoe.plan.layout import ALONE, Layout, ParameterLayout, layout_of, own_part
from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.cache.turns import CompileTurns
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.compile.recompute import RecomputedSegments
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.training import as_traced
from tests.runs import config
from tests.tolerances import assert_forward_close, assert_gradient_close

MICRO_BATCHES = 2
"""Number for all ranks together; each has those of its place along dp."""


@dataclass
class Outcome:
    """Findings of a rank after its micro-batches."""

    outputs: dict[int, LossOutput]
    """Outputs by number of the micro-batch."""
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """Gradients, summed over the rank's micro-batches."""
    parallel: dict[str, ParameterLayout]
    graphs: list[str] = field(default_factory=list)
    """The code of all compiled graphs."""
    matches: dict[tuple[str, str], int] = field(default_factory=dict)
    """Matches by compiled unit and pass."""
    left: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """Loss and gradients of two micro-batches, without an optimizer."""

    words: tuple[str, ...]
    layout: Layout = ALONE
    compiled: bool = False
    traced: bool = False
    """True where compiled units run as they were traced."""
    dtype: torch.dtype = torch.float32
    ignored: str = "none"
    """Labels that are ignored: none, some, or all."""
    device: str = "cpu"

    def __call__(self, ranks: Ranks, folder: Path) -> Outcome:
        with as_traced() if self.traced else contextlib.nullcontext():
            return self._run(folder)

    def _run(self, folder: Path) -> Outcome:
        run = config(*self.words)
        mesh = Mesh(self.layout)
        use_groups(mesh)
        model = build_model(
            run.model,
            device=self.device,
            dtype=self.dtype,
            seed=0,
            execution=run.moe,
            layout=self.layout,
            rank=mesh.rank,
        )
        for i, router in enumerate(model.routers()):
            if run.model.selection_bias:
                router.selection_bias.copy_(torch.randn(len(router.selection_bias), generator=_seeded(i)))
        execute = compiling(run, folder) if self.compiled else _eagerly(run)
        outputs = {}
        for number in range(mesh.index("dp"), MICRO_BATCHES, self.layout.dp):
            tokens, labels = batch(number, run.model.vocab_size, self.ignored)
            outputs[number] = model.loss(tokens.to(self.device), labels.to(self.device), execute)
            outputs[number].total.backward()
            _count(model, outputs[number])
        parameters = dict(model.named_parameters())
        outcome = Outcome(
            {number: LossOutput(*map(_on_host, output[:-1])) for number, output in outputs.items()},
            {name: _copied(p) for name, p in parameters.items()},
            {
                name: _copied(torch.zeros_like(p) if p.grad is None else p.grad)
                for name, p in parameters.items()
            },
            {name: layout_of(p) for name, p in parameters.items()},
        )
        if isinstance(execute, CompiledSegments):
            describe(execute, outcome)
        use_groups(None)
        return outcome


def batch(number: int, vocab_size: int, ignored: str) -> tuple[Tensor, Tensor]:
    """Two sequences of 16 tokens and their labels."""
    tokens = torch.randint(0, vocab_size, (2, 17), generator=_seeded(number))
    labels = tokens[:, 1:].clone()
    if ignored == "some":
        labels[0, 3:11] = labels[1, -1] = IGNORED
    elif ignored == "all":
        labels[:] = IGNORED
    return tokens[:, :-1].contiguous(), labels


def whole_gradient(name: str, outcomes: Sequence[Outcome], layout: Layout, like: Tensor) -> Tensor:
    """A whole parameter's gradient by the contract: sums over ``summed_over``, then parts put together."""
    return _whole(
        outcomes[0].parallel[name], [o.gradients[name] for o in outcomes], layout, like, summed=True
    )


def whole_weight(name: str, outcomes: Sequence[Outcome], layout: Layout, like: Tensor) -> Tensor:
    """A whole parameter, from its parts."""
    return _whole(outcomes[0].parallel[name], [o.weights[name] for o in outcomes], layout, like, summed=False)


@functools.cache
def alone(step: Step, dtype: torch.dtype = torch.float32) -> Outcome:
    """The same by one process, eagerly."""
    return dataclasses.replace(step, layout=Layout(), compiled=False, traced=False, dtype=dtype)(
        Ranks(), Path()
    )


def assert_outputs_are_those_of_one_process(step: Step, outcomes: list[Outcome]) -> None:
    """Losses and statistics on each rank, and loads summed over the ranks that share sequences."""
    expected = alone(step)
    for rank, outcome in enumerate(outcomes):
        assert list(outcome.outputs) == [*range(step.layout.index("dp", rank), 2, step.layout.dp)]
        for number, output in outcome.outputs.items():
            for key in ("total", "cross_entropy", "mtp", "stats_L3"):
                assert_forward_close(getattr(output, key), getattr(expected.outputs[number], key))
            group = [outcomes[other].outputs[number] for other in step.layout.group("cp_tp", rank)]
            assert all(other.total.equal(output.total) for other in group)
            counts_LE = torch.stack([other.counts_LE for other in group]).sum(dim=0)
            assert counts_LE.equal(expected.outputs[number].counts_LE)


def assert_gradients_are_those_of_one_process(step: Step, outcomes: list[Outcome]) -> None:
    """Every gradient, put together by the contract."""
    expected = alone(step)
    assert outcomes[0].gradients.keys() == expected.gradients.keys()
    for parameter, gradient in expected.gradients.items():
        found = whole_gradient(parameter, outcomes, step.layout, gradient)
        try:
            assert_gradient_close(found, gradient)
        except AssertionError as error:
            raise AssertionError(f"{parameter}: {error}") from error


def _whole(
    parallel: ParameterLayout, parts: Sequence[Tensor], layout: Layout, like: Tensor, *, summed: bool
) -> Tensor:
    place = torch.arange(like.numel()).view(like.shape)
    whole = torch.full_like(like, torch.nan, dtype=torch.float32).flatten()
    for rank in range(layout.size("world")):
        group = layout.group(parallel.summed_over, rank) if summed else (rank,)
        part = torch.stack([parts[other] for other in group]).float().sum(dim=0)  # as the optimizer does
        whole[own_part(place, parallel, layout, rank).flatten()] = part.flatten()
    return whole.view_as(like)


def _on_host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _copied(tensor)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _count(model: Transformer, output: LossOutput) -> None:
    """Tell the routers of this rank's slots so far, as a training step does."""
    counted_LE = output.counts_LE if output.counted_LE is None else output.counted_LE
    for router, counts_E in zip(model.routers(), counted_LE, strict=True):
        if router.reads_earlier:
            router.earlier_counts += counts_E


def _eagerly(run: RunConfig) -> RecomputedSegments:
    """Recompute without the parts that only compiled graphs choose."""
    return RecomputedSegments(replace(Recompute.of(run.recompute), parts=frozenset()))


def compiling(run: RunConfig, folder: Path) -> CompiledSegments:
    """Ranks whose graphs are equal compile each once."""
    made = CompiledSegments(
        lambda trains: PassRunner(select_passes(run.passes, {"fuse_loss": {"needs_grad": trains}})),
        recompute=Recompute.of(run.recompute),
    )
    made.turns = CompileTurns(folder)
    return made


def describe(execute: CompiledSegments, outcome: Outcome) -> None:
    """Add the graphs and matches of what was compiled."""
    for code, report in execute._codes.values():
        split = code.graphs.backward
        modules = [code.graphs.forward, *((split.inputs, split.weights) if split else ())]
        outcome.graphs += [str(module.graph) for module in modules if isinstance(module, nn.Module)]
        for row in report.passes:
            outcome.matches[report.unit, row.name] = row.matches
            outcome.left[report.unit, row.name] = row.left
