"""Recompute: bitwise the gradients without it, from fewer kept bytes, eagerly and compiled."""

import functools
from collections import Counter

import pytest
import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphmoe.config.schema import ConfigError, RecomputeConfig
from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.compile.cut import RecomputedSegments, executor_outside_graphs, root_of
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.segments import LAYER_SEGMENTS, Segment, run_segments
from tests.runtime.test_compiled import batch, executor, model_of

pytestmark = pytest.mark.usefixtures("unmeasured")
B, S, D = 2, 16, 16
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
GQA = ("model.attention=gqa", "model.num_kv_heads=1", "model.head_dim=4", "model.qk_norm=true")
UNFUSED = "passes.disabled=[fuse_experts]"


def recompute(**named) -> Recompute:
    return Recompute.of(RecomputeConfig(**named))


def of_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    for buffer in module.to(dtype).buffers():
        buffer.data = buffer.data.float()
    return module


def layer_gradients(execute, *overrides: str, layer: int = 1, dtype=torch.float32):
    model = model_of("model.num_layers=2", *overrides)
    module = of_dtype(model.layers[layer], dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, S, D, generator=generator).to(dtype).requires_grad_()
    output = module(x, *model.rope(S, x.device), execute, layer)
    loss = output.square().sum() if layer == 0 else output.x_BSD.square().sum() + output.loss
    return loss, torch.autograd.grad(loss, [x, *module.parameters()])


@functools.cache
def kept_without(*overrides: str, layer: int = 1, dtype=torch.float32) -> tuple[int, list[torch.Tensor]]:
    execute = executor(*overrides)
    loss, gradients = layer_gradients(execute, *overrides, layer=layer, dtype=dtype)
    assert execute.reports[0].recomputed == 0
    return execute.reports[0].kept_bytes, [loss, *gradients]


TOKENS = B * S * 4
"""Bytes of one fp32 number for each token."""
VARIANTS = {  # what is asked for, overrides, layer, bytes that are kept less; None: all
    "all": ({"all": True}, (), 1, None),
    "a dense layer": ({"layer_ids": [0]}, (), 0, None),
    "attn": ({"segments": ["attn"]}, (), 1, 4000),
    "mlp": ({"segments": ["mlp"]}, (), 0, 3 * TOKENS * 16),  # gate, up and their product
    "moe_router": ({"segments": ["moe_router"]}, (), 1, TOKENS * 4),  # the logits at least
    "shared_experts": ({"segments": ["shared_experts"]}, (), 1, 3 * TOKENS * 8),
    "moe_experts": ({"segments": ["moe_experts"]}, (), 1, 2 * TOKENS * 2 * 8),  # h of two slots
    "two regions": ({"segments": ["attn", "moe_experts"]}, (), 1, 4000),
    "neighbours": ({"segments": ["moe_router", "moe_preprocess", "moe_dispatch"]}, (), 1, 0),
    "layernorm": ({"ops": ["layernorm"]}, (), 1, TOKENS * 16),
    "core_attn": ({"ops": ["core_attn"]}, (), 1, TOKENS * 2 * 4),
    "mla_up_proj": ({"ops": ["mla_up_proj"]}, (), 1, 2 * TOKENS * 2 * 8),
    "moe_act": ({"ops": ["moe_act"]}, (UNFUSED,), 1, 2 * TOKENS * 8),
    "the part mlp": ({"ops": ["mlp"]}, (), 0, 3 * TOKENS * 16),
    "the part shared_experts": ({"ops": ["shared_experts"]}, (), 1, 3 * TOKENS * 8),
    "parts of gqa": ({"ops": ["layernorm", "core_attn"]}, GQA, 0, TOKENS * 16),
    "moe_experts, unfused": ({"segments": ["moe_experts"]}, ("passes.enabled=[]",), 1, 4 * TOKENS * 8),
    "moe_preprocess keeps nothing": ({"segments": ["moe_preprocess"]}, (), 1, 0),
    "moe_dispatch keeps nothing": ({"segments": ["moe_dispatch"]}, (), 1, 0),
    "moe_combine keeps nothing": ({"segments": ["moe_combine"]}, (), 1, 0),
    "fused experts keep nothing": ({"ops": ["moe_act"]}, (), 1, 0),
}
ROUNDED = pytest.param("all", torch.bfloat16, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "dtype"), [*((n, torch.float32) for n in VARIANTS), ROUNDED], ids=str)
def test_gradients_are_bitwise_those_of_kept_values_from_fewer_bytes(name, dtype, graphs_as_they_are):
    asked, overrides, layer, less = VARIANTS[name]
    before, expected = kept_without(*overrides, layer=layer, dtype=dtype)
    execute = executor(*overrides, recompute=recompute(**asked))
    loss, gradients = layer_gradients(execute, *overrides, layer=layer, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip([loss, *gradients], expected, strict=True))
    (report,) = execute.reports
    if "nothing" in name:
        assert (report.kept_bytes, report.recomputed) == (before, 0)
    else:
        assert report.recomputed > 0
        limit = 0 if less is None else before - less * dtype.itemsize // 4
        assert report.kept_bytes <= limit and (report.kept_bytes < before or less == 0)


