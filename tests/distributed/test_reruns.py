"""A suspicious step runs again: a transient fault leaves no trace, and a faulty device ends the run."""

import logging
import math
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import ConfigError
from graphmoe.model.transformer import Transformer
from graphmoe.plan.rules import check
from graphmoe.runtime.ranks import Ranks
from graphmoe.training import reruns
from graphmoe.training.reruns import FLOOR, LEAST, WINDOW, Own
from graphmoe.training.saves import TrainingStopped
from graphmoe.training.trainer import Trainer
from tests.distributed import training
from tests.distributed.ranks import Job, selected
from tests.distributed.training import Outcome, Training
from tests.runs import (
    TINY,
    assert_same_state,
    command,
    config,
    metrics,
    slow_but,
    spoil_steps,
    train_in,
    trainer_in,
)

BASE = (
    "train.val_batches=3", "train.val_interval=3", "train.log_interval=2", "checkpoint.interval=2",
    "train.global_batch_size=16", "model.aux_loss=global_batch", "model.aux_loss_coef=0.1",
)  # fmt: skip
ON = ("train.rerun=true",)
SPIKES = ("train.steps=20", "train.spike_factor=20")
CAPTURED = ("graph.scope=full_iteration", "graph.warmup_steps=1")


class Found(NamedTuple):
    run: Outcome
    said: list[str]


def only_gradients(trainer: Trainer) -> None:
    """Let the injected fault multiply gradients and not the loss."""
    model, scale = trainer.model, trainer.steps._reruns._fault._scale

    def stage(*arguments):
        output = Transformer.stage(model, *arguments)
        return output._replace(total=output.total * scale)

    model.stage = stage


@dataclass(frozen=True)
class Case:
    """A run with an injected fault, and what its log says of it."""

    fault: str = ""
    words: tuple[str, ...] = ()
    change: training.Change | None = None
    rerun: bool = True
    traced: bool = False

    def __call__(self, ranks: Ranks, folder: Path) -> Found:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logger = reruns.log
        logger.addHandler(handler)
        words = (*BASE, *self.words, *(ON if self.rerun else ()))
        words += (f"train.inject_fault={self.fault}",) if self.fault else ()
        try:
            run = Training(words, self.change, traced=self.traced)(ranks, folder)
        finally:
            logger.removeHandler(handler)
        return Found(run, [line for line in said if "again" in line])


