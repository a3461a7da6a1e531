"""Training with layers shared out along pp gives what one process gives on the same global batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphmoe.runtime.ranks import Ranks
from tests.distributed.pipelined import BUDGET, COMPILED, MTP, TIED, TURNS, Case, assert_same
from tests.distributed.ranks import Job, selected
from tests.distributed.training import Outcome, Training
from tests.runs import COMPILED_MODEL

ON_LANES = Case(
    2,
    2,
    "zbv",
    (COMPILED, "graph.scope=partial", "graph.warmup_steps=1", "train.micro_batch_size=2"),
    COMPILED_MODEL,
    traced=True,
)
CASES = {
    "gpipe": Case(2, 2, "gpipe"),
    "1f1b": Case(2, 2, "1f1b"),
    "1f1b, routed again": Case(2, 2, "1f1b", ("recompute.all=true",)),
    "1f1b, tied": Case(2, 2, "1f1b", model=(TIED,)),
    "1f1b, later tokens": Case(2, 2, "1f1b", model=(MTP,)),
    "1f1b, later tokens, the loss apart": Case(2, 2, "1f1b", ("pipeline.layout=Ettttmm|L",), (MTP,)),
    "1f1b, compiled": Case(2, 2, "1f1b", (COMPILED,), traced=True),
    "1f1b, compiled, routed again": Case(
        2, 2, "1f1b", (COMPILED, "recompute.segments=[moe_router]"), traced=True
    ),
    "interleaved": Case(2, 2, "interleaved"),
    "interleaved, three stages a rank": Case(2, 2, "interleaved", ("pipeline.virtual_stages=3",)),
    "interleaved, later tokens, the loss apart": Case(
        2, 2, "interleaved", ("pipeline.layout=Etttt|m|m|L",), (MTP,)
    ),
    "zb1p": Case(2, 2, "zb1p"),
    "zb1p, compiled": Case(2, 2, "zb1p", (COMPILED,), (MTP, TIED), traced=True),
    "zbv": Case(2, 2, "zbv", model=(TIED,)),
    "v_half": Case(2, 2, "v_half", model=(MTP,)),
    "v_min": Case(2, 2, "v_min"),
    "more stages than micro-batches": Case(4, 4, "1f1b", ("train.micro_batch_size=4",)),
    "1f1b on four": Case(4, 4, "1f1b", model=(MTP, TIED)),
    "zbv on four": Case(4, 4, "zbv", ("pipeline.layout=E|t|t|t|t|m|m|L",), (MTP,)),
    "interleaved beside dp": Case(4, 2, "interleaved"),
    "zb1p beside ep": Case(4, 2, "zb1p", ("parallel.ep=2",), (TIED,)),
    "1f1b beside tp": Case(4, 2, "1f1b", ("parallel.tp=2",), (MTP, TIED)),
    "1f1b in turns beside ep": Case(4, 2, "1f1b", (*TURNS, "parallel.ep=2"), traced=True),
    "interleaved in turns beside ep": Case(
        4, 2, "interleaved", (*TURNS, "parallel.ep=2"), (MTP,), traced=True
    ),
    "1f1b beside ep, room for the mean, a stage without experts": Case(
        4, 2, "1f1b", (*BUDGET, "pipeline.layout=Etttt|L")
    ),
    "zb1p on lanes": Case(
        2, 2, "zb1p", (COMPILED, "graph.scope=layer", "graph.warmup_steps=1"), (MTP,), traced=True
    ),
    "zbv on lanes": ON_LANES,
    "interleaved on lanes": Case(
        2,
        2,
        "interleaved",
        (COMPILED, "graph.scope=layer", "graph.warmup_steps=1", "recompute.all=true"),
        (TIED,),
        traced=True,
    ),
    "1f1b in one graph": Case(
        2, 2, "1f1b", (COMPILED, "graph.scope=full_iteration", "graph.warmup_steps=1"), traced=True
    ),
    "zb1p on four, compiled": Case(4, 4, "zb1p", (COMPILED,), traced=True),
    "1f1b beside cp and etp": Case(4, 2, "1f1b", ("parallel.cp=2", "parallel.etp=2")),
    "1f1b on eight": Case(8, 8, "1f1b", model=(MTP, TIED)),
    "zbv on four beside dp and ep": Case(8, 4, "zbv", ("parallel.ep=2",), (MTP,)),
    "interleaved beside copies of ep": Case(8, 2, "interleaved", ("parallel.ep=2",), (MTP, TIED)),
}
OTHERS = {
    "zbv, compiled": Case(2, 2, "zbv", (COMPILED,), traced=True),
    "zbv on lanes, by Inductor": replace(ON_LANES, traced=False),
}
"""The first is on lanes above. Of the second's model Inductor has compiled much elsewhere."""
ALL = CASES | OTHERS


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Outcome]]:
    names = selected(request, "name")
    names += [again for name in names if (again := f"{name}, routed again") in CASES and again not in names]
    wanted, found = {name: ALL[name] for name in names}, dict[str, list[Outcome]]()
    for ranks in sorted({case.ranks for case in wanted.values()}):
        cases = {name: case.training for name, case in wanted.items() if case.ranks == ranks}
        found |= Job(tmp_path_factory.mktemp(f"of{ranks}"), cases, num_ranks=ranks).results(seconds=500)
    return found


@pytest.fixture(scope="module")
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Training, Outcome]:
    runs = dict.fromkeys(ALL[name].alone for name in selected(request, "name"))
    return {run: run(Ranks(), tmp_path_factory.mktemp("alone")) for run in runs}


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)]
)
def test_losses_gradients_and_weights_are_those_of_one_process(outcomes, alone, name):
    assert_same(ALL[name], outcomes[name], alone[ALL[name].alone])


@pytest.mark.parametrize("name", ["1f1b", "1f1b, compiled"])
def test_what_is_routed_again_when_later_micro_batches_are_counted_is_bitwise_what_was_kept(outcomes, name):
    for kept, again in zip(outcomes[name], outcomes[f"{name}, routed again"], strict=True):
        assert torch.equal(again.rows, kept.rows) and again.gradients.keys() == kept.gradients.keys()
        for parameter, gradient in kept.gradients.items():
            assert torch.equal(again.gradients[parameter], gradient), parameter
            assert torch.equal(again.weights[parameter], kept.weights[parameter]), parameter
