"""A model whose products are in 8 bits, compiled: close to the plain one, and its sums of gradients."""

import math
import shutil
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from graphmoe.config.schema import RecomputeConfig, RunConfig
from graphmoe.model.build import build_model
from graphmoe.ops.fp8 import Stored
from graphmoe.ops.fp8_mlp import reference
from graphmoe.ops.gradients import Gradient
from graphmoe.optim.zero1 import Optimizer
from graphmoe.plan.plan import plan_of
from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.compile import graphs as unit_graphs
from graphmoe.runtime.compile import kept
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.compile.weight_forms import STEPS, DelayedScales, WeightForm, WeightForms
from graphmoe.runtime.overlap import Backward, Overlap
from graphmoe.training.executor import pass_runner
from graphmoe.training.saves import first_not_finite
from tests.distributed.training import as_traced as units_as_traced
from tests.ops.test_fp8_mlp import decibels
from tests.runs import COMPILED, QUIET, config, numbers, slow_but, train_in, trainer_in
from tests.runtime.test_compiled import batch, gradients

pytestmark = pytest.mark.usefixtures("unmeasured")
SIZES = (
    "model.mtp_depth=0", "model.hidden_size=64", "model.dense_ffn_size=64", "model.qk_nope_head_dim=16",
    "model.qk_rope_head_dim=16", "model.v_head_dim=16", "model.kv_lora_rank=16", "model.q_lora_rank=16",
    "model.shared_ffn_size=32", "model.expert_ffn_size=32",
)  # fmt: skip
RUN = config(*COMPILED, *SIZES, "precision.fp8=rowwise")


def model_of(run: RunConfig = RUN) -> nn.Module:
    cpu = torch.device("cpu")
    return build_model(run.model, device=cpu, dtype=torch.float32, seed=0, execution=run.moe)


def executor_of(run: RunConfig, *arguments, **named) -> CompiledSegments:
    return CompiledSegments(pass_runner(plan_of(run, 1), "torch"), *arguments, **named)


BLOCKS = *(f"{word.partition('=')[0]}=128" for word in SIZES[1:]), "precision.fp8_products=[attn,mlp]"
RECIPES = {
    "rowwise": ((), 7, 14, ["fp8_rows", "fp8_columns"]),
    "mxfp8": ((), 4, 12, ["mx_rows", "mx_columns"]),
    "blockwise": (BLOCKS, 7, 14, ["fp8_squares", "fp8_squares_turned"]),
}
"""Words; products of the dense layer whose sides are multiples of 16, 32 or 128; the least signal over noise;
operations that store weights."""
Made = tuple[dict[str, Tensor], CompiledSegments, RunConfig]


@pytest.fixture(scope="module", params=RECIPES)
def of_fp8(request) -> Made:
    """Gradients in 8 bits, what computed them, and the run."""
    run = config(*COMPILED, *SIZES, f"precision.fp8={request.param}", *RECIPES[request.param][0])
    made = executor_of(run)
    with units_as_traced():
        return gradients(model_of(run), made)[1], made, run


@pytest.mark.slow
def test_gradients_are_close_to_those_of_the_plain_model(of_fp8):
    found, made, run = of_fp8
    wanted, (_, products, least, _) = gradients(model_of(run))[1], RECIPES[run.precision.fp8]
    for name, gradient in found.items():
        assert decibels(gradient, wanted[name]) > least, name
    matches = {(r.unit, p.name): p.matches for r in made.reports for p in r.passes}
    assert matches["attn..mlp", "fp8_linear"] == products and matches["loss", "fp8_linear"] == 0
    assert matches.get(("attn..moe_combine", "fp8_experts"), 0) == (run.precision.fp8 != "blockwise")


@pytest.mark.slow
def test_sums_over_micro_batches_are_those_of_the_gradients(of_fp8, as_traced):
    one, _, run = of_fp8
    model, forms = model_of(run), WeightForms()
    sums = {id(p): Gradient(torch.empty_like(p)) for p in model.parameters()}
    made = executor_of(run, lambda p: sums[id(p)], weight_forms=forms)
    for _ in range(2):
        model.loss(*batch(), made).total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sums[id(parameter)].total, 2 * one[name], rtol=1e-5, atol=1e-7)
    experts = {id(parameter) for parameter in model.parameters() if parameter.dim() == 3}
    names = RECIPES[run.precision.fp8][-1]
    assert {operation for _, operation in forms._held} >= {*names}
    stored = [operation for weight, operation in forms._held if weight in experts]
    assert sorted(stored) == (sorted(2 * names) if run.precision.fp8 != "blockwise" else [])


