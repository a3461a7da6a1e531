"""Ranks that share matrices along tp compute the losses and gradients of one process."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.model.build import build_model
from graphmoe.plan.layout import Layout
from graphmoe.runtime.ranks import Ranks
from tests.distributed.parallel_steps import (
    Outcome,
    Step,
    alone,
    assert_gradients_are_those_of_one_process,
    assert_outputs_are_those_of_one_process,
    whole_gradient,
    whole_weight,
)
from tests.distributed.ranks import Job
from tests.distributed.training import as_traced
from tests.runs import config
from tests.tolerances import relative_error

PAIR, TWO, FOUR = Layout(tp=2), Layout(dp=2, tp=2), Layout(tp=4)
BASE = (
    "model.num_heads=4",
    "model.init_std=0.3",
    "model.aux_loss=sequence",
    "model.aux_loss_coef=0.1",
    "model.z_loss_coef=0.1",
)
GQA = (*BASE, "model.attention=gqa", "model.head_dim=6")
LORA = (*BASE, "model.q_lora_rank=6")
DENSE = (*BASE, "model.num_dense_layers=2")
EAGER = {
    "gqa with qk-norm": Step((*GQA, "model.num_kv_heads=2", "model.qk_norm=true"), TWO),
    "no selection bias": Step((*BASE, "model.selection_bias=false"), TWO),
    "sigmoid scores of groups": Step(
        (*BASE, "model.score_function=sigmoid", "model.num_groups=2", "model.renormalise=true"), TWO
    ),
    "ignored labels": Step((*BASE, "model.mtp_depth=1"), TWO, ignored="some"),
    "all labels ignored": Step(BASE, TWO, ignored="all"),
    "dense only": Step(DENSE, TWO),
    "no shared experts": Step((*BASE, "model.shared_ffn_size=0"), TWO),
    "four: mla": Step(LORA, FOUR),
    "four: aux loss over the global batch": Step((*BASE, "model.aux_loss=global_batch"), FOUR),
}
"""Models and labels that no case of test_layouts.py has."""
ONE_MOE = (*LORA, "model.num_layers=1", "model.num_dense_layers=0")
COMPILED = {
    "mla and mtp": Step((*ONE_MOE, "model.mtp_depth=1"), PAIR, compiled=True, traced=True, ignored="some"),
    "gqa, dense": Step(
        (*GQA, "model.num_layers=1", "model.num_kv_heads=4", "model.qk_norm=true", "compile.enabled=true")
        + ("recompute.ops=[mlp]",),
        PAIR,
        compiled=True,
        traced=True,
    ),
}
"""Units run as they were traced."""
BF16 = {"bf16": Step(DENSE, TWO, dtype=torch.bfloat16)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """The outcomes of four ranks that run eagerly."""
    return Job(tmp_path_factory.mktemp("ranks"), {**EAGER, **BF16}, num_ranks=4).results()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """The outcomes of two ranks that compile."""
    return Job(tmp_path_factory.mktemp("ranks"), COMPILED, num_ranks=2).results(seconds=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER)
def test_losses_loads_and_every_gradient_are_those_of_one_process(ranks, name):
    assert_outputs_are_those_of_one_process(EAGER[name], ranks[name])
    assert_gradients_are_those_of_one_process(EAGER[name], ranks[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER)
def test_initial_weights_do_not_depend_on_the_layout(ranks, name):
    for parameter, weight in alone(EAGER[name]).weights.items():
        assert whole_weight(parameter, ranks[name], EAGER[name].layout, weight).equal(weight), parameter


@pytest.mark.slow
def test_a_rank_holds_its_share_of_every_large_matrix(ranks):
    whole = {name: weight.numel() for name, weight in alone(EAGER["four: mla"]).weights.items()}
    shares = {name: whole[name] // weight.numel() for name, weight in ranks["four: mla"][0].weights.items()}
    cut = ("embed.", "head.head.", "q_up", "kv_up", "out_proj", "gate_up.weight", ".down.weight")
    assert shares == {name: 4 if any(part in name for part in cut) else 1 for name in shares}


@pytest.mark.slow
def test_in_bf16_the_ranks_stay_as_close_to_fp32_as_one_process(ranks):
    """Within a quarter over all gradients, within twice for each and the loss: parts are rounded too."""
    step, exact = BF16["bf16"], alone(BF16["bf16"])
    of_one_rank, found = alone(step, torch.bfloat16), {}
    rounded = of_one_rank.gradients
    for parameter, gradient in exact.gradients.items():
        found[parameter] = whole_gradient(parameter, ranks["bf16"], step.layout, gradient)
        limit = 2 * relative_error(rounded[parameter], gradient) + 5e-3
        assert relative_error(found[parameter], gradient) < limit, parameter
    whole, of_ranks, of_one = (
        torch.cat([tensor.flatten().float() for tensor in gradients.values()])
        for gradients in (exact.gradients, found, rounded)
    )
    assert relative_error(of_ranks, whole) < 1.25 * relative_error(of_one, whole)
    for number in (0, 1):
        loss = exact.outputs[number].total
        limit = 2 * relative_error(of_one_rank.outputs[number].total, loss) + 5e-3
        for outcome in ranks["bf16"]:
            assert number not in outcome.outputs or (
                relative_error(outcome.outputs[number].total, loss) < limit
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_ranks_compute_what_one_eager_process_does(compiled, name):
    assert_outputs_are_those_of_one_process(COMPILED[name], compiled[name])
    assert_gradients_are_those_of_one_process(COMPILED[name], compiled[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_graphs_name_axes_and_no_process_group(compiled, name):
    first, *others = (outcome.graphs for outcome in compiled[name])
    assert first and all(graphs == first for graphs in others)  # groups and places differ, graphs do not
    pattern = r"graphmoe\.(all_gather|reduce_scatter|all_reduce)\.default\]\(args = \(%\w+, (.*?)\)"
    calls = re.findall(pattern, "\n".join(first))
    assert {kind for kind, _ in calls} == {"all_gather", "reduce_scatter", "all_reduce"}
    size = COMPILED[name].layout.tp
    allowed = {f"tp, {size}, 0", f"tp, {size}, 1", "tp, sum", "cp_tp, sum", "tp, max"}
    assert {arguments for _, arguments in calls} <= allowed


@pytest.mark.slow
def test_what_an_mlp_gathers_is_gathered_again_where_it_is_recomputed(compiled):
    forward, inputs, weights = compiled["gqa, dense"][0].graphs[3:6]
    gathered = [text.count("graphmoe.all_gather.default]") for text in (forward, inputs + weights)]
    assert gathered == [2, 3]  # attention and MLP; in the backward the gradients of their sums, and the MLP


@pytest.mark.slow
def test_passes_match_as_they_do_on_one_rank_but_for_the_loss(compiled, tmp_path):
    found = compiled["mla and mtp"][0]
    with as_traced():
        one = dataclasses.replace(COMPILED["mla and mtp"], layout=Layout())(Ranks(), tmp_path)
    assert found.matches.keys() == one.matches.keys()
    different = {key for key, count in one.matches.items() if bool(count) != bool(found.matches[key])}
    assert different == {("loss", "fuse_loss")}
    assert "share the vocabulary" in found.left["loss", "fuse_loss"][0]
    assert found.matches["attn..moe_combine", "fuse_router"] == 1
    words = ("all_gather", "reduce_scatter", "all_reduce", "index_along")
    assert one.graphs and not any(word in graph for graph in one.graphs for word in words)


def test_a_rank_with_a_part_of_the_logits_refuses_to_generate():
    model = build_model(config(*BASE).model, layout=Layout(tp=2), device="meta")
    with pytest.raises(ConfigError, match=r"parallel.tp=2: .* use parallel.tp=1"):
        model(torch.zeros(1, 16, dtype=torch.long, device="meta"))
