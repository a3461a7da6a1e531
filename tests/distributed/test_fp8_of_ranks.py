"""Training in 8 bits on several ranks: rows sent to experts, replicas of experts, and delayed scales."""

from dataclasses import replace

import pytest
import torch

from graphmoe.training.step_rows import RECEIVED, SCALARS
from tests.distributed.layouts import all_on_two_experts
from tests.distributed.ranks import Job, run_ranks, selected
from tests.distributed.training import Change, Graphs, Outcome, Training, as_traced
from tests.runs import QUIET, assert_same_state, slow_but, spoil_steps, trainer_in
from tests.tolerances import relative_error

WORDS = (
    "model.hidden_size=32", "model.expert_ffn_size=32", "model.shared_ffn_size=16", "model.dense_ffn_size=16",
    "model.num_experts=8", "model.top_k=2", "model.num_layers=3", "moe.dispatcher=symm",
    "moe.balance=none", "moe.receive_budget=worst_case", "compile.enabled=true", "precision.fp8=rowwise",
    "parallel.ep=2", "train.global_batch_size=8", "train.steps=3", "checkpoint.enabled=false",
    "checkpoint.interval=0",
)  # fmt: skip
TURNS, FULL = "pipeline.ep_overlap=true", ("graph.scope=full_iteration", "graph.warmup_steps=1")
BLOCKS, BF16 = "moe.transport=copy_engine", "precision.compute=bf16"
SKIPS = "precision.fp8_skip_layers=[1]"
ONE_LAYER = ("model.num_layers=1", "model.num_dense_layers=0")
REPLICAS = "moe.balance=replicas"
TWICE = "recompute.segments=[moe_router,moe_preprocess,moe_dispatch,moe_experts,moe_combine]"


def case(*words: str, change: Change | None = None, traced: bool = True) -> Training:
    return Training((*WORDS, *words), change, traced)


CASES = {
    "blocks, the whole step captured": case(BLOCKS, BF16, *FULL, *ONE_LAYER),
    "a rank without rows": case("model.mtp_depth=1", SKIPS, change=all_on_two_experts),
    "too little room": case("moe.receive_budget=1.0", change=all_on_two_experts),
    "parts of an expert, computed twice": case("parallel.ep=1", "parallel.etp=2", TWICE, BF16),
    "dispatch and combine captured": case("graph.scope=[moe_dispatch,moe_combine]", "graph.warmup_steps=1"),
    "with replicas": case(REPLICAS, BLOCKS, TURNS, *FULL, change=all_on_two_experts),
}
INDUCTOR = "by Inductor, in turns"
CASES[INDUCTOR] = case(TURNS, BF16, *ONE_LAYER, traced=False)
NAMES = slow_but([*CASES], "blocks, the whole step captured", exhaustive=[INDUCTOR])
BIASED = "with biases"
CASES[BIASED] = case("model.expert_bias=true", "model.swiglu_limit=1", "model.router_bias=true", *ONE_LAYER)


@pytest.fixture(scope="module")
def outcomes(request, folder):
    cases = {}
    for name in selected(request, "name"):
        for dtype in ("auto", "bf16"):
            words = *CASES[name].words, f"moe.dispatch_dtype={dtype}"
            cases[f"{name}: {dtype}"] = replace(CASES[name], words=words)
    for name in selected(request, "copied"):
        for balance in (REPLICAS, "moe.balance=none"):
            words = *COPIED[name], "train.val_batches=0", balance
            cases[f"{name}: {balance}"] = case(*words, change=all_on_two_experts)
    return Job(folder, cases).results(seconds=900)


@pytest.mark.parametrize("name", slow_but([BIASED]))
def test_rows_of_biased_experts_are_not_sent_in_8_bits(outcomes, name):
    for found, plain in zip(outcomes[f"{name}: auto"], outcomes[f"{name}: bf16"], strict=True):
        assert found.gradients and all(gradient.isfinite().all() for gradient in found.gradients.values())
        assert_same_state(found.gradients, plain.gradients)


