"""fp8_linear, fp8_experts and fp8_quantise: what they put, what they leave, and numbers spelt out or not."""

import functools

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.compile_utils import fx_graph_cse

from graphmoe.config.formats import FORMATS
from graphmoe.config.schema import ConfigError
from graphmoe.ops import fp8_mlp  # noqa: F401  # registers the operations
from graphmoe.ops.formats import KERNELS
from graphmoe.ops.fp8 import fp8_dtype
from graphmoe.passes.fp8 import fp8_experts, fp8_linear, fp8_quantise
from graphmoe.runtime.compile.units import fakes_of
from graphmoe.runtime.torch_compat import joint_graph
from tests.passes.blocks import Traced, assert_left, expert_inputs, random, traced
from tests.passes.test_fuse_experts import BEHIND_PERMUTATION as BEHIND
from tests.passes.test_fuse_experts import block, clamped

HERE = functools.partial(fp8_linear, products=("here",))


def two_products(x: Tensor, first: Tensor, second: Tensor, down: Tensor) -> Tensor:
    x = F.rms_norm(x, x.shape[-1:])
    return F.silu(F.linear(F.silu(F.linear(x, first)) * F.linear(x, second), down))


WIDTHS = {"rowwise": (32, 48), "tensorwise": (32, 48), "blockwise": (128, 256), "mxfp8": (64, 96)}
"""Inputs and outputs of the first two products."""
WEIGHTS = {name: (each.weight.name, each.transposed.name) for name, each in KERNELS.items()}
"""Operations that store weights."""


def weights(dtype: torch.dtype = torch.float32, widths: tuple[int, int] = (32, 48)) -> list[Tensor]:
    K, N = widths
    sizes = ((40, K), (N, K), (N, K), (K, N))
    return [random(*size, seed=i, dtype=dtype) for i, size in enumerate(sizes)]


def joint_of(plain: Traced, *passes: functools.partial[object]) -> Traced:
    joint = joint_graph(plain.graph, fakes_of(plain.inputs))
    for each in passes:
        each(joint.graph)  # type: ignore[operator]
        joint.graph.eliminate_dead_code()
        joint.graph.lint()
    joint.recompile()
    return Traced(joint, plain.inputs)


def results(joint: Traced, plain: Traced) -> list[Tensor]:
    outputs = [x.detach() for x in plain.graph(*plain.inputs) if x.requires_grad]
    both = joint.graph([x.detach() for x in joint.inputs], [torch.ones_like(x) for x in outputs])
    return [x for part in both for x in part if x is not None]


def spelt_out(found: Traced) -> Traced:
    """The joint graph with its quantization spelt out, which has the bits of the operations."""
    plain, spelt = joint_of(found), joint_of(found, fp8_quantise)
    for one, other in zip(results(spelt, found), results(plain, found), strict=True):
        assert one.dtype == other.dtype and one.equal(other)
    return spelt


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
@pytest.mark.parametrize("recipe", FORMATS)
def test_products_that_share_an_operand_store_it_once_with_the_bits_of_each_alone(recipe, wgrad):
    dtype = (torch.float32, torch.bfloat16)[([*FORMATS].index(recipe) + (wgrad == "bf16")) % 2]
    here = functools.partial(HERE, recipe=recipe, wgrad=wgrad)
    found, (result,) = traced(two_products, *weights(dtype, WIDTHS[recipe])).rewritten(here)
    assert result.matches == 3 and found.calls["fp8_linear"] == 3 and not found.calls["mm"]
    spelt = spelt_out(found)
    assert torch._functorch.config.cse  # as the partition does, which joins forward and backward
    spelt.graph.graph = fx_graph_cse(spelt.graph.graph)
    calls = spelt.calls
    assert not calls["fp8_linear"] + calls["fp8_linear_dgrad"] + calls["fp8_linear_wgrad"]
    # x, the activation, the gradients of three products, three weights along either axis: each once.
    casts = [n for n in spelt.nodes if n.target is torch.ops.aten._to_copy.default]
    stored = sum(node.meta["val"].dtype == fp8_dtype() for node in casts)
    assert stored + calls["fp8_given"] == 2 + 3
    if recipe == "tensorwise":  # what two products read has one scale
        assert [calls["fp8_scale_of_input"], calls["fp8_scale_of_gradient"]] == [2, 3]
    assert [calls[name] for name in WEIGHTS[recipe]] == [3, 3]
    assert calls["fp8_transposed"] + calls["fp8_blocks_turned"] == (5 if wgrad == "fp8" else 0)


def test_other_products_and_uneven_sides_are_left():
    assert_left(traced(lambda x, a, b, down: F.linear(x, a[:40]), *weights()), "is not a weight", HERE)
    turned = traced(lambda x, a, b, down: F.linear(x, down.t()), *weights())
    assert_left(turned, "its second factor is not a weight", HERE)
    assert_left(traced(lambda x: x * 2, random(2)), "none in here", HERE)
    for recipe, size in (("rowwise", 24), ("blockwise", 64), ("mxfp8", 48)):
        plain = traced(lambda x, w: F.linear(x, w), random(8, size), random(128, size))
        reason = f"{size} of its weight [128, {size}] is not a multiple of {FORMATS[recipe].aligned}"
        assert_left(plain, reason, functools.partial(HERE, recipe=recipe))


