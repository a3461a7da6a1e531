"""Traffic of replicas between processes by torch.distributed, and torch's checks of its operations."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from graphmoe.ops.symm import CollectivePeers, use_peers
from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import Job
from tests.ops.replica_cases import HOLDERS, Case, Results, assert_traffic_is_that_of_the_definition

pytestmark = pytest.mark.slow
RANKS = 3


@dataclass(frozen=True)
class Traffic:
    """All calls of a case, and torch's checks."""

    case: Case

    def __call__(self, ranks: Ranks, folder: Path) -> Results:
        use_peers(CollectivePeers(dist.group.WORLD))
        try:
            return self.case.run(ranks.rank)
        finally:
            use_peers(None)


def checks(ranks: Ranks, folder: Path) -> None:
    case = Case(RANKS, 2, 2, "all")
    use_peers(CollectivePeers(dist.group.WORLD))
    weights = case.weights(ranks.rank, 0).nan_to_num()
    for op, arguments in {
        torch.ops.graphmoe.replica_counts: (case.counts_RE[ranks.rank], RANKS),
        torch.ops.graphmoe.replica_weights: (weights.requires_grad_(), case.expert_RS),
        torch.ops.graphmoe.replica_weights_grad: (case.gradients(ranks.rank, 0), case.expert_RS, 2),
    }.items():
        torch.library.opcheck(op.default, arguments)
    use_peers(None)


CASES = {
    f"{holders} {dtype}": Case(RANKS, 2, 3, holders, dtype)
    for holders in HOLDERS
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of each rank, by case."""
    cases = {name: Traffic(case) for name, case in CASES.items()}
    return Job(tmp_path_factory.mktemp("ranks"), {**cases, "checks": checks}, num_ranks=RANKS).results()


@pytest.mark.parametrize("name", CASES)
def test_ranks_get_what_the_definition_says(ranks, name):
    assert_traffic_is_that_of_the_definition(CASES[name], ranks[name])


def test_operations_are_registered_as_torch_wants(ranks):
    assert ranks["checks"] == [None] * RANKS
