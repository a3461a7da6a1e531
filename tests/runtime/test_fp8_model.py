"""A model whose products are in 8 bits, compiled: close to the plain one, and its sums of gradients."""

import pytest
import torch
from torch import Tensor, nn

from graphmoe.model.build import build_model
from graphmoe.ops.gradients import Gradient
from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.training.executor import pass_runner
from tests.ops.test_fp8_mlp import decibels
from tests.runs import COMPILED, config
from tests.runtime.test_compiled import batch, gradients

SIZES = (
    "model.mtp_depth=0", "model.hidden_size=64", "model.dense_ffn_size=64", "model.qk_nope_head_dim=16",
    "model.qk_rope_head_dim=16", "model.v_head_dim=16", "model.kv_lora_rank=16", "model.q_lora_rank=16",
    "model.shared_ffn_size=32", "model.expert_ffn_size=32",
)  # fmt: skip
RUN = config(*COMPILED, *SIZES, "precision.fp8=rowwise")


def model_of() -> nn.Module:
    cpu = torch.device("cpu")
    return build_model(RUN.model, device=cpu, dtype=torch.float32, seed=0, execution=RUN.moe)


@pytest.fixture(scope="module")
def of_fp8() -> tuple[dict[str, Tensor], CompiledSegments]:
    made = CompiledSegments(lambda trains: pass_runner(RUN, "torch", None, trains))
    return gradients(model_of(), made)[1], made


@pytest.mark.slow  # compiles a model
def test_gradients_are_close_to_those_of_the_plain_model(of_fp8):
    found, made = of_fp8
    _, wanted = gradients(model_of())
    for name, gradient in found.items():
        assert decibels(gradient, wanted[name]) > 14, name
    matches = {(r.unit, p.name): p.matches for r in made.reports for p in r.passes}
    assert matches["attn..mlp", "fp8_linear"] == 7 and matches["attn..moe_combine", "fp8_experts"] == 1
    assert matches["loss", "fp8_linear"] == 0


@pytest.mark.slow  # compiles a model
def test_sums_over_micro_batches_are_those_of_the_gradients(of_fp8):
    model = model_of()
    sums = {id(p): Gradient(torch.empty_like(p)) for p in model.parameters()}
    made = CompiledSegments(lambda trains: pass_runner(RUN, "torch", None, trains), lambda p: sums[id(p)])
    for _ in range(2):
        model.loss(*batch(), made).total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sums[id(parameter)].total, 2 * of_fp8[0][name], rtol=1e-5, atol=1e-7)


@pytest.mark.slow  # compiles a model
def test_gradients_of_a_forward_that_is_computed_again_have_the_same_bits(of_fp8):
    words = "recompute.segments=[attn,mlp,moe_experts,shared_experts]"
    again = config(*COMPILED, *SIZES, "precision.fp8=rowwise", words)
    made = CompiledSegments(
        lambda trains: pass_runner(again, "torch", None, trains), recompute=Recompute.of(again.recompute)
    )
    _, found = gradients(model_of(), made)
    assert all(gradient.equal(of_fp8[0][name]) for name, gradient in found.items())
    kept = [{r.unit: r.kept_bytes for r in each.reports} for each in (made, of_fp8[1])]
    assert kept[0]["attn..moe_combine"] < kept[1]["attn..moe_combine"] / 3
