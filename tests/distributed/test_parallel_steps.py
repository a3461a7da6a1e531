"""Ranks that share matrices, sequences or experts compute the losses and gradients of one process."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from graphmoe.config.schema import ConfigError, ContextMethod
from graphmoe.model.build import build_model
from graphmoe.model.rope import own_positions
from graphmoe.ops.collectives import use_groups
from graphmoe.plan.layout import ALONE, Layout
from graphmoe.plan.rules.check import resolve
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.ranks import Job
from tests.distributed.steps import Ring, Step, assert_that_of_one_process, whole
from tests.distributed.training import as_traced
from tests.runs import config
from tests.tolerances import assert_forward_close, assert_gradient_close, relative_error

BASE = (
    "model.num_heads=4", "model.init_std=0.3", "model.aux_loss=sequence", "model.aux_loss_coef=0.1",
    "model.z_loss_coef=0.1",
)  # fmt: skip
GQA = (*BASE, "model.attention=gqa", "model.head_dim=6", "model.num_kv_heads=2", "model.qk_norm=true")
LORA = (*BASE, "model.q_lora_rank=6")
MTP = (*LORA, "model.mtp_depth=2")
DENSE = (*BASE, "model.num_dense_layers=2")
EXPERTS = (
    "model.num_experts=8", "model.top_k=2", "model.num_layers=3", "model.num_dense_layers=1",
    "model.aux_loss=micro_batch", "model.aux_loss_coef=0.1", "model.z_loss_coef=0.1", "model.init_std=0.2",
)  # fmt: skip
TP, FOUR, RING = Layout(dp=2, tp=2), Layout(tp=4), Layout(cp=2, tp=2, ring=True)
SHARED = {
    "ep=4": Layout(dp=4, ep=4),
    "ep=2 etp=2": Layout(dp=4, ep=2, etp=2),
    "ep=2 edp=2": Layout(dp=4, ep=2),
    "etp=2 edp=2": Layout(dp=4, etp=2),
}
ROUTINGS = {
    "natural": (0.0,) * 8,
    "an expert without tokens": (0.0,) * 3 + (-9.0,) + (0.0,) * 4,
    "all on two experts of one rank": (0.0,) * 4 + (9.0, 9.0, 0.0, 0.0),
}
STEPS = {
    "tp, no selection bias": Step((*BASE, "model.selection_bias=false"), TP),
    "tp, sigmoid scores of groups": Step(
        (*BASE, "model.score_function=sigmoid", "model.num_groups=2", "model.renormalise=true"), TP
    ),
    "tp, ignored labels": Step((*GQA, "model.mtp_depth=1"), TP, ignored="some"),
    "tp, all labels ignored": Step(BASE, TP, ignored="all"),
    "tp, dense only": Step(DENSE, TP),
    "tp, no shared experts": Step((*BASE, "model.shared_ffn_size=0"), TP),
    "tp=4, aux loss over the global batch": Step((*LORA, "model.aux_loss=global_batch"), FOUR),
    "cp, mla, mtp": Step(MTP, Layout(dp=2, cp=2), ignored="some"),
    "cp, tp, gqa": Step((*GQA, "model.num_heads=8", "model.num_kv_heads=4"), Layout(cp=2, tp=2)),
    "ring=4": Step((*GQA, "model.num_heads=2"), Layout(cp=4, ring=True), ignored="some"),
    "ring, mla, tp, mtp": Step(MTP, RING),
    "ring, gqa, tp": Step((*GQA, "recompute.all=true"), RING),
    "ring=4, all labels ignored": Step(BASE, Layout(cp=4, ring=True), ignored="all"),
    **{
        f"{name}, {routing}": Step(EXPERTS, layout, 4, bias=bias)
        for name, layout in SHARED.items()
        for routing, bias in ROUTINGS.items()
    },
    "ep=2 etp=2, forced balance": Step((*EXPERTS, "moe.force_balance=true"), SHARED["ep=2 etp=2"], 4),
    "ep=4, no shared experts": Step((*EXPERTS, "model.shared_ffn_size=0"), SHARED["ep=4"], 4),
}
ONE_MOE = ("model.num_layers=1", "model.num_dense_layers=0")
ROUTED = "recompute.segments=[moe_router,moe_preprocess,moe_dispatch,moe_experts,moe_combine]"
EP = Layout(dp=2, ep=2)
TRACED = {
    "tp, mla, mtp": Step((*LORA, *ONE_MOE, "model.mtp_depth=1"), Layout(tp=2), ignored="some"),
    "tp, gqa, an MLP again": Step(
        (*GQA, "model.num_layers=1", "compile.enabled=true", "recompute.ops=[mlp]"), Layout(tp=2)
    ),
    "cp": Step((*BASE, *ONE_MOE), Layout(cp=2)),
    "ring": Step((*GQA, *ONE_MOE, "model.qk_norm=false"), Layout(cp=2, ring=True)),
    "ep, without fuse_experts": Step((*EXPERTS, "passes.disabled=[fuse_experts]"), EP, 4),
    "ep, computed again": Step((*EXPERTS, "compile.enabled=true", ROUTED), EP, 4),
}
TRACED = {name: dataclasses.replace(step, mode="traced") for name, step in TRACED.items()}
OF_TP = {("all_gather", "tp"), ("reduce_scatter", "tp"), ("all_reduce", "tp"), ("all_reduce", "cp_tp")}
AXES = {
    "tp, mla, mtp": OF_TP,
    "tp, gqa, an MLP again": OF_TP - {("all_reduce", "cp_tp")},
    "cp": {("all_to_all", "cp"), ("all_gather", "cp_tp"), ("reduce_scatter", "cp_tp"), ("index_along", "cp")},
    "ring": {("ring_attention", "cp"), ("ring_attention_backward", "cp")},
}
"""Operations that graphs send by, each with its axis; those of a loss apart."""
BF16 = {
    "tp in bf16": Step(DENSE, TP, dtype=torch.bfloat16),
    "ep in bf16": Step((*EXPERTS, "model.num_layers=2"), SHARED["ep=2 edp=2"], 4, dtype=torch.bfloat16),
}
RINGS = {
    "ring of 4": Ring(Layout(cp=4, ring=True)),
    "ring of 2, grouped heads": Ring(Layout(dp=2, cp=2, ring=True), heads=(6, 2)),
    "ring of 4, grouped unequal heads, fp64": Ring(Layout(cp=4, ring=True), (4, 2), (6, 10), torch.float64),
    "ring of 4, bf16": Ring(Layout(cp=4, ring=True), (4, 2), (12, 6), dtype=torch.bfloat16, seq_len=64),
}


def positions(ranks: Ranks, folder: Path) -> list[list[int]]:
    """Return the positions of 16 that a rank holds in each order."""
    found = []
    for layout in (Layout(cp=4), Layout(cp=4, ring=True), Layout(dp=2, cp=2, ring=True)):
        use_groups(Mesh(layout))
        found.append(own_positions(torch.arange(16)[None], layout, dim=1)[0].tolist())
    use_groups(None)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Results of four ranks, and of two that trace, by case."""
    cases = {**RINGS, **STEPS, **BF16, "positions": positions}
    four = Job(tmp_path_factory.mktemp("four"), cases, num_ranks=4).results(seconds=600)
    return four | Job(tmp_path_factory.mktemp("two"), TRACED).results(seconds=600)


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
    for rank, (neighbours, zigzag, of_two) in enumerate(ranks["positions"]):
        assert neighbours == [4 * rank + i for i in range(4)]
        assert zigzag == [2 * rank, 2 * rank + 1, 14 - 2 * rank, 15 - 2 * rank]
        assert of_two == [*range(0, 4), *range(12, 16)] if rank % 2 == 0 else [*range(4, 12)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STEPS, *TRACED])
