"""Decisions of a plan, which all that builds and runs a model asks; ranks along the parallel dimensions."""

import ast
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphmoe.config.schema import ParallelConfig, Transport
from graphmoe.plan.experts import blocks_of
from graphmoe.plan.layout import (
    ALONE,
    AXES,
    DENSE,
    EXPERT,
    SUMMED_OVER,
    Cut,
    Layout,
    ParameterLayout,
    own_part,
)
from graphmoe.plan.pipeline.layouts import all_pieces
from graphmoe.plan.plan import plan_of
from graphmoe.plan.recompute import Recompute
from graphmoe.plan.rules.unused import without_effect
from tests.runs import ROOT, config

COMPILED = "compile.enabled=true"
DECISIONS = {
    "Layout.of", "arrivals_of", "balanced_load", "experts_of", "num_micro_batches",
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


SYMM, FP8 = "parallel.ep=2 moe.dispatcher=symm", "precision.fp8=rowwise"
IN_32S = "model.hidden_size=32 model.expert_ffn_size=32"


@pytest.mark.parametrize(
    ("words", "in_fp8"),
    [
        (FP8, True), (f"{FP8} moe.dispatch_dtype=fp8", True), ("", False),
        (f"{FP8} moe.dispatch_dtype=bf16", False), (f"{FP8} precision.fp8_products=[attn]", False),
        (f"{FP8} {IN_32S}", True), (f"precision.fp8=mxfp8 {IN_32S}", False),
    ],
)  # fmt: skip
def test_rows_go_to_their_experts_in_8_bits_where_these_compute_in_8_bits(words, in_fp8):
    run = config(COMPILED, "model.expert_ffn_size=16", *SYMM.split(), *words.split())
    assert plan_of(run, 2).fp8_rows == in_fp8


@pytest.mark.parametrize(
    ("words", "balance"),
    [
        (SYMM, "replicas"), (f"{SYMM} moe.balance=none", "none"), (f"{SYMM} {FP8}", "replicas"),
        (f"{SYMM} {FP8} moe.experts=turbo", "none"), (f"{SYMM} parallel.etp=2", "none"),
        (f"{SYMM} compile.enabled=false", "none"), (f"{SYMM} passes.disabled=[fuse_experts]", "none"),
        ("parallel.ep=2", "none"), ("moe.dispatcher=local", "none"),
    ],
)  # fmt: skip
def test_experts_have_replicas_wherever_symm_can_make_them(words, balance):
    assert config(COMPILED, "model.expert_ffn_size=16", *words.split()).moe.balance == balance


@pytest.mark.parametrize(
    ("words", "backends", "size"),
    [
        ("", "", 3 * 2), ("", "triton,triton,torch", 3 * 2), ("", "triton", 2 * 2 + 4),
        ("moe.replica_keep=true", "torch,torch,triton", 2 + 4), ("precision.compute=fp32", "torch", 3 * 4),
        ("precision.fp8=rowwise", "", 2 * 1 + 4), ("compile.enabled=false", "", 2 + 2),
    ],
)  # fmt: skip
def test_bytes_of_a_replica_are_of_its_weights_and_of_a_gradient_as_it_is_sent(words, backends, size):
    given = "precision.compute=bf16", COMPILED, *f"{SYMM} {words}".split()
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

    def needed(arrived: list[int]) -> int:
        """Of rows from each rank, none of which has more than its tokens."""
        return 4 * block + sum(max(each - block, 0) for each in arrived)

    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        arrived = (tokens * torch.rand(4, generator=generator) ** 0.2).int().tolist()
        arrived[0] -= max(sum(arrived) - plan.room().rows, 0)
        assert needed(arrived) <= rows
    assert needed([tokens] * 3 + [plan.room().rows - 3 * tokens]) == rows


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


def called_in(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}


def test_modules_that_build_and_run_a_model_ask_the_plan_for_decisions():
    folders = ("graphmoe/model", "graphmoe/optim", "graphmoe/training", "passes", "runtime")
    files = [file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py")]
    files.remove(ROOT / "graphmoe/training/auto.py")  # it decides before there is a plan
    asking = {str(file.relative_to(ROOT)): found for file in files if (found := called_in(file) & DECISIONS)}
    assert len(files) > 50 and asking == {}
    whole = [file for file in files if re.search(r"\bRunConfig\b|plan\.config\b", file.read_text())]
    assert len(whole) <= 6


LAYOUTS = [
    Layout(), Layout(dp=8), Layout(dp=2, tp=2, cp=2), Layout(dp=2, tp=4, ep=8),
    Layout(dp=2, tp=2, cp=2, ep=2, etp=2), Layout(dp=2, tp=2, pp=2, ep=4), Layout(dp=96, tp=4, cp=2, ep=8),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_meet_in_one_group_of_one_axis_of_a_folding(layout):
    ranks = layout.size("world")
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(ranks))
        assert {len(group) for group in groups} == {layout.size(axis)}
        for rank in {0, ranks // 2, ranks - 1}:
            assert layout.group(axis, rank)[layout.index(axis, rank)] == rank
    assert layout.edp * layout.ep * layout.etp == layout.dp * layout.cp * layout.tp
    for folding in (DENSE, EXPERT):
        for rank in range(min(ranks, 16)):
            others = [set(layout.group(axis, rank)) - {rank} for axis in folding]
            assert all(not one & other for one, other in itertools.combinations(others, 2))
        assert math.prod(layout.size(axis) for axis in folding) == ranks


def test_each_axis_has_its_groups_of_ranks():
    for layout, groups in (
        (Layout(dp=2, cp=1, tp=2, pp=2, ep=4), {
            "tp": "01 23 45 67", "dp": "02 13 46 57", "pp": "04 15 26 37", "ep": "0123 4567",
            "stage": "0123 4567", "edp": "0 1 2 3 4 5 6 7",
        }),
        (Layout(dp=4, tp=2, ep=2, etp=2), {
            "etp": "01 23 45 67", "ep": "02 13 46 57", "edp": "04 15 26 37", "ep_etp": "0123 4567",
        }),
        (Layout(dp=2, cp=2, tp=2), {"dp_cp": "0246 1357"}),
    ):  # fmt: skip
        for axis, of_ranks in groups.items():
            assert layout.groups(axis) == [tuple(map(int, group)) for group in of_ranks.split()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [None, 1, 2, 8])
def test_a_block_of_ranks_has_all_shards_and_others_have_the_same(layout, size):
    size = size if size is None or layout.size("stage") % size == 0 else None
    layout = replace(layout, shard_size=size)
    for axis in SUMMED_OVER:
        shards, replicas = layout.shard_groups(axis), layout.replica_groups(axis)
        assert {len(group) for group in shards} == {layout.num_shards(axis)}
        if size is not None:
            assert all(len({rank // size for rank in group}) == 1 for group in shards)
        groups = {rank: group for group in layout.groups(axis) for rank in group}
        places = {rank: group.index(rank) for group in shards for rank in group}
        for ranks in replicas:
            assert len({groups[rank] for rank in ranks}) == len({places[rank] for rank in ranks}) == 1
        assert sorted(rank for ranks in replicas for rank in ranks) == [*range(layout.size("world"))]
        assert len(replicas[0]) * layout.num_shards(axis) == layout.size(axis)


def test_own_parts_are_cut_piece_by_piece():
    layout = Layout(dp=2, tp=2, ep=2, etp=2)
    rows = torch.arange(8)[:, None].expand(8, 3)
    gate_and_up = ParameterLayout((Cut(0, "tp", pieces=2),), "dp_cp")
    assert own_part(rows, gate_and_up, layout, 1)[:, 0].tolist() == [2, 3, 6, 7]
    experts = torch.arange(4 * 4 * 3).view(4, 4, 3)
    parallel = ParameterLayout((Cut(0, "ep"), Cut(1, "etp", pieces=2)), "edp")
    parts = [own_part(experts, parallel, layout, rank) for rank in range(4)]
    assert torch.equal(parts[2], experts[2:, [0, 2]])  # rank 2: second of ep, first of etp
    assert torch.equal(parts[1], experts[:2, [1, 3]])
    assert own_part(rows, ParameterLayout(), layout, 3) is rows


def test_ranks_that_no_other_axis_takes_are_data_parallel():
    assert Layout.of(ParallelConfig(), 1) == ALONE
    assert Layout.of(ParallelConfig(tp=2, cp=2), 8) == Layout(dp=2, tp=2, cp=2)
    assert Layout.of(ParallelConfig(ep=8, tp=4, cp=2), 768) == Layout(dp=96, tp=4, cp=2, ep=8)
