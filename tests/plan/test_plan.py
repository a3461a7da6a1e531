"""Decisions of a plan, which all that builds and runs a model asks."""

import ast
import re
from pathlib import Path

import pytest
import torch

from graphmoe.config.schema import Transport
from graphmoe.plan.experts import blocks_of
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.layouts import all_pieces
from graphmoe.plan.plan import plan_of
from graphmoe.plan.recompute import Recompute
from graphmoe.plan.rules.unused import without_effect
from tests.runs import ROOT, config

COMPILED = "compile.enabled=true"
DECISIONS = {
    "Layout.of", "arrivals_of", "balanced_load", "dispatcher_of", "experts_of", "num_micro_batches",
    "pipeline_of", "Recompute.of", "routed_tokens", "transport_of_run",
}  # fmt: skip


def test_one_rank_alone_has_the_local_dispatcher_and_no_pipeline():
    plan = plan_of(config("train.global_batch_size=12", "data.seq_len=16"), 1)
    assert plan.layout == Layout() and plan.pipeline is None
    assert plan.own_stages(0) == [all_pieces(plan.model.num_layers, 0)]
    assert (plan.dispatcher, plan.transport, plan.reads_peers) == ("local", None, False)
    assert (plan.num_micro_batches, plan.global_micro_batches, plan.tokens) == (6, 6, 32)
    assert plan.dtype == torch.float32 and not plan.captured and not plan.captures_step
    assert plan.recompute == Recompute() and plan.moe.experts == "auto"


def test_a_plan_is_of_ranks_that_share_experts_layers_and_matrices():
    words = (
        "parallel.pp=2", "parallel.tp=2", "parallel.ep=2", "moe.dispatcher=symm", "model.num_layers=4",
        "pipeline.layout=Ett|ttL", "train.global_batch_size=16", "data.seq_len=16",
        "model.tie_embeddings=true", "graph.scope=[attn,loss]", "compile.enabled=true", "moe.balance=none",
    )  # fmt: skip
    plan = plan_of(config(*words, "launch.nproc=8"), 8)
    assert (plan.layout.dp, plan.layout.tp, plan.layout.pp, plan.layout.embed_on) == (2, 2, 2, (0, 1))
    assert plan.transport is Transport.pull and plan.reads_peers
    assert (plan.num_micro_batches, plan.global_micro_batches, plan.tokens) == (4, 8, 16)
    assert [stage.loss for stage in plan.own_stages(1)] == [True] and plan.captured == {"attn", "loss"}
    assert plan.balanced.slots == 32 and plan.room().slots == 48 and plan.room(2.0).slots <= plan.worst.slots


def test_rows_go_to_their_experts_in_8_bits_where_these_compute_in_8_bits():
    words = "parallel.ep=2", "model.expert_ffn_size=16", "compile.enabled=true", "moe.dispatcher=symm"

    def travels(*more: str) -> bool:
        return plan_of(config(*words, *more), 2).fp8_rows

    fp8 = "precision.fp8=rowwise"
    assert travels(fp8) and travels(fp8, "moe.dispatch_dtype=fp8")
    assert not travels() and not travels(fp8, "moe.dispatch_dtype=bf16")
    assert not travels(fp8, "precision.fp8_products=[attn]")
    in_32s = "model.hidden_size=32", "model.expert_ffn_size=32"
    assert travels(fp8, *in_32s) and not travels("precision.fp8=mxfp8", *in_32s)


@pytest.mark.parametrize(
    ("words", "balance"),
    [
        ("moe.dispatcher=symm parallel.ep=2", "replicas"),
        ("moe.dispatcher=symm parallel.ep=2 moe.balance=none", "none"),
        ("moe.dispatcher=symm parallel.ep=2 precision.fp8=rowwise", "replicas"),
        ("moe.dispatcher=symm parallel.ep=2 precision.fp8=rowwise moe.experts=turbo", "none"),
        ("moe.dispatcher=symm parallel.ep=2 parallel.etp=2", "none"),
        ("moe.dispatcher=symm parallel.ep=2 compile.enabled=false", "none"),
        ("moe.dispatcher=symm parallel.ep=2 passes.disabled=[fuse_experts]", "none"),
        ("parallel.ep=2", "none"),
        ("moe.dispatcher=local", "none"),
    ],
)
def test_experts_have_replicas_wherever_symm_can_make_them(words, balance):
    assert config("compile.enabled=true", "model.expert_ffn_size=16", *words.split()).moe.balance == balance


