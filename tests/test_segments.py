"""Segments: what is read and written is declared, checked and kept apart."""

import pytest
import torch

from graphmoe.segments import CAPTURABLE, Segment, lowest_stage, run_segments, segments_of, waiting_segments


def test_words_stand_for_lists_of_segments():
    assert segments_of("partial") == ("attn", "moe_router", "moe_preprocess")
    assert set(segments_of("layer")) == set(CAPTURABLE) - {"embed", "loss"}
    assert all(name.startswith("moe_") for name in segments_of("moe")) and len(segments_of("moe")) == 5
    assert segments_of("none") == segments_of("full_iteration") == ()
    assert segments_of(["loss", "attn"]) == ("attn", "loss")


def test_tensors_are_handed_over_by_name_in_the_declared_order():
    segments = [
        Segment("attn", lambda b, a: (a - b, a * b), ("b", "a"), ("difference", "product")),
        Segment("mlp", torch.neg, ("difference",), ("a",)),
    ]
    a, b = torch.tensor(7.0), torch.tensor(3.0)
    kept = run_segments(segments, {"a": a, "b": b}, ("product", "a", "b"))
    assert [t.item() for t in kept] == [21.0, -4.0, 3.0]
    with pytest.raises(KeyError, match="difference"):
        run_segments(segments[1:], {"a": a}, ("a",))


@pytest.mark.parametrize("writes", [("x",), ("x", "y", "z")])
def test_returning_another_number_of_tensors_than_declared_is_an_error(writes):
    segment = Segment("attn", lambda x: (x, x), ("x",), writes)
    with pytest.raises(ValueError, match="zip"):
        run_segments([segment], {"x": torch.tensor(2.0)}, ("x",))


@pytest.mark.parametrize(
    "scope, stage",
    [("none", 0), (["embed", "attn", "mlp", "shared_experts", "loss"], 0), (["moe_preprocess"], 1),
     ("partial", 1), (["moe_dispatch"], 3), (["moe_experts", "attn"], 3), (["moe_combine"], 3), ("moe", 3),
     ("layer", 3), ("full_iteration", 3)],
    ids=str,
)  # fmt: skip
def test_a_scope_needs_the_stage_at_which_nothing_of_it_waits(scope, stage):
    assert lowest_stage(scope) == stage
    assert waiting_segments(scope, stage) == () and (stage == 0 or waiting_segments(scope, stage - 1))