@pytest.mark.parametrize("name", NAMES)
def test_no_bit_differs_from_rounding_at_arrival(outcomes, name):
    for found, plain in zip(outcomes[f"{name}: auto"], outcomes[f"{name}: bf16"], strict=True):
        assert found.rows.equal(plain.rows) and len(found.rows) >= 3
        assert found.val_losses.equal(plain.val_losses) and len(found.val_losses) > 0
        assert_same_state(found.state, plain.state)
        assert_same_state(found.gradients, plain.gradients)
        if found.graphs is not None:
            assert_rows_are_sent_in_8_bits(found.graphs, plain.graphs, CASES[name].words)


def assert_rows_are_sent_in_8_bits(found: Graphs, plain: Graphs, words: tuple[str, ...]) -> None:
    """Tokens and gradients of sums are; sums, gradients of tokens, and rows of skipped layers are not."""

    def calling(graphs: Graphs, op: str) -> list[str]:
        return [text for text in graphs.code if f"graphmoe.{op}.default]" in text]

    stored = calling(found, "symm_bring_fp8")
    assert {text.partition(":")[0] for text in stored} == {"moe_dispatch", "moe_combine"}
    assert not calling(plain, "symm_bring_fp8")
    for op in ("symm_dispatch", "symm_combine_grad"):  # in a validation too
        assert bool(calling(found, op)) == (SKIPS in words)
    for op in ("symm_combine", "symm_dispatch_grad"):
        assert len(calling(found, op)) == len(calling(plain, op)) > 0
    # x in F, which is kept in 8 bits, and dy in I; of a forward that is computed again x in I too.
    counts = [text.count("graphmoe.fp8_arrived.default]") for text in calling(found, "fp8_arrived")]
    assert set(counts) == ({1, 2} if TWICE in words else {1})


EXPERTS = "precision.fp8_products=[experts]"
COPIED = {
    "rowwise, a layer in bf16, computed twice": (SKIPS, TWICE),
    "rowwise, rows in bf16": ("moe.dispatch_dtype=bf16", BF16, *ONE_LAYER),
    "tensorwise, in turns, captured": ("precision.fp8=tensorwise", TURNS, *FULL),
    "mxfp8": ("precision.fp8=mxfp8", EXPERTS),
}


@pytest.mark.parametrize("copied", slow_but([*COPIED], "rowwise, rows in bf16"))
def test_replicas_change_a_training_by_the_order_of_sums_only(outcomes, copied):
    with_copies, without = outcomes[f"{copied}: {REPLICAS}"], outcomes[f"{copied}: moe.balance=none"]
    assert receive_load(with_copies[0]) < 1.3 < 1.9 < receive_load(without[0])
    most = 0.05 if copied == "mxfp8" else 1e-5  # there blocks of a sum begin with the first row of a copy
    for found, plain in zip(with_copies, without, strict=True):
        scalars = [outcome.rows[:, : len(SCALARS)] for outcome in (found, plain)]
        assert relative_error(*scalars) < most
        for name, gradient in found.gradients.items():
            assert relative_error(gradient, plain.gradients[name]) < most, name
        assert found.graphs is not None
        text = "".join(found.graphs.code)
        assert "fp8_mlp_wgrad" in text and ("grouped_mlp" in text) == (SKIPS in COPIED[copied])


def receive_load(outcome: Outcome) -> float:
    return float(outcome.rows[:, len(SCALARS) + RECEIVED.index("receive_load")].max())


STEPS = 2
SCALED = (
    "model.hidden_size=64", "model.expert_ffn_size=32", "model.shared_ffn_size=32", "model.dense_ffn_size=64",
    "model.qk_nope_head_dim=16", "model.qk_rope_head_dim=16", "model.v_head_dim=16", "model.kv_lora_rank=16",
    "model.tie_embeddings=true", "model.num_layers=4", "train.micro_batch_size=1", "train.val_batches=0",
    "compile.enabled=true", "compile.cache=false", "precision.fp8=tensorwise", f"train.steps={STEPS}",
    "checkpoint.interval=0",
)  # fmt: skip
LAYOUTS = {  # of two ranks; with pp each has two stages, and both have the embedding
    "dp": (),
    "tp": ("parallel.tp=2",),
    "ep": ("parallel.ep=2", "moe.dispatcher=symm", "moe.balance=none", "moe.receive_budget=worst_case"),
    "pp": ("parallel.pp=2", "pipeline.schedule=interleaved"),
}
OF_ONE_TENSOR = {  # scales of what other products read too, in one unit: the former stay as they began
    "moe_experts.w_gate_up.fp8_scale_of_input": "shared_experts.gate_up.weight.fp8_scale_of_input",
    "shared_experts.down.weight.fp8_scale_of_gradient": "moe_experts.w_down.fp8_scale_of_gradient",
}
Values = dict[str, list[float]]


