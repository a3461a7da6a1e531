"""Ranks that share sequences along cp compute the losses and gradients of one process."""

from __future__ import annotations

import re

import pytest
import torch

from graphmoe.config.schema import ConfigError, ContextMethod
from graphmoe.model.build import build_model
from graphmoe.plan.layout import Layout
from graphmoe.plan.rules.check import resolve
from tests.distributed.parallel_steps import (
    Step,
    assert_gradients_are_those_of_one_process,
    assert_outputs_are_those_of_one_process,
)
from tests.distributed.ranks import Job
from tests.distributed.shared_sequences import CompiledAttention, Ring, positions
from tests.runs import config
from tests.tolerances import assert_forward_close, assert_gradient_close

RINGS = {
    "ring of 4": Ring(Layout(cp=4, ring=True)),
    "ring of 2, grouped heads": Ring(Layout(dp=2, cp=2, ring=True), heads=(6, 2)),
    "ring of 4, unequal heads": Ring(Layout(cp=4, ring=True), sizes=(12, 6)),
    "ring of 4, grouped unequal heads, fp64": Ring(Layout(cp=4, ring=True), (4, 2), (6, 10), torch.float64),
    "ring of 4, bf16": Ring(Layout(cp=4, ring=True), (4, 2), dtype=torch.bfloat16, seq_len=64),
}
BASE = (
    "model.num_heads=4",
    "model.init_std=0.3",
    "model.aux_loss=sequence",
    "model.aux_loss_coef=0.1",
    "model.z_loss_coef=0.1",
)
GQA = (*BASE, "model.attention=gqa", "model.head_dim=6", "model.num_kv_heads=2", "model.qk_norm=true")
LORA = (*BASE, "model.q_lora_rank=6")
MTP = (*LORA, "model.mtp_depth=2")
STEPS = {
    "alltoall: mla, mtp": Step(MTP, Layout(dp=2, cp=2), ignored="some"),
    "alltoall: gqa, tp": Step((*GQA, "model.num_heads=8", "model.num_kv_heads=4"), Layout(cp=2, tp=2)),
    "ring: four": Step((*GQA, "model.num_heads=2"), Layout(cp=4, ring=True), ignored="some"),
    "ring: mla, tp, mtp": Step(MTP, Layout(cp=2, tp=2, ring=True)),
    "ring: gqa, tp": Step((*GQA, "recompute.all=true"), Layout(cp=2, tp=2, ring=True)),
    "ring: all labels ignored": Step(BASE, Layout(cp=4, ring=True), ignored="all"),
}
COMPILED = {
    "alltoall": CompiledAttention(BASE, Layout(cp=2)),
    "ring": CompiledAttention((*GQA, "model.qk_norm=false"), Layout(cp=2, ring=True)),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of four ranks, by case."""
    cases = {**RINGS, **STEPS, "positions": positions}
    return Job(tmp_path_factory.mktemp("ranks"), cases, num_ranks=4).results(seconds=400)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Results of two ranks that compile."""
    return Job(tmp_path_factory.mktemp("ranks"), COMPILED, num_ranks=2).results(seconds=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", RINGS)
def test_ring_attention_and_its_gradients_are_those_of_the_definition(ranks, name):
    found = RINGS[name].joined(ranks[name])
    for check, result, expected in zip(
        (assert_forward_close, *[assert_gradient_close] * 3), found, RINGS[name].expected(), strict=True
    ):
        assert result.dtype == RINGS[name].dtype
        check(result, expected)


@pytest.mark.slow
def test_a_rank_holds_neighbouring_positions_or_first_and_last_chunks(ranks):
    for rank, found in enumerate(ranks["positions"]):
        assert found["neighbours"] == [4 * rank + i for i in range(4)]
        assert found["zigzag"] == [2 * rank, 2 * rank + 1, 14 - 2 * rank, 15 - 2 * rank]
        assert found["dp"] == [*range(0, 4), *range(12, 16)] if rank % 2 == 0 else [*range(4, 12)]


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_losses_loads_and_every_gradient_are_those_of_one_process(ranks, name):
    assert_outputs_are_those_of_one_process(STEPS[name], ranks[name])
    assert_gradients_are_those_of_one_process(STEPS[name], ranks[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_attention_is_that_of_the_eager_ranks_by_operations_that_name_axes(compiled, name):
    for outcome in compiled[name]:
        assert len(outcome.compiled) == len(outcome.eager) > 5
        for found, expected in zip(outcome.compiled, outcome.eager, strict=True):
            assert_gradient_close(found, expected)
    first, other = (outcome.graphs for outcome in compiled[name])
    assert first == other  # process groups and places differ, graphs do not
    calls = re.findall(r"graphmoe\.(\w+)\.default\]\(args = \((.*?)\)", "\n".join(first))
    axes = {(kind, axis) for kind, words in calls for axis in re.findall(r"(?<![%\w])[a-z_]+\b", words)}
    exchanged = {
        ("all_to_all", "cp"),
        ("all_gather", "cp_tp"),
        ("reduce_scatter", "cp_tp"),
        ("index_along", "cp"),
    }
    passed_round = {("ring_attention", "cp"), ("ring_attention_backward", "cp")}
    assert axes == (exchanged if name == "alltoall" else passed_round)


@pytest.mark.parametrize(
    ("words", "method"),
    [
        ("parallel.cp=2 model.num_heads=4", ContextMethod.alltoall),
        ("parallel.cp=4 model.num_heads=4 parallel.tp=2", ContextMethod.ring),
        ("parallel.cp=2 model.num_heads=4 model.attention=gqa model.num_kv_heads=1", ContextMethod.ring),
        ("parallel.cp=2 model.num_heads=4 parallel.cp_method=ring", ContextMethod.ring),
    ],
)
def test_auto_exchanges_heads_where_they_can_be_shared(words, method):
    run = config(*words.split())
    assert resolve(run).parallel.cp_method is method
    ranks = run.parallel.cp * run.parallel.tp
    assert Layout.of(resolve(run).parallel, ranks).ring == (method is ContextMethod.ring)


def test_a_rank_with_a_part_of_a_sequence_refuses_to_generate():
    model = build_model(config().model, layout=Layout(cp=2), device="meta")
    with pytest.raises(ConfigError, match=r"parallel.cp=2: .* use parallel.cp=1"):
        model(torch.zeros(1, 16, dtype=torch.long, device="meta"))
