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
from tests.runs import slow_but
from tests.tolerances import assert_forward_close, assert_gradient_close

STEPS = 5
SHAPES = {
    "embed": (37, 5), "norm": (11,), "first": (20, 20), "experts": (3, 9, 8), "bias": (70,), "head": (41, 7),
}  # fmt: skip
TINY = 600e-6  # MB: 150 elements, less than some parameters have
ADDITIONS: dict[str, Callable[[int, str], int]] = {  # numbers of gradients of a parameter in a step
    "once": lambda step, name: 1,
    "several": lambda step, name: 3 if name == "embed" else 2,
    "used twice": lambda step, name: 2 if (step, name) == (2, "first") else 1,
    "unused": lambda step, name: 0 if (step, name) == (2, "experts") else 1,
    # the total of step 2 is that of other steps
    "one for another": lambda step, name: 1 if step != 2 else {"first": 3, "experts": 0}.get(name, 1),
}


def random(words: str, shape: Sequence[int]) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(words.encode())))


def weights_of(optimizer: Optimizer) -> dict[str, nn.Parameter]:
    return dict(zip(optimizer.names, optimizer.weights, strict=True))


@dataclass
class Nets:
    """The same training for a rank of two, and for one process that has the gradients of both."""

    dtype: torch.dtype = torch.float32
    additions: str = "once"
    compiled: bool = False
    bad: tuple[int, int] | None = None  # step and rank of a gradient with a NaN
    rule: str = "adamw"

    def __call__(self, ranks: Ranks, folder: Path) -> dict[str, Any]:
        return self.train(ranks.rank)

    def train(self, rank: int | None) -> dict[str, Any]:
        optimizer = self.optimizer(rank)
        results = [self.step(optimizer, step, rank) for step in range(STEPS)]
        optimizer.gather()
        return {
            "weights": {name: weight.detach().clone() for name, weight in weights_of(optimizer).items()},
            "main": {name: main.data.clone() for name, main in optimizer.weights_to_fill().items()},
            "norms": torch.stack([result.grad_norm for result in results]),
            "applied": [result.finite.item() for result in results],
        }

    def start(self, name: str) -> Tensor:
        return random(name, SHAPES[name]).to(self.dtype)

    def optimizer(self, rank: int | None) -> Optimizer:
        net = nn.ParameterDict([(name, nn.Parameter(self.start(name))) for name in SHAPES])  # not sorted
        optim = OptimConfig(self.rule, lr=0.1, bucket_mb=TINY, beta1=0.5)
        mesh = None if rank is None else Mesh(TWO)
        optimizer = Optimizer(net, optim, TrainConfig(steps=9, clip_grad_norm=1.0), mesh)
        if self.compiled:
            optimizer.compile(CompiledSegments(PassRunner([])).in_place)
        return optimizer

    def step(self, optimizer: Optimizer, step: int, rank: int | None) -> StepResult:
        """Made-up gradients of a step through autograd, as often as they come; then the update."""
        optimizer.start_gather()
        for name, weight in reversed(weights_of(optimizer).items()):
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
CASES = {name: Nets(additions=name) for name in ADDITIONS} | {
    "a bad gradient": Nets(bad=(2, 1)),
    "whole matrices, used twice": Nets(additions="used twice", rule="muon"),
    "compiled": Nets(dtype=torch.bfloat16, compiled=True, bad=(2, 1)),
}


def times_of_sums(ranks: Ranks, folder: Path) -> list[list[str]]:
    """List for each step the first parameter of each summed bucket, and "-" where the backward ends."""
    nets = Nets(additions="used twice")
    optimizer, steps = nets.optimizer(ranks.rank), []
    (family,) = optimizer.families
    reduce, finish = family.reduce, optimizer._reduction.finish

    def logged(bucket, release):
        steps[-1].append(family.names[bucket.members[0]])
        return reduce(bucket, release)

    family.reduce, optimizer._reduction.finish = logged, lambda: (steps[-1].append("-"), finish())
    for step in range(STEPS):
        steps.append([])
        nets.step(optimizer, step, ranks.rank)
    return steps


def weights_on_their_way(ranks: Ranks, folder: Path) -> None:
    nets = Nets()
    optimizer = nets.optimizer(ranks.rank)
    weights = weights_of(optimizer)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    nets.step(optimizer, 0, ranks.rank)
    main = {name: tensor.clone() for name, tensor in optimizer.weights_to_fill().items()}

    def fresh() -> set[str]:
        return {name for name, weight in weights.items() if torch.equal(weight, main[name])}

    assert not fresh() and all(torch.equal(weights[name], old) for name, old in before.items())
    optimizer.start_gather()
    optimizer._weight_gather.wait([weights["first"], weights["norm"]])
    assert fresh() >= {"first", "norm"} and len(optimizer._weight_gather._underway) == 4  # of six buckets
    optimizer.gather()
    assert fresh() == {*SHAPES}


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases: dict[str, Case] = {name: CASES[name] for name in selected(request, "name")}
    cases |= {f.__name__: f for f in (times_of_sums, weights_on_their_way)}
    return run_ranks(tmp_path_factory.mktemp("two"), cases)


@pytest.mark.parametrize("name", slow_but(CASES.keys(), *(CASES.keys() - {"compiled"})))
def test_ranks_end_with_the_weights_and_norms_of_one_process(ranks, name):
    nets, (first, second) = CASES[name], ranks[name]
    alone = nets.train(None)
    finite = alone["norms"].isfinite()
    assert torch.equal(first["norms"][finite], second["norms"][finite])
    assert_forward_close(first["norms"][finite], alone["norms"][finite])
    assert first["applied"] == second["applied"] == alone["applied"] == [1, 1, 0 if nets.bad else 1, 1, 1]
    assert first["main"].keys() == alone["main"].keys() == SHAPES.keys()
    for parameter, main in first["main"].items():
        of_one, start = alone["main"][parameter], nets.start(parameter).float()
        assert_gradient_close(main, of_one)
        moved, wanted = main - start, of_one - start
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


def test_weights_arrive_when_they_are_asked_for_and_not_before(ranks):
    assert ranks["weights_on_their_way"] == [None, None]
