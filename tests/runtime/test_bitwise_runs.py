"""Runs that are captured or compute again: bitwise those that do not, and their reports say what was done."""

import json
from pathlib import Path
from typing import Any

import pytest

from graphmoe.runtime.capture import REPORT_FILE
from graphmoe.runtime.compile.report import REPORT_FILE as COMPILE_REPORT
from graphmoe.segments import SCOPES
from tests.distributed.training import as_traced as units_as_traced
from tests.runs import COMPILED, assert_load_swings, assert_same_runs, metrics, numbers, slow_but, train_in
from tests.runtime.test_lanes import ALL, ZERO_BUBBLE, assert_bitwise

pytestmark = pytest.mark.usefixtures("unmeasured")
TRACED, UNVALIDATED = "compile.cache=false", "train.val_batches=0"
STEP, LAYER = "graph.scope=full_iteration", "graph.scope=layer"
LATE, EARLY = ("graph.warmup_steps=99",), ("graph.warmup_steps=1",)
"""Words of runs that end before anything is captured, and that capture from the second step on."""
EAGER = ("train.steps=8", "graph.warmup_steps=2", "train.val_interval=4", "checkpoint.interval=4")
UNITS = (*COMPILED, "train.steps=6", "checkpoint.interval=6")
AGAIN = (*COMPILED, "train.steps=4", UNVALIDATED)
BALANCED = ("train.micro_batch_size=1", "model.aux_loss=global_batch", "model.aux_loss_coef=0.1")
SWINGING = ("model.top_k=1", "train.global_batch_size=2", "train.steps=12", UNVALIDATED)
EVERYTHING, SEGMENTS = "recompute.all=true", "recompute.segments=[attn,moe_router,moe_experts]"
PARTS = "recompute.ops=[layernorm,core_attn,mla_up_proj,shared_experts,mlp,moe_act]"

CASES = {  # words of both runs, of the plain one and of the other
    "step": (EAGER, (), (STEP,)),
    "one micro-batch": ((*EAGER, "train.micro_batch_size=4"), (), (STEP,)),
    "global balance": ((*EAGER, *BALANCED), (), (STEP,)),
    "mtp in bf16": ((*EAGER, "model.mtp_depth=1", "precision.compute=bf16"), (), (STEP,)),
    "step again": (EAGER, (), (EVERYTHING, STEP)),
    "rotating load": ((*EAGER, "moe.expert_load=rotating"), (), (STEP,)),
    "swinging": (SWINGING, (), ("graph.warmup_steps=2", STEP)),
    "captured parts again": (
        (*AGAIN, "graph.scope=[attn,moe_experts]", "recompute.ops=[layernorm,core_attn]", TRACED), LATE, EARLY
    ),
    "dense step": ((*EAGER, "model.num_experts=0", "model.tie_embeddings=true"), (), (EVERYTHING, STEP)),
    "dense layers": ((*AGAIN, "model.num_experts=0", LAYER, TRACED), LATE, EARLY),
    "moe in bf16": (
        (*AGAIN, "precision.compute=bf16", "model.shared_ffn_size=0", "graph.scope=moe", TRACED), LATE, EARLY
    ),
    "adapters in captured layers": (
        (*AGAIN, "model.lora_rank=3", "model.lora_targets=[mlp,experts]", LAYER, TRACED), LATE, EARLY
    ),
    "adapters again": ((*AGAIN, "model.lora_rank=3", TRACED), (), (EVERYTHING,)),
    "adapters in a captured step": ((*EAGER, "model.lora_rank=3"), (), (STEP,)),
    "captured layers again": ((*AGAIN, LAYER, EVERYTHING, TRACED), LATE, EARLY),
    "captured step again": ((*AGAIN, STEP, SEGMENTS, TRACED), LATE, EARLY),
    "segments again": ((*AGAIN, TRACED), (), (SEGMENTS,)),
    "two layers again": (
        (*AGAIN, "model.num_layers=3", "train.global_batch_size=2", TRACED),
        (),
        ("recompute.layer_ids=[0,2]",),
    ),
    "embed, experts and loss": ((*UNITS, "graph.scope=[embed,moe_experts,loss]", TRACED), LATE, EARLY),
    "captured layers, rotating load": (
        (*UNITS, "model.mtp_depth=1", "moe.expert_load=rotating", LAYER, TRACED), LATE, EARLY
    ),
    "captured layers, swinging": ((*SWINGING, *COMPILED, LAYER, TRACED), LATE, EARLY),
    "parts again": ((*AGAIN, TRACED), (), (PARTS,)),
    "compiled again": (AGAIN, (), (EVERYTHING,)),
}  # fmt: skip
IN_EVERY_SUITE = [*CASES][: [*CASES].index("moe in bf16")]


