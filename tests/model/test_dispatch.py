"""The plan by which tokens go to ranks, and a layer whose one rank sends them to itself."""

import pytest
import torch

from graphmoe.config.schema import ModelConfig, MoEConfig
from graphmoe.model.layer import MoELayer
from graphmoe.ops.dispatch import send_plan
from graphmoe.plan.layout import Layout
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.ranks import Mesh
from tests.model.models import filled
from tests.tolerances import assert_forward_close

T, NUM_EXPERTS, K = 11, 12, 4


@pytest.mark.parametrize("ep, etp", [(1, 1), (2, 1), (4, 1), (12, 1), (2, 3), (1, 2)])
def test_rows_go_to_each_rank_of_each_block_once_in_the_order_of_tokens(ep, etp):
    likelihood = torch.tensor([9.0, 5, 1, 1, 0, 0, 1, 1, 1, 1, 8, 8]).expand(T, -1)
    experts = torch.multinomial(likelihood, K, generator=torch.Generator().manual_seed(0)).int()
    plan = send_plan(experts, NUM_EXPERTS, ep, etp)
    expected = []
    for rank in range(ep * etp):
        block = rank // etp
        expected.append([t for t in range(T) if block in (experts[t] // (NUM_EXPERTS // ep)).tolist()])
    assert plan.send_counts_P.tolist() == [len(tokens) for tokens in expected]
    live = int(plan.send_ends_P[-1])
    assert live == sum(map(len, expected))
    assert (plan.send_slot_R[:live] // (K * etp)).tolist() == sum(expected, [])
    rows = sorted(plan.send_row_TW[plan.send_row_TW >= 0].tolist())
    assert rows == list(range(live))
    assert {tensor.dtype for tensor in plan} == {torch.int32}


def test_one_rank_that_dispatches_to_itself_computes_what_one_without_a_dispatcher_does():
    config = ModelConfig(num_experts=NUM_EXPERTS, top_k=K, hidden_size=32, num_heads=2, expert_ffn_size=8)
    dispatcher = AllToAll(Mesh(Layout()), NUM_EXPERTS)
    layers = [MoELayer(config, MoEConfig(), Layout(), d) for d in (None, dispatcher)]
    layers[1].load_state_dict(filled(layers[0]).state_dict())
    generator = torch.Generator().manual_seed(0)
    x, angle = torch.randn(2, 7, 32, generator=generator), torch.rand(7, config.qk_rope_head_dim // 2)
    alone, sent = (layer(x, angle.cos(), angle.sin()) for layer in layers)
    assert alone[4:] == sent[4:] == (None, None, None)  # the host counts rows: no slots, load or replicas
    for one, other in zip(alone[:4], sent[:4], strict=True):
        assert other.dtype == one.dtype
        assert_forward_close(other.float(), one.float())
    names = [[s.name + "*" * s.dynamic for s in layer.segments()] for layer in layers]
    assert [name.rstrip("*") for name in names[1]] == names[0]
    assert [name for name in names[1] if "*" in name] == ["moe_dispatch*", "moe_experts*", "moe_combine*"]
    assert {s.name for s in layers[1].segments() if s.stream == "comm"} == {"moe_dispatch", "moe_combine"}


def test_experts_of_other_ranks_need_a_dispatcher():
    with pytest.raises(AssertionError, match="experts are on other ranks"):
        MoELayer(ModelConfig(), MoEConfig(), Layout(dp=2, ep=2)).segments()
