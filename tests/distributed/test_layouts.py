"""Ranks of every layout train as one process does on the same global batches.

By default one job of four ranks runs some; ``-m slow`` adds more, of two and eight ranks too, and
``-m exhaustive`` each schedule beside dp, tp and ep on deep pipelines, and code of Inductor.
"""

import functools
from dataclasses import replace

import pytest
import torch

from graphmoe.runtime.ranks import Ranks
from tests.distributed.layouts import BUDGET, FSDP, MTP, TIED, TURNS, Case, assert_same
from tests.distributed.ranks import Job
from tests.distributed.training import Outcome
from tests.runs import COMPILED_MODEL

BF16, AGAIN = "precision.compute=bf16", "recompute.all=true"
FULL = ("graph.scope=full_iteration", "graph.warmup_steps=1")
LAYERS = ("graph.scope=layer", "graph.warmup_steps=1")
ROUTED_TWICE = "recompute.segments=[moe_router]"
FOUR = (
    Case(4, "", model=("model.mtp_depth=1",), overrides=(BF16, *FULL)),
    Case(4, "tp=4 etp=2", model=(TIED, MTP)),
    Case(4, "cp=2 tp=2 ep=4", model=("model.q_lora_rank=6", MTP)),
    Case(4, "cp=4 cp_method=ring"),
    Case(4, f"ep=2 {FSDP}", overrides=(AGAIN,)),
    Case(4, "pp=4", "zb1p", mode="traced"),
    Case(4, "pp=2 ep=2", "1f1b", (*BUDGET, "pipeline.layout=Etttt|L")),  # a stage without experts
)
LANES = Case(
    2, "pp=2", "zbv", ("graph.scope=partial", "graph.warmup_steps=1", "train.micro_batch_size=2"),
    COMPILED_MODEL, "traced",
)  # fmt: skip
ROUTED = {
    Case(2, "pp=2", "1f1b"): Case(2, "pp=2", "1f1b", (AGAIN,)),
    Case(2, "pp=2", "1f1b", mode="traced"): Case(2, "pp=2", "1f1b", (ROUTED_TWICE,), mode="traced"),
}
"""Cases, and the same ones routed again in the backward."""
TWO = (
    *ROUTED, *ROUTED.values(),
    Case(2, "", model=("model.aux_loss=sequence",)), Case(2, "", model=("train.clip_grad_norm=0.01",)),
    Case(2, "", model=(TIED,), mode="traced"),
    Case(2, FSDP), Case(2, FSDP, overrides=(AGAIN,), model=(MTP, TIED)),
    Case(2, "pp=2", "gpipe"), Case(2, "pp=2", "interleaved", ("pipeline.virtual_stages=3",)),
    Case(2, "pp=2", "1f1b", ("pipeline.layout=Ettttmm|L",), (MTP,)),
    Case(2, "pp=2", "interleaved", ("pipeline.layout=Etttt|m|m|L",), (MTP,)),
    Case(2, "pp=2", "zb1p", model=(MTP, TIED), mode="traced"), Case(2, "pp=2", "zbv", model=(TIED,)),
    Case(2, "pp=2", "v_half", model=(MTP,)), Case(2, "pp=2", "v_min"), LANES,
    Case(2, "pp=2", "zb1p", LAYERS, (MTP,), "traced"),
    Case(2, "pp=2", "interleaved", (*LAYERS, AGAIN), (TIED,), "traced"),
    Case(2, "pp=2", "1f1b", FULL, mode="traced"),
)  # fmt: skip
MORE_OF_FOUR = (
    Case(4, "ep=2 etp=2", model=(MTP,)),
    Case(4, "tp=2 ep=2", model=("model.attention=gqa", "model.head_dim=6", "model.num_kv_heads=2")),
    Case(4, FSDP, model=("model.num_experts=6",)), Case(4, f"tp=2 ep=4 {FSDP}", model=(TIED,)),
    Case(4, "pp=4", "zbv", ("pipeline.layout=E|t|t|t|t|m|m|L",), (MTP,)),
    Case(4, "pp=2 ep=2", "zb1p", model=(TIED,)),
    Case(4, "pp=2 tp=2", "1f1b", model=(MTP, TIED)), Case(4, "pp=2 cp=2 etp=2", "1f1b"),
    Case(4, "", overrides=("train.global_batch_size=32", "optim.bucket_mb=100")),
    Case(4, "", overrides=LAYERS, mode="traced"),
    Case(4, "tp=2", overrides=("recompute.ops=[mlp]",), mode="traced"),
    Case(4, "pp=4", "1f1b", ("train.micro_batch_size=4",)),  # more stages than micro-batches
    Case(4, "pp=2 ep=2", "1f1b", TURNS, mode="traced"),
    Case(4, "pp=2 ep=2", "interleaved", TURNS, (MTP,), "traced"),
)  # fmt: skip
EIGHT = (
    *(Case(8, layout) for layout in (
        "ep=8", "ep=4 etp=2", "tp=4 ep=2 etp=2", "cp=2 tp=2 ep=4 etp=2", "cp=2 tp=2 cp_method=ring ep=8",
    )),
    Case(8, "pp=8", "1f1b", model=(MTP, TIED)), Case(8, "pp=4 ep=2", "zbv", model=(MTP,)),
)  # fmt: skip
DEEP = ("model.num_layers=12", "train.global_batch_size=16")
"""A part of the model for each of 16 stages, and as many micro-batches."""
GRID = (
    *(Case(8, layout, schedule, model=(MTP, TIED)) for layout, schedule in {
        "pp=4": "gpipe", "pp=4 tp=2 ep=2": "interleaved", "pp=2 tp=2 ep=2": "zbv", "pp=2 ep=2": "v_half",
    }.items()),
    *(Case(8, layout, schedule, model=(MTP,)) for layout, schedule in {
        "pp=4 ep=2": "1f1b", "pp=2 ep=2": "zb1p", "pp=4 tp=2 ep=2": "v_min",
    }.items()),
    *(Case(8, "pp=8", name, model=(MTP, TIED, *DEEP)) for name in ("interleaved", "v_half")),
    Case(8, "pp=8", "zbv", model=(MTP, *DEEP)), replace(LANES, mode="inductor"),
)  # fmt: skip
MARKS = {FOUR: (), (*TWO, *MORE_OF_FOUR, *EIGHT): (pytest.mark.slow,), GRID: (pytest.mark.exhaustive,)}
CASES = [pytest.param(case, id=str(case), marks=marks) for cases, marks in MARKS.items() for case in cases]


@pytest.fixture(scope="module")
def on_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Outcomes of a case by rank; all cases with so many ranks that will be tested run in one job."""
    items = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params["case"] for item in items}
    wanted |= {ROUTED[case] for case in wanted if case in ROUTED}

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


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in ROUTED])
def test_routing_again_when_later_micro_batches_are_counted_changes_no_bit(on_ranks, case):
    for kept, again in zip(on_ranks(case), on_ranks(ROUTED[case]), strict=True):
        assert torch.equal(again.rows, kept.rows) and again.gradients.keys() == kept.gradients.keys()
        for parameter, gradient in kept.gradients.items():
            assert torch.equal(again.gradients[parameter], gradient), parameter
            assert torch.equal(again.weights[parameter], kept.weights[parameter]), parameter
