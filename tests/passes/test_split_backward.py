"""split_backward: I and W together are the backward, and each weight gradient is computed once."""

import functools

import pytest
import torch

from graphmoe.model.build import build_model
from graphmoe.passes import PASSES
from graphmoe.passes.base import PassRunner
from graphmoe.passes.matching import origin
from graphmoe.passes.split_backward import SUMS, drop_kept_axes, split_backward
from graphmoe.runtime.compile.graphs import UnitGraphs, unit_graphs
from graphmoe.runtime.compile.units import BoundUnit, fakes_of, units_of
from graphmoe.runtime.torch_compat import make_fx
from tests.passes.blocks import assert_agrees
from tests.runs import config
from tests.tolerances import TOLERANCES

aten = torch.ops.aten
SPLIT = next(spec for spec in PASSES if spec.run is split_backward)
PRODUCTS = {aten.mm.default, aten.bmm.default, torch.ops.graphmoe.grouped_mm_wgrad.default}


@functools.cache
def graphs_of(layer: int, cut: bool = False, dtype=torch.float32) -> tuple[UnitGraphs, list[torch.Tensor]]:
    run = config("model.aux_loss=sequence", "model.aux_loss_coef=0.1")
    model = build_model(run.model, device=torch.device("cpu"), dtype=dtype, seed=0, execution=run.moe)
    segments = model.layers[layer].segments()
    keep = ("x", "loss") if layer else ("x",)
    (unit,) = units_of(segments, keep)
    bound = BoundUnit.of(unit)
    x = torch.randn(2, 16, 16, dtype=dtype, requires_grad=True)
    values = dict(zip(("x", "cos", "sin"), (x, *model.rope(16, torch.device("cpu"))), strict=True))
    tensors = [*bound.tensors, *(values[name] for name in unit.reads)]
    runner, count = PassRunner([SPLIT] if cut else []), bound.num_parameters
    return unit_graphs(bound.run, fakes_of(tensors), num_weights=count, runner=runner, name="unit"), tensors


def kept(graphs: UnitGraphs, tensors: list[torch.Tensor]):
    with torch.no_grad():
        results = graphs.forward(*tensors)
    outputs, rest = results[: graphs.num_outputs], results[graphs.num_outputs :]
    gradients = [torch.randn_like(o) for o, d in zip(outputs, graphs.differentiable, strict=True) if d]
    return [*(tensors[i] for i in graphs.kept_inputs), *rest, *gradients]


def run_both(split, count: int, read: list[torch.Tensor]) -> list[torch.Tensor]:
    first = split.inputs(*(read[i] for i in split.inputs_read))
    assert len(first) == count + split.num_handed
    return [*first[:count], *split.weights(*first[count:], *(read[i] for i in split.weights_read))]