def graphs_of(execute: CompiledSegments):
    ((code, _),) = execute._codes.values()
    return code.graphs


def calls(module: fx.GraphModule, target) -> list[fx.Node]:
    return module.graph.find_nodes(op="call_function", target=target)


def test_what_is_expensive_is_computed_again_once_and_the_experts_as_far_as_needed(graphs_as_they_are):
    execute = executor(recompute=recompute(all=True))
    layer_gradients(execute)
    ops, graphs = torch.ops.graphmoe, graphs_of(execute)
    halves = graphs.backward.inputs, graphs.backward.weights
    inputs, weights = (Counter(node.target for node in half.graph.nodes) for half in halves)
    both = inputs + weights
    assert graphs.weight_gradients and both[ATTENTION] == both[ops.router.default] == 1
    assert both[ops.grouped_mlp_hidden.default] == 1 and both[ops.grouped_mlp.default] == 0
    assert weights[ATTENTION] == 0


def test_a_border_is_read_where_it_is_kept_and_leaves_no_copy(graphs_as_they_are):
    """The norm's result is kept for the experts, so the logits that are computed again read it there."""
    execute = executor(recompute=recompute(segments=["moe_router"]))
    layer_gradients(execute)
    (router,) = calls(graphs_of(execute).backward.inputs, torch.ops.graphmoe.router.default)
    logits = router.args[0]
    assert logits.target is torch.ops.aten.mm.default and root_of(logits.args[0]).op == "placeholder"
    plain = executor()
    layer_gradients(plain)
    copies = [len(calls(graphs_of(each).forward, torch.ops.aten.clone.default)) for each in (execute, plain)]
    assert copies[0] == copies[1]


