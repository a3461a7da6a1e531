"""Traffic of replicas between GPUs by kernels: what its definition says, captured too, without waiting.

Two ranks share the GPU where there is one.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphmoe.ops.symm import use_peers
from graphmoe.ops.symm.peers import exchange_of
from graphmoe.plan.layout import Layout
from graphmoe.runtime.dispatch.symm import make_peers
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.ranks import Job
from tests.gpu.sleeping import Replayed, assert_never_waits, captured
from tests.ops.replica_cases import HOLDERS, Case, Results, assert_traffic_is_that_of_the_definition

BF16, SHAPES = torch.bfloat16, ((512, 272), (256, 512))


@dataclass(frozen=True)
class Traffic:
    """All calls of a case."""

    case: Case

    def __call__(self, ranks: Ranks, folder: Path) -> Results:
        use_peers(make_peers(Mesh(Layout(dp=2, ep=2)), torch.device("cuda")))
        try:
            return {name: tensor.cpu() for name, tensor in self.case.run(ranks.rank).items()}
        finally:
            use_peers(None)


@dataclass(frozen=True)
class CapturedTraffic:
    """Calls in a graph, replayed with other experts in the slots, and proofs that none waits."""

    case: Case

    def __call__(self, ranks: Ranks, folder: Path) -> tuple[Replayed, list[Tensor]]:
        use_peers(make_peers(Mesh(Layout(dp=2, ep=2)), torch.device("cuda")))
        case, rank, exchange = self.case, ranks.rank, exchange_of(2)
        weights = [case.values(case.owned, i, rank).to("cuda", case.dtype) for i in range(2)]
        slots = [replace(case, holders=holders).expert_RS.cuda() for holders in ("all", "hot")]
        expert_RS, counts_E = slots[0].clone(), case.counts_RE[rank].cuda()

        def step() -> list[Tensor]:
            counts_RE = torch.ops.graphmoe.replica_counts(counts_E, case.ranks)
            pulled = exchange.pull(weights, expert_RS)
            totals = [w_LX.new_zeros(w_LX.shape, dtype=torch.float32) for w_LX in weights]
            with exchange.slot_gradients(totals, expert_RS, torch.float32) as made:
                for to_SX, w_SX in zip(made, pulled, strict=True):
                    to_SX.copy_(w_SX)
            return [counts_RE, *totals]

        replayed = captured(step, lambda number: expert_RS.copy_(slots[number]))
        ranks.barrier()
        assert_never_waits(step)
        ranks.barrier()
        use_peers(None)
        held_L = (slots[1][:, :, None] == rank * case.owned + torch.arange(case.owned).cuda()).sum((0, 1))
        of_weights = [(w_LX.float() * held_L.view(-1, 1, 1)).cpu() for w_LX in weights]
        return replayed, [case.counts_RE, *of_weights]


CASES = {holders: Case(2, 4, 4, holders, BF16, SHAPES, "cuda") for holders in HOLDERS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    cases = {name: Traffic(case) for name, case in CASES.items()}
    cases["captured"] = CapturedTraffic(CASES["all"])
    return Job(tmp_path_factory.mktemp("ranks"), cases, device="cuda").results()


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_get_what_the_definition_says(ranks, name):
    assert_traffic_is_that_of_the_definition(CASES[name], ranks[name])


def test_a_replay_with_other_experts_in_the_slots_is_bitwise_the_uncaptured_run(ranks):
    for replayed, wanted in ranks["captured"]:
        for actual, plain, right in zip(replayed.captured, replayed.plain, wanted, strict=True):
            assert actual.equal(plain) and actual.equal(right)
