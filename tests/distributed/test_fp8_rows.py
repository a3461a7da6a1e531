"""Rows that go to the ranks of their experts in 8 bits: a training has the bits of rounding at arrival.

Replicas of experts in 8 bits: a training is that without, but for the order of sums.
"""

from dataclasses import replace

import pytest

from graphmoe.training.step_rows import RECEIVED, SCALARS
from tests.distributed.layouts import all_on_two_experts
from tests.distributed.ranks import Job, selected
from tests.distributed.training import Change, Graphs, Outcome, Training
from tests.runs import assert_same_state, slow_but
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
    "parts of an expert": case("parallel.ep=1", "parallel.etp=2", BF16),
    "in turns, captured": case(TURNS, BLOCKS, *FULL),
    "dispatch and combine captured": case("graph.scope=[moe_dispatch,moe_combine]", "graph.warmup_steps=1"),
    "computed twice": case(TWICE, BF16),
    "with replicas": case(REPLICAS, BLOCKS, TURNS, *FULL, change=all_on_two_experts),
}
INDUCTOR = "by Inductor, in turns"
NAMES = [*slow_but([*CASES], "blocks, the whole step captured")]
NAMES += [pytest.param(INDUCTOR, marks=pytest.mark.exhaustive)]
CASES[INDUCTOR] = case(TURNS, BF16, *ONE_LAYER, traced=False)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    cases = {}
    for name in selected(request, "name"):
        for dtype in ("auto", "bf16"):
            words = *CASES[name].words, f"moe.dispatch_dtype={dtype}"
            cases[f"{name}: {dtype}"] = replace(CASES[name], words=words)
    for name in selected(request, "copied"):
        for balance in (REPLICAS, "moe.balance=none"):
            cases[f"{name}: {balance}"] = case(*COPIED[name], balance, change=all_on_two_experts)
    return Job(tmp_path_factory.mktemp("ranks"), cases).results(seconds=900)


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
    "rowwise, computed twice": (TWICE,),
    "rowwise, in turns, captured": (TURNS, *FULL),
    "rowwise, rows in bf16": ("moe.dispatch_dtype=bf16", BF16, *ONE_LAYER),
    "tensorwise": ("precision.fp8=tensorwise",),
    "mxfp8": ("precision.fp8=mxfp8", EXPERTS),
    "a layer in bf16": (SKIPS,),
}


@pytest.mark.parametrize("copied", slow_but([*COPIED], "rowwise, rows in bf16"))
def test_replicas_change_a_training_by_the_order_of_sums_only(outcomes, copied):
    with_copies, without = outcomes[f"{copied}: {REPLICAS}"], outcomes[f"{copied}: moe.balance=none"]
    assert receive_load(with_copies[0]) < 1.3 < 1.9 < receive_load(without[0])
    most = 0.05 if copied == "mxfp8" else 1e-5  # there blocks of a sum begin with the first row of a copy
    for found, plain in zip(with_copies, without, strict=True):
        scalars = [outcome.rows[:, : len(SCALARS)] for outcome in (found, plain)]
        assert relative_error(*scalars) < most and relative_error(found.val_losses, plain.val_losses) < most
        for name, gradient in found.gradients.items():
            assert relative_error(gradient, plain.gradients[name]) < most, name
        assert found.graphs is not None
        text = "".join(found.graphs.code)
        assert "fp8_mlp_wgrad" in text and ("grouped_mlp" in text) == (SKIPS in COPIED[copied])


def receive_load(outcome: Outcome) -> float:
    return float(outcome.rows[:, len(SCALARS) + RECEIVED.index("receive_load")].max())