def test_weights_that_are_to_stay_in_their_dtype_are_left():
    plain = functools.partial(HERE, plain=[[48, 32]])
    found, (result,) = traced(two_products, *weights()).rewritten(plain)
    assert result.matches == 1 and found.calls["mm"] == 2
    assert all("its weight [48, 32] is no faster" in reason for reason in result.left)


def experts_in(width: int) -> list[Tensor]:
    x, weight_TK, *_, expert_TK = expert_inputs()
    weights = random(4, 2 * width, width, seed=1), random(4, width, width, seed=2)
    return [random(len(x), width), weight_TK, *weights, expert_TK]


@pytest.mark.parametrize("is_clamped", [False, True])
@pytest.mark.parametrize(("recipe", "width"), [("rowwise", 16), ("mxfp8", 32)])
def test_experts_are_spelt_out_with_the_same_bits(recipe, width, is_clamped):
    bias = [random(4, 2 * width, seed=3)] if is_clamped else []
    plain = traced(clamped() if is_clamped else block(), *experts_in(width), *bias)
    put = functools.partial(fp8_experts, recipe=recipe)
    found, (*_, result) = plain.rewritten(*BEHIND, put)
    assert result.matches == 1 and found.call("fp8_mlp") is not None
    calls = spelt_out(found).calls
    names = ("fp8_mlp_forward", "fp8_mlp_dgrad", "fp8_mlp_wgrad", "expert_sums", *WEIGHTS[recipe])
    counts = [1, 1, 1, int(is_clamped), 2 + 3, 2]  # weights, and inputs: x twice, dy
    assert [calls[name] for name in names] == counts


@pytest.mark.parametrize("has_room", [False, True])
def test_rows_where_no_token_lies_are_no_largest_number_of_a_tensor(has_room):
    put = functools.partial(fp8_experts, recipe="tensorwise")
    found, _ = traced(block(), *experts_in(16)).rewritten(*BEHIND, put)
    spelt = joint_of(found, functools.partial(fp8_quantise, has_room=has_room))
    spelt.graph.graph = fx_graph_cse(spelt.graph.graph)
    stored = [n.args[0] for n in spelt.nodes if n.target is torch.ops.graphmoe.fp8_given.default]
    assert [x.target is torch.ops.aten.where.self for x in stored] == [has_room] * 2  # x, dy


def test_rows_in_8_bits_are_refused_to_experts_that_compute_with_more():
    found, _ = traced(block(), *experts_in(16)).rewritten(*BEHIND)
    joint = joint_of(found)
    for node in joint.nodes:
        node.meta["custom"] = {"segment": "moe_experts"}
    with pytest.raises(ConfigError, match="fp8_experts left the experts as they are; use moe.dispatch_dtype"):
        fp8_quantise(joint.graph.graph, dispatched=True)


def test_experts_of_other_sizes_are_left():
    assert_left(traced(block(), *expert_inputs()), "8 of its weights", *BEHIND, fp8_experts)
    in_32s = functools.partial(fp8_experts, recipe="mxfp8")
    assert_left(traced(block(), *experts_in(16)), "16 of its weights [4, 32, 16] is no", *BEHIND, in_32s)


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(F.silu(x), gate_up).chunk(2, -1)
    return F.silu(F.linear(F.silu(gate) * up, down))


def rotated(x: Tensor, q: Tensor, out: Tensor) -> Tensor:
    plain, turned = F.linear(F.silu(x), q).unflatten(-1, (2, -1)).split([8, 16], -1)
    turned = torch.cat([-turned[..., 8:], turned[..., :8]], -1)
    heads = F.rms_norm(torch.cat([plain, turned], -1), (24,)).transpose(0, 1)
    return F.silu(F.linear((heads @ heads.mT @ heads).transpose(0, 1).flatten(1), out))


@pytest.mark.parametrize(("run", "width"), [(swiglu, 96), (rotated, 48)])
def test_gradients_made_by_a_cat_are_stored_by_a_kernel_of_their_own_with_the_same_bits(run, width):
    given = random(40, 32), random(width, 32, seed=1), random(32, 48, seed=2)
    found, (result,) = traced(run, *given).rewritten(HERE)
    spelt = spelt_out(found)
    spelt.graph.graph = fx_graph_cse(spelt.graph.graph)
    stored = [n.args[0] for n in spelt.nodes if n.target is torch.ops.graphmoe.fp8_rows.default]
    of_weights = [node for node in stored if node.op == "placeholder"]
    (others,) = [node for node in stored if node.op != "placeholder"]
    assert result.matches == 2 == len(of_weights) and others.meta["val"].shape == (40, width)