@pytest.mark.parametrize(
    ("words", "backends", "size"),
    [
        ("", "", 3 * 2), ("", "triton,triton,torch", 3 * 2), ("", "triton", 2 * 2 + 4),
        ("moe.replica_keep=true", "torch,torch,triton", 2 + 4), ("precision.compute=fp32", "torch", 3 * 4),
        ("precision.fp8=rowwise", "", 2 * 1 + 4), ("compile.enabled=false", "", 2 + 2),
    ],
)  # fmt: skip
def test_bytes_of_a_replica_are_of_its_weights_and_of_a_gradient_as_it_travels(words, backends, size):
    given = "precision.compute=bf16", "moe.dispatcher=symm", "parallel.ep=2", COMPILED, *words.split()
    plan = plan_of(config("model.hidden_size=32", "model.expert_ffn_size=16", *given), 2)
    assert plan.replica_bytes(backends) == 3 * 32 * 16 * size


def test_with_replicas_there_is_room_for_all_that_can_arrive_and_no_more():
    words = (
        "parallel.ep=4", "moe.dispatcher=symm", "moe.balance=replicas", "model.top_k=3",
        "model.num_experts=8", "train.global_batch_size=8", "data.seq_len=64", "model.context_length=64",
    )  # fmt: skip
    plan, few = (plan_of(config(*words, *more), 4) for more in ((), ("moe.replica_slots=1",)))
    tokens, share = plan.tokens, plan.tokens * 3
    assert plan.room() == plan.room(2.0) == plan.worst == (share + share // 64, share + share // 64)
    assert [(each.replica_slots, each.exact_of) for each in (plan, few)] == [(2, tokens), (1, None)]
    assert few.room().slots == 1.5 * few.balanced.slots

    block, rows = blocks_of(plan.balanced, plan.room(), 4, plan.exact_of)
    generator, most = torch.Generator().manual_seed(0), 0
    for _ in range(200):  # rows from each rank, none of which has more than its tokens
        arrived = (tokens * torch.rand(4, generator=generator) ** 0.2).int().tolist()
        arrived[0] -= max(sum(arrived) - plan.room().rows, 0)
        most = max(most, 4 * block + sum(max(each - block, 0) for each in arrived))
        assert most <= rows
    full = [tokens] * 3 + [plan.room().rows - 3 * tokens]
    assert 4 * block + sum(max(each - block, 0) for each in full) == rows


def test_weights_of_replicas_are_kept_as_asked_for_or_by_separate_steps_unless_they_are_read_again():
    words = ("parallel.ep=2", "moe.dispatcher=symm", "moe.balance=replicas", "moe.replica_keep=true")
    for more, kept, has_effect in (
        ((COMPILED,), True, True),
        ((COMPILED, "recompute.segments=[moe_router]"), True, True),
        ((COMPILED, "recompute.layer_ids=[0]"), True, True),  # a dense one
        ((COMPILED, "recompute.segments=[moe_experts]"), False, False),
        ((COMPILED, "recompute.all=true"), False, False),
        ((), True, False),  # in separate steps, which keep them in any case
    ):
        plan = plan_of(config(*words, "model.num_dense_layers=1", *more), 2)
        said = [line for line in without_effect(plan, 2) if line.startswith("moe.replica_keep=true")]
        assert (plan.keeps_replicas, not said) == (kept, has_effect), more
    plan = plan_of(config("parallel.ep=2", "moe.dispatcher=symm", "moe.replica_slots=2"), 2)
    why = "with moe.balance=none: auto makes no replicas without the pass fuse_experts"
    assert f"moe.replica_slots=2 has no effect {why}" in without_effect(plan, 2)


def test_a_coefficient_of_no_loss_says_how_to_turn_the_loss_on_or_off():
    plans = [plan_of(config("model.aux_loss=none", f"model.aux_loss_coef={each}"), 1) for each in (0.02, 0)]
    said = [[line for line in without_effect(plan, 1) if "aux_loss" in line] for plan in plans]
    how = "model.aux_loss=micro_batch turns the loss on, model.aux_loss_coef=0 off"
    assert said == [[f"model.aux_loss_coef=0.02 has no effect with model.aux_loss=none; {how}"], []]


def called_in(file: Path) -> set[str]:
    calls = (node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    return {ast.unparse(function) for function in calls}


def test_modules_that_build_and_run_a_model_ask_the_plan_for_decisions():
    folders = ("graphmoe/model", "graphmoe/optim", "graphmoe/training", "passes", "runtime")
    files = [file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py")]
    asking = {str(file.relative_to(ROOT)): found for file in files if (found := called_in(file) & DECISIONS)}
    assert len(files) > 50 and asking == {}
    whole = [file for file in files if re.search(r"\bRunConfig\b|plan\.config\b", file.read_text())]
    assert len(whole) <= 6