def gradients_of(graphs: UnitGraphs, read: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    positions = (*graphs.input_gradients, *graphs.weight_gradients)
    return dict(zip(positions, run_both(graphs.backward, len(graphs.input_gradients), read), strict=True))


def outputs_of(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return list(module.graph.output_node().args[0])


def products(module: torch.fx.GraphModule) -> int:
    return sum(node.target in PRODUCTS for node in module.graph.nodes)


LAYERS = [(0, torch.float32), (1, torch.bfloat16)]


@pytest.mark.parametrize(("layer", "dtype"), [*LAYERS, (1, torch.float32)])
def test_inputs_then_weights_give_the_gradients_of_the_whole_backward(layer, dtype):
    torch.manual_seed(1)
    whole, tensors = graphs_of(layer, dtype=dtype)
    cut, _ = graphs_of(layer, cut=True, dtype=dtype)
    read = kept(whole, tensors)
    expected, got = (gradients_of(graphs, read) for graphs in (whole, cut))
    assert not whole.weight_gradients and cut.weight_gradients
    assert got.keys() == expected.keys() and len(got) > 8
    for position, gradient in got.items():
        limit = TOLERANCES[dtype].gradient
        assert_agrees(gradient, expected[position], SPLIT.numerics, limit, f"gradient {position}")


@pytest.mark.parametrize(("layer", "dtype"), LAYERS)
def test_w_makes_each_weight_gradient_by_one_product_and_is_handed_no_view_and_no_sum_to_make(layer, dtype):
    whole, tensors = graphs_of(layer, dtype=dtype)
    cut, _ = graphs_of(layer, cut=True, dtype=dtype)
    assert whole.backward is not None and cut.backward is not None
    inputs, weights = cut.backward.inputs, cut.backward.weights
    matrices = [tensors[i] for i in cut.weight_gradients if tensors[i].dim() > 1]
    assert products(weights) == len(matrices) > 4
    assert products(inputs) + products(weights) == products(whole.backward.inputs)
    handed = outputs_of(inputs)[len(cut.input_gradients) :]
    assert handed and not [n for n in handed if n.target in (aten.view.default, aten.permute.default)]
    made = zip(cut.weight_gradients, outputs_of(weights), strict=True)
    norms = [node for i, node in made if tensors[i].dim() == 1]
    assert len(norms) == 3  # before attention, of the latents, before the MLP: rows that I has summed
    assert {origin(node).op for node in norms} == {"placeholder"}
    assert not [node for node in weights.graph.nodes if node.target in SUMS]


def behind_a_product(a, b):
    c = a.sin().cos()
    return c * 2, (c @ b).sum(0)


def of_a_piece(a, b):
    first, second = a.split(2)
    return first.sin(), second * b[:2]


@pytest.mark.parametrize(
    ("backward", "handed"),
    [
        (lambda a, b: (a * 2, (a * b).sum(0)), []),  # a sum of what is in memory anyway stays in W
        (behind_a_product, ["cos"]),  # a sum behind a product too
        (of_a_piece, []),  # a piece of a view is made again
        (lambda a, b: (a * b, a + b), []),
    ],
)
def test_i_hands_over_what_w_cannot_make_of_what_is_in_memory(backward, handed):
    read = [torch.randn(4, 4), torch.randn(4, 4)]
    graph = make_fx(backward)(*read)
    text = graph.code
    split = split_backward(graph, [1])
    assert graph.code == text
    names = [node.name for node in split.weights.graph.find_nodes(op="placeholder")]
    assert names[: split.num_handed] == handed
    for actual, wanted in zip(run_both(split, 1, read), backward(*read), strict=True):
        assert torch.equal(actual, wanted)


def test_sums_drop_the_axes_that_views_take_away():
    def backward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        of_bias, of_rows = x.sum((0, 1), keepdim=True), x.sum(-1, keepdim=True)
        return of_bias.view(-1) * 2, of_rows.squeeze(2), x / of_rows, x.sum(0, keepdim=True)

    x = torch.randn(2, 3, 4)
    module = make_fx(backward, tracing_mode="fake")(x)
    wanted = module(x)
    drop_kept_axes(module.graph)
    module.recompile()
    assert all(map(torch.equal, module(x), wanted))
    sums = module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert [node.meta["val"].dim() for node in sums] == [1, 3, 3]


def test_a_backward_without_weights_is_left_whole():
    fakes, runner = fakes_of([torch.randn(3, requires_grad=True)]), PassRunner([SPLIT])
    made = unit_graphs(lambda x: (x.sin(),), fakes, num_weights=0, runner=runner, name="sin")
    assert made.backward is not None and not made.weight_gradients and made.input_gradients == (0,)


def test_a_value_is_handed_on_in_the_dtype_that_both_read():
    def backward(dy: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = dy.float().abs().amax(-1, keepdim=True)
        stored = (dy.float() / largest).to(torch.bfloat16)
        return stored @ w, stored.t() @ x

    given = [torch.randn(8, 4), torch.randn(4, 6, dtype=torch.bfloat16), torch.randn(8, 6).bfloat16()]
    cut = split_backward(make_fx(backward, tracing_mode="fake")(*given), [1])
    handed = outputs_of(cut.inputs)[1:]
    assert [node.meta["val"].dtype for node in handed] == [torch.bfloat16]
    assert run_both(cut, 1, given)[1].equal(backward(*given)[1])
