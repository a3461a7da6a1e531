"""Captured units: replays are bitwise the compiled units, from static buffers, whatever scope is named."""

import json
import logging

import pytest
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.ops.gradients import Gradient
from graphmoe.passes.table import PassRunner
from graphmoe.runtime.capture.capture import REPORT_FILE, Capture
from graphmoe.runtime.compile.captured_units import UnitCapture
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.compile.report import REPORT_FILE as COMPILE_REPORT
from graphmoe.segments import CAPTURABLE, SCOPES, Segment, run_segments, segments_of
from tests.runs import COMPILED, assert_same_state, config, final_state, numbers, train_in
from tests.runtime.chains import CPU, Chain, OrderedChain, Scale

pytestmark = pytest.mark.usefixtures("unmeasured")
RUN = (*COMPILED, "train.steps=6", "train.val_interval=3", "checkpoint.interval=6")


@pytest.mark.parametrize("in_flight, order", [(1, 1), (2, 1), (2, -1)])
@pytest.mark.parametrize("warmed_up_with", [1, 3])
def test_graphs_of_a_backward_and_its_forward_replay_in_the_order_in_which_their_pool_has_made_them(
    in_flight, order, warmed_up_with
):
    """Try each order of the backwards in flight, and a W that adds for the first time."""
    chain = OrderedChain()
    for step in range(5):
        with chain.capture.step():
            for number in range(3 if step else warmed_up_with):
                chain.replayed = []
                leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(in_flight)]
                outputs = [chain.forward(leaf) for leaf in leaves]
                for output in outputs[::order]:
                    output.square().sum().backward()
                adds_first = step == 1 and (number, warmed_up_with) == (1, 1)
                for pool in range(in_flight):
                    numbers = [number for of, number in chain.replayed if of == (None, pool)]
                    assert numbers == sorted(numbers)
                    assert adds_first or len(numbers) == 6 * chain.capture.ready
        for gradient in chain.gradients.values():
            gradient.finish()
        made = chain.capture.report.graphs  # F, and backwards that store and that add, or that add only
        assert step < 2 or made == (9 if in_flight == 1 else 9 + 6)


@pytest.mark.parametrize("names", [("attn",), ("mlp",), ("attn", "mlp")])
def test_replays_of_one_and_several_forwards_in_flight_have_the_plain_results(names):
    chain = Chain(names)
    for _ in range(4):
        chain.check(torch.randn(3, 4))
    for _ in range(3):  # a W that adds runs uncaptured first, and is captured at its second use
        chain.check(torch.randn(3, 4), torch.randn(3, 4))
    (span,) = chain.capture.report.spans
    assert (span.segments, span.places) == (names, 1) and span.graphs == 2 + 3


def test_a_forward_without_a_backward_does_not_hold_its_buffers_for_ever():
    chain = Chain()
    for _ in range(5):
        with chain.capture.step():
            chain.forward(torch.randn(3, 4, requires_grad=True))
    assert sum(span.graphs for span in chain.capture.report.spans) == 1


def test_validation_between_steps_leaves_what_replays_alone():
    chain = Chain(("attn", "mlp"))
    for _ in range(3):
        chain.check(torch.randn(3, 4))
        x = torch.randn(3, 4)
        with torch.no_grad():
            (plain,) = run_segments(chain.segments, {"x": x, "shift": chain.shift}, ("x",))
            torch.testing.assert_close(chain.forward(x), plain)


def test_lasting_tensors_are_read_where_they_lie_and_must_stay_there():
    chain = Chain()
    for _ in range(3):
        chain.check(torch.randn(3, 4))
    chain.shift.fill_(0.25)  # in place: seen by the next replay
    chain.check(torch.randn(3, 4))
    chain.shift = chain.shift.clone()
    with pytest.raises(RuntimeError, match="attn: shift lies at another address"):
        chain.check(torch.randn(3, 4))


def test_another_shape_is_an_error_that_names_segment_and_tensor():
    chain = Chain()
    for _ in range(2):
        chain.check(torch.randn(3, 4))
    message = r"attn is captured, and x was torch.float32 \[3, 4\] and is torch.float32 \[5, 4\]"
    with pytest.raises(ValueError, match=message):
        chain.check(torch.randn(5, 4))


def test_words_stand_for_lists_of_segments():
    assert segments_of("partial") == ("attn", "moe_router", "moe_preprocess")
    assert set(segments_of("layer")) == set(CAPTURABLE) - {"embed", "loss"}
    assert all(name.startswith("moe_") for name in segments_of("moe")) and len(segments_of("moe")) == 5
    assert segments_of("none") == segments_of("full_iteration") == ()
    assert segments_of(["loss", "attn"]) == ("attn", "loss")


