"""Products of a run in 8 bits: which there are, the choice among them, and what a checkpoint keeps of it."""

import logging
from dataclasses import replace

import pytest
import torch

from graphmoe.config.schema import DispatchDtype
from graphmoe.ops import fp8_choice
from graphmoe.ops.fp8_choice import Experts, InBf16
from graphmoe.ops.grouped_mlp.choice import MlpShape
from graphmoe.plan.plan import plan_of
from graphmoe.training import products
from graphmoe.training.products import dense_products, describe_products, fp8_passes, measured, plain_products
from tests.runs import COMPILED, config, metrics, train_in, trainer_in
from tests.runtime.test_fp8_model import SIZES

CPU = torch.device("cpu")
WORDS = (*COMPILED, *SIZES, "precision.fp8=rowwise")
SHORT = (*WORDS, "compile.cache=false", "train.val_batches=0")
ATTN = {"attn 16x64": (16, 64), "attn 64x16": (64, 16), "attn 32x64": (32, 64)}
MLPS = {"mlp 128x64": (128, 64), "mlp+shared_experts 64x64": (64, 64)}
DENSE = {**ATTN, "attn+shared_experts 64x32": (64, 32), **MLPS}
FAST, SLOW = (3.0, 1.0, 0.5), (1.0, 1.0, 0.5)


@pytest.fixture
def timer(monkeypatch):
    def times(calls, rounds, device):
        times.runs += 1
        found = dict(zip(calls, times.ms[(times.runs - 1) % len(times.ms)], strict=True))
        return {form: [ms] for form, ms in found.items()}

    times.runs, times.ms = 0, [FAST]
    monkeypatch.setattr(fp8_choice, "time_in_turns", times)
    monkeypatch.setattr(products, "measures", lambda device: True)
    return times


def test_products_are_the_weights_of_layers_in_8_bits_each_shape_once():
    def found(*words: str) -> dict[str, tuple[int, int]]:
        return dense_products(plan_of(config(*WORDS, *words), 1))

    assert found() == DENSE
    assert found("precision.fp8_products=[attn,experts]") == {**ATTN, "attn 64x32": (64, 32)}
    assert not MLPS.keys() & found("precision.fp8_skip_layers=[0]").keys()
    assert not any("shared" in name for name in found("precision.fp8_skip_layers=[-1]"))
    assert "attn 24x64" not in found("model.q_lora_rank=24")  # no multiple of 16, which the pass leaves


def test_all_but_known_products_are_timed_on_a_gpu_alone(timer, monkeypatch):
    def speeds(*words: str) -> dict[str, float]:
        plan = plan_of(config(*WORDS, "train.global_batch_size=8", *words), 1)
        assert plan.num_micro_batches == 4
        return measured(plan, DENSE, None, {"attn 16x64": 0.5, "attn 8x8": 0.5}, CPU, None)

    assert speeds() == {"attn 16x64": 0.5, **dict.fromkeys([*DENSE][1:], 3 / 1.125)} and timer.runs == 5
    assert speeds("precision.fp8_measure=none") == {}
    monkeypatch.undo()
    assert speeds() == {"attn 16x64": 0.5}


def test_tokens_that_must_be_dispatched_in_fp8_keep_experts_in_fp8(timer):
    timer.ms, run = [SLOW], config(*WORDS)
    experts = Experts(MlpShape(32, 64, 32, 4, 2), "torch,torch,torch")
    for dtype, speeds in ((DispatchDtype.fp8, {}), (DispatchDtype.auto, {"experts": 1 / 1.25})):
        run.moe.dispatch_dtype = dtype
        assert measured(plan_of(run, 1), {}, lambda: experts, {}, CPU, None) == speeds
    lines = describe_products(replace(plan_of(run, 1), fp8_rows=True), speeds)
    said = "rowwise fp8 in 0 of 1 products; bf16 for: experts (0.80x); so tokens are dispatched in bf16"
    assert [*lines] == [said]


def test_a_slow_product_is_left_by_its_pass_and_slow_experts_have_none():
    plain = plain_products(DENSE, {"attn 64x16": 1.0, "mlp 128x64": 1.5, "experts": 1.0})
    assert plain == InBf16(((64, 16),), experts=True)
    passes = fp8_passes(plan_of(config(*WORDS), 1), plain)
    assert passes["fp8_linear"]["plain"] == [[64, 16]] and "fp8_experts" not in passes
    assert "fp8_experts" in fp8_passes(plan_of(config(*WORDS), 1))


