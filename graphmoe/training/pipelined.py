"""Micro-batches of a step through a model whose layers the ranks along pp share."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from graphmoe.model.transformer import Transformer
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.pipeline.plan import PipelinePlan
from graphmoe.plan.pipeline.schedules import SCHEDULES
from graphmoe.plan.pipeline.transfers import Channel, channels_of
from graphmoe.plan.plan import Plan
from graphmoe.runtime.overlap.runner import Overlap
from graphmoe.runtime.pipeline.channels import Channels, Spec
from graphmoe.runtime.pipeline.engine import lanes_of
from graphmoe.runtime.pipeline.overlapped import OverlappedStage
from graphmoe.runtime.pipeline.stages import Deferring
from graphmoe.runtime.ranks import Mesh
from graphmoe.segments import Executor
from graphmoe.training.micro_batches import Add, MicroBatches, OneAfterTheOther, overlap_in_use

log = logging.getLogger(__name__)

OpenChannels = Callable[[Iterable[Channel], Sequence[Sequence[int]], torch.device], Channels]


@dataclass(frozen=True)
class StageOptions:
    """Choices of the executor that change how stages run."""

    deferring: Deferring | None = None
    """Context in which compiled units leave weight gradients for later; None without compiled units."""
    overlap: Overlap | None = None
    lane: Callable[[Hashable], AbstractContextManager[None]] | None = None
    """Context with the captured graphs of one lane; None without captured units."""
    waiting_steps: int = 0
    """Number of first steps of a program in which the host waits: those that compile or capture."""


def micro_batches_of(
    plan: Plan,
    model: Transformer,
    execute: Executor,
    mesh: Mesh,
    options: StageOptions,
    open_channels: OpenChannels = Channels,
) -> MicroBatches:
    """Return the runner of a run's micro-batches. A collective."""
    config, num_global = plan.config, plan.global_micro_batches
    if plan.pipeline is None:
        return OneAfterTheOther(model, execute, num_global, options.overlap)
    log.info(plan.pipeline.describe())
    assert config.data.seq_len is not None
    positions = config.data.seq_len // plan.layout.size("cp_tp")
    shape = config.train.micro_batch_size, positions, config.model.hidden_size
    message = Spec(shape, next(model.parameters()).dtype)
    return Pipelined(plan.pipeline, model, execute, mesh, message, num_global, options, open_channels)


class Pipelined:
    """`MicroBatches` by the schedule of a plan. Making one is collective."""

    def __init__(
        self,
        plan: PipelinePlan,
        model: Transformer,
        execute: Executor,
        mesh: Mesh,
        message: Spec,
        num_global: int,
        options: StageOptions,
        open_channels: OpenChannels = Channels,
    ) -> None:
        """``message`` is a hidden state of a micro-batch.

        ``num_global`` is how many micro-batches all ranks together have in a step.
        """
        self.model, self.execute, self.num_global = model, execute, num_global
        self.device = next(model.parameters()).device
        self.overlap = options.overlap
        self._waiting_steps = options.waiting_steps
        self._num_run: Counter[tuple[bool, Dispatcher | None]] = Counter()
        """Steps and validations run so far, of each program."""
        self._batches: list[Tensor] = []
        self._add: Add | None = None
        place = mesh.index("pp")
        self.stages = plan.own_stages(place)
        self._lane = options.lane
        self._lanes = lanes_of(plan.table, place)
        counts = carried_counts(plan.stages)
        runs = {
            number: OverlappedStage(
                functools.partial(self._run, number),
                (message,) * counts[number],
                (message,) * counts[number + 1],
                options.deferring if SCHEDULES[plan.table.schedule].splits_backward else None,
                self._overlap_in_use,
            )
            for number in self.stages
        }
        self.channels = open_channels(channels_of(plan.table), mesh.layout.groups("pp"), self.device)
        from graphmoe.runtime.pipeline.engine import Pipeline  # imports Dynamo, by torch's own schedules

        self.pipeline = Pipeline(plan.table, place, runs, self.channels, copies=self._lane is not None)

    def train(self, batches: Iterable[Tensor], add: Add) -> None:
        """Train on the same batches as all ranks along pp."""
        self._begin(batches, add, self._waiting_steps)
        self.pipeline.train()
        if self.overlap:
            self.overlap.finish()

    def evaluate(self, batches: Sequence[Tensor], add: Add) -> None:
        self._begin(batches, add, 1)
        self.pipeline.evaluate(len(batches))

    def _overlap_in_use(self) -> Overlap | None:
        return overlap_in_use(self.overlap, self.model)

    def _begin(self, batches: Iterable[Tensor], add: Add, waiting: int) -> None:
        """Take the batches; the first ``waiting`` times of each program compile or capture."""
        self._batches = [tokens.to(self.device, non_blocking=True) for tokens in batches]
        self._add = add
        program = torch.is_grad_enabled(), self.model.dispatcher  # each rung of a ladder has its own
        self.channels.by_host = self._num_run[program] < waiting
        if waiting and self.channels.has_nccl and not self._num_run[program]:
            what = "steps" if program[0] else "validations"
            log.info("%d first %s: messages go through the memory of the hosts, slowly", waiting, what)
        self._num_run[program] += 1

    def _run(
        self, number: int, micro_batch: int, received: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Run a stage: hidden states for the next one, and the term of the loss."""
        assert self._add is not None
        pieces, tokens = self.stages[number], self._batches[micro_batch]
        with self._on_lane(number, micro_batch):
            output = self.model.stage(pieces, received, tokens[:, :-1], tokens[:, 1:], self.execute)
        self._add(pieces, output)
        return output.carried, output.total / self.num_global

    def _on_lane(self, number: int, micro_batch: int) -> AbstractContextManager[None]:
        if self._lane is None or not torch.is_grad_enabled():
            return nullcontext()
        return self._lane((number, self._lanes[number, micro_batch]))


def carried_counts(stages: Sequence[StagePieces]) -> list[int]:
    """Return the number of hidden states that each stage is given, and 0 behind the last.

    One, and one more for each later token that stages before it have predicted from.
    """
    counts = [0]
    for stage in stages[:-1]:
        counts.append(1 + stage.mtp.stop)
    return [*counts, 0]