OFF = {"rerun": False}
SYMM = ("moe.dispatcher=symm", "moe.receive_budget=1.5", "parallel.ep=2", "moe.balance=none")
LAYERS = ("compile.enabled=true", "graph.scope=layer", "graph.warmup_steps=1", "checkpoint.interval=0")
GRADIENTS = {"change": only_gradients}
EP2 = ("parallel.ep=2",)
PP2 = ("parallel.pp=2", "model.num_layers=3")
TRANSIENT = {  # each with the case without a fault, and the ranks that are named
    "transient": (Case("transient:1:3"), "off", [1]),
    "transient, the first step": (Case("transient:0:1"), "off", [0]),
    "transient, the last step": (Case("transient:0:6"), "off", [0]),
    "transient, captured": (Case("transient:1:4", CAPTURED), "off, captured", [1]),
    "transient spike": (Case("transient:1:19:4", SPIKES), "off, long", [1]),
    "transient, gradients": (Case("transient:0:4", **GRADIENTS), "off", [0]),
    "transient, fsdp2": (Case("transient:1:4", ("parallel.dp_shard=fsdp2",)), "off, fsdp2", [1]),
    "transient, ep": (Case("transient:1:4", SYMM), "off, ep", [0, 1]),
    "transient, layers": (Case("transient:1:5", LAYERS, traced=True), "off, layers", [1]),
    "four: transient, pipeline": (Case("transient:3:4", PP2), "four: off, pipeline", [1, 3]),
}
PERSISTENT = {  # each with the ranks that are named
    "persistent": (Case("persistent:1:4"), [1]),
    "persistent, captured": (Case("persistent:0:4", CAPTURED), [0]),
    "persistent spike": (Case("persistent:0:19:4", SPIKES), [0]),
    "persistent, gradients": (Case("persistent:1:4", **GRADIENTS), [1]),
    "four: persistent, ep2": (Case("persistent:2:4", EP2), [2, 3]),
    "four: persistent, pipeline": (Case("persistent:3:4", PP2), [1, 3]),
}
DATA = {  # each with what is said
    "data": (
        Case("data:1:2"),
        "so did rank 0 on .* with the batches of rank 1, .*sequences 2 to 3 of each 4 of",
    ),
    "data, captured": (Case("data:1:4", CAPTURED), "with the batches of rank 1"),
    "data spike": (
        Case("data:0:19:4", SPIKES),
        "so did rank 1 .*sequences 0 to 1 of .*; its update is applied",
    ),
    "data, ep": (
        Case("data:0:4", SYMM),
        "one replica of the model cannot tell data from device; it is skipped",
    ),
    "gradients, fsdp2": (
        Case("persistent:1:4", ("parallel.dp_shard=fsdp2",), **GRADIENTS),
        "gradients of single ranks, which would tell data from device, are not kept",
    ),
    "four: data, ep2": (Case("data:3:4", EP2), "so did rank [01] .*with the batches of rank [23]"),
}
PLAIN = {
    "off": Case(**OFF),
    "on": Case(),
    "off, captured": Case(words=CAPTURED, **OFF),
    "off, long": Case(words=SPIKES[:1], **OFF),
    "off, skipped": Case(change=training.nan_gradient_in_step_2, **OFF),
    "off, fsdp2": Case(words=("parallel.dp_shard=fsdp2",), **OFF),
    "off, ep": Case(words=SYMM, **OFF),
    "off, layers": Case(words=LAYERS, traced=True, **OFF),
    "four: off, pipeline": Case(words=PP2, **OFF),
}
CASES = PLAIN | {name: case for name, (case, *_) in (TRANSIENT | PERSISTENT | DATA).items()}
DEFAULT = {"transient", "transient, captured", "transient, gradients", "persistent", "data", "data spike"}
OTHERS = {"off", "on", "off, captured", "off, long", "off, skipped"}


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, folder: Path) -> dict[str, list[Found]]:
    """Findings of two ranks, and of four where any other than the default cases run."""
    is_short = {*selected(request, "name")} <= DEFAULT
    found: dict[str, list[Found]] = {}
    for count in (2, 4):
        chosen = {name: case for name, case in CASES.items() if name.startswith("four") == (count == 4)}
        if cases := {name: c for name, c in chosen.items() if name in DEFAULT | OTHERS or not is_short}:
            found |= Job(folder, cases, num_ranks=count).results(seconds=600)
    return found


def assert_same_run(one: Outcome, other: Outcome) -> None:
    for part in ("step", "written", "state", "stopped_by", "error"):
        assert_same_state(getattr(one, part), getattr(other, part), part)


def test_without_a_fault_nothing_runs_again_and_no_bit_changes(ranks):
    for on, off in zip(ranks["on"], ranks["off"], strict=True):
        assert_same_run(on.run, off.run)
        assert on.said == off.said == [] and len(on.run.rows) == 6


def names(cases: dict[str, tuple]) -> list:
    return slow_but([*cases], *DEFAULT & cases.keys())


@pytest.mark.parametrize("name", names(TRANSIENT))
def test_a_transient_fault_is_named_and_leaves_no_trace(ranks, name):
    _, plain, named = TRANSIENT[name]
    for found, undisturbed in zip(ranks[name], ranks[plain], strict=True):
        assert_same_run(found.run, undisturbed.run)
        first, second = found.said
        assert "is suspicious, and runs again: loss" in first
        who = [rank for rank in range(len(ranks[name])) if f"rank {rank} on " in second]
        assert "a transient fault of " in second and who == named
        assert ("one of" in second) == (len(named) > 1)


@pytest.mark.parametrize("name", names(PERSISTENT))
def test_a_device_at_fault_is_named_and_nothing_more_is_saved(ranks, folder, name):
    case, named = PERSISTENT[name]
    bad = int(case.fault.split(":")[2])
    for found in ranks[name]:
        who = [rank for rank in range(len(ranks[name])) if f"rank {rank} on " in found.run.error]
        assert who == named and f"step {bad}: suspicious results of " in found.run.error
        assert "are not those of another rank with the same batches: the device is faulty" in found.run.error
        assert found.run.state["optimizer.counters.applied"] == bad - 1
        assert found.run.state["optimizer.counters.skipped"] == 0
        assert len(found.said) == 1
    saved = CheckpointStore.open_any(folder / name).latest()
    assert saved[0] == (bad - 1) // 2 * 2
    assert [row["step"] for row in metrics(folder / name) if "loss" in row][-1] < bad