@pytest.mark.slow
def test_gradients_of_a_forward_that_is_computed_again_have_the_same_bits(of_fp8, as_traced):
    one, before, run = of_fp8
    segments = RecomputeConfig(segments=["attn", "mlp", "moe_experts", "shared_experts"])
    made = executor_of(run, recompute=Recompute.of(segments))
    _, found = gradients(model_of(run), made)
    assert all(gradient.equal(one[name]) for name, gradient in found.items())
    if run.precision.fp8 == "blockwise":  # not of experts
        return
    kept = [{r.unit: r.kept_bytes for r in each.reports} for each in (made, before)]
    assert kept[0]["attn..moe_combine"] < kept[1]["attn..moe_combine"] / 3
    halves = [code.graphs.backward.inputs for code, _ in made._codes.values() if code.graphs.backward]
    both = Counter(node.target for half in halves for node in half.graph.nodes)
    ops = torch.ops.graphmoe
    assert both[ops.fp8_mlp_hidden.default] == 1 and both[ops.fp8_mlp_forward.default] == 0


@pytest.mark.slow
def test_skipped_layers_have_code_of_their_own_with_the_bits_of_a_run_without_fp8(as_traced):
    words = (*COMPILED, *SIZES, "model.num_layers=4", "model.num_dense_layers=0", "precision.fp8=rowwise")
    runs = {"skips": config(*words, "precision.fp8_skip_layers=[0,-1]"), "plain": config(*words[:-1])}
    made = {name: executor_of(run) for name, run in runs.items()}
    model = model_of(runs["skips"])
    made["skips"].expect(model.segment_lists())
    gradients(model, made["skips"])
    assert made["skips"].num_expected == 1 + 4  # the update, embed, loss, and layers in two forms
    layers = [report for report in made["skips"].reports if report.unit == "attn..moe_combine"]
    matches = [{row.name: row.matches for row in report.passes} for report in layers]
    assert [report.shared_by for report in layers] == [2, 2]  # the first and the last, and those between
    assert not {"fp8_linear", "fp8_experts", "fp8_quantise"} & {*matches[0]}
    assert matches[0]["fuse_experts"] == 1 and matches[1]["fp8_experts"] == 1 and matches[1]["fp8_linear"] > 4

    def of_layer(number: int, execute: CompiledSegments) -> list[Tensor]:
        layer, x = model.layers[number], torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
        layer.zero_grad()
        y = layer(x.requires_grad_(), *model.rope(16, x.device), execute, number).x_BSD
        y.square().mean().backward()
        return [y.detach(), x.grad, *(weight.grad for weight in layer.parameters())]

    for number in range(4):
        found, wanted = (of_layer(number, each) for each in made.values())
        assert all(map(torch.equal, found, wanted)) == (number in (0, 3)), number


TRAINED = (
    *COMPILED, *SIZES, "precision.fp8=rowwise", "compile.cache=false",
    "train.micro_batch_size=1", "train.global_batch_size=2",
)  # fmt: skip
NUM_WEIGHTS = 7 + 9
"""Weights of the dense and of the MoE layer that are in products of 8 bits."""
EARLY, AGAIN = "graph.warmup_steps=1", "recompute.segments=[attn,mlp,moe_experts]"
STEP, LAYERS = ("graph.scope=full_iteration", EARLY), ("graph.scope=layer", EARLY, AGAIN)
VARIANTS = {
    "rows": ("rowwise",),
    "rows, layers, again": ("rowwise", *LAYERS),
    "tensors, step": ("tensorwise", *STEP),
}


@pytest.fixture
def stored(as_traced, monkeypatch) -> list[int]:
    """Addresses of what was stored by an operation of its own, as weights are, along either axis."""
    addresses, rows = list[int](), reference.rows

    def noted(w: Tensor, **words: bool) -> Stored:
        addresses.append(w.data_ptr())
        return rows(w, **words)

    monkeypatch.setattr(reference, "rows", noted)
    return addresses


TENSORWISE = (*TRAINED, "precision.fp8=tensorwise")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, Path]:
    """Runs without a capture: by scales of rows, which stores weights in each micro-batch, and of tensors."""
    folders = {recipe: tmp_path_factory.mktemp(recipe) for recipe in ("tensorwise", "rowwise")}
    with units_as_traced():
        train_in(folders["tensorwise"], *TENSORWISE)
        with mock.patch.object(unit_graphs, "take_out_forms", lambda *_: ()):
            train_in(folders["rowwise"], *TRAINED)
    return folders


