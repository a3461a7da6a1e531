"""Ranks of every layout train as one process does on the same global batches.

By default one job of four ranks runs some; ``-m slow`` adds more, of two and eight ranks too, and
``-m exhaustive`` each schedule beside dp, tp and ep on deep pipelines, and code of Inductor.
"""

import functools
import re
from dataclasses import replace

import pytest
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.model.blocks import IGNORED
from graphmoe.model.build import build_model
from graphmoe.plan.layout import ALONE, Layout
from graphmoe.runtime.ranks import Ranks
from graphmoe.training.step_rows import names_of
from graphmoe.training.trainer import Trainer
from tests.distributed.layouts import FSDP, REPLICAS, Case, all_on_two_experts, assert_same, gradient_errors
from tests.distributed.ranks import Job, selected
from tests.distributed.training import Outcome, nan_gradient_in_step_2
from tests.runs import COMPILED_MODEL, assert_same_state, config, trainer_in
from tests.tolerances import relative_error


def labels_ignored(trainer: Trainer, every: int = 5) -> None:
    whole = trainer.model.loss

    def loss(tokens, labels, *rest):
        return whole(tokens, labels.masked_fill(labels % every == 0, IGNORED), *rest)

    trainer.model.loss = loss


def all_labels_ignored(trainer: Trainer) -> None:
    labels_ignored(trainer, every=1)


def an_expert_without_tokens(trainer: Trainer) -> None:
    for router in trainer.model.routers():
        router.selection_bias[3] = -9.0