@pytest.mark.parametrize("name", names(DATA))
def test_a_step_that_others_reproduce_is_skipped_or_kept(ranks, name):
    case, said = DATA[name]
    bad = int(case.fault.split(":")[2])
    for found in ranks[name]:
        first, second = found.said
        assert f"step {bad} is suspicious, and runs again" in first
        assert f"step {bad} gave the same again" in second and re.search(said, second), second
        rows = [row for row in found.run.written if "loss" in row]
        skips = "spike" not in name
        assert [row["step"] for row in rows if row["skipped"]] == [bad] * skips
        assert found.run.state["optimizer.counters.applied"] == len(rows) - skips
        assert found.run.error == "" and found.run.step == len(rows)
    if name == "data":
        for found, plain in zip(ranks[name], ranks["off, skipped"], strict=True):
            assert_same_state(found.run.state, plain.run.state)


def test_a_kept_spike_is_the_update_of_a_run_without_the_rule(ranks):
    for found, plain in zip(ranks["data spike"], ranks["off, long"], strict=True):
        losses = [[row["loss"] for row in of.run.written if "loss" in row] for of in (found, plain)]
        assert losses[0][:18] == losses[1][:18] and losses[0][19:] != losses[1][19:]
        assert losses[0][18] > 2 * losses[1][18]


def test_one_rank_says_that_it_cannot_tell_data_from_device(tmp_path, caplog):
    trainer = train_in(tmp_path, *ON, "train.inject_fault=persistent:0:3")
    assert "step 3 gave the same again, loss nan" in caplog.text
    assert "one replica of the model cannot tell data from device; it is skipped" in caplog.text
    assert trainer.optimizer.skipped.item() == trainer.optimizer.longest_skip.item() == 1


def test_skips_in_a_row_still_end_the_run(tmp_path, monkeypatch):
    trainer = trainer_in(tmp_path, *ON, "train.max_nonfinite=2", "train.steps=9", "train.log_interval=1")
    spoil_steps(monkeypatch, trainer, {4, 5, 6})
    with pytest.raises(TrainingStopped, match="2 steps in a row .*train.max_nonfinite=2"):
        trainer.run()
    assert trainer.optimizer.applied.item() == 3


def test_results_are_alike_by_loss_and_by_what_is_finite():
    nan, inf = math.nan, math.inf
    alike = [(2.0, 1.0), (2.09, 300.0)], [(nan, nan), (inf, inf)], [(2.0, nan), (2.0, 1e20)], [(0.0, 0.0)] * 2
    others = [(2.0, 1.0), (2.2, 1.0)], [(nan, nan), (2.0, nan)], [(2.0, 1.0), (2.0, nan)]
    for same, pairs in ((True, alike), (False, others)):
        for one, other in pairs:
            assert Own(*one).is_like(Own(*other)) is Own(*other).is_like(Own(*one)) is same


def test_the_limit_follows_the_median_and_spread_of_recent_losses(tmp_path):
    trainer = trainer_in(tmp_path, *ON, "train.spike_factor=5")
    rule = trainer.steps._reruns
    losses = torch.rand(3 * WINDOW, generator=torch.Generator().manual_seed(0)).add(2).tolist()
    for number, loss in enumerate(losses):
        recent = torch.tensor(losses[max(0, number - WINDOW) : number], dtype=torch.float64)
        limit = math.inf
        if number >= LEAST:
            spread = max((recent - recent.quantile(0.5)).abs().quantile(0.5), FLOOR * recent.quantile(0.5))
            limit = recent.quantile(0.5) + 5 * spread
        assert rule.limit() == pytest.approx(float(limit))
        rule._finish(loss)
    rule._finish(math.nan)
    assert len(rule._losses) == WINDOW
    trainer.loader.close()


@pytest.mark.parametrize("fault", ["transient", "once:1:3", "data:1", "data:-1:3", "data:1:3:x"])
def test_a_fault_that_cannot_be_injected_is_refused(fault):
    with pytest.raises(ConfigError, match=f"train.inject_fault={fault} must be .* such as transient:1:5"):
        check(config(*ON, f"train.inject_fault='{fault}'"))


@pytest.mark.slow
def test_a_device_at_fault_ends_the_command_with_status_3(tmp_path):
    words = (*ON, "train.inject_fault=persistent:1:5", "launch.nproc=2", "hydra.run.dir=run")
    run = command(tmp_path, *TINY, *words)
    assert run.wait() == 3
    *_, error, path = run.err.read_text().splitlines()
    here = re.escape(platform.node())
    assert re.match(rf"error: rank 1 on {here}: step 5: suspicious .* of rank 1 on {here} are not", error)
    assert path.endswith("run/logs/rank1.log")
    assert [each.name for each in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000003"]
