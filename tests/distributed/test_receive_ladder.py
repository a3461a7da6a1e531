"""A step that finds too little room runs again with more: everything is as if there had been enough."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from graphmoe.checkpoint import CheckpointStore
from tests.distributed.ranks import Job, selected
from tests.distributed.skewed import (
    ONE_LAYER,
    Both,
    Found,
    HangsBeforeItClimbs,
    NoMemory,
    Sharded,
    SignalIn,
    Skew,
    SmallChunks,
)
from tests.distributed.test_data_parallel import assert_same
from tests.distributed.training import Outcome, Training
from tests.runs import metrics, numbers
from tests.tolerances import relative_error


def at(*places: tuple[int, int], **how) -> Skew:
    return Skew(frozenset(places), **how)


SAVES = ("checkpoint.enabled=true", "checkpoint.interval=2")
VALIDATES = ("train.val_batches=3", "train.val_interval=3")
FSDP = ("parallel.dp_shard=fsdp2",)
BF16 = "precision.compute=bf16"
FULL = ("graph.scope=full_iteration", "graph.warmup_steps=1", "train.steps=9")
CASES = {
    "the second of four micro-batches": Both((at((3, 1)),)),
    "tokens of one rank": Both((at((3, 1), ranks=(1,)),), budget=1.3),
    "two steps in a row": Both((at((2, 1), (3, 0)),)),
    "the first step": Both((at((1, 0)),)),
    "the last step": Both((at((6, 3)),)),
    "before a checkpoint": Both((at((4, 2)),), words=SAVES),
    "before a validation": Both((at((3, 2)),), words=VALIDATES),
    "every step is logged": Both((at((3, 1)),), words=("train.log_interval=1",)),
    "down and up again": Both((at((1, 1), (5, 1)),), words=("train.steps=7",), calm=2),
    "no memory": Both((at((3, 1)),), of_ladder=(NoMemory(),)),
    "no memory, bf16": Both((at((3, 1)),), words=(BF16,), of_ladder=(NoMemory(),)),
    "not finite": Both((at((2, 1), (4, 0), spoiled=frozenset({(2, 2), (4, 3)})),), calm=1),
    "a signal": Both((at((3, 1)), SignalIn(4)), words=SAVES),
    "killed": Both((at((5, 1)),), words=SAVES),
    "captured": Both((at((2, 1), (6, 1)),), words=FULL),
    "captured, down and up again": Both((at((3, 1), (8, 1)),), words=FULL, calm=2),
    "captured, no memory": Both((at((5, 1)),), words=FULL, of_ladder=(NoMemory(),), calm=2),
    "in a validation": Both((Skew(validates=True),), words=VALIDATES),
    "fsdp2": Both((at((2, 1), (3, 1)),), words=FSDP, runs=Sharded()),
    "fsdp2, no memory": Both((at((3, 1)),), words=FSDP, of_ladder=(NoMemory(),), runs=Sharded()),
}
DEFAULT = {"the second of four micro-batches", "before a checkpoint", "captured"}
SPLIT = {
    name: Both((at((3, 1)),), words=words, of_ladder=(NoMemory(), SmallChunks(0.3)))
    for name, words in (("fp32", ()), ("bf16", (BF16,)))
}
"""Cases whose experts have more rows than the rung without limit works on at a time."""
OF_FOUR_RANKS = ("parallel.ep=4", "train.global_batch_size=32", "model.num_experts=16", "model.top_k=4")
OF_FOUR = {
    "two rungs in a row": Both((at((3, 1), (4, 1)),), budget=1.6, layout=OF_FOUR_RANKS),
    "ep2 beside dp2": Both((at((3, 1)),), layout=("parallel.ep=2", "train.global_batch_size=32")),
    "ep2 etp2": Both(
        (at((3, 1)),), layout=("parallel.ep=2", "parallel.etp=2", "train.global_batch_size=32"),
        of_ladder=(NoMemory(),),
    ),
}  # fmt: skip
COMPILED = ("compile.enabled=true", "graph.warmup_steps=1", "train.steps=8", "checkpoint.interval=0")
TRACED, AS_TRACED = (*COMPILED, "compile.cache=false"), Training((), traced=True)
SLOW = {
    "compiled": Both((at((3, 1)),), words=(*COMPILED, *ONE_LAYER)),
    "layers": Both((at((3, 1), (7, 1)),), words=(*TRACED, "graph.scope=layer"), calm=1, runs=AS_TRACED),
}
UNCOMPILED_RUNG = {
    "compiled, no memory": Both((at((3, 1)),), words=TRACED, of_ladder=(NoMemory(),), runs=AS_TRACED),
    "layers, no memory": Both(
        (at((3, 1), (7, 1)),), words=(*TRACED, "graph.scope=layer"), of_ladder=(NoMemory(),), calm=1,
        runs=AS_TRACED,
    ),
}  # fmt: skip
"""Cases in which other units are compiled, whose code may round otherwise."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, folder: Path) -> dict[str, list[Found]]:
    names = {*selected(request, "name")}
    chosen = DEFAULT if names <= DEFAULT else {*CASES, *SPLIT}
    return Job(folder, {n: case for n, case in (CASES | SPLIT).items() if n in chosen}).results(seconds=500)


@pytest.fixture(scope="module")
def four(folder: Path) -> dict[str, list[Found]]:
    return Job(folder / "four", OF_FOUR, num_ranks=4).results(seconds=500)


