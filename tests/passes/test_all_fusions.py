"""All fusion passes after another, on MoE blocks of transformers, layers of the model and a whole model."""

import pytest
import torch

from graphmoe.model.build import build_model
from graphmoe.model.transformer import Transformer
from graphmoe.passes import PASSES
from graphmoe.runtime.compile.units import fakes_of
from graphmoe.runtime.torch_compat import joint_graph
from tests.passes.blocks import DTYPES, D, R, T, Traced, random, traced, transformers_block
from tests.runs import config

FUSIONS = [spec.run for spec in PASSES if spec.name.startswith("fuse_")]
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
    fused, results = plain.rewritten(*FUSIONS)
    assert [result.matches for result in results] == [4, 1, 1, 0, 1]
    assert not any(result.left for result in results)
    assert len(plain.row_sized(R)) >= 6 and fused.row_sized(R) == []
    assert [fused.calls[name] for name in ("router", "routing_plan", "grouped_mlp")] == [1, 1, 1]
    gone = {"permute", "unpermute", "swiglu", "grouped_mm", "sort", "topk", "histc", "transpose", "_softmax"}
    assert not gone & set(fused.calls)
    assert fused.call("router").args[3:] == (1, 2, *options, False)
    if device == "cpu":
        fused.assert_same(plain)


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
    fused, results = plain.rewritten(*FUSIONS)
    assert [result.matches for result in results] == [12, 3, 3, 2, 3]
    assert not any(result.left for result in results)
    rows = 2 * 16 * 2
    assert len(plain.row_sized(rows)) == 3 * 6 and fused.row_sized(rows) == []
    assert fused.calls["silu"] == (1 if "ffn_size=0" in words else 4)
    fused.assert_same(plain)


def test_forward_and_backward_are_traced_from_the_rewritten_layer_with_forced_experts():
    model = model_of(torch.bfloat16, "moe.force_balance=true")
    given = random(2, T // 2, D, dtype=torch.bfloat16)
    layer = traced(model.layers[1], given, *model.rope(T // 2, torch.device("cpu")))
    fused, _ = layer.rewritten(*FUSIONS)
    fused.assert_same(layer)
    joint = Traced(joint_graph(fused.graph, fakes_of(fused.inputs)), [])
    names = ["router", "router_backward", "grouped_mlp", "grouped_mlp_dgrad", "grouped_mlp_wgrad"]
    assert [joint.calls[name] for name in names] == [1] * 5, joint.calls
    assert joint.row_sized(R) == []