class Held(TorchDispatchMode):
    """Measures the storages that operations made and something still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def num_bytes(self) -> int:
        return sum(size for made, size in self.made.items() if not made.expired())


def held_bytes(num_layers: int, *execute) -> int:
    model = model_of(f"model.num_layers={num_layers}", "model.mtp_depth=0")
    model.loss(*batch())  # makes the rotary tables
    with Held() as held:
        total = model.loss(*batch(), *execute).total
    size = held.num_bytes()
    total.backward()
    return size


def test_an_eager_forward_holds_about_one_hidden_state_for_each_layer():
    execute = RecomputedSegments(recompute(all=True))
    everything = (held_bytes(4) - held_bytes(2)) / 2
    again = (held_bytes(4, execute) - held_bytes(2, execute)) / 2
    state = B * S * D * 4
    assert state <= again <= 1.1 * state and everything > 20 * state


def test_a_compiled_forward_holds_what_the_report_says(graphs_as_they_are):
    for wanted in (None, recompute(all=True), recompute(segments=["attn"])):
        execute = executor(recompute=wanted)
        model = model_of("model.num_layers=2", "model.mtp_depth=0")
        x, (cos, sin) = torch.randn(B, S, D, requires_grad=True), model.rope(S, torch.device("cpu"))
        given = model.layers[1].segments(1), {"x": x, "cos": cos, "sin": sin}, ("x", "loss")
        execute(*given)  # traces
        with Held() as held:
            outputs = execute(*given)
        handed_on = sum(output.untyped_storage().nbytes() for output in outputs)
        assert held.num_bytes() - handed_on == execute.reports[0].kept_bytes


EAGER = [
    {"all": True},
    *({"segments": [name]} for name in LAYER_SEGMENTS),
    {"layer_ids": [0, 2]},
    {"segments": ["attn", "moe_experts"], "layer_ids": [1, 3]},
    {"segments": ["moe_router", "moe_preprocess", "moe_experts", "moe_combine"]},
]


OF_DTYPES = [(asked, torch.float32) for asked in EAGER] + [(asked, torch.bfloat16) for asked in EAGER[::6]]


@pytest.mark.parametrize(("asked", "dtype"), OF_DTYPES, ids=str)
def test_eager_gradients_are_bitwise_those_of_kept_values(asked, dtype):
    model = of_dtype(model_of("model.num_layers=3"), dtype)  # and a layer that predicts later tokens
    execute = RecomputedSegments(recompute(**asked))
    for num_batches in (1, 2):
        totals = []
        for run in (run_segments, execute):
            model.zero_grad()
            losses = []
            for number in range(num_batches):
                losses.append(model.loss(*batch(number), run).total)
                losses[-1].backward()
            totals.append([*losses, *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*totals, strict=True))


@pytest.mark.parametrize(
    "asked, again",
    [
        ({}, ""),
        ({"all": True}, "attn 0, mlp 0, attn 1, mlp 1"),
        ({"segments": ["attn"]}, "attn 0, attn 1"),
        ({"segments": ["attn"], "ops": ["moe_act"]}, "attn 0, attn 1"),
        ({"layer_ids": [0]}, "attn 0, mlp 0"),
        ({"segments": ["attn", "loss"], "layer_ids": [1]}, "attn 1"),
        ({"ops": ["moe_act"]}, ""),
        ({"ops": ["core_attn"], "layer_ids": [0]}, ""),
    ],
    ids=str,
)
def test_outside_graphs_segments_and_layers_are_computed_again_and_parts_are_not(asked, again):
    calls = []

    def called(name, x):
        calls.append(name)
        return x.sin()

    places = [("embed", 0), ("attn", 0), ("mlp", 0), ("attn", 1), ("mlp", 1), ("loss", None)]
    runs = [functools.partial(called, f"{name} {layer}") for name, layer in places]
    segments = [Segment(n, run, ("x",), ("x",), layer=i) for (n, i), run in zip(places, runs, strict=True)]
    execute = executor_outside_graphs(recompute(**asked))
    (y,) = execute(segments, {"x": torch.ones(3, requires_grad=True)}, ("x",))
    forward, calls = calls, []
    y.sum().backward()
    assert len(forward) == len(places) and sorted(calls) == sorted(filter(None, again.split(", ")))


def test_layers_treated_alike_share_a_compilation_and_others_do_not(graphs_as_they_are):
    execute = executor(recompute=recompute(layer_ids=[1, 2, 4]))
    model = model_of("model.num_layers=5", "model.mtp_depth=0")
    model.loss(*batch(), execute).total.backward()
    used = {(r.unit, r.recomputed > 0): r.shared_by for r in execute.reports if r.unit.startswith("attn")}
    assert used == {("attn..mlp", False): 1, ("attn..moe_combine", True): 3, ("attn..moe_combine", False): 1}


RANDOM = {
    "rand": lambda x: (x + torch.rand_like(x)).sin(),
    "dropout": nn.Dropout(0.5),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
}


@pytest.mark.parametrize("run", RANDOM.values(), ids=RANDOM)
@pytest.mark.parametrize("eager", [True, False])
def test_random_numbers_in_what_is_computed_again_are_refused(run, eager, graphs_as_they_are):
    wanted = recompute(segments=["attn"])
    split = "passes.enabled=[split_backward]"
    execute = RecomputedSegments(wanted) if eager else executor(split, recompute=wanted)
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    segments = [Segment(name, run, ("x",), ("x",), layer=0) for name in ("attn", "mlp")]
    (y,) = execute(segments[1:], {"x": x}, ("x",))  # not covered
    y.sum().backward()
    if eager:
        with torch.no_grad():
            execute(segments, {"x": x}, ("x",))  # not computed again
    with pytest.raises(ConfigError, match="recompute covers .*attn, which draws random numbers"):
        execute(segments, {"x": x}, ("x",))