@pytest.fixture(scope="module")
def slow(folder: Path) -> dict[str, list[Found]]:
    return Job(folder / "slow", {**SLOW, **UNCOMPILED_RUNG}).results(seconds=900)


def found_by(request: pytest.FixtureRequest, name: str) -> list[Found]:
    fixture = "four" if name in OF_FOUR else "slow" if name in SLOW else "ranks"
    return request.getfixturevalue(fixture)[name]


@pytest.fixture(scope="module")
def resumed(folder: Path, ranks: dict[str, list[Found]]) -> list[Outcome]:
    """The outcomes of ranks that go on where both were killed before a void step could run again."""
    case = CASES["killed"]
    run = functools.partial(case.run, budget="moe.receive_budget=1.5")
    job = Job(folder / "kill", {"run": functools.partial(run, more=(HangsBeforeItClimbs(),))})
    job.wait_until(lambda: len([*folder.glob("kill/run/climbs_*")]) == 2)
    # The checkpoint of step 4 is written by a thread, beside the step that is found void.
    job.wait_until(lambda: CheckpointStore.open_any(folder / "kill" / "run").latest() == [4, 2])
    job.kill()
    return Job(folder / "kill", {"run": run}).results()["run"]


@pytest.mark.slow
def test_a_run_that_is_killed_between_a_void_step_and_the_next_try_goes_on_bitwise(ranks, resumed, folder):
    for after, whole in zip(resumed, ranks["killed"], strict=True):
        assert after.step == whole.worst.step
        assert_same(after.state, whole.worst.state)
    assert numbers(folder / "kill" / "run") == numbers(folder / "killed" / "worst")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in DEFAULT)) for n in (*CASES, *OF_FOUR, *SLOW)],
)
def test_state_metrics_and_steps_are_those_of_a_run_with_room_for_everything(request, name):
    for found in found_by(request, name):
        assert any("it runs again with" in line for line in found.log) or "validation" in name
        assert found.ladder.step == found.worst.step
        assert repr(found.ladder.written) == repr(found.worst.written)
        assert_same(found.ladder.state, found.worst.state)
        assert_same(found.ladder.model, found.worst.model)
        assert found.ladder.stopped_by == found.worst.stopped_by


@pytest.mark.slow
def test_the_log_says_which_rung_follows_and_how_many_steps_ran_in_vain(ranks, four):
    def steps_of(found: Found) -> list[str]:
        return [line.partition(":")[0] for line in found.log if line.startswith("step")]

    one = ranks["the second of four micro-batches"][0]
    assert one.log == [
        "step 3: 64 rows and 128 slots arrived at a rank, and the receive budget has room for 64 and 96; it "
        "runs again with twice the receive budget (64 rows, 128 slots)"
    ]
    assert one.launched == 6 + 2
    assert ranks["the last step"][0].launched == ranks["every step is logged"][0].launched == 6 + 1
    assert steps_of(ranks["two steps in a row"][0]) == ["step 2"]
    up_and_down = ranks["down and up again"][0]
    assert steps_of(up_and_down) == ["step 1", "step 3", "step 5", "step 7"]
    assert "step 3: the last 2 steps had room in the receive budget, which" in up_and_down.log[1]
    assert ranks["no memory"][0].log[0].startswith("twice the receive budget needs 0.00 GiB, which not every")
    assert ranks["no memory"][0].log[1].endswith("it runs again with the counts of the host")
    both = four["two rungs in a row"][0]
    assert steps_of(both) == ["step 3", "step 3"] and both.launched == 6 + 4
    assert "again with the counts of the host" in both.log[1]


@pytest.mark.slow
def test_checkpoints_and_metrics_files_know_nothing_of_void_steps(ranks, folder):
    for run in ("ladder", "worst"):
        saved = folder / "before a checkpoint" / run
        assert CheckpointStore.open_any(saved).latest() == [6, 4]
        assert [row["step"] for row in metrics(saved)] == [1, 2, 3, 4, 5, 6]
        signalled = folder / "a signal" / run
        assert CheckpointStore.open_any(signalled).latest()[0] == ranks["a signal"][0].ladder.step
    assert [found.ladder.stopped_by for found in ranks["a signal"]] == ["SIGTERM", "SIGTERM"]


@pytest.mark.slow
def test_a_void_step_that_is_not_finite_is_skipped_once(ranks):
    for found in ranks["not finite"]:
        assert [row["skipped"] for row in found.ladder.written] == [False, True, False, True, False, False]
        assert found.ladder.state["optimizer.counters.skipped"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_sums_over_the_rows_of_an_expert_that_is_split_differ_by_rounding_only(ranks, name):
    for found in ranks[name]:
        before = [[row for row in run.written if row["step"] < 3] for run in (found.ladder, found.worst)]
        assert repr(before[0]) == repr(before[1])
        assert_close(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNCOMPILED_RUNG)
def test_the_rung_without_limit_gives_what_other_compiled_units_give_but_for_rounding(slow, name):
    for found in slow[name]:
        assert any("the counts of the host" in line for line in found.log)
        assert_close(found)


def assert_close(found: Found) -> None:
    """Compare loosely: six steps of Adam amplify a difference in the last bit of a gradient near zero."""
    for key in ("loss", "grad_norm"):
        ladder, worst = ([row[key] for row in run.written] for run in (found.ladder, found.worst))
        assert ladder == pytest.approx(worst, rel=1e-3)
    for weight, value in found.worst.weights.items():
        assert relative_error(found.ladder.weights[weight], value) < 4e-3, weight