@pytest.mark.slow
def test_a_resumed_run_keeps_the_choice_of_its_checkpoint(tmp_path, timer, caplog):
    timer.ms = [SLOW, FAST, FAST, FAST, FAST, FAST, FAST]  # the experts are last
    with caplog.at_level(logging.INFO):
        first = trainer_in(tmp_path / "first", *SHORT)
    chosen = first.execution.chosen
    assert "; rowwise fp8 in 6 of 7 products; bf16 for: attn 16x64 (0.80x)\n" in caplog.text
    found = first.execution.precision()
    assert found == {"fp8": "rowwise", "products_in_fp8": 6, "products_in_bf16": 1}
    assert timer.runs == 7 and chosen.experts == "" and [*chosen.fp8] == [*DENSE, "experts"]
    first.saves.store.save(2, first._state() | {"step": 2}, wait=True)
    first.saves.store.close()

    timer.ms = [SLOW]
    resumed = (*SHORT, f"checkpoint.resume_from={tmp_path / 'first'}")
    again = trainer_in(tmp_path / "again", *resumed)
    assert again.step == 2 and timer.runs == 7 and again.execution.chosen == chosen
    assert trainer_in(tmp_path / "all", *resumed, "precision.fp8_measure=none").execution.chosen.fp8 == {}


@pytest.mark.parametrize("speed", [FAST, SLOW])
def test_the_dtype_of_dispatched_tokens_is_named_once_it_is_known(tmp_path, timer, speed):
    timer.ms = [speed]
    execution = trainer_in(tmp_path, *SHORT).execution
    execution._plan = replace(execution._plan, fp8_rows=True)
    assert (execution.describe()[-1] == "tokens are dispatched in fp8") == (speed == FAST)


@pytest.mark.slow  # traces a model twice
@pytest.mark.usefixtures("as_traced")
def test_a_run_whose_products_are_all_slow_is_that_of_bf16(tmp_path, timer, caplog):
    timer.ms, steps = [SLOW], "train.steps=2"
    with caplog.at_level(logging.INFO):
        run = train_in(tmp_path / "slow", *SHORT, steps, "precision.fp8_skip_layers=[0]")
        plain = train_in(tmp_path / "plain", *SHORT, steps, "precision.fp8=none")
    assert "fp8 in 0 of 6 products; bf16 for: attn 16x64 (0.80x), attn 64" in caplog.text
    assert "; no fp8 in layer 0\n" in caplog.text
    assert run.execution.chosen.experts == plain.execution.chosen.experts == "torch,torch,torch"
    report = {unit.unit: {row.name: row for row in unit.passes} for unit in run.execution.compiled.reports}
    assert "fp8_linear" not in report["attn..mlp"] and "fp8_experts" not in report["attn..moe_combine"]
    left = report["attn..moe_combine"]["fp8_linear"].left
    assert len(left) > 4 and all("is no faster in fp8 (precision.fp8_measure)" in line for line in left)
    losses = [[row["loss"] for row in metrics(tmp_path / name)] for name in ("slow", "plain")]
    assert losses[0] == losses[1]


def test_a_cpu_keeps_all_in_8_bits_and_the_log_says_so(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        trainer = trainer_in(tmp_path, *SHORT)
    words = "fp8 in experts, attn, mlp, shared_experts; what gains by it is timed on a GPU only"
    assert words in caplog.text and trainer.execution.chosen.fp8 == {}
    assert "  precision   fp32, products in 8 bits (rowwise)\n" in caplog.text
    assert trainer.execution.precision()["products_in_fp8"] == len(DENSE) + 1


def test_experts_of_skipped_layers_are_no_product_in_8_bits(tmp_path, as_traced):
    words = "model.num_layers=3", "model.num_dense_layers=1", "precision.fp8_skip_layers=[1,2]"
    trainer = trainer_in(tmp_path, *WORDS, *words)
    assert trainer.execution.precision()["products_in_fp8"] == len(trainer.execution._dense)
