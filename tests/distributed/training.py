"""Training runs as cases of `tests.distributed.ranks`, and what they leave behind."""

import contextlib
import fcntl
import functools
import hashlib
import io
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor, nn

from graphmoe.checkpoint import store
from graphmoe.checkpoint.entries import flatten
from graphmoe.checkpoint.flat_shards import FlatShard, shards_of
from graphmoe.config.schema import RunConfig
from graphmoe.optim.flat_buffers import Family
from graphmoe.passes.base import PassRunner
from graphmoe.plan.plan import plan_of
from graphmoe.runtime.compile import code as unit_code
from graphmoe.runtime.compile import executor
from graphmoe.runtime.compile.code import CompileTurns
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.compile.graphs import UnitGraphs
from graphmoe.runtime.compile.kept import kept_graphs, lasting_text
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.host.logs import Progress
from graphmoe.runtime.launch.failures import DeviceFault
from graphmoe.runtime.ranks import Ranks
from graphmoe.training.metrics import MetricsWriter
from graphmoe.training.saves import TrainingStopped
from graphmoe.training.setup import build_trainer
from graphmoe.training.step_rows import SCALARS, StepRow
from graphmoe.training.trainer import Trainer
from tests.runs import TIMED, config

Change = Callable[[Trainer], None]  # before it starts its loop


@dataclass
class Outcome:
    rows: Tensor  # of each step
    written: list[dict[str, Any]]  # rows for metrics.jsonl, without what differs from run to run
    weights: dict[str, Tensor]  # fp32
    gradients: dict[str, Tensor]  # of the last step, as clipped
    state: dict[str, Any]  # that a checkpoint holds
    step: int
    writes: bool
    stopped_by: str | None = None
    error: str = ""
    graphs: "Graphs | None" = None  # set where compiled units ran as the graphs that were traced
    scales: dict[str, list[float]] = field(default_factory=dict)  # delayed ones, with their history

    @property
    def val_losses(self) -> Tensor:
        return torch.tensor([row["val_loss"] for row in self.written if "val_loss" in row])


@dataclass
class Graphs:
    code: list[str]  # name of its unit and code, of each graph
    matches: dict[tuple[str, str], int]  # by unit and pass
    left: dict[tuple[str, str], tuple[str, ...]]  # reasons for what passes left as it was
    recompiled: int
    dispatched: int  # times that tokens were sent to their experts from outside the graphs

    @classmethod
    def of(cls, compiled: CompiledSegments, dispatched: int) -> "Graphs":
        found = cls([], {}, {}, compiled.recompiled, dispatched)
        for code, report in compiled._codes.values():
            split = code.graphs.backward
            modules = [code.graphs.forward, *((split.inputs, split.weights) if split else ())]
            texts = [str(module.graph) for module in modules if isinstance(module, nn.Module)]
            found.code += [f"{report.unit}: {text}" for text in texts]
            for row in report.passes:
                found.matches[report.unit, row.name] = row.matches
                found.left[report.unit, row.name] = row.left
        return found


class Recorder(MetricsWriter):
    def __init__(self, inner: MetricsWriter | None) -> None:
        self.inner, self.rows = inner, list[dict[str, Any]]()

    def close(self) -> None:
        if self.inner:
            self.inner.close()

    def write(self, rows: list[dict[str, Any]], read: Sequence[StepRow] = ()) -> None:
        self.rows += [{k: v for k, v in row.items() if k not in TIMED} for row in rows]
        if self.inner:
            self.inner.write(rows, read)


