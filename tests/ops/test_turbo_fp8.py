"""Experts in 8 bits on Primus-Turbo: configs, rows without tokens, signal over noise, passes, and a run."""

import logging

import pytest
import torch

from graphmoe.ops.grouped_mlp import vendor
from graphmoe.plan.plan import plan_of
from graphmoe.training import executor
from graphmoe.training.products import describe_products, fp8_passes
from tests.ops import grouped_mlp_fakes
from tests.ops.mlp_cases import exact_result, make_problem, ops_of, until_wgrad
from tests.ops.test_fp8_mlp import decibels
from tests.runs import COMPILED, config, metrics, train_in, trainer_in
from tests.runtime.test_fp8_model import SIZES

RECIPES = {
    "rowwise": ("ROWWISE", None, "FP32"),
    "tensorwise": ("TENSORWISE", None, "FP32"),
    "blockwise": ("BLOCKWISE", 128, "FP32"),
    "mxfp8": ("MX_BLOCKWISE", 32, "E8M0"),
}
CASE = ("skewed", 33, 128, 256, 4, 2, 9)
EXPERTS = "precision.fp8_products=[experts]"


@pytest.fixture
def turbo(monkeypatch):
    return grouped_mlp_fakes.install_turbo(monkeypatch)


def signals(backend):
    """dB of y and gradients, with weights as in a trained layer, so that no activation is saturated."""
    p, run = make_problem(CASE, torch.bfloat16), ops_of(backend)
    p = p._replace(w_gate_up=p.w_gate_up * 128**-0.5, w_down=p.w_down * 256**-0.5)
    y_TD, _, dx_TD, dweight_TK, *made = until_wgrad(run, p)
    found = (y_TD, dx_TD, *run.wgrad(p.dy_TD, p.x_TD, *made, *p.plan), dweight_TK)
    exact_TD, gradients = exact_result(p)
    pairs = zip(found, (exact_TD.detach(), *gradients), strict=True)
    return [decibels(each.double(), exact) for each, exact in pairs]


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_are_multiplied_by_the_recipe_and_weight_gradients_are_in_bf16(recipe, turbo):
    assert all(20 < signal < 38 for signal in signals(f"turbo.{recipe}"))
    assert ["trans_c" in call for call in turbo.calls] == [False] * 4 + [True] * 2
    configs = [call["config"] for call in turbo.calls[:4]]
    assert [(c.granularity.name, c.block_size, c.scale_dtype.name) for c in configs] == [RECIPES[recipe]] * 4
    assert [call["trans_b"] for call in turbo.calls[:4]] == [True, True, *[recipe == "mxfp8"] * 2]
    assert not any("config" in call for call in turbo.calls[4:])
    assert min(signals("turbo")) > 40


def test_passes_hand_experts_to_the_library_and_dense_products_stay_ours():
    words = (*COMPILED, *SIZES, "moe.experts=turbo", "precision.fp8=rowwise")
    passes = fp8_passes(plan_of(config(*words), 1))
    assert passes["fp8_experts"] == {"recipe": "rowwise", "vendor": "turbo"}
    assert passes["fp8_quantise"] == {} and "fp8_linear" in passes
    alone = plan_of(config(*words, EXPERTS), 1)
    assert [*fp8_passes(alone)] == ["fp8_experts"]
    assert describe_products(alone, {}) == ["rowwise fp8 in experts; experts by moe.experts=turbo, not timed"]
    assert not plan_of(config(*words, "parallel.ep=2", "moe.dispatcher=symm"), 2).fp8_rows
    assert alone.sizes(on_nvidia=False).fp8 == frozenset()


@pytest.mark.parametrize("products, needed", [("experts", "rowwise"), ("experts,attn", "blockwise")])
def test_blocks_of_the_library_need_no_products_of_torch_by_blocks(
    products, needed, tmp_path, turbo, monkeypatch
):
    seen = []
    monkeypatch.setattr(executor, "reason_against", lambda device, recipe: seen.append(recipe))
    monkeypatch.setattr(vendor.TURBO, "reason_against", lambda *_: None)
    sizes = [f"{word.partition('=')[0]}=128" for word in SIZES[1:]]
    trainer_in(
        tmp_path, *COMPILED, SIZES[0], *sizes, "precision.compute=bf16", "moe.experts=turbo",
        "precision.fp8=blockwise", f"precision.fp8_products=[{products}]", "compile.cache=false",
    )  # fmt: skip
    assert seen == [needed]


@pytest.mark.slow  # three runs
@pytest.mark.usefixtures("as_traced")
def test_a_compiled_run_has_its_experts_in_8_bits_but_for_skipped_layers(
    tmp_path, turbo, monkeypatch, caplog
):
    monkeypatch.setattr(vendor.TURBO, "reason_against", lambda *_: None)
    words = (
        *COMPILED, *SIZES, "precision.compute=bf16", "moe.experts=turbo", "train.steps=2",
        "compile.cache=false", "model.num_layers=3", "train.val_batches=0", "checkpoint.interval=0",
    )  # fmt: skip
    fp8 = ("precision.fp8=rowwise", "precision.fp8_skip_layers=[-1]")
    losses, numbers = {}, {}
    for name, more in {"bf16": (), "experts": (*fp8, EXPERTS), "all": fp8}.items():
        turbo.calls.clear()
        with caplog.at_level(logging.INFO):
            train_in(tmp_path / name, *words, *more)
        losses[name] = [row["loss"] for row in metrics(tmp_path / name)]
        in_fp8 = sum("config" in call for call in turbo.calls)
        of_weights = sum("trans_c" in call for call in turbo.calls)
        numbers[name] = (in_fp8, len(turbo.calls) - in_fp8 - of_weights, of_weights)
    # Two steps of two micro-batches; each of two layers has four products of rows and two weight gradients.
    assert numbers == {"bf16": (0, 32, 16), "experts": (16, 16, 16), "all": (16, 16, 16)}
    assert losses["bf16"] != losses["experts"] != losses["all"]
    assert all(loss == pytest.approx(losses["bf16"], rel=0.02) for loss in losses.values())
    assert "has no effect" not in caplog.text and "experts by moe.experts=turbo, not timed" in caplog.text
