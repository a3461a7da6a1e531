"""The optimizer on several ranks: what each owns, when they exchange it; one process does the same."""

import functools
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphmoe.config.schema import OptimConfig, TrainConfig
from graphmoe.optim.zero1 import Optimizer, StepResult
from graphmoe.passes.table import PassRunner
from graphmoe.plan.layout import Axis, Layout, ParameterLayout
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.ranks import run_ranks, selected
from tests.tolerances import assert_forward_close, assert_gradient_close

STEPS = 5
SHAPES = {
    "embed": (37, 5), "norm": (11,), "first": (20, 20), "experts": (3, 9, 8), "bias": (70,), "head": (41, 7),
}  # fmt: skip
TINY = 600e-6
"""MB: 150 elements, less than some parameters have."""
ADDITIONS: dict[str, Callable[[int, str], int]] = {
    "once": lambda step, name: 1,
    "several": lambda step, name: 3 if name == "embed" else 2,
    "used twice": lambda step, name: 2 if (step, name) == (2, "first") else 1,
    "unused": lambda step, name: 0 if (step, name) == (2, "experts") else 1,
    # the total of step 2 is that of other steps
    "one for another": lambda step, name: (
        {"first": 3, "embed": 1, "experts": 0}.get(name, 1) if step == 2 else 1
    ),
}
"""Numbers of gradients of a parameter in a step."""


def random(words: str, shape: Sequence[int]) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(words.encode())))


@dataclass
class Nets:
    """The same training for a rank, and for one process that has what all ranks have."""

    layout: Layout
    axes: Mapping[str, Axis] = field(default_factory=dict)
    """Axes that parameters are summed over, where not ``stage``: each group has weights of its own."""
    dtype: torch.dtype = torch.float32
    additions: str = "once"
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

    def optimizer(self, rank: int | None) -> Optimizer:
        optim = OptimConfig(lr=0.1, bucket_mb=TINY, beta1=0.5)
        mesh = None if rank is None else Mesh(self.layout)
        optimizer = Optimizer(self.net(rank), optim, TrainConfig(steps=9, clip_grad_norm=1.0), mesh)
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
            for addition, of_rank in itertools.product(range(ADDITIONS[self.additions](step, plain)), ranks):
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


TWO, FOUR = Layout(dp=2), Layout(dp=4)
CASES = {
    "two ranks": Nets(TWO),
    "several additions": Nets(TWO, additions="several"),
    "used twice": Nets(TWO, additions="used twice"),
    "unused": Nets(TWO, additions="unused"),
    "one for another": Nets(TWO, additions="one for another"),
    "a bad gradient": Nets(TWO, bad=(2, 1)),
    "compiled": Nets(TWO, dtype=torch.bfloat16, compiled=True, bad=(2, 1)),
    "a family of one rank in bf16": Nets(TWO, {"experts": "tp", "bias": "tp"}, torch.bfloat16),
}
OF_FOUR = {
    "four ranks": Nets(FOUR),
    "experts on two": Nets(Layout(dp=4, ep=2), {"experts": "edp"}),
    "cut along tp": Nets(Layout(dp=2, tp=2, ep=2), {"experts": "edp", "first": "dp_cp", "head": "dp_cp"}),
}


def train(nets: Nets, rank: int | None) -> dict[str, Any]:
    """Results of a training: whole weights, and of each step the norm and whether it was applied."""
    optimizer = nets.optimizer(rank)
    results = [nets.step(optimizer, step, rank) for step in range(STEPS)]
    optimizer.gather()
    return {
        "weights": {n: w.detach().clone() for n, w in zip(optimizer.names, optimizer.weights, strict=True)},
        "main": {name: main.clone() for name, main in optimizer.weights_to_fill().items()},
        "norms": torch.stack([result.grad_norm for result in results]),
        "applied": [result.finite.item() for result in results],
    }