@pytest.mark.parametrize("name", slow_but([*CASES], *IN_EVERY_SUITE))
def test_a_run_is_bitwise_the_plain_one_and_reports_what_it_did(request, tmp_path, caplog, name):
    words, of_plain, of_other = CASES[name]
    every, compiles = " ".join((*words, *of_other)), "compile.enabled=true" in words
    if TRACED in words:
        request.getfixturevalue("as_traced")
    if SWINGING[0] in words:
        request.getfixturevalue("swinging_load")
    assert_same_runs(tmp_path, words, of_plain, of_other)
    other = tmp_path / "other"
    told = [message for message in caplog.messages if "captured nothing: the run did" in message]
    assert len(told) == (of_plain == LATE) and not (tmp_path / "plain" / REPORT_FILE).exists()
    assert (other / REPORT_FILE).exists() == ("graph.scope=" in every)
    if "graph.scope=" in every:
        assert_captured(other, every.partition("graph.scope=")[2].split()[0])
    if "recompute." in " ".join(of_other) and compiles:
        assert_fewer_bytes_are_kept(tmp_path)
    if SWINGING[0] in words:
        assert_load_swings(metrics(other), num_experts=4, after=2)
    unused = "recompute.ops=moe_act has no effect with the pass fuse_experts"
    assert (unused in caplog.text) == (PARTS in of_other)


def assert_captured(folder: Path, scope: str) -> None:
    """Each segment of the scope has its graphs, or the report says why not."""
    report = json.loads((folder / REPORT_FILE).read_text())
    if scope == "full_iteration":
        assert (report["scope"], report["on"], report["graphs"]) == (scope, "host", 1)
        return
    names = SCOPES.get(scope, scope.strip("[]").split(","))
    captured = {segment for span in report["spans"] for segment in span["segments"]}
    assert captured | set(report["not_captured"]) == set(names) and not captured & set(report["not_captured"])
    with_backward = [span for span in report["spans"] if span["segments"] != ["moe_preprocess"]]
    assert all(span["graphs"] >= 2 * span["places"] > 0 for span in with_backward)


def assert_fewer_bytes_are_kept(folder: Path) -> None:
    units = [json.loads((folder / name / COMPILE_REPORT).read_text())["units"] for name in ("plain", "other")]
    plain, again = ({u["unit"]: u for u in found} for found in units)
    assert all(again[name]["kept_bytes"] <= unit["kept_bytes"] for name, unit in plain.items())
    assert any(unit["recomputed"] > 0 for unit in again.values())


@pytest.mark.slow  # test_lanes replays graphs as they were traced
def test_replays_of_code_of_inductors_have_the_bits_of_the_uncaptured_units():
    assert_bitwise(ALL, [ZERO_BUBBLE] * 4)


FUSED = (*AGAIN, TRACED, "checkpoint.interval=0", *EARLY)


@pytest.fixture(scope="module")
def uncut(tmp_path_factory) -> list[dict[str, Any]]:
    """Rows of a run that captures nothing."""
    folder = tmp_path_factory.mktemp("uncut")
    with units_as_traced():
        train_in(folder, *FUSED)
    return numbers(folder)


@pytest.mark.parametrize("scope", slow_but(("layer", "partial", "moe", "[moe_experts]"), "partial"))
def test_experts_are_fused_where_the_scope_cuts_them_from_their_plan(tmp_path, scope, as_traced, uncut):
    train_in(tmp_path, *FUSED, f"graph.scope={scope}")
    matches = json.loads((tmp_path / COMPILE_REPORT).read_text())["passes"]
    assert matches["fuse_permutation"]["matches"] >= 4 and matches["fuse_experts"]["matches"] >= 1
    cut = numbers(tmp_path)
    if scope in ("layer", "partial"):
        assert cut == uncut
    assert cut[0]["loss"] == uncut[0]["loss"], "before any gradient"
    for key in ("loss", "grad_norm"):  # docs/compile.md says so
        assert [row[key] for row in cut] == pytest.approx([row[key] for row in uncut], rel=1e-6)
