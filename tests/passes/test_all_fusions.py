"""All fusion passes after another, on MoE blocks of transformers, layers of the model and a whole model."""

import itertools

import pytest
import torch

from graphmoe.model.build import build_model
from graphmoe.model.transformer import Transformer
from graphmoe.passes.fuse_activation import fuse_activation
from graphmoe.passes.fuse_experts import fuse_experts
from graphmoe.passes.fuse_loss import fuse_loss
from graphmoe.passes.fuse_permutation import fuse_permutation
from graphmoe.passes.fuse_router import fuse_router
from graphmoe.runtime.compile.units import fakes_of
from graphmoe.runtime.torch_compat import joint_graph
from tests.passes.blocks import (
    DTYPES,
    D,
    R,
    T,
    Traced,
    assert_same_numbers,
    call_of,
    operations,
    random,
    rewritten,
    row_sized,
    traced,
    transformers_block,
)
from tests.runs import config

PASSES = (fuse_router, fuse_permutation, fuse_activation, fuse_experts)
FAMILIES = [  # family, its settings, and settings of the router's operation
    ("mixtral", {}, ("softmax", 1, 1, 1, True, False, 1.0)),
    ("qwen3_moe", {"norm_topk_prob": False}, ("softmax", 1, 1, 1, False, False, 1.0)),
    ("qwen3_moe", {"norm_topk_prob": True}, ("softmax", 1, 1, 1, True, False, 1.0)),
    ("deepseek_v2", {"topk_method": "greedy"}, ("softmax", 1, 1, 1, False, False, 2.5)),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, ("softmax", 4, 2, 1, False, False, 2.5)),
    ("deepseek_v3", {"norm_topk_prob": True}, ("sigmoid", 4, 2, 2, True, False, 2.5)),
]


@pytest.mark.parametrize(("device", "dtype"), [*(("cpu", dtype) for dtype in DTYPES), ("cuda", DTYPES[1])])
@pytest.mark.parametrize(("family", "changes", "options"), FAMILIES)
def test_blocks_of_transformers_keep_nothing_of_row_size(family, changes, options, dtype, device):
    if device == "cuda" and not torch.backends.cuda.is_built():
        pytest.skip("needs a torch built for GPUs, but no GPU")
    plain = transformers_block(family, dtype, device=device, **changes)
    fused, results = rewritten(plain, *PASSES)
    assert [result.matches for result in results] == [1, 4, 1, 1]
    assert not any(result.left for result in results)
    assert len(row_sized(plain, R)) >= 6 and row_sized(fused, R) == []
    calls = operations(fused)
    assert calls["router"] == calls["routing_plan"] == calls["grouped_mlp"] == 1
    gone = {"permute", "unpermute", "swiglu", "grouped_mm", "sort", "topk", "histc", "transpose", "_softmax"}
    assert not gone & set(calls)
    assert call_of(fused, "router").args[3:] == (1, 2, *options, False)
    if device == "cpu":
        assert_same_numbers(fused, plain)


def test_the_order_of_the_passes_before_the_last_does_not_matter():
    plain = transformers_block("mixtral", torch.float32)
    expected = operations(rewritten(plain, *PASSES)[0])
    for order in itertools.permutations(PASSES[:3]):
        fused, _ = rewritten(plain, *order, fuse_experts)
        assert operations(fused) == expected, order
        assert_same_numbers(fused, plain)


def model_of(dtype: torch.dtype, *words: str) -> Transformer:
    run_config = config("model.aux_loss_coef=0.1", *words)
    options = {"dtype": dtype, "seed": 0, "execution": run_config.moe}
    return build_model(run_config.model, device=torch.device("cpu"), **options)


@pytest.mark.parametrize(
    ("words", "dtype"), [("model.shared_ffn_size=8", DTYPES[0]), ("model.shared_ffn_size=0", DTYPES[1])]
)
def test_every_layer_and_loss_of_a_whole_model_matches_and_nothing_of_row_size_is_kept(words, dtype):
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(5))

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model_of(dtype, "model.num_layers=3", "model.mtp_depth=1", words)

        def forward(self, tokens_BS, labels_BS):
            return tuple(self.model.loss(tokens_BS, labels_BS)[:-1])

    plain = traced(Loss(), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    fused, results = rewritten(plain, *PASSES, fuse_loss)
    assert [result.matches for result in results] == [3, 12, 3, 3, 2]
    assert not any(result.left for result in results)
    rows = 2 * 16 * 2
    assert len(row_sized(plain, rows)) == 3 * 6 and row_sized(fused, rows) == []
    assert operations(fused)["silu"] == (1 if "ffn_size=0" in words else 4)
    assert_same_numbers(fused, plain)


def test_forward_and_backward_are_traced_from_the_rewritten_layer_with_forced_experts():
    model, given = (
        model_of(torch.bfloat16, "moe.force_balance=true"),
        random(2, T // 2, D, dtype=torch.bfloat16),
    )
    layer = traced(model.layers[1], given, *model.rope(T // 2, torch.device("cpu")))
    fused, _ = rewritten(layer, *PASSES)
    assert_same_numbers(fused, layer)
    joint = Traced(joint_graph(fused.graph, fakes_of(fused.inputs)), [])
    calls = operations(joint)
    for name in ("router", "router_backward", "grouped_mlp", "grouped_mlp_dgrad", "grouped_mlp_wgrad"):
        assert calls[name] == 1, calls
    assert row_sized(joint, R) == []