BF16, AGAIN = "precision.compute=bf16", "recompute.all=true"
MTP, TIED = "model.mtp_depth=2", "model.tie_embeddings=true"
MASK = ("data.document_mask=true", "data.document_length=8")
BUDGET = ("moe.dispatcher=symm", "moe.balance=none", "moe.receive_budget=1.0")
ROOM = (*BUDGET[:-1], "moe.receive_budget=worst_case")
TURNS = (*ROOM, "pipeline.ep_overlap=true")
FULL = ("graph.scope=full_iteration", "graph.warmup_steps=1")
LAYERS = ("graph.scope=layer", "graph.warmup_steps=1")
PARTIAL = ("graph.scope=partial", "graph.warmup_steps=1")
NEARLY_ALL = (
    "graph.scope=[embed,attn,moe_router,moe_preprocess,moe_experts,shared_experts,mlp,loss]",
    *LAYERS[1:],
)
EXCHANGES = ("graph.scope=[moe_dispatch,moe_combine]", *LAYERS[1:])
SENT_TWICE = "recompute.segments=[moe_router,moe_preprocess,moe_dispatch,moe_experts,moe_combine]"
BY_EACH = "traced by each rank"
SENT = Case(2, "ep=2", mode=BY_EACH)
SENDS = (SENT, replace(SENT, overrides=(SENT_TWICE,)))
GQA = ("model.attention=gqa", "model.head_dim=6", "model.num_kv_heads=2", "model.qk_norm=true")
EIGHT_HEADS = (*GQA, "model.num_heads=8", "model.num_kv_heads=4")
OPTIONS = (  # of attention
    "model.window=5", "model.full_every=2", "model.attention_sinks=true", "model.attention_gate=true",
    "model.attention_bias=qkvo",
)  # fmt: skip
HALF_ROTARY = ("model.head_dim=8", "model.rotary_fraction=0.5")
WHOLE = (*EIGHT_HEADS, *HALF_ROTARY, "model.qk_norm_whole=true", "model.shared_gate=true")
GPT_OSS = (
    *GQA[:3], "model.window=5", "model.attention_sinks=true", "model.expert_bias=true",
    "model.swiglu_limit=0.05", "model.router_bias=true",
)  # fmt: skip
LLAMA4 = (
    *EIGHT_HEADS, "model.qk_norm_weight=false", "model.attention_chunk=5", "model.nope_every=2",
    "model.attention_temperature_floor=4", "model.top_k=1", "model.score_function=sigmoid",
    "model.input_scaling=true", "model.num_dense_layers=0", "model.moe_every=2",
)  # fmt: skip
STATE = (
    *GQA[:3], "model.linear_attention=delta_net", "model.full_every=2", "model.linear_key_heads=2",
    "model.linear_value_heads=4", "model.linear_value_head_dim=16",
)  # fmt: skip
GROUPS = ("model.num_groups=2", "model.renormalise=true")
LORA, RING = "model.q_lora_rank=6", "cp_method=ring"
NO_EXPERTS = (*GQA, "model.num_experts=0", "model.rope_scaling=llama3", "model.llama3_original_context=8")
DENSE, ALL_MOE = "model.num_dense_layers=3", "model.num_dense_layers=0"
NOT_SHARED, MICRO = "model.shared_ffn_size=0", "model.aux_loss=micro_batch"
# gradients are not clipped: compiled updates scale them without storing them
CLIP = ("optim.name=muon", "optim.qk_clip=3", "model.init_std=0.3", "train.clip_grad_norm=0")
SMALL = ("train.global_batch_size=4",)
ADAPTED = ("model.lora_rank=3", "model.lora_targets=[attention,mlp,shared_experts,experts]")
HOT = Case(4, "ep=4", "", REPLICAS, ("train.steps=2",), change=all_on_two_experts)
HOT_STAGE = Case(4, "pp=2 ep=2", "1f1b", REPLICAS, change=all_on_two_experts)
FOUR = (
    Case(4, "", model=("model.mtp_depth=1",), overrides=(BF16, *FULL)),
    Case(4, "tp=4 etp=2", "", SMALL, (TIED,)),
    Case(4, "cp=2 tp=2 ep=4", "", SMALL, (LORA, MTP)),
    Case(4, f"cp=4 {RING}", "", SMALL),
    Case(4, "pp=2 ep=2", "1f1b", (*BUDGET, "pipeline.layout=Etttt|L")),  # a stage without experts
    Case(4, "pp=2 cp=2 ep=2", "1f1b", model=(MTP, *MASK)),
    Case(4, "pp=2 cp=2 ep=2", "1f1b", model=GPT_OSS),
    Case(4, "tp=2 ep=2", "", (*SMALL, *ROOM), GPT_OSS),
    Case(4, "cp=2 tp=2", "", SMALL, (*EIGHT_HEADS, *OPTIONS, *MASK)),
    Case(4, "pp=2 tp=2", "1f1b", model=(*NO_EXPERTS, TIED)),
    Case(4, "cp=2 tp=2 ep=2", "", SMALL, (*WHOLE, "model.mtp_depth=1")),
    Case(4, "cp=2 tp=2 ep=2", "", SMALL, (*LLAMA4, *MASK)),
    Case(4, "pp=2 ep=2", "1f1b", REPLICAS, (*LLAMA4, MTP)),
    Case(4, "pp=2 ep=2", "1f1b", model=ADAPTED),
    Case(4, "tp=2 ep=2", "", (*SMALL, *ROOM), (*ADAPTED, *GQA, "optim.eps=1e-3"), "traced"),
    HOT,
)
LANES = Case(
    2, "pp=2", "zbv", ("graph.scope=partial", "graph.warmup_steps=1", "train.micro_batch_size=2"),
    COMPILED_MODEL, "traced",
)  # fmt: skip
UNVALIDATED = "train.val_batches=0"  # no graphs of a forward alone: a third of the time
ONE_BY_ONE = Case(2, "ep=2", "", ROOM, ("model.mtp_depth=1", *MASK, UNVALIDATED), "traced")
RECOMPUTED = ("recompute.ops=[layernorm,shared_experts]", "recompute.segments=[moe_router]")
KEPT = "moe.replica_keep=true"
FEW_SLOTS = (*REPLICAS, "moe.replica_slots=1", "moe.receive_budget=1.0")
COPIED = Case(2, "ep=2", "", REPLICAS, ("model.mtp_depth=1", UNVALIDATED), "traced")
IN_TURNS = Case(4, "pp=2 ep=2", "1f1b", TURNS, mode="traced")
PAIRED = Case(4, "pp=2 ep=2", "dualpipe_v", TURNS, (ALL_MOE,), "traced")
ONE_LAYER = Case(2, "ep=2", "", REPLICAS, ("model.num_layers=2",), "traced")
LIKE = {  # cases that are bitwise others: routed again in the backward, or with backwards in turns
    Case(2, "pp=2", "1f1b", (AGAIN,)): Case(2, "pp=2", "1f1b"),
    SENDS[1]: SENT,
    replace(ONE_BY_ONE, overrides=(*TURNS, *PARTIAL)): ONE_BY_ONE,
    replace(ONE_BY_ONE, overrides=(*TURNS, *NEARLY_ALL)): ONE_BY_ONE,
    replace(ONE_BY_ONE, overrides=(*TURNS, *FULL)): ONE_BY_ONE,
    replace(COPIED, overrides=(*REPLICAS, *TURNS[-1:], *LAYERS)): COPIED,
    replace(COPIED, overrides=(*REPLICAS, *TURNS[-1:], *EXCHANGES)): COPIED,
    replace(IN_TURNS, overrides=(*TURNS, *LAYERS)): IN_TURNS,
    replace(IN_TURNS, overrides=(*TURNS, *PARTIAL)): IN_TURNS,
    replace(COPIED, overrides=(*REPLICAS, *PARTIAL)): COPIED,
    replace(PAIRED, overrides=(*TURNS, *PARTIAL)): PAIRED,
    replace(PAIRED, overrides=(*TURNS, *FULL)): PAIRED,
    replace(ONE_BY_ONE, overrides=(*TURNS, *RECOMPUTED)): ONE_BY_ONE,
    replace(COPIED, overrides=(*REPLICAS, SENT_TWICE)): COPIED,
    replace(COPIED, overrides=(*REPLICAS, KEPT, *LAYERS)): COPIED,
    replace(COPIED, overrides=(*REPLICAS, KEPT, *TURNS[-1:], *FULL)): COPIED,
    replace(ONE_LAYER, overrides=(*REPLICAS, *TURNS[-1:])): ONE_LAYER,
}
TWO = (
    *LIKE, *dict.fromkeys(LIKE.values()),
    Case(2, "", model=("model.aux_loss=sequence", "train.clip_grad_norm=0.01")),
    Case(2, "", overrides=LAYERS, mode="traced"),
    Case(2, FSDP, overrides=(AGAIN,), model=(MTP, TIED)), Case(2, "pp=2", "gpipe"),
    Case(2, "pp=2", "1f1b", ("pipeline.layout=Ettttmm|L",), (MTP,)),
    Case(2, "pp=2", "interleaved", ("pipeline.layout=Etttt|m|m|L",), (MTP,)),
    Case(2, "pp=2", "zb1p", model=(MTP, TIED), mode="traced"), Case(2, "pp=2", "zbv", model=(TIED,)),
    Case(2, "pp=2", "v_half", model=(MTP,)), Case(2, "pp=2", "v_min"), LANES,
    Case(2, "pp=2", "interleaved", (*LAYERS, AGAIN, "pipeline.virtual_stages=3"), (TIED,), "traced"),
    Case(2, "pp=2", "1f1b", FULL, mode="traced"), Case(2, "pp=2", "zb1p", change=nan_gradient_in_step_2),
    Case(2, "cp=2", model=(*ADAPTED, *GQA, *MASK)),
    Case(2, "pp=2", "zb1p", LAYERS, ADAPTED, "traced"),
    Case(2, "pp=2", "zb1p", LAYERS, (*CLIP, MTP), "traced"), Case(2, "ep=2", "", TURNS, CLIP, "traced"),
)  # fmt: skip
MORE_OF_FOUR = (
    Case(4, "tp=4", "", SMALL, WHOLE, "traced"),
    Case(4, f"cp=4 {RING}", "", SMALL, WHOLE), Case(4, f"tp=2 ep=2 {FSDP}", overrides=(AGAIN,), model=WHOLE),
    Case(4, "cp=2", model=(*NO_EXPERTS, *MASK), mode="traced"),
    Case(4, FSDP, overrides=(AGAIN,), model=(*NO_EXPERTS, TIED)),
    Case(4, "pp=2 tp=2", "zb1p", FULL, NO_EXPERTS, "traced"),
    HOT_STAGE,
    Case(4, "ep=2 etp=2", model=(MTP, "moe.force_balance=true")),
    Case(4, "tp=2 ep=4", model=(NOT_SHARED, MICRO)),
    Case(4, "tp=2 ep=2", model=("model.selection_bias=false", "model.score_function=sigmoid", *GROUPS)),
    Case(4, "tp=2", model=(*GQA, MTP), change=labels_ignored),
    Case(4, "tp=2", model=("model.aux_loss=sequence",), change=all_labels_ignored),
    Case(4, "cp=2", model=(LORA, MTP), change=labels_ignored),
    Case(2, "pp=2", "zbv", LAYERS, (*GQA, *OPTIONS, *MASK, "train.clip_grad_norm=0"), "traced"),
    # Adam divides the first gradients of decay rates, 1e-9 of the others: with seed 0 step 2 differs by 2e-5
    Case(4, "tp=2 ep=2", model=(*STATE, *MASK, "train.seed=1")),
    Case(2, "pp=2", "zb1p", LAYERS, STATE, "traced"),
    Case(4, f"cp=4 {RING}", model=("model.aux_loss=sequence",), change=all_labels_ignored),
    Case(4, f"cp=2 tp=2 {RING}", overrides=(AGAIN,), model=(*GQA, MTP)),
    Case(4, "ep=4", overrides=(*FEW_SLOTS, *FULL), change=all_on_two_experts, mode="traced"),
    Case(4, f"ep=2 {FSDP}", overrides=REPLICAS, mode="traced"),
    Case(4, "ep=4", model=("moe.expert_load=rotating",)),
    Case(4, "ep=4", change=an_expert_without_tokens),
    Case(4, "ep=4", model=(*GPT_OSS, "model.selection_bias=true"), change=an_expert_without_tokens),
    Case(4, f"ep=2 {FSDP}", model=GPT_OSS),
    Case(4, "ep=2 etp=2", model=LLAMA4),
    # Adam divides gradients of positions that see one key, zero but for rounding: with 1e-8 by 1e-4 apart
    Case(4, "pp=2 ep=2", "zb1p", TURNS, (*LLAMA4, MTP, *MASK, "optim.eps=1e-3"), "traced"),
    Case(4, "pp=2 cp=2", "interleaved", LAYERS, LLAMA4, "traced"),
    Case(4, f"cp=4 {RING}", model=(*LLAMA4, "model.attention_chunk=0")),
    Case(4, "pp=2 ep=2", "zb1p", ROOM, GPT_OSS, "traced"),
    Case(4, "ep=2", model=(*GPT_OSS, "optim.name=muon")),
    Case(4, "etp=2", model=(MICRO,), change=an_expert_without_tokens),
    Case(4, "ep=2 etp=2", change=all_on_two_experts),
    Case(4, FSDP, change=nan_gradient_in_step_2), Case(4, FSDP, model=("model.num_experts=6",)),
    Case(4, "pp=4", "zbv", ("pipeline.layout=E|t|t|t|t|m|m|L",), (MTP,)),
    Case(4, "pp=2 cp=2 etp=2", "1f1b"),
    Case(4, "", overrides=("train.global_batch_size=32", "optim.bucket_mb=100")),
    Case(4, "pp=4", "1f1b", ("train.micro_batch_size=4",)),  # more stages than micro-batches
    Case(4, "pp=2 ep=2", "interleaved", TURNS, (MTP,), "traced"),
    Case(2, "pp=2", "dualpipe_v", model=(TIED,)),
)  # fmt: skip
LAYERS_AGAIN = Case(2, "tp=2", "", ("recompute.ops=[mlp]",), (*GQA, DENSE), BY_EACH)
ONE_PROCESS = Case(2, "tp=2", model=(LORA, MTP, "model.num_layers=1", ALL_MOE), mode=BY_EACH)
OF_TP = {("all_gather", "tp"), ("reduce_scatter", "tp"), ("linear_cross_entropy", "tp")}
AXES = {  # operations that graphs of layouts send by, each with its axis
    ONE_PROCESS: OF_TP | {("all_reduce", "cp_tp")},
    LAYERS_AGAIN: OF_TP,
    Case(2, "cp=2", model=(ALL_MOE,), mode=BY_EACH): {
        ("all_to_all", "cp"), ("all_gather", "cp_tp"), ("reduce_scatter", "cp_tp"), ("index_along", "cp"),
    },
    Case(2, f"cp=2 {RING}", model=GQA, mode=BY_EACH): {
        ("ring_attention", "cp"), ("ring_attention_backward", "cp"),
    },
    replace(SENT, overrides=("passes.disabled=[fuse_experts]",)): set(),
}  # fmt: skip
ROUNDED = [
    Case(4, layout, model=(BF16, "train.steps=1", *more)) for layout, *more in (("tp=2", DENSE), ("ep=2",))
]
SUMS, ONE = "optim.grad_dtype=bf16", (BF16, "train.steps=1")
ROUNDED += [  # sums in bf16 too
    Case(4, "ep=2", overrides=(SUMS, "optim.grad_shard=true", *TURNS), model=(*ONE, ALL_MOE), mode="traced"),
    Case(4, "ep=4", overrides=(SUMS, *REPLICAS), model=ONE, mode="traced", change=all_on_two_experts),
    Case(4, "pp=2", "zbv", overrides=(SUMS, "optim.grad_shard=true"), model=(*ONE, MTP, TIED)),
    Case(4, "", overrides=(SUMS,), model=(*ONE, "optim.name=muon")),
]
EIGHT = Case(8, "cp=2 tp=2 ep=4 etp=2"), Case(8, "pp=4 ep=2", "zbv", model=(MTP,))
# a part of the model for each of 16 stages, and as many micro-batches
DEEP = ("model.num_layers=12", "train.global_batch_size=16")
ALIKE = (  # whose layout, model and mode are each in another case
    *(Case(2, "ep=2", model=model, mode="traced") for model in (ADAPTED[:1], LLAMA4)),
    Case(4, "pp=2 ep=2", "1f1b", model=(*GQA, *HALF_ROTARY, "model.attention_bias=qkv", MTP)),
    Case(4, f"ep=2 {FSDP}", overrides=(AGAIN,), model=LLAMA4), Case(4, "cp=2", model=GPT_OSS, mode="traced"),
    Case(4, "tp=2 ep=4", model=(*GQA, *OPTIONS, MTP)),
    Case(4, "ep=2", overrides=ROOM, model=GPT_OSS, mode="traced"),
    Case(4, "ep=4", model=LLAMA4, change=all_labels_ignored),
    Case(4, f"cp=4 {RING}", model=GQA, change=labels_ignored),
    Case(4, "ep=4", overrides=(*REPLICAS, *FULL), model=LLAMA4, mode="traced"),
    Case(4, "pp=2 ep=2", "zb1p", TURNS, (ALL_MOE,), "traced"),
)  # fmt: skip
GRID = (
    *ALIKE,
    *(Case(8, layout) for layout in (
        "ep=8", "ep=4 etp=2", "tp=4 ep=2 etp=2", "cp=2 tp=2 cp_method=ring ep=8",
    )),
    Case(8, "pp=8", "1f1b", model=(MTP, TIED)),
    *(Case(8, layout, schedule, model=(MTP, TIED)) for layout, schedule in {
        "pp=4": "gpipe", "pp=4 tp=2 ep=2": "interleaved", "pp=2 tp=2 ep=2": "zbv", "pp=2 ep=2": "v_half",
    }.items()),
    *(Case(8, layout, schedule, model=(MTP,)) for layout, schedule in {
        "pp=4 ep=2": "1f1b", "pp=2 ep=2": "zb1p", "pp=4 tp=2 ep=2": "v_min",
    }.items()),
    *(Case(8, "pp=8", name, model=(MTP, TIED, *DEEP)) for name in ("interleaved", "v_half")),
    Case(8, "pp=8", "zbv", model=(MTP, *DEEP)), replace(LANES, mode="inductor"),
)  # fmt: skip
MARKS = {FOUR: (), (*TWO, *AXES, *MORE_OF_FOUR, *EIGHT): (pytest.mark.slow,), GRID: (pytest.mark.exhaustive,)}
CASES = [pytest.param(case, id=str(case), marks=marks) for cases, marks in MARKS.items() for case in cases]