@pytest.mark.parametrize(
    "scope, bad", [("everything", "everything"), ("[attn,optimizer]", "optimizer"), ("3", "3")]
)
def test_an_unknown_scope_lists_the_valid_ones(scope, bad):
    with pytest.raises(ConfigError) as caught:
        config(f"graph.scope={scope}")
    assert f"has {bad}; use one of none, partial, moe, layer, full_iteration, or a list" in str(caught.value)


def test_a_list_of_no_segments_is_refused():
    with pytest.raises(ConfigError, match="names no segment; use graph.scope=none"):
        config("graph.scope=[]")


def test_what_a_second_forward_overwrote_is_not_read_by_the_backward_of_the_first():
    """A unit without a gradient has one set of buffers: autograd must see that they changed."""
    scale = Scale()
    segments = [
        Segment("moe_preprocess", lambda ids: ids * 2.0, ("ids",), ("shift",)),
        Segment("attn", scale, ("x", "shift"), ("x",), stream="comm"),
    ]
    gradient = Gradient(torch.zeros(4))
    capture = Capture("test", CPU, warmup_steps=1)
    shared = UnitCapture(frozenset({"moe_preprocess"}), capture)
    execute = CompiledSegments(lambda trains: PassRunner([]), lambda p: gradient, shared)
    for step in range(3):
        with capture.step():
            outputs = [
                execute(segments, {"ids": torch.full((4,), i), "x": torch.randn(3, 4)}, ("x",))[0]
                for i in (1, 2)
            ]
            if step == 2:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    outputs[0].sum().backward()


def test_segments_are_captured_compiled_only():
    with pytest.raises(
        ConfigError, match="compile.enabled=true, graph.scope=full_iteration or graph.scope=none"
    ):
        config("graph.scope=partial", "compile.enabled=false")


TRACED = ("compile.cache=false", "train.val_batches=0")


@pytest.mark.parametrize(
    "scope, overrides",
    [
        pytest.param("layer", ("model.mtp_depth=1",), marks=pytest.mark.slow),
        ("moe", (*TRACED, "model.shared_ffn_size=0", "train.global_batch_size=8")),
        ("[embed,moe_experts,loss]", (*TRACED, "precision.compute=bf16")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_training_is_bitwise_that_of_the_same_units_uncaptured(request, tmp_path, caplog, scope, overrides):
    if scope != "layer":
        request.getfixturevalue("as_traced")
    words = (*RUN, *overrides, f"graph.scope={scope}")
    with caplog.at_level(logging.WARNING):
        train_in(tmp_path / "plain", *words, "graph.warmup_steps=6")
        assert "captured nothing: the run did 6 steps" in caplog.text
        caplog.clear()
        train_in(tmp_path / "captured", *words, "graph.warmup_steps=1")
        assert not [record for record in caplog.records if "captured nothing" in record.message]
    assert numbers(tmp_path / "captured") == numbers(tmp_path / "plain")
    plain, replayed = (
        final_state(tmp_path / name / "checkpoints", tmp_path / f"{name}_scratch", *words)
        for name in ("plain", "captured")
    )
    assert_same_state(plain, replayed)
    report = json.loads((tmp_path / "captured" / REPORT_FILE).read_text())
    names = SCOPES.get(scope, scope.strip("[]").split(","))
    captured = {segment for span in report["spans"] for segment in span["segments"]}
    assert captured | set(report["not_captured"]) == set(names) and not captured & set(report["not_captured"])
    assert all(
        span["graphs"] >= 2 * span["places"] > 0
        for span in report["spans"]
        if span["segments"] != ["moe_preprocess"]
    )


@pytest.mark.parametrize("scope", ["layer", "partial", "moe", "[moe_experts]"])
def test_experts_are_fused_where_the_scope_cuts_them_from_their_plan(tmp_path, scope, as_traced):
    words = (*RUN, "compile.cache=false", "train.steps=4", "train.val_batches=0", "checkpoint.interval=0")
    for name in ("none", scope):
        train_in(tmp_path / name, *words, f"graph.scope={name}", "graph.warmup_steps=1")
    matches = json.loads((tmp_path / scope / COMPILE_REPORT).read_text())["passes"]
    assert matches["fuse_permutation"]["matches"] >= 4 and matches["fuse_experts"]["matches"] >= 1
    whole, cut = (numbers(tmp_path / name) for name in ("none", scope))
    if scope in ("layer", "partial"):
        assert cut == whole
    assert cut[0]["loss"] == whole[0]["loss"], "before any gradient"
    for key in ("loss", "grad_norm"):  # docs/capture.md says so
        assert [row[key] for row in cut] == pytest.approx([row[key] for row in whole], rel=1e-6)
