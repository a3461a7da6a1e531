"""Captured units: replays are bitwise the compiled units, from static buffers, whatever scope is named."""

import json
import logging

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.runtime.capture.capture import REPORT_FILE
from graphmoe.runtime.compile.report import REPORT_FILE as COMPILE_REPORT
from graphmoe.segments import CAPTURABLE, SCOPES, segments_of
from tests.runs import COMPILED, assert_same_state, config, final_state, numbers, train_in
from tests.runtime.test_lanes import ALL, ZERO_BUBBLE, assert_bitwise

pytestmark = pytest.mark.usefixtures("unmeasured")
RUN = (*COMPILED, "train.steps=6", "train.val_interval=3", "checkpoint.interval=6")


def test_replays_of_code_of_inductors_have_the_bits_of_the_uncaptured_units():
    assert_bitwise(ALL, [ZERO_BUBBLE] * 4)


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
