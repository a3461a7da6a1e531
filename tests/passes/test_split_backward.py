"""split_backward: I and W together are the backward, and each weight gradient is computed once."""

import pytest
import torch

from graphmoe.model.build import build_model
from graphmoe.passes.matching import origin
from graphmoe.passes.split_backward import SUMS, split_backward
from graphmoe.passes.table import PASSES, PassRunner
from graphmoe.runtime.compile.graphs import UnitGraphs, unit_graphs
from graphmoe.runtime.compile.tracing import fakes_of
from graphmoe.runtime.compile.units import BoundUnit, units_of
from graphmoe.runtime.torch_compat import make_fx
from tests.passes.blocks import assert_agrees
from tests.runs import config
from tests.tolerances import TOLERANCES

aten = torch.ops.aten
SPLIT = next(spec for spec in PASSES if spec.run is split_backward)
PRODUCTS = {aten.mm.default, aten.bmm.default, torch.ops.graphmoe.grouped_mm_wgrad.default}


def graphs_of(layer: int, *specs, dtype=torch.float32) -> tuple[UnitGraphs, list[torch.Tensor]]:
    """Graphs of a tiny layer, and tensors to run them with."""
    run = config("model.aux_loss=sequence", "model.aux_loss_coef=0.1")
    model = build_model(run.model, device=torch.device("cpu"), dtype=dtype, seed=0, execution=run.moe)
    segments = model.layers[layer].segments()
    keep = ("x", "loss") if layer else ("x",)
    (unit,) = units_of(segments, keep)
    bound = BoundUnit.of(unit)
    x = torch.randn(2, 16, 16, dtype=dtype, requires_grad=True)
    values = dict(zip(("x", "cos", "sin"), (x, *model.rope(16, torch.device("cpu"))), strict=True))
    tensors = [*bound.tensors, *(values[name] for name in unit.reads)]
    made = unit_graphs(
        bound.run,
        fakes_of(tensors),
        num_weights=bound.num_parameters,
        trains=True,
        runner=PassRunner(specs),
        name=unit.name,
    )
    return made, tensors


def kept(graphs: UnitGraphs, tensors: list[torch.Tensor]):
    with torch.no_grad():
        results = graphs.forward(*tensors)
    outputs, rest = results[: graphs.num_outputs], results[graphs.num_outputs :]
    gradients = [torch.randn_like(o) for o, d in zip(outputs, graphs.differentiable, strict=True) if d]
    return [*(tensors[i] for i in graphs.kept_inputs), *rest, *gradients]


def run_both(graphs: UnitGraphs, read: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Gradients by the input's position."""
    split = graphs.backward
    assert split is not None
    first = split.inputs(*(read[i] for i in split.inputs_read))
    count = len(graphs.input_gradients)
    second = split.weights(*first[count:], *(read[i] for i in split.weights_read))
    assert len(first) == count + split.num_handed
    positions = (*graphs.input_gradients, *graphs.weight_gradients)
    return dict(zip(positions, [*first[:count], *second], strict=True))


def products(module: torch.fx.GraphModule) -> int:
    return sum(node.target in PRODUCTS for node in module.graph.nodes)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_then_weights_give_the_gradients_of_the_whole_backward(layer, dtype):
    torch.manual_seed(1)
    whole, tensors = graphs_of(layer, dtype=dtype)
    cut, _ = graphs_of(layer, SPLIT, dtype=dtype)
    read = kept(whole, tensors)
    expected, got = run_both(whole, read), run_both(cut, read)
    assert not whole.weight_gradients and cut.weight_gradients
    assert got.keys() == expected.keys() and len(got) > 8
    for position, gradient in got.items():
        limit = TOLERANCES[dtype].gradient
        assert_agrees(gradient, expected[position], SPLIT.numerics, limit, f"gradient {position}")


@pytest.mark.parametrize("layer", [0, 1])
def test_each_weight_gradient_is_one_product_and_runs_in_w(layer):
    whole, tensors = graphs_of(layer)
    cut, _ = graphs_of(layer, SPLIT)
    assert whole.backward is not None and cut.backward is not None
    matrices = [tensors[i] for i in cut.weight_gradients if tensors[i].dim() > 1]
    assert products(cut.backward.weights) == len(matrices) > 4
    assert products(cut.backward.inputs) + products(cut.backward.weights) == products(whole.backward.inputs)


def test_no_view_or_cast_is_handed_from_i_to_w():
    cut, _ = graphs_of(1, SPLIT)
    assert cut.backward is not None
    outputs = next(n for n in reversed(cut.backward.inputs.graph.nodes) if n.op == "output").args[0]
    handed = outputs[len(cut.input_gradients) :]  # type: ignore[index]
    assert handed and not [n for n in handed if n.target in (aten.view.default, aten.permute.default)]


@pytest.mark.parametrize("layer", [0, 1])
def test_i_sums_the_gradients_of_norms_and_hands_over_rows(layer):
    cut, tensors = graphs_of(layer, SPLIT)
    assert cut.backward is not None
    results = next(n for n in reversed(cut.backward.weights.graph.nodes) if n.op == "output").args[0]
    norms = [n for i, n in zip(cut.weight_gradients, results, strict=True) if tensors[i].dim() == 1]
    assert len(norms) == 3  # before attention, of the latents, before the MLP
    assert {origin(node).op for node in norms} == {"placeholder"}
    assert not [node for node in cut.backward.weights.graph.nodes if node.target in SUMS]


def test_a_sum_of_what_is_in_memory_anyway_stays_in_w():
    def backward(a, b):
        return a * 2, (a * b).sum(0)

    a, b = torch.randn(4, 3), torch.randn(4, 3)
    split = split_backward(make_fx(backward)(a, b), [1])
    assert split.num_handed == 0 and split.weights(a, b)[0].equal((a * b).sum(0))


def test_a_sum_behind_a_product_stays_in_w():
    def backward(a, b):
        c = a.sin().cos()
        return c * 2, (c @ b).sum(0)

    a, b = torch.randn(4, 4), torch.randn(4, 4)
    split = split_backward(make_fx(backward)(a, b), [1])
    (c,) = [n.name for n in split.weights.graph.nodes if n.op == "placeholder"][: split.num_handed]
    assert c == "cos" and split.weights(a.sin().cos(), b)[0].equal((a.sin().cos() @ b).sum(0))


def test_a_piece_of_a_view_is_made_again_and_not_handed_over():
    def backward(a, b):
        first, second = a.split(2)
        return first.sin(), second * b

    a, b = torch.randn(4), torch.randn(2)
    split = split_backward(make_fx(backward)(a, b), [1])
    assert split.num_handed == 0 and split.weights(a, b)[0].equal(a[2:] * b)


def test_a_backward_without_weights_is_left_whole():
    def run(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.sin(),)

    made = unit_graphs(
        run,
        fakes_of([torch.randn(3, requires_grad=True)]),
        num_weights=0,
        trains=True,
        runner=PassRunner([SPLIT]),
        name="sin",
    )
    assert made.backward is not None and not made.weight_gradients and made.input_gradients == (0,)


def test_the_input_graph_is_not_changed():
    graph = torch.fx.symbolic_trace(lambda a, b: (a * b, a + b))
    text = graph.code
    split = split_backward(graph, [1])
    assert graph.code == text
    a, b = torch.randn(3), torch.randn(3)
    assert split.inputs(a, b)[0].equal(a * b) and split.weights(a, b)[0].equal(a + b)
