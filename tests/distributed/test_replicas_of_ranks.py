"""Traffic of replicas between processes by torch.distributed, and torch's checks of its operations."""

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from graphmoe.ops.replicas import reference
from graphmoe.ops.replicas.exchange import Exchange
from graphmoe.ops.symm import CollectivePeers, use_peers
from graphmoe.runtime.ranks import Ranks
from tests.distributed.layouts import REPLICAS, Case
from tests.distributed.ranks import Job, run_ranks
from tests.ops import replica_cases
from tests.ops.replica_cases import HOLDERS, Results, assert_traffic_is_that_of_the_definition

pytestmark = pytest.mark.slow
RANKS = 3


@dataclass(frozen=True)
class Traffic:
    """All calls of a case, and torch's checks."""

    case: replica_cases.Case

    def __call__(self, ranks: Ranks, folder: Path) -> Results:
        use_peers(CollectivePeers(dist.group.WORLD))
        try:
            return self.case.run(ranks.rank)
        finally:
            use_peers(None)


def checks(ranks: Ranks, folder: Path) -> None:
    case = replica_cases.Case(RANKS, 2, 2, "all")
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
    f"{holders} {dtype}": replica_cases.Case(RANKS, 2, 3, holders, dtype)
    for holders in HOLDERS
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    cases = {name: Traffic(case) for name, case in CASES.items()}
    return Job(tmp_path_factory.mktemp("ranks"), {**cases, "checks": checks}, num_ranks=RANKS).results()


@pytest.mark.parametrize("name", CASES)
def test_ranks_get_what_the_definition_says(ranks, name):
    assert_traffic_is_that_of_the_definition(CASES[name], ranks[name])


def brought(more: Sequence[str], ranks: Ranks, folder: Path) -> tuple[int, int, int]:
    """Train compiled, in turns; returns pulls that found weights that came along with rows, and all pulls.

    And how often gradients went home in an exchange of rows.
    """
    words = (*REPLICAS, "pipeline.ep_overlap=true", "recompute.segments=[moe_experts]", *more)
    calls = [(Exchange, "pull"), (Exchange, "keep"), (reference, "pull"), (reference, "add_made")]
    with ExitStack() as stack:
        patches = [mock.patch.object(*call, autospec=True, side_effect=getattr(*call)) for call in calls]
        spies = [stack.enter_context(patch) for patch in patches]
        replace(Case(2, "ep=2", "", words), mode="traced").training(ranks, folder)
    pulls, along, transfers, homes = (spy.call_count for spy in spies)
    return pulls - (transfers - along), pulls, homes


@pytest.mark.parametrize("more", [(), ("moe.replica_keep=true",)])
def test_in_compiled_runs_weights_and_gradients_travel_with_rows(tmp_path, more):
    found = run_ranks(tmp_path, {"brought": functools.partial(brought, more)}, 2)
    for served, pulls, homes in found["brought"]:
        assert served == pulls > 0 and homes > 0


def test_operations_are_registered_as_torch_wants(ranks):
    assert ranks["checks"] == [None] * RANKS
