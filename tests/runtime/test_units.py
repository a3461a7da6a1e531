"""Units: where a list of segments is cut, and which units are the same."""

import pytest
import torch
from torch import nn

from graphmoe.model.build import build_model
from graphmoe.runtime.compile.units import BoundUnit, Unit, units_of
from graphmoe.segments import Segment, run_segments
from tests.runs import config


def model(*overrides: str) -> nn.Module:
    run = config(*overrides)
    return build_model(run.model, device=torch.device("cpu"), dtype=torch.float32, seed=0, execution=run.moe)


def add_one(x):
    return x + 1


def bound(segments, keep=("x",)) -> BoundUnit:
    (unit,) = units_of(segments, keep)
    return BoundUnit.of(unit)


def test_neighbours_on_one_stream_are_one_unit():
    segments = [
        Segment("attn", add_one, ("x",), ("x",)),
        Segment("moe_router", torch.neg, ("x",), ("h",)),
        Segment("moe_dispatch", torch.neg, ("h",), ("received",), stream="comm"),
        Segment("moe_experts", torch.neg, ("received",), ("routed",)),
        Segment("moe_combine", torch.add, ("x", "routed"), ("x",)),
    ]
    units = units_of(segments, ("x",))
    assert [unit.name for unit in units] == ["attn..moe_router", "moe_dispatch", "moe_experts..moe_combine"]
    assert [unit.reads for unit in units] == [("x",), ("h",), ("received", "x")]
    assert [unit.writes for unit in units] == [("h", "x"), ("received",), ("x",)]


def test_a_segment_without_fixed_sizes_is_no_part_of_a_unit_that_has_them():
    segments = [
        Segment("moe_router", torch.neg, ("x",), ("h",)),
        Segment("moe_experts", torch.neg, ("h",), ("routed",), dynamic=True),
        Segment("moe_combine", torch.add, ("x", "routed"), ("x",)),
    ]
    units = units_of(segments, ("x",))
    assert [(unit.name, unit.dynamic) for unit in units] == [
        ("moe_router", False),
        ("moe_experts", True),
        ("moe_combine", False),
    ]
    with pytest.raises(AssertionError, match="moe_experts waits for the host"):
        units_of(segments, ("x",), captured={"moe_experts"})


def test_a_unit_hands_on_only_what_is_needed_after_it():
    segments = [Segment("attn", torch.neg, ("x",), ("h",)), Segment("mlp", torch.neg, ("h",), ("y",))]
    assert units_of(segments, ("y",))[0].writes == ("y",)
    assert units_of(segments, ("h", "y"))[0].writes == ("h", "y")


def test_a_bound_unit_computes_what_its_segments_compute():
    layer = model().layers[1]
    x = torch.randn(2, 16, 16)
    tensors = {"x": x, "cos": torch.randn(16, 2), "sin": torch.randn(16, 2)}
    keep = ("x", "loss", "counts")
    unit = bound(layer.segments(), keep)
    results = unit.run(*unit.tensors, *(tensors[name] for name in unit.unit.reads))
    expected = dict(zip(keep, run_segments(layer.segments(), tensors, keep), strict=True))
    for name, result in zip(unit.unit.writes, results, strict=True):
        assert result.equal(expected[name]), name


def test_parameters_come_before_buffers_and_each_is_there_once():
    layer = model().layers[1]
    unit = bound(layer.segments())
    held = {id(t) for t in unit.tensors}
    assert {id(p) for p in layer.parameters()} == {id(t) for t in unit.tensors[: unit.num_parameters]}
    assert held == {id(t) for t in (*layer.parameters(), *layer.buffers())} and len(held) == len(unit.tensors)


def test_layers_alike_have_one_fingerprint_and_others_their_own():
    layers = model("model.num_layers=4").layers
    dense, *moe = [bound(layer.segments()).fingerprint() for layer in layers]
    assert moe[0] == moe[1] == moe[2] != dense
    for override in ("model.norm_eps=1e-3", "model.aux_loss_coef=0.5", "moe.force_balance=true"):
        other = bound(model("model.num_layers=4", override).layers[1].segments()).fingerprint()
        assert other != moe[0], override


def test_the_fingerprint_of_a_unit_depends_on_the_results_that_it_keeps():
    segments = model().layers[1].segments()
    assert bound(segments, ("x",)).fingerprint() != bound(segments, ("x", "loss")).fingerprint()


def test_a_module_with_an_attribute_that_is_not_plain_shares_with_no_other():
    def unit() -> Unit:
        module = nn.Linear(2, 2)
        module.hidden = object()  # type: ignore[assignment]
        return units_of([Segment("mlp", module, ("x",), ("x",))], ("x",))[0]

    first = BoundUnit.of(unit())
    assert first.fingerprint() == first.fingerprint() != BoundUnit.of(unit()).fingerprint()


def test_a_method_of_a_module_runs_with_the_parameters_it_is_given():
    head = model().loss_head
    unit = bound(head.segments(None), ("cross_entropy",))
    h, labels = torch.randn(2, 16, 16), torch.randint(0, 64, (2, 16))
    values = {"normed": h, "labels": labels}
    read = [values[name] for name in unit.unit.reads]
    (loss,) = unit.run(*(torch.zeros_like(t) for t in unit.tensors), *read)
    assert torch.allclose(loss, torch.tensor(64.0).log())
    assert unit.run(*unit.tensors, *read)[0].equal(head.cross_entropy(h, labels))