def trained(nets: Nets, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """``train`` as a case of ``run_ranks``."""
    return train(nets, ranks.rank)


def times_of_sums(ranks: Ranks, folder: Path) -> list[list[str]]:
    """List for each step the first parameter of each summed bucket, and "-" where the backward ends."""
    nets = Nets(TWO, additions="used twice")
    optimizer, steps = nets.optimizer(ranks.rank), []
    (family,) = optimizer.families
    reduce, finish = family.reduce, optimizer._reduction.finish

    def logged(bucket):
        steps[-1].append(family.names[bucket.members[0]])
        return reduce(bucket)

    family.reduce, optimizer._reduction.finish = logged, lambda: (steps[-1].append("-"), finish())
    for step in range(STEPS):
        steps.append([])
        nets.step(optimizer, step, ranks.rank)
    return steps


def weights_on_their_way(ranks: Ranks, folder: Path) -> dict[str, set[str]]:
    """Names of the parameters that are as the last step has made them, after each call."""
    nets = Nets(TWO)
    optimizer = nets.optimizer(ranks.rank)
    weights = dict(zip(optimizer.names, optimizer.weights, strict=True))
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    nets.step(optimizer, 0, ranks.rank)
    main = {name: tensor.clone() for name, tensor in optimizer.weights_to_fill().items()}

    def fresh() -> set[str]:
        return {name for name, weight in weights.items() if torch.equal(weight, main[name])}

    found = {"after the step": fresh() | {n for n in weights if not torch.equal(weights[n], before[n])}}
    optimizer.start_gather()
    optimizer.wait_for([weights["first"], weights["norm"]])
    found["first and norm"] = fresh() & {"first", "norm"}
    found["awaited"] = {str(len(optimizer._weight_gather._underway))}
    optimizer.gather()
    found["gathered"] = fresh()
    return found


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Results of two ranks."""
    wanted = selected(request, "name")
    cases = {name: functools.partial(trained, nets) for name, nets in CASES.items() if name in wanted}
    cases |= {f.__name__: f for f in (times_of_sums, weights_on_their_way)}
    return run_ranks(tmp_path_factory.mktemp("two"), cases)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Results of four ranks."""
    cases = {name: functools.partial(trained, nets) for name, nets in OF_FOUR.items()}
    return run_ranks(tmp_path_factory.mktemp("four"), cases, num_ranks=4)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "compiled")) for n in (*CASES, *OF_FOUR)]
)
def test_ranks_end_with_the_weights_and_norms_of_one_process(name, request):
    nets = CASES.get(name) or OF_FOUR[name]
    ranks = request.getfixturevalue("two" if name in CASES else "four")[name]
    alone = train(nets, None)
    for rank in ranks:
        assert torch.equal(rank["norms"], ranks[0]["norms"]) or nets.bad
        assert rank["applied"] == alone["applied"] == [1, 1, 0 if nets.bad else 1, 1, 1]
        finite = alone["norms"].isfinite()
        assert_forward_close(rank["norms"][finite], alone["norms"][finite])
    for parameter, main in nets.whole([rank["main"] for rank in ranks]).items():
        assert_gradient_close(main, alone["main"][parameter])
        start = nets.net(None).get_parameter(parameter).detach().float()
        moved, wanted = main - start, alone["main"][parameter] - start
        assert (moved - wanted).norm() < 1e-4 * wanted.norm()  # rounded where the weight is
    for parameter, weight in nets.whole([rank["weights"] for rank in ranks]).items():
        main = nets.whole([rank["main"] for rank in ranks])[parameter]
        assert weight.dtype == nets.dtype and torch.equal(weight, main.to(nets.dtype))


def test_from_the_second_step_on_sums_start_in_the_backward_and_late_gradients_are_summed_again(two):
    order = ["head", "bias", "experts", "first", "norm", "embed"]
    for steps in two["times_of_sums"]:
        assert steps[0] == ["-", *order]
        assert steps[1] == [*order, "-"]
        # the second gradient of "first" comes after its bucket was started
        assert steps[2] == [*order, "-", "first"]
        # one addition is missing of those that the last step had
        assert steps[3] == ["head", "bias", "experts", "-", "first", "norm", "embed"]
        assert steps[4] == [*order, "-"]


def test_weights_arrive_when_they_are_asked_for(two):
    for found in two["weights_on_their_way"]:
        assert found["after the step"] == set()  # the model still has the old ones
        assert found["first and norm"] == {"first", "norm"}
        assert found["awaited"] == {"4"}  # of six buckets
        assert found["gathered"] == set(SHAPES)
