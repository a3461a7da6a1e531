"""The model on a GPU: no host sync, and parity with fp64 on the CPU."""

import copy
import dataclasses

import pytest
import torch

from graphmoe.config.schema import GroupScore, ModelConfig, MoEConfig, RopeScaling
from graphmoe.model.build import build_model
from graphmoe.ops.grouped_mm import grouped_mm
from graphmoe.ops.permute import permute, routing_plan, unpermute
from graphmoe.ops.router import select_experts
from tests.gpu.sleeping import assert_host_is_back_while_the_device_sleeps, syncs_are_errors
from tests.ops.row_cases import choose
from tests.ops.test_grouped_mm import CASES, assert_matches_the_loop, make_inputs
from tests.ops.test_router import coarse_choices

B, S, V = 8, 512, 512  # 4096 tokens: beyond the size at which torch's embedding backward sorts
CONFIG = ModelConfig(
    vocab_size=V,
    hidden_size=128,
    num_layers=2,
    dense_ffn_size=256,
    num_heads=4,
    q_lora_rank=48,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    rope_scaling=RopeScaling.yarn,
    num_experts=16,
    top_k=4,
    num_groups=4,
    topk_groups=2,
    selection_bias=True,
    expert_ffn_size=72,
    shared_ffn_size=64,
    z_loss_coef=1e-3,
    init_std=0.05,
)
ODD = dataclasses.replace(CONFIG, hidden_size=126, expert_ffn_size=71)


def make_batch(sequences=B, length=S):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, V, (sequences, length + 1), generator=generator).cuda()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def forward_and_backward(model, batch):
    model.zero_grad()
    model.loss(*batch).total.backward()


@pytest.fixture
def warm():
    """(model, batch) in bf16 whose kernels, memory and rotary tables are ready."""

    def make(config, execution=None):
        model = build_model(config, device="cuda", dtype=torch.bfloat16, execution=execution)
        batch = make_batch()
        for _ in range(3):
            forward_and_backward(model, batch)
        torch.cuda.synchronize()
        return model, batch

    return make


@pytest.mark.parametrize("force_balance", [False, True])
@pytest.mark.parametrize("config", [dataclasses.replace(CONFIG, mtp_depth=1), ODD], ids=["mtp", "odd"])
def test_loss_and_backward_never_sync_the_device(warm, config, force_balance):
    model, batch = warm(config, MoEConfig(force_balance=force_balance))
    with syncs_are_errors():
        forward_and_backward(model, batch)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_the_host_is_back_while_the_device_is_still_asleep(warm):
    # One layer: eager launches of more would take the host longer than the limit.
    model, batch = warm(dataclasses.replace(CONFIG, num_layers=1, num_dense_layers=0))
    assert_host_is_back_while_the_device_sleeps(lambda: forward_and_backward(model, batch))


def relative(actual, expected):
    """||actual - expected|| / ||expected|| of two lists of tensors, on the CPU in fp64."""
    pairs = [(a.detach().double().cpu(), e.detach().double()) for a, e in zip(actual, expected, strict=True)]
    error = sum((a - e).square().sum() for a, e in pairs)
    return float((error / sum(e.square().sum() for _, e in pairs)).sqrt())


def compare_with_fp64(config, dtype, force_balance):
    """(relative error of the loss, of each gradient by name, of all gradients together)."""
    execution = MoEConfig(force_balance=force_balance)
    start = build_model(config, dtype=torch.bfloat16, execution=execution)  # weights that bf16 holds exactly
    model, reference = copy.deepcopy(start).to("cuda", dtype), copy.deepcopy(start).double()
    tokens, labels = make_batch(2, 128)
    loss = model.loss(tokens, labels).total
    expected = reference.loss(tokens.cpu(), labels.cpu()).total
    loss.backward(), expected.backward()
    wanted = dict(reference.named_parameters())
    by_name = {n: relative([p.grad], [wanted[n].grad]) for n, p in model.named_parameters()}
    together = relative([p.grad for p in model.parameters()], [p.grad for p in wanted.values()])
    return relative([loss], [expected]), by_name, together


