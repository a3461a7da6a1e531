"""The optimizer on several ranks: what each owns, when they exchange it; one process does the same."""

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphmoe.config.schema import OptimConfig, TrainConfig
from graphmoe.optim.zero1 import Optimizer, StepResult
from graphmoe.passes.base import PassRunner
from graphmoe.plan.layout import Layout
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.ranks import Case, run_ranks, selected
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
    """The same training for a rank of two, and for one process that has the gradients of both."""

    dtype: torch.dtype = torch.float32
    additions: str = "once"
    compiled: bool = False
    bad: tuple[int, int] | None = None
    """The step and the rank of a gradient with a NaN."""

    def __call__(self, ranks: Ranks, folder: Path) -> dict[str, Any]:
        return self.train(ranks.rank)

    def train(self, rank: int | None) -> dict[str, Any]:
        optimizer = self.optimizer(rank)
        results = [self.step(optimizer, step, rank) for step in range(STEPS)]
        optimizer.gather()
        weights = zip(optimizer.names, optimizer.weights, strict=True)
        return {
            "weights": {name: weight.detach().clone() for name, weight in weights},
            "main": {name: main.clone() for name, main in optimizer.weights_to_fill().items()},
            "norms": torch.stack([result.grad_norm for result in results]),
            "applied": [result.finite.item() for result in results],
        }

    def net(self) -> nn.Module:
        net = nn.Module()
        for name, shape in SHAPES.items():
            net.register_parameter(name, nn.Parameter(random(name, shape).to(self.dtype)))
        return net

    def optimizer(self, rank: int | None) -> Optimizer:
        optim = OptimConfig(lr=0.1, bucket_mb=TINY, beta1=0.5)
        mesh = None if rank is None else Mesh(TWO)
        optimizer = Optimizer(self.net(), optim, TrainConfig(steps=9, clip_grad_norm=1.0), mesh)
        if self.compiled:
            segments = CompiledSegments(PassRunner([]))
            optimizer.compile(segments.in_place)
        return optimizer

    def step(self, optimizer: Optimizer, step: int, rank: int | None) -> StepResult:
        """Made-up gradients of a step through autograd, as often as they come; then the update."""
        optimizer.start_gather()
        for name, weight in reversed(list(zip(optimizer.names, optimizer.weights, strict=True))):
            ranks = range(TWO.dp) if rank is None else (rank,)
            for addition, of_rank in itertools.product(range(ADDITIONS[self.additions](step, name)), ranks):
                (weight.float() * self._gradient(name, step, addition, of_rank)).sum().backward()
        return optimizer.step(torch.tensor(1.0))

    def _gradient(self, name: str, step: int, addition: int, rank: int) -> Tensor:
        gradient = random(f"{name} {step} {addition} {rank}", SHAPES[name])
        if self.bad == (step, rank) and name == "head":
            gradient[3, 3] = torch.nan
        return gradient


TWO = Layout(dp=2)
CASES = {
    "two ranks": Nets(),
    "several additions": Nets(additions="several"),
    "used twice": Nets(additions="used twice"),
    "unused": Nets(additions="unused"),
    "one for another": Nets(additions="one for another"),
    "a bad gradient": Nets(bad=(2, 1)),
    "compiled": Nets(dtype=torch.bfloat16, compiled=True, bad=(2, 1)),
}


def times_of_sums(ranks: Ranks, folder: Path) -> list[list[str]]:
    """List for each step the first parameter of each summed bucket, and "-" where the backward ends."""
    nets = Nets(additions="used twice")
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
    nets = Nets()
    optimizer = nets.optimizer(ranks.rank)
    weights = dict(zip(optimizer.names, optimizer.weights, strict=True))
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    nets.step(optimizer, 0, ranks.rank)
    main = {name: tensor.clone() for name, tensor in optimizer.weights_to_fill().items()}

    def fresh() -> set[str]:
        return {name for name, weight in weights.items() if torch.equal(weight, main[name])}

    found = {"after the step": fresh() | {n for n in weights if not torch.equal(weights[n], before[n])}}
    optimizer.start_gather()
    optimizer._weight_gather.wait([weights["first"], weights["norm"]])
    found["first and norm"] = fresh() & {"first", "norm"}
    found["awaited"] = {str(len(optimizer._weight_gather._underway))}
    optimizer.gather()
    found["gathered"] = fresh()
    return found


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases: dict[str, Case] = {name: CASES[name] for name in selected(request, "name")}
    cases |= {f.__name__: f for f in (times_of_sums, weights_on_their_way)}
    return run_ranks(tmp_path_factory.mktemp("two"), cases)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "compiled")) for name in CASES]
)
def test_ranks_end_with_the_weights_and_norms_of_one_process(ranks, name):
    nets, (first, second) = CASES[name], ranks[name]
    alone = nets.train(None)
    finite = alone["norms"].isfinite()
    assert torch.equal(first["norms"][finite], second["norms"][finite])
    assert_forward_close(first["norms"][finite], alone["norms"][finite])
    assert first["applied"] == second["applied"] == alone["applied"] == [1, 1, 0 if nets.bad else 1, 1, 1]
    for parameter, start in nets.net().named_parameters():
        main, of_one = (found["main"][parameter] for found in (first, alone))
        assert_gradient_close(main, of_one)
        moved, wanted = main - start.detach().float(), of_one - start.detach().float()
        assert (moved - wanted).norm() < 1e-4 * wanted.norm()  # rounded where the weight is
        assert main.equal(second["main"][parameter])
        for found in (first, second):
            assert found["weights"][parameter].equal(main.to(nets.dtype))


def test_from_the_second_step_on_sums_start_in_the_backward_and_late_gradients_are_summed_again(ranks):
    order = ["head", "bias", "experts", "first", "norm", "embed"]
    for steps in ranks["times_of_sums"]:
        assert steps[0] == ["-", *order]
        assert steps[1] == [*order, "-"]
        # the second gradient of "first" comes after its bucket was started
        assert steps[2] == [*order, "-", "first"]
        # one addition is missing of those that the last step had
        assert steps[3] == ["head", "bias", "experts", "-", "first", "norm", "embed"]
        assert steps[4] == [*order, "-"]


def test_weights_arrive_when_they_are_asked_for(ranks):
    for found in ranks["weights_on_their_way"]:
        assert found["after the step"] == set()  # the model still has the old ones
        assert found["first and norm"] == {"first", "norm"}
        assert found["awaited"] == {"4"}  # of six buckets
        assert found["gathered"] == set(SHAPES)
