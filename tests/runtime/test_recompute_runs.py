"""Recompute in whole runs, captured or not: bitwise those without it, and the log says what it does."""

import json

import pytest

from tests.runs import COMPILED, assert_same_state, final_state, numbers, train_in

pytestmark = pytest.mark.usefixtures("unmeasured")


def test_an_eager_step_that_computes_again_is_captured_bitwise(tmp_path):
    words = ("train.steps=4", "graph.warmup_steps=1", "train.val_interval=4", "checkpoint.interval=4")
    for name, more in (
        ("plain", ()),
        ("again", ("recompute.all=true",)),
        ("captured", ("recompute.all=true", "graph.scope=full_iteration")),
    ):
        train_in(tmp_path / name, *words, *more)
    for name in ("again", "captured"):
        assert numbers(tmp_path / name) == numbers(tmp_path / "plain")


RUN = (*COMPILED, "train.steps=4", "train.val_batches=0", "checkpoint.interval=4")


MTP = ("model.mtp_depth=1", "train.val_batches=1", "train.val_interval=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param("recompute.all=true", marks=pytest.mark.exhaustive),
        "recompute.ops=[layernorm,core_attn,mla_up_proj,shared_experts,mlp,moe_act]",
    ],
)
def test_compiled_training_is_bitwise_that_of_kept_values(tmp_path, caplog, asked):
    assert_bitwise_that_of_kept_values(tmp_path, caplog, asked)


@pytest.mark.parametrize(
    "asked, overrides",
    [
        pytest.param("recompute.all=true", MTP, marks=pytest.mark.slow),
        pytest.param(
            "recompute.layer_ids=[0,2]",
            ("model.num_layers=3", "train.global_batch_size=2"),
            marks=pytest.mark.slow,
        ),
        ("recompute.segments=[attn,moe_router,moe_experts]", ()),
    ],
)
def test_training_of_other_units_is_bitwise_that_of_kept_values(
    tmp_path, caplog, asked, overrides, mostly_traced
):
    assert_bitwise_that_of_kept_values(tmp_path, caplog, asked, *overrides, *mostly_traced)


def assert_bitwise_that_of_kept_values(tmp_path, caplog, asked, *overrides):
    states = []
    for name, words in (("plain", ()), ("again", (asked,))):
        train_in(tmp_path / name, *RUN, *overrides, *words)
        states.append(
            final_state(tmp_path / name / "checkpoints", tmp_path / f"{name}_scratch", *RUN, *overrides)
        )
    assert numbers(tmp_path / "again") == numbers(tmp_path / "plain")
    assert_same_state(*states)
    units = [
        json.loads((tmp_path / n / "compile_report.json").read_text())["units"] for n in ("plain", "again")
    ]
    plain, again = ({u["unit"]: u for u in found if u["for"] == "training"} for found in units)
    assert all(again[name]["kept_bytes"] <= unit["kept_bytes"] for name, unit in plain.items())
    assert any(unit["recomputed"] > 0 for unit in again.values())
    unused = "recompute.ops=moe_act has no effect with the pass fuse_experts"
    assert (unused in caplog.text) == ("moe_act" in asked)


@pytest.mark.parametrize(
    "scope, asked",
    [
        pytest.param("layer", "recompute.all=true", marks=pytest.mark.slow),
        pytest.param(
            "full_iteration", "recompute.segments=[attn,moe_router,moe_experts]", marks=pytest.mark.slow
        ),
        ("[attn,moe_experts]", "recompute.ops=[layernorm,core_attn]"),
    ],
)
def test_captured_training_is_bitwise_that_of_the_same_units_uncaptured(tmp_path, scope, asked, as_traced):
    words = (*RUN, "compile.cache=false", f"graph.scope={scope}", asked)
    states = []
    for name, warmup in (("plain", 4), ("captured", 1)):
        train_in(tmp_path / name, *words, f"graph.warmup_steps={warmup}")
        states.append(final_state(tmp_path / name / "checkpoints", tmp_path / f"{name}_scratch", *words))
    assert numbers(tmp_path / "captured") == numbers(tmp_path / "plain")
    assert_same_state(*states)