@pytest.mark.parametrize("config", [dataclasses.replace(CONFIG, mtp_depth=1), ODD], ids=["mtp", "odd"])
def test_bf16_matches_fp64_on_the_cpu_where_routing_is_forced(config):
    """Compare as a CPU does, where the errors are 3e-5, at most 1.8e-2 and 1.0e-2."""
    loss, by_name, together = compare_with_fp64(config, torch.bfloat16, force_balance=True)
    assert loss < 1e-3
    assert {n: e for n, e in by_name.items() if e > 4e-2} == {}
    assert together < 2e-2


def test_bf16_matches_fp64_on_the_cpu_with_its_own_routing():
    """bf16 sends some tokens to other experts: single gradients differ by about 0.1, all by 2e-2."""
    loss, by_name, together = compare_with_fp64(CONFIG, torch.bfloat16, force_balance=False)
    assert loss < 2e-3 and together < 6e-2
    assert {n: e for n, e in by_name.items() if e > 0.3} == {}


@pytest.mark.parametrize("config", [dataclasses.replace(CONFIG, mtp_depth=1), ODD], ids=["mtp", "odd"])
def test_fp32_matches_fp64_on_the_cpu(config):
    loss, by_name, _ = compare_with_fp64(config, torch.float32, force_balance=True)
    assert loss < 1e-5
    assert {n: e for n, e in by_name.items() if e > 1e-4} == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_grouped_mm_matches_the_loop(case, dtype):
    assert_matches_the_loop(*make_inputs(*CASES[case], dtype, device="cuda"))


@pytest.mark.parametrize(("N", "K"), [(144, 128), (142, 126), (71, 128), (128, 71)])
def test_grouped_mm_in_bf16_keeps_nan_of_dead_rows_out_at_larger_sizes(N, K):
    counts = [0, 130, 1, 0, 257, 64, 0, 31, 500, 0]
    assert_matches_the_loop(*make_inputs(counts, 333, N, K, torch.bfloat16, device="cuda"))


def test_grouped_mm_takes_views_that_start_at_an_odd_address():
    x, w, ends, dy = make_inputs([3, 0, 9], 0, 16, 24, torch.bfloat16, device="cuda")
    flat = torch.cat([torch.zeros_like(w.detach().flatten()[:1]), w.detach().flatten()])
    shifted = flat[1:].view_as(w).requires_grad_()
    assert shifted.data_ptr() % 16
    y = grouped_mm(x, shifted, ends)
    assert torch.equal(y, grouped_mm(x, w, ends))
    assert torch.equal(
        torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(grouped_mm(x, w, ends), x, dy)[0]
    )


@pytest.mark.parametrize(("T", "K", "E"), [(1, 1, 2), (333, 6, 64), (1025, 16, 512), (64, 8, 8)])
def test_plan_and_row_movement_are_those_of_the_cpu(T, K, E):
    experts = choose("skewed", T, K, E)
    expected, actual = routing_plan(experts, E), routing_plan(experts.cuda(), E)
    for wanted, tensor in zip(expected, actual, strict=True):
        assert tensor.dtype == torch.int32 and torch.equal(tensor.cpu(), wanted)
    x = torch.randint(-50, 50, (T, 24)).float()  # integers: sums are exact
    rows = permute(x.cuda(), actual.slot_R, actual.row_TK)
    assert torch.equal(rows.cpu(), permute(x, expected.slot_R, expected.row_TK))
    assert torch.equal(unpermute(rows, actual.slot_R, actual.row_TK).cpu(), K * x)


@pytest.mark.parametrize("group_score", GroupScore)
def test_ties_are_decided_as_on_the_cpu(group_score):
    for E, k, groups, limit in ((512, 16, 1, 1), (256, 8, 8, 4), (64, 6, 4, 2), (2, 1, 1, 1)):
        config = ModelConfig(
            num_experts=E, top_k=k, num_groups=groups, topk_groups=limit, group_score=group_score
        )
        choices = coarse_choices(1000, E, seed=k)
        assert torch.equal(select_experts(config, choices.cuda()).cpu(), select_experts(config, choices))