@pytest.fixture(scope="module")
def scales(folder) -> dict[str, list[Values]]:
    """Scales with their history by layout and rank; by "a, b" those of a's checkpoint as b begins with it."""

    def cases(*layouts: str, source: str = "") -> dict[str, Training]:
        begin = (f"checkpoint.resume_from={folder / source}",) if source else ()
        words = {name: (*SCALED, *LAYOUTS.get(name, ()), *begin) for name in layouts}
        return {f"{source}, {n}" if source else n: Training(w, traced=True) for n, w in words.items()}

    found = run_ranks(folder, cases("one"), 1)
    found |= run_ranks(folder, cases(*LAYOUTS) | cases("dp", "pp", source="one") | cases("dp", source="pp"))
    again = [cases("one", source=source) for source in LAYOUTS]
    found |= run_ranks(folder, {name: case for each in again for name, case in each.items()}, 1)
    return {name: [outcome.scales for outcome in outcomes] for name, outcomes in found.items()}


def moved(values: Values) -> Values:
    return {name: each for name, each in values.items() if each[1] > 0}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_of_several_ranks_are_those_of_one_with_the_same_batch(scales, layout):
    (one,), ranks = scales["one"], scales[layout]
    if layout == "pp":
        names = [{name for name in rank if not name.startswith("embed.")} for rank in ranks]
        assert not names[0] & names[1] and min(map(len, names)) > 20
    else:
        assert ranks[0] == ranks[1]
    found = ranks[0] | ranks[1]
    assert found.keys() == one.keys() and moved(found).keys() >= moved(one).keys()
    for name, values in moved(found).items():
        layer = ".".join(name.split(".")[:2])
        same = OF_ONE_TENSOR.get(name.removeprefix(f"{layer}."))
        wanted = one[name if same is None or name in moved(one) else f"{layer}.{same}"]
        assert values[0] == wanted[0], name
        assert values[1:] == pytest.approx(wanted[1:], rel=1e-5), name
        assert min(values[1 : STEPS + 1]) > 0 == max(values[STEPS + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "layout"), [*((name, "one") for name in LAYOUTS), ("one", "dp"), ("one", "pp"), ("pp", "dp")]
)
def test_a_run_goes_on_with_the_scales_of_another_layout(scales, source, layout):
    saved = scales[source][0] | scales[source][-1]
    for rank, began in zip(scales[f"{source}, {layout}"], scales[layout], strict=True):
        assert rank.keys() == began.keys() and moved(rank)
        assert all(rank[name] == saved[name] for name in rank)


def test_a_step_that_is_void_or_not_finite_leaves_the_scales_as_they_were(tmp_path, monkeypatch):
    void, loss, gradients = 2, 4, 6
    one_layer = "model.num_layers=1", "model.num_dense_layers=0", "train.global_batch_size=2"
    with as_traced():
        trainer = trainer_in(tmp_path, *SCALED, *one_layer, *QUIET)
        spoil_steps(monkeypatch, trainer, {loss})
        spoil_steps(monkeypatch, trainer, {gradients}, only_gradients=True)
        found = {}
        for step in range(1, 8):
            trainer.optimizer.void.fill_(float(step == void))
            trainer._train_step()
            found[step] = trainer.optimizer.scales.values()
        trainer.loader.close()
    for step in (void, loss, gradients):
        before, after = found[step - 1], found[step + 1]
        assert before == found[step] and moved(before)
        assert all(after[name][2] == values[1] for name, values in moved(before).items())
        assert torch.tensor([*after.values()]).isfinite().all()