@dataclass(frozen=True)
class Training:
    """A run of the tiny model on however many ranks there are."""

    words: tuple[str, ...]
    change: Change | None = None
    traced: bool = False  # compiled units run as they were traced: Inductor takes a minute for a run's
    each_rank: bool = False  # each rank traces by itself; else ranks and runs share traces of equal units

    @functools.cached_property
    def config(self) -> RunConfig:
        # Kept graphs would not be read again, and writing them takes a fifth of a run.
        return config(*self.words, *(["compile.cache=false"] if self.traced else []))

    def __getstate__(self) -> dict[str, Any]:
        """Compose the configuration before the case is sent to the ranks, which share two cores."""
        return {**vars(self), "config": self.config}

    def __call__(self, ranks: Ranks, folder: Path) -> Outcome:
        shared_by = f"rank {ranks.rank}" if self.each_rank else "all ranks"
        with as_traced(shared_by) if self.traced else unmeasured():
            return self._train(ranks, folder)

    def _train(self, ranks: Ranks, folder: Path) -> Outcome:
        trainer, rows, written = quiet_trainer(self.config, folder, ranks)
        assert isinstance(trainer.metrics, Recorder)
        writes = trainer.metrics.inner is not None
        compiled = trainer.execution.compiled
        if compiled is not None and ranks.size > 1 and not self.traced:
            # As where torch's caches are graphmoe's own: what one rank has compiled the others load.
            compiled.turns = CompileTurns(Path(ranks.on_first(lambda: tempfile.mkdtemp(dir=folder))))
        if self.change is not None:
            self.change(trainer)
        error, dispatches, dispatch = "", list[None](), AllToAll.dispatch

        def counted(*given: Any) -> tuple[Tensor, ...]:
            dispatches.append(None)
            return dispatch(*given)

        with mock.patch.object(AllToAll, "dispatch", counted):
            try:
                trainer.run()
            except (TrainingStopped, DeviceFault) as stopped:
                error = str(stopped)
        entries = flatten(whole_state(trainer))
        return Outcome(
            torch.stack(rows).cpu() if rows else torch.zeros(0),
            written,
            _on_host({**trainer.optimizer.frozen, **gathered(trainer, "main")}),
            _on_host(gathered(trainer, "grad_shard")),
            {**_on_host(entries.tensors), **entries.values},
            trainer.step,
            writes,
            trainer.stopped_by,
            error,
            Graphs.of(compiled, len(dispatches)) if self.traced and compiled else None,
            trainer.optimizer.scales.values() if trainer.optimizer.scales else {},
        )


_traces: dict[str, UnitGraphs] = {}


@contextlib.contextmanager
def as_traced(shared_by: str = "") -> Iterator[None]:
    """Run graphs as they were traced instead of compiling them; passes do not tell what they save.

    A trace takes about a second, so equal units of all runs in this context share one, or of all runs and
    ranks of the test session whose ``shared_by`` is the same.
    """
    known = _traces if shared_by else {}

    def traced(graph: torch.fx.GraphModule, *_: object) -> Callable[..., Any]:
        return torch.no_grad()(graph.forward)

    def once(kept: Path | None, key: tuple[Any, ...], trace: Callable[[], UnitGraphs]) -> UnitGraphs:
        text = lasting_text((shared_by, key))
        if kept is not None or text is None:
            return kept_graphs(kept, key, trace)
        if text not in known and shared_by:
            folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "traces")
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"{hashlib.sha256(text.encode()).hexdigest()}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # one rank traces, the others load, in a quarter of the time
                known[text] = kept_graphs(folder, (shared_by, *key), trace)
        return known[text] if text in known else known.setdefault(text, trace())

    graphs = mock.patch.object(executor, "kept_graphs", once)
    with mock.patch.object(unit_code, "compile_inference", traced), graphs, unmeasured():
        yield


@contextlib.contextmanager
def unmeasured() -> Iterator[None]:
    """Let passes not tell how many bytes they save.

    For these numbers every unit is differentiated once more for each pass that matched: two thirds of a run
    that finds all its code in the cache.
    """
    run = PassRunner.run
    with mock.patch.object(PassRunner, "run", lambda *given: run(*given[:5])):
        yield


def without_rank_load(rows: Tensor) -> Tensor:
    """Rows of steps, but for the one metric that depends on the layout."""
    place = SCALARS.index("rank_load")
    return torch.cat([rows[:, :place], rows[:, place + 1 :]], dim=1)


