"""Units: where a list of segments is cut, and which units are the same."""

import pytest
import torch
from torch import nn

from graphmoe.runtime.compile.units import BoundUnit, units_of
from graphmoe.segments import Segment
from tests.runtime.test_compiled import model_of


def fingerprint(segments, keep=("x",)) -> str:
    (unit,) = units_of(segments, keep)
    return BoundUnit.of(unit).fingerprint()


def test_units_end_where_the_stream_changes_and_hand_on_only_what_is_needed_after_them():
    segments = [
        Segment("attn", torch.neg, ("x",), ("x",)),
        Segment("moe_router", torch.neg, ("x",), ("h",)),
        Segment("moe_dispatch", torch.neg, ("h",), ("received",), stream="comm"),
        Segment("moe_experts", torch.neg, ("received",), ("routed",)),
        Segment("moe_combine", torch.add, ("x", "routed"), ("x",)),
    ]
    units = units_of(segments, ("x",))
    assert [unit.name for unit in units] == ["attn..moe_router", "moe_dispatch", "moe_experts..moe_combine"]
    assert [unit.reads for unit in units] == [("x",), ("h",), ("received", "x")]
    assert [unit.writes for unit in units] == [("h", "x"), ("received",), ("x",)]
    assert units_of(segments, ("h", "x"))[2].writes == ("x",)
    assert units_of(segments[:2], ("x",))[0].writes == ("x",)


def test_a_segment_without_fixed_sizes_is_no_part_of_a_unit_that_has_them():
    segments = [
        Segment("moe_router", torch.neg, ("x",), ("h",)),
        Segment("moe_experts", torch.neg, ("h",), ("routed",), dynamic=True),
        Segment("moe_combine", torch.add, ("x", "routed"), ("x",)),
    ]
    dynamic = {unit.name: unit.dynamic for unit in units_of(segments, ("x",))}
    assert dynamic == {"moe_router": False, "moe_experts": True, "moe_combine": False}
    with pytest.raises(AssertionError, match="moe_experts waits for the host"):
        units_of(segments, ("x",), captured={"moe_experts"})


def test_layers_alike_have_one_fingerprint_and_others_or_other_results_their_own():
    layers = [layer.segments() for layer in model_of("model.num_layers=4").layers[:4]]
    dense, *moe = map(fingerprint, layers)
    assert moe[0] == moe[1] == moe[2] != dense
    assert fingerprint(layers[1], ("x", "loss")) != moe[0]
    for word in ("model.norm_eps=1e-3", "model.aux_loss_coef=0.5", "moe.force_balance=true"):
        assert fingerprint(model_of("model.num_layers=4", word).layers[1].segments()) != moe[0], word


def test_a_module_with_an_attribute_that_is_not_plain_shares_with_no_other():
    def segments() -> list[Segment]:
        module = nn.Linear(2, 2)
        module.hidden = object()  # type: ignore[assignment]
        return [Segment("mlp", module, ("x",), ("x",))]

    first = segments()
    assert fingerprint(first) == fingerprint(first) != fingerprint(segments())
