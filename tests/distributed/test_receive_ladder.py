"""A step that finds too little room runs again with more: everything is as if there had been enough."""

import functools
from pathlib import Path

import pytest

from graphmoe.checkpoint.store import CheckpointStore
from tests.distributed.ranks import Job, selected
from tests.distributed.skewed import Both, Found, Skew, hang_before_climbing, no_memory, small_chunks
from tests.distributed.training import Outcome, SignalIn, Training
from tests.runs import assert_same_state, metrics, numbers
from tests.tolerances import relative_error


def at(*places: tuple[int, int], **how) -> tuple[Skew]:
    return (Skew(frozenset(places), **how),)


SAVES = ("checkpoint.enabled=true", "checkpoint.interval=2")
VALIDATES = ("train.val_batches=3", "train.val_interval=3")
FSDP, BF16 = ("parallel.dp_shard=fsdp2",), ("precision.compute=bf16",)
FULL = ("graph.scope=full_iteration", "graph.warmup_steps=1", "train.steps=9")
COMPILED = ("compile.enabled=true", "graph.warmup_steps=1", "train.steps=8", "checkpoint.interval=0")
LAYERS, TRACED = (*COMPILED, "graph.scope=layer"), Training((), traced=True)
NO_MEMORY = {"of_ladder": (no_memory,)}
OF_FOUR = ("parallel.ep=4", "train.global_batch_size=32", "model.num_experts=16", "model.top_k=4")
EP2 = ("parallel.ep=2", "train.global_batch_size=32")
PP2 = ("parallel.ep=2", "parallel.pp=2", "train.global_batch_size=16")
TWO_MOE = ("model.num_layers=3",)
CASES = {
    "the second of four micro-batches": Both(at((3, 1))),
    "tokens of one rank": Both(at((3, 1), ranks=(1,)), budget=1.3),
    "two steps in a row": Both(at((2, 1), (3, 0))),
    "the first step": Both(at((1, 0))),
    "the last step": Both(at((6, 3))),
    "before a checkpoint": Both(at((4, 2)), SAVES),
    "before a validation": Both(at((3, 2)), VALIDATES),
    "every step is logged": Both(at((3, 1)), ("train.log_interval=1",)),
    "room for both": Both(at((1, 1), (5, 1)), ("train.steps=7",)),
    "one of two layers, then the other": Both((*at((2, 1), layer=1), *at((4, 1), layer=0)), TWO_MOE),
    "little room at first": Both(at((3, 1)), TWO_MOE, budget=0.4),
    "no memory, several steps": Both(at((2, 1), (4, 1), (5, 0)), ("train.steps=9",), **NO_MEMORY),
    "no memory, bf16": Both(at((3, 1)), BF16, **NO_MEMORY),
    "not finite": Both(at((2, 1), (4, 0), spoiled=frozenset({(2, 2), (4, 3)}))),
    "a signal": Both((*at((3, 1)), SignalIn(4)), SAVES),
    "killed": Both(at((5, 1)), SAVES),
    "captured, before a checkpoint": Both(at((2, 1), (6, 1)), (*FULL, *SAVES[:1], "checkpoint.interval=3")),
    "captured, while it warms up": Both(at((1, 1)), FULL),
    "captured, one of two layers, then the other": Both(
        (*at((3, 1), layer=1), *at((6, 1), layer=0)), (*FULL, *TWO_MOE)
    ),
    "captured, no memory": Both(at((5, 1), (7, 1)), FULL, **NO_MEMORY),
    "in a validation": Both((Skew(validates=True),), VALIDATES),
    "fsdp2": Both(at((2, 1), (3, 1)), FSDP),
    "fsdp2, no memory": Both(at((3, 1)), FSDP, **NO_MEMORY),
    "layers": Both(at((3, 1), (7, 1)), LAYERS, runs=TRACED),
    "four ranks": Both(at((3, 1), (4, 1)), budget=1.6, layout=OF_FOUR),
    "four ranks, a pipeline": Both((*at((2, 1), layer=1), *at((4, 1))), TWO_MOE, layout=PP2),
    "four ranks, a pipeline, captured": Both(
        at((4, 1), layer=0), (*LAYERS, *TWO_MOE), layout=PP2, runs=TRACED
    ),
    "four ranks, a pipeline, no memory": Both(at((2, 1), (4, 1)), layout=PP2, **NO_MEMORY),
    "four ranks, ep2 beside dp2": Both(at((3, 1)), layout=EP2),
    "four ranks, ep2 etp2": Both(at((3, 1)), layout=(*EP2, "parallel.etp=2"), **NO_MEMORY),
}
ROUNDED = {
    "chunks": Both(at((3, 1)), of_ladder=(no_memory, small_chunks)),
    "chunks, bf16": Both(at((3, 1)), BF16, of_ladder=(no_memory, small_chunks)),
    "compiled, no memory": Both(at((3, 1)), COMPILED, runs=TRACED, **NO_MEMORY),
    "layers, no memory": Both(at((3, 1), (7, 1)), LAYERS, runs=TRACED, **NO_MEMORY),
}
"""Cases whose rung without limit adds in another order: in chunks, or by other compiled units."""
DEFAULT = {"captured, before a checkpoint", "the second of four micro-batches"}
LAUNCHED = {"the second of four micro-batches": 6 + 2, "the last step": 6 + 1, "every step is logged": 6 + 1}
LAUNCHED |= {"four ranks": 6 + 2, "room for both": 7 + 1, "one of two layers, then the other": 6 + 2}
LAUNCHED |= {"no memory, several steps": 9 + 2, "captured, no memory": 9 + 4}
"""Steps that ran, void ones too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, folder: Path) -> dict[str, list[Found]]:
    """Findings of two ranks, and of four where any other than the default cases run."""
    is_short = {*selected(request, "name")} <= DEFAULT
    found: dict[str, list[Found]] = {}
    for count in (2, 4):
        chosen = {n: c for n, c in (CASES | ROUNDED).items() if n.startswith("four") == (count == 4)}
        if cases := {n: c for n, c in chosen.items() if n in DEFAULT or not is_short}:
            found |= Job(folder, cases, num_ranks=count).results(seconds=800)
    return found


@pytest.fixture(scope="module")
def resumed(folder: Path, ranks: dict[str, list[Found]]) -> list[Outcome]:
    """The outcomes of ranks that go on where both were killed before a void step could run again."""
    case = CASES["killed"]
    run = functools.partial(case.run, budget="moe.receive_budget=1.5")
    job = Job(folder / "kill", {"run": functools.partial(run, more=(hang_before_climbing,))})
    job.wait_until(lambda: len([*folder.glob("kill/run/climbs_*")]) == 2)
    # The checkpoint of step 4 is written by a thread, beside the step that is found void.
    job.wait_until(lambda: CheckpointStore.open_any(folder / "kill" / "run").latest() == [4, 2])
    job.kill()
    return Job(folder / "kill", {"run": run}).results()["run"]


@pytest.mark.slow
def test_a_run_that_is_killed_between_a_void_step_and_the_next_try_goes_on_bitwise(ranks, resumed, folder):
    for after, whole in zip(resumed, ranks["killed"], strict=True):
        assert after.step == whole.worst.step
        assert_same_state(after.state, whole.worst.state)
    assert numbers(folder / "kill" / "run") == numbers(folder / "killed" / "worst")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in DEFAULT)) for n in CASES]
)
def test_state_metrics_and_steps_are_those_of_a_run_with_room_for_everything(ranks, name):
    for found in ranks[name]:
        launched = len(found.ladder.rows)
        assert launched == LAUNCHED.get(name, launched)
        assert launched > len(found.worst.rows) or "validation" in name or "signal" in name
        assert found.ladder.step == found.worst.step
        assert repr(found.ladder.written) == repr(found.worst.written)
        assert_same_state(found.ladder.state, found.worst.state)
        assert_same_state(found.ladder.model, found.worst.model)
        assert found.ladder.stopped_by == found.worst.stopped_by


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
@pytest.mark.parametrize("name", ROUNDED)
def test_a_rung_that_adds_in_another_order_differs_by_rounding_only(ranks, name):
    """Compare loosely: six steps of Adam amplify a difference in the last bit of a gradient near zero."""
    for found in ranks[name]:
        before = [[row for row in run.written if row["step"] < 3] for run in (found.ladder, found.worst)]
        assert repr(before[0]) == repr(before[1]) and len(found.ladder.rows) > len(found.worst.rows)
        for key in ("loss", "grad_norm"):
            ladder, worst = ([row[key] for row in run.written] for run in (found.ladder, found.worst))
            assert ladder == pytest.approx(worst, rel=1e-3)
        for weight, value in found.worst.weights.items():
            assert relative_error(found.ladder.weights[weight], value) < 4e-3, weight