@pytest.mark.parametrize("case", VARIANTS.values(), ids=VARIANTS)
def test_weights_are_stored_once_a_step_with_the_same_bits(tmp_path, stored, plain, case):
    recipe, *words = case
    trainer = train_in(tmp_path, *TRAINED, f"precision.fp8={recipe}", *words)
    assert numbers(tmp_path) == numbers(plain[recipe])
    if recipe == "rowwise":  # along either axis, in steps and validations
        weights = {weight.data_ptr() for weight in trainer.optimizer.weights}
        assert sum(address in weights for address in stored) == 2 * NUM_WEIGHTS * (6 + 3)


def test_a_run_by_scales_of_tensors_learns_as_one_by_scales_of_rows(plain):
    found, wanted = ([row["loss"] for row in numbers(each) if "loss" in row] for each in plain.values())
    assert found == pytest.approx(wanted, rel=5e-3) and found != wanted


@pytest.mark.slow
def test_a_resumed_run_has_the_history_of_its_scales(tmp_path, as_traced, plain):
    first = trainer_in(tmp_path, *TENSORWISE)
    for _ in range(3):
        first._train_step()
    first._validate()  # counts for nothing
    first.saves.store.wait()
    resumed = train_in(tmp_path, *TENSORWISE)
    rows = [[row for row in numbers(folder) if row["step"] > 3] for folder in (tmp_path, plain["tensorwise"])]
    assert rows[0] == rows[1] and len(rows[0]) == 4
    values = resumed.optimizer.scales.values()
    assert all(len(history) == 1 + STEPS for history in values.values())
    moved = [name for name, (_, *history) in values.items() if history[0] > 0]
    assert len(moved) == 2 * NUM_WEIGHTS - 2  # the products of one input share its scale
    assert all(min(values[name][1:7]) > 0 for name in moved)


@pytest.mark.slow
def test_a_checkpoint_without_scales_goes_on_with_the_first_ones(tmp_path, as_traced, plain):
    shutil.copytree(plain["rowwise"], tmp_path / "run")  # 6 steps by scales of rows
    resumed = train_in(tmp_path / "run", *TENSORWISE, "checkpoint.resume=true", "train.steps=8")
    assert resumed._first == 7
    steps = [sum(amax > 0 for amax in history) for _, *history in resumed.optimizer.scales.values().values()]
    assert {*steps} == {0, 2}  # from the first new step on, of what products read


def test_scales_follow_the_largest_numbers_of_steps_that_were_done():
    weights = {name: torch.zeros(2, 2) for name in ("one", "other", "last")}
    scales, done = DelayedScales(weights, 1024, None), torch.ones(())
    first = scales.scale_P.tolist()
    assert first == [0.25, 0.25 / 1024] * 3
    scales.largest_P.copy_(torch.tensor([448.0, torch.inf, 0, 1e-3, 3e38, 0]))
    scales.update(torch.zeros(()))
    assert scales.scale_P.tolist() == first and not scales.history_SP.any()
    scales.update(done)
    assert scales.scale_P.tolist() == [2, *first[1:3], 2.0**-24, 2.0**120, first[5]]  # room for twice as much
    scales.begin()
    assert not scales.largest_P.any()
    scales.update(done)  # in which nothing was stored
    for _ in range(STEPS):
        assert scales.scale_P[0] == 2
        scales.largest_P[0] = 112
        scales.update(done)
    assert scales.scale_P[0] == 0.5
    addresses = [tensor.data_ptr() for _, pair in scales.tensors() for tensor in pair]
    assert not any(address % 16 for address in addresses)
    other = DelayedScales(weights, 1, None)
    other.load(scales.values())
    assert other.scale_P.equal(scales.scale_P) and other.history_SP.equal(scales.history_SP)
    (name, good), *_ = scales.values().items()
    for wrong in (
        good[:-1],
        [*good, 1.0],
        [math.nan, *good[1:]],
        [*good[1:], math.inf],
        [*good[1:], -1.0],
        2.0,
        "ab",
    ):
        with pytest.raises(ValueError, match=f"{name} has no scale and {STEPS} magnitudes, finite"):
            other.load({name: wrong})
    values = {"optimizer": {"scales": {name: [*good[1:], math.nan]}}}
    assert first_not_finite(values) == f"optimizer.scales.{name}"