def quiet_trainer(
    run_config: RunConfig, folder: Path, ranks: Ranks
) -> tuple[Trainer, list[Tensor], list[dict[str, Any]]]:
    folder.mkdir(parents=True, exist_ok=True)
    silent = Progress(Console(file=io.StringIO()), run_config.train.steps, wanted=False)
    trainer = build_trainer(plan_of(run_config, ranks.size), folder, silent, ranks)
    recorder = trainer.metrics = Recorder(trainer.metrics)
    rows, step = list[Tensor](), trainer.steps.run

    def run(batches):
        rows.append(step(batches).clone())
        return rows[-1]

    trainer.steps.run = run
    return trainer, rows, recorder.rows


def gathered(trainer: Trainer, kind: str) -> dict[str, Tensor]:
    """Whole tensors by parameter name, of the shards of all ranks that have the same parameter."""
    optimizer, found = trainer.optimizer, dict[str, Tensor]()
    for family in optimizer.families:
        if kind in optimizer.rule.all_moments and kind not in family.moments:
            continue  # matrices and the rest may have other moments
        found |= family.gathered(shard_of(family, kind))
    return found


def shard_of(family: Family, kind: str) -> Tensor:
    shard = family.moments[kind] if kind in family.moments else getattr(family, kind)
    if encoded := family.encoded(kind):
        shard = torch.zeros(shard.shape)
        for name, (_, own) in family.owned(shard).items():
            encoded[name].decode(own)
    return shard


def whole_state(trainer: Trainer) -> dict[str, Any]:
    optimizer = trainer.optimizer
    counters = optimizer.state_dict()["counters"]
    moments = {key: gathered(trainer, key) for key in optimizer.rule.all_moments}
    state = {**moments, "main": gathered(trainer, "main") if optimizer.rounds else {}, "counters": counters}
    weights = gathered(trainer, "weight_shard")
    model = shards_of(trainer.model, trainer.plan.layout, trainer.ranks.rank, weights)
    with mock.patch.multiple(optimizer, state_dict=lambda: state, model_state=lambda: model):
        return trainer._state()


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    held = {n: each.data if isinstance(each, FlatShard) else each.detach() for n, each in tensors.items()}
    return {name: tensor.to("cpu", copy=True) for name, tensor in held.items()}


def on_rank(trainer: Trainer, rank: int) -> bool:
    return trainer.ranks.rank == min(rank, trainer.ranks.size - 1)


def nan_gradient_in_step_2(trainer: Trainer) -> None:
    _spoil(trainer, lambda step: step == 2)


def nan_gradients_from_step_2(trainer: Trainer) -> None:
    _spoil(trainer, lambda step: step >= 2)


def infinite_moment_in_step_3(trainer: Trainer) -> None:
    """Spoil a moment of rank 1 only, whose weights then stay: loss, gradients and weights are finite."""

    def spoil() -> None:
        for family in trainer.optimizer.families:
            for _, own in family.owned(family.moments["exp_avg_sq"]).values():
                own.fill_(math.inf)

    _before_step(trainer, 3, spoil)


def _before_step(trainer: Trainer, number: int, do: Callable[[], None]) -> None:
    run, done = trainer.steps.run, list[None]()

    def do_first(batches):
        if trainer.step + 1 == number and not done:
            done.append(do())
        return run(batches)

    if on_rank(trainer, 1):
        trainer.steps.run = do_first


def _spoil(trainer: Trainer, spoiled: Callable[[int], bool]) -> None:
    whole = trainer.model.stage  # of the one stage, or of each

    def stage(*arguments):
        output = whole(*arguments)
        bad = torch.is_grad_enabled() and spoiled(trainer.step + 1)
        return output._replace(total=output.total * math.nan) if bad else output

    if on_rank(trainer, 1):
        trainer.model.stage = stage


@dataclass(frozen=True)
class SignalIn:
    """Rank 1 gets a signal before it launches a step."""

    step: int
    number: int = signal.SIGTERM

    def __call__(self, trainer: Trainer) -> None:  # once: a second one would end the process
        _before_step(trainer, self.step, lambda: os.kill(os.getpid(), self.number))


def never_publish_step_4(trainer: Trainer) -> None:
    write = store.write_entries

    def hang(folder: Path, *arguments):
        sums = write(folder, *arguments)
        if "step_00000004" in folder.name:
            time.sleep(600)
        return sums

    if on_rank(trainer, 1):
        store.write_entries = hang
