"""Collectives between four ranks: values and gradients by their definition, and torch's own checks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.distributed.collectives import LAYOUT, SIZE, Collective, others
from tests.distributed.ranks import Job

pytestmark = pytest.mark.slow
KINDS = ("all_gather", "reduce_scatter", "all_to_all", "sum", "max")
SHAPES = {"first dim": ((4, 3, 5), 0), "behind one": ((1, 4, 5), 1), "in the middle": ((3, 4, 5), 1)}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
CASES = {
    f"{kind}, {where}, {dtype}": Collective(kind, *SHAPES[where], dtype)
    for kind in KINDS
    for where in SHAPES
    for dtype in DTYPES
}


TRANSPOSED = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all back",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of each rank, by case."""
    return Job(tmp_path_factory.mktemp("ranks"), {**CASES, "others": others}, num_ranks=4).results()


def expected(case: Collective, xs: list[Tensor], index: int) -> Tensor:
    """The result on one rank of the group, from what all of them have."""
    if case.kind == "all_gather":
        return torch.cat(xs, dim=case.dim)
    if case.kind == "all_to_all":
        return torch.cat([x.chunk(SIZE, dim=case.dim)[index] for x in xs], dim=-1)
    if case.kind == "all_to_all back":
        return torch.cat([x.chunk(SIZE, dim=-1)[index] for x in xs], dim=case.dim)
    if case.kind == "max":
        return torch.stack(xs).amax(dim=0)
    total = torch.stack(xs).sum(dim=0)
    return total if case.kind == "sum" else total.chunk(SIZE, dim=case.dim)[index]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_definition(ranks, name):
    case = CASES[name]
    for rank, ends in enumerate(ranks[name]):
        group = [ranks[name][other] for other in LAYOUT.group("tp", rank)]
        index = LAYOUT.index("tp", rank)
        assert ends.y.equal(expected(case, [other.x for other in group], index)) and ends.fresh
        if case.kind == "max":
            assert ends.dx is None
        elif case.kind == "sum":
            assert ends.dx.equal(ends.dy)
        else:  # the gradient of the sum over ranks of <y, dy>: the other collective of dy
            other_kind = TRANSPOSED[case.kind]
            transposed = Collective(other_kind, case.shape, case.dim, case.dtype)
            assert ends.dx.equal(expected(transposed, [other.dy for other in group], index))


def test_several_tensors_are_summed_and_each_rank_knows_its_place(ranks):
    for rank, found in enumerate(ranks["others"]):
        group = LAYOUT.group("tp", rank)
        x = SIZE * torch.arange(4.0).view(2, 2) + sum(group)
        assert found["first"].equal(x) and found["second"].equal(x.sum())
        assert int(found["index"]) == rank % 2