def test_losses_loads_and_every_gradient_are_those_of_one_process(ranks, name):
    step = (STEPS | TRACED)[name]
    assert_that_of_one_process(step, ranks[name])
    for parameter, weight in step.expected.weights.items():  # initial weights do not depend on the layout
        found = whole(parameter, ranks[name], step.layout, weight, "weights")
        assert found.equal(weight), parameter


@pytest.mark.slow
def test_a_rank_holds_its_share_of_every_large_matrix(ranks):
    name = "tp=4, aux loss over the global batch"
    sizes = {parameter: weight.numel() for parameter, weight in STEPS[name].expected.weights.items()}
    shares = {parameter: sizes[parameter] // w.numel() for parameter, w in ranks[name][0].weights.items()}
    cut = ("embed.", "head.head.", "q_up", "kv_up", "out_proj", "gate_up.weight", ".down.weight")
    assert shares == {each: 4 if any(part in each for part in cut) else 1 for each in shares}


@pytest.mark.slow
@pytest.mark.parametrize("name", BF16)
def test_in_bf16_ranks_stay_as_close_to_fp32_as_one_process(ranks, name):
    """Within a half over all gradients, within twice for each and the loss: parts are rounded too."""
    step = BF16[name]
    exact, of_one, found = step.expected, step.alone(torch.bfloat16), {}
    for parameter, gradient in exact.gradients.items():
        found[parameter] = whole(parameter, ranks[name], step.layout, gradient)
        limit = 2 * relative_error(of_one.gradients[parameter], gradient) + 5e-3
        assert relative_error(found[parameter], gradient) < limit, parameter
    wanted, of_ranks, rounded = (
        torch.cat([gradients[parameter].flatten().float() for parameter in exact.gradients])
        for gradients in (exact.gradients, found, of_one.gradients)
    )
    assert 0 < relative_error(of_ranks, wanted) < 1.5 * relative_error(rounded, wanted)
    for outcome in ranks[name]:
        for number, output in outcome.outputs.items():
            loss = exact.outputs[number].total
            limit = 2 * relative_error(of_one.outputs[number].total, loss) + 5e-3
            assert relative_error(output.total, loss) < limit


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_compiled_graphs_are_those_of_every_rank_and_name_axes_instead_of_process_groups(ranks, name):
    first, other = (outcome.graphs for outcome in ranks[name])
    assert first and first == other  # groups and places differ, graphs do not
    calls = re.findall(r"graphmoe\.(\w+)\.default\]\(args = \((.*?)\)", "\n".join(first))
    named = r"(?<![%\w])(?:cp|tp|cp_tp)\b"
    axes = {(kind, axis) for kind, words in calls for axis in re.findall(named, words)}
    assert axes >= AXES.get(name, set()) and {axis for _, axis in axes} <= {"cp", "tp", "cp_tp"}


@pytest.mark.slow
def test_what_an_mlp_gathers_is_gathered_again_where_it_is_recomputed(ranks):
    forward, inputs, weights = ranks["tp, gqa, an MLP again"][0].graphs[3:6]
    gathered = [text.count("graphmoe.all_gather.default]") for text in (forward, inputs + weights)]
    assert gathered == [2, 3]  # attention and MLP; in the backward the gradients of their sums, and the MLP


@pytest.mark.slow
def test_passes_match_as_they_do_on_one_rank_but_for_the_loss(ranks, tmp_path):
    found = ranks["tp, mla, mtp"][0]
    with as_traced():
        one = dataclasses.replace(TRACED["tp, mla, mtp"], layout=ALONE)(Ranks(), tmp_path)
    assert found.matches.keys() == one.matches.keys()
    different = {key for key, count in one.matches.items() if bool(count) != bool(found.matches[key])}
    assert different == {("loss", "fuse_loss")}
    assert "share the vocabulary" in found.left["loss", "fuse_loss"][0]
    assert found.matches["attn..moe_combine", "fuse_router"] == 1
    words = ("all_gather", "reduce_scatter", "all_reduce", "index_along")
    assert one.graphs and not any(word in graph for graph in one.graphs for word in words)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep, without fuse_experts", "ep, computed again"])
def test_other_loads_compile_nothing_again_and_recompute_sends_no_token_again(ranks, name):
    for found in ranks[name]:
        first, second = (output.counts_LE for output in found.outputs.values())
        assert not first.equal(second) and found.recompiled == 0
        assert sorted(found.units) == ["attn..mlp", "attn..moe_preprocess", "embed", "loss", "shared_experts"]
        assert found.dispatched == 2 * 2  # layers and micro-batches


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
    run = resolve(config(*words.split()))
    assert run.parallel.cp_method is method
    layout = Layout.of(run.parallel, run.parallel.cp * run.parallel.tp)
    assert layout.ring == (method is ContextMethod.ring)


@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_a_rank_with_a_part_of_a_sequence_or_of_the_logits_refuses_to_generate(axis):
    model = build_model(config("model.num_heads=4").model, layout=Layout(**{axis: 2}), device="meta")
    with pytest.raises(ConfigError, match=rf"parallel.{axis}=2: .* use parallel.{axis}=1"):
        model(torch.zeros(1, 16, dtype=torch.long, device="meta"))
