"""A net of plain parameters with made-up gradients, on many ranks and as one process sees it."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from graphmoe.config.schema import OptimConfig, TrainConfig
from graphmoe.optim.zero1 import Optimizer, StepResult
from graphmoe.passes.table import PassRunner
from graphmoe.plan.layout import Axis, Layout, ParameterLayout
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.ranks import Mesh

SHAPES = {
    "embed": (37, 5), "norm": (11,), "first": (20, 20), "experts": (3, 9, 8), "bias": (70,), "head": (41, 7),
}  # fmt: skip
TINY = 600e-6
"""MB: 150 elements, less than some parameters have."""

Additions = Callable[[int, str], int]
"""Number of gradients of a parameter in a step."""


def once(step: int, name: str) -> int:
    return 1


def random(words: str, shape: Sequence[int]) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(words.encode())))


@dataclass
class Nets:
    """The same training for a rank, and for one process that has what all ranks have."""

    layout: Layout
    axes: Mapping[str, Axis] = field(default_factory=dict)
    """Axes that parameters are summed over, where not ``stage``: each group has weights of its own."""
    dtype: torch.dtype = torch.float32
    additions: Additions = once
    compiled: bool = False
    bad: tuple[int, int] | None = None
    """The step and the rank of a gradient with a NaN."""

    def net(self, rank: int | None) -> nn.Module:
        """The parameters of a rank, or with None of all ranks: those of group g are ``<name>_<g>``."""
        net = nn.Module()
        for name, shape in SHAPES.items():
            for number, group in enumerate(self.groups(name)):
                weight = nn.Parameter(random(f"{name} {number}", shape).to(self.dtype))
                weight.parallel = ParameterLayout(summed_over=self.axes.get(name, "stage"))
                if rank is None or rank in group:
                    net.register_parameter(f"{name}_{number}" if rank is None else name, weight)
        return net

    def groups(self, name: str) -> list[tuple[int, ...]]:
        return self.layout.groups(self.axes.get(name, "stage"))

    def optimizer(self, rank: int | None, bucket_mb: float = TINY, clip: float = 1.0) -> Optimizer:
        optim = OptimConfig(lr=0.1, bucket_mb=bucket_mb, beta1=0.5)
        mesh = None if rank is None else Mesh(self.layout)
        optimizer = Optimizer(self.net(rank), optim, TrainConfig(steps=9, clip_grad_norm=clip), mesh)
        if self.compiled:
            segments = CompiledSegments(lambda trains: PassRunner([]))
            optimizer.compile(functools.partial(segments.in_place, "optimizer"))
        return optimizer

    def step(self, optimizer: Optimizer, step: int, rank: int | None) -> StepResult:
        """Made-up gradients of a step through autograd, as often as they come; then the update."""
        optimizer.start_gather()
        for name, weight in reversed(list(zip(optimizer.names, optimizer.weights, strict=True))):
            plain, _, number = name.partition("_")
            ranks = self.groups(plain)[int(number)] if rank is None else (rank,)
            for addition, of_rank in itertools.product(range(self.additions(step, plain)), ranks):
                (weight.float() * self._gradient(plain, step, addition, of_rank)).sum().backward()
        return optimizer.step(torch.tensor(1.0))

    def whole(self, of_ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Tensors of all ranks by the parameter names of one process; ranks of a group have the same."""
        found = {}
        for name in SHAPES:
            for number, group in enumerate(self.groups(name)):
                found[f"{name}_{number}"] = of_ranks[group[0]][name]
                for rank in group:
                    assert torch.equal(of_ranks[rank][name], of_ranks[group[0]][name]), (name, rank)
        return found

    def _gradient(self, name: str, step: int, addition: int, rank: int) -> Tensor:
        gradient = random(f"{name} {step} {addition} {rank}", SHAPES[name])
        if self.bad == (step, rank) and name == "head":
            gradient[3, 3] = torch.nan
        return gradient