@pytest.fixture(scope="module")
def on_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Outcomes of a case by rank; all cases with so many ranks that will be tested run in one job."""
    wanted = {*selected(request, "case")}
    wanted |= {LIKE[case] for case in wanted if case in LIKE}

    @functools.cache
    def run(num_ranks: int) -> dict[str, list[Outcome]]:
        cases = {str(case): case.training for case in wanted if case.ranks == num_ranks}
        return Job(tmp_path_factory.mktemp("ranks"), cases, num_ranks=num_ranks).results(seconds=1800)

    return lambda case: run(case.ranks)[str(case)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    return functools.cache(lambda training: training(Ranks(), tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_weights_are_those_of_one_process(on_ranks, alone, case):
    assert_same(case, on_ranks(case), alone(case.alone))


@pytest.mark.parametrize("case", [HOT, pytest.param(HOT_STAGE, marks=pytest.mark.slow)], ids=str)
def test_metrics_say_how_many_replicas_there_are_and_what_load_they_leave(on_ranks, case):
    """All rows are of experts of one rank, so each other rank gets one replica in each MoE layer, once."""
    model, ranks = case.training.config.model, 2 if "pp" in case.layout else 4
    copies = (model.num_layers - model.num_dense_layers) * (ranks - 1)
    replica_gb = copies * 3 * model.hidden_size * model.expert_ffn_size * (4 + 4) / 1e9
    for found in on_ranks(case):
        for values in found.rows.tolist():
            row = dict(zip(names_of(True, True), values, strict=False))
            assert (row["rank_load"], row["replicas"]) == (ranks, copies)
            assert 1 <= row["planned_rank_load"] <= 65 / 64
            assert row["replica_gb"] == pytest.approx(replica_gb)


@pytest.mark.slow
@pytest.mark.parametrize("case", LIKE, ids=str)
def test_routing_again_and_overlap_change_no_bit(on_ranks, case):
    for found, wanted in zip(on_ranks(case), on_ranks(LIKE[case]), strict=True):
        if KEPT in case.overrides:  # then they move less
            place = names_of(True, True).index("replica_gb")
            assert (found.rows[:, place] <= wanted.rows[:, place]).all()
            found.rows[:, place] = wanted.rows[:, place]
            for row, other in zip(found.written, wanted.written, strict=True):
                row |= {"replica_gb": other["replica_gb"]} if "replica_gb" in other else {}
        assert torch.equal(found.rows, wanted.rows) and found.written == wanted.written
        assert_same_state(found.state, wanted.state)
        assert_same_state(found.gradients, wanted.gradients)


@pytest.mark.slow
@pytest.mark.parametrize("case", ROUNDED, ids=str)
def test_in_bf16_ranks_stay_as_close_to_fp32_as_one_process(on_ranks, alone, case):
    """Within twice for each gradient and the loss: parts are rounded too."""
    found, of_one = on_ranks(case), alone(case.alone)
    exact = alone(replace(case, model=case.model[1:]).alone)
    for parameter, error in gradient_errors(case, found, exact).items():
        assert error < 2 * relative_error(of_one.gradients[parameter], exact.gradients[parameter]) + 5e-3
    loss, of_ranks, rounded = (run.rows[0, :1] for run in (exact, found[0], of_one))
    assert 0 < relative_error(of_ranks, loss) < 2 * relative_error(rounded, loss) + 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", [*AXES, *SENDS], ids=str)
def test_compiled_graphs_are_those_of_every_rank_and_name_axes_instead_of_process_groups(on_ranks, case):
    first, other = (outcome.graphs for outcome in on_ranks(case))
    assert first.code and first.code == other.code  # groups and places differ, graphs do not
    calls = re.findall(r"graphmoe\.(\w+)\.default\]\(args = \((.*?)\)", "\n".join(first.code))
    named = r"(?<![%\w])(?:cp|tp|cp_tp)\b"
    axes = {(kind, axis) for kind, words in calls for axis in re.findall(named, words)}
    assert axes >= AXES.get(case, set()) and {axis for _, axis in axes} <= {"cp", "tp", "cp_tp"}


@pytest.mark.slow
@pytest.mark.parametrize("case", [LAYERS_AGAIN], ids=str)
def test_what_an_mlp_gathers_is_gathered_again_where_it_is_recomputed(on_ranks, case):
    of_layers = [text for text in on_ranks(case)[0].graphs.code if text.startswith("attn..mlp:")]
    *_, forward, inputs, weights = (text.count("graphmoe.all_gather.default]") for text in of_layers)
    # attention and MLP; in the backward the gradients of their sums, and the MLP
    assert (forward, inputs + weights) == (2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("case", [ONE_PROCESS], ids=str)
def test_passes_match_as_they_do_on_one_rank(on_ranks, alone, case):
    found, one = on_ranks(case)[0].graphs, alone(replace(case, layout="").training).graphs
    assert found.matches.keys() == one.matches.keys()
    assert all(bool(count) == bool(found.matches[key]) for key, count in one.matches.items())
    assert found.matches["loss", "fuse_loss"] == 1
    assert found.matches["attn..moe_combine", "fuse_router"] == 1
    words = ("all_gather", "reduce_scatter", "all_reduce", "index_along")
    assert one.code and not any(word in graph for graph in one.code for word in words)


@pytest.mark.slow
@pytest.mark.parametrize("case", SENDS[1:], ids=str)
def test_other_loads_compile_nothing_again_and_recompute_sends_no_token_again(on_ranks, case):
    for found, once in zip(on_ranks(case), on_ranks(LIKE[case]), strict=True):
        assert not found.rows[0].equal(found.rows[1]) and found.graphs.recompiled == 0
        assert found.graphs.dispatched == once.graphs.dispatched > 0


def test_a_rank_holds_its_share_of_every_large_matrix():
    model = config("model.num_heads=4", LORA, "model.num_dense_layers=1").model
    built = (build_model(model, layout=layout, device="meta") for layout in (ALONE, Layout(tp=4)))
    whole, part = ({name: weight.numel() for name, weight in each.named_parameters()} for each in built)
    cut = ("embed.", "head.head.", "q_up", "kv_up", "out_proj", "mlp.gate_up.weight", "mlp.down.weight")
    expected = {name: 4 if any(each in name for each in cut) else 1 for name in whole}
    assert {name: whole[name] // size for name, size in part.items()} == expected


def test_one_rank_has_nobody_to_share_weights_with(tmp_path):
    with pytest.raises(ConfigError, match=r"dp_shard=fsdp2 shards .* use parallel.dp_shard=zero1"):
        trainer_in(tmp_path, f"parallel.{FSDP}")