@pytest.mark.slow  # compiles a model
def test_gradients_by_delayed_scales_are_close_to_those_of_the_plain_model():
    model, forms = model_of(), WeightForms()
    made = executor_of(config(*COMPILED, *SIZES, "precision.fp8=tensorwise"), weight_forms=forms)
    matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() > 1}
    forms.keep(scales := DelayedScales(matrices, batch()[0].numel(), None))
    wanted, levels = gradients(model_of())[1], []
    for _ in range(2):
        scales.begin()
        found = gradients(model, made)[1]
        levels.append(min(decibels(gradient, wanted[name]) for name, gradient in found.items()))
        scales.update(torch.ones(()))
    assert levels[0] > 3 and levels[1] > 14, levels  # first scales are a guess


WITHIN = {scope: (scope, "rowwise", NUM_WEIGHTS) for scope in ("none", "layer")}
WITHIN["full_iteration"] = ("full_iteration", "mxfp8", 4 + 6)


@pytest.mark.parametrize("case", slow_but(WITHIN))
def test_forms_in_the_memory_of_their_weights_change_no_bit(tmp_path, as_traced, case):
    scope, recipe, count = case
    words = f"precision.fp8={recipe}", "precision.compute=bf16", f"graph.scope={scope}", EARLY
    words = (*TRAINED, *words)
    with mock.patch.object(Optimizer, "_restorable", lambda self: {}):
        apart = train_in(tmp_path / "apart", *words)
    within = train_in(tmp_path / "within", *words)
    assert numbers(tmp_path / "within") == numbers(tmp_path / "apart")
    held = [each for each in within.optimizer.weight_forms._held.values() if each.within]
    assert len(held) == 2 * count
    taken = {weight.data_ptr() + i * weight.numel() for weight in within.optimizer.weights for i in (0, 1)}
    assert {each.tensors[0].data_ptr() for each in held} <= taken
    for one, other in zip(within.optimizer.weights, apart.optimizer.weights, strict=True):
        assert one.equal(other)  # has its values back


def test_forms_are_made_anew_of_weights_that_were_written():
    main = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    weight = main.bfloat16()
    forms = WeightForms({id(weight): main})
    both = [WeightForm(name, 0, alone=True) for name in ("fp8_rows", "fp8_columns")]
    before = [tensor.clone() for tensor in forms.of(both, [weight])]
    forms.written()
    weight.copy_(main.mul_(2))
    for found, wanted, factor in zip(forms.of(both, [weight]), before, (1, 2, 1, 2), strict=True):
        assert found.float().equal(factor * wanted.float())
    forms.changed()
    assert weight.equal(main.bfloat16())
    with pytest.raises(AssertionError, match="is read as it is, too"):
        forms.of([WeightForm("fp8_rows", 0)], [weight])


DENSE = "precision.fp8_products=[attn,mlp,shared_experts]"
WARNINGS = {
    "precision.fp8=blockwise has no effect: none of the GEMMs can run in fp8": ("blockwise", DENSE),
    "moe.experts=torch has no effect with precision.fp8=rowwise of experts, which runs": (
        "rowwise", "moe.experts=torch"
    ),
}  # fmt: skip


@pytest.mark.parametrize("warning", WARNINGS)
def test_a_run_says_which_of_its_settings_have_no_effect(tmp_path, as_traced, caplog, warning):
    recipe, word = WARNINGS[warning]
    train_in(tmp_path, *TRAINED, *QUIET, f"precision.fp8={recipe}", word, "train.steps=1")
    assert warning in caplog.text


@pytest.mark.slow
def test_two_micro_batches_in_turns_and_kept_graphs_have_the_same_sums(tmp_path, as_traced, monkeypatch):
    monkeypatch.setattr(kept, "own_sources", list)
    found = []
    for forms in (None, WeightForms(), WeightForms()):
        model, overlap = model_of(), Overlap(torch.device("cpu"))
        sums = {id(p): Gradient(torch.empty_like(p)) for p in model.parameters()}
        made = executor_of(RUN, lambda p, sums=sums: sums[id(p)], unit_turns=overlap, weight_forms=forms)
        made.kept, tape = tmp_path, None
        for _ in range(2):
            beside, like = (Backward(tape), tape.units) if tape else (None, ())
            output, tape = overlap.record(lambda m=model, e=made: m.loss(*batch(), e), beside, like)
            tape.start([output.total])
        overlap.run_backward(Backward(tape))
        found.append([sums[id(p)].total for p in model.parameters()])
        if forms:
            assert len(forms._held) == 2 * NUM_WEIGHTS
            monkeypatch.setattr(unit_graphs, "joint_graph", None)  # those of the first are loaded
    for one, *others in zip(*found, strict=True):
        assert all(map(one.equal, others))
