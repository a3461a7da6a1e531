"""Micro-batches of a step: through a model that is whole on its rank, or through its stages."""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.model.transformer import LossOutput, Transformer
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.plan.pipeline.schedules import schedule_of
from graphmoe.plan.pipeline.transfers import Channel, channels_of
from graphmoe.plan.plan import Plan
from graphmoe.runtime.overlap.runner import Overlap
from graphmoe.runtime.pipeline.channels import Channels, Spec
from graphmoe.runtime.pipeline.engine import Pipeline, lanes_of
from graphmoe.runtime.pipeline.stages import Deferring, Stage
from graphmoe.runtime.ranks import Mesh
from graphmoe.segments import Executor
from graphmoe.training.step import Add, MicroBatches

log = logging.getLogger(__name__)

OpenChannels = Callable[[Iterable[Channel], Sequence[Sequence[int]], torch.device], Channels]


class StageOptions(NamedTuple):
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
    if plan.pipeline is None:
        return OneAfterTheOther(model, execute, plan.global_micro_batches, options)
    return Pipelined(plan, model, execute, mesh, options, open_channels)


class OneAfterTheOther:
    """`MicroBatches` of a model that is whole; with overlap the backward of one beside the next's forward."""

    def __init__(self, model: Transformer, execute: Executor, num_global: int, options: StageOptions) -> None:
        """``num_global`` is the number of micro-batches of all ranks in a step."""
        self.model, self.execute, self.num_global = model, execute, num_global
        self.overlap, self._lane = options.overlap, options.lane
        self.device = next(model.parameters()).device
        (self.pieces,) = model.stages

    def train(self, batches: Iterable[Tensor], add: Add) -> None:
        overlap = _overlap_in_use(self.overlap, self.model)

        def run(number: int, received: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
            with self._lane(0) if self._lane else nullcontext():
                output = self._forward(tokens, add)
            return (), output.total / self.num_global

        stage, number = Stage(run, overlap=lambda: overlap), 0
        for number, tokens in enumerate(batches):  # noqa: B007  # ``run`` reads them
            if overlap and number:
                stage.together(number, (), stage, number - 1, ())
            else:
                stage.forward(number, ())
            if not overlap:
                stage.backward(number, (), weights=True)
        if overlap:
            stage.backward(number, (), weights=True)

    def evaluate(self, batches: Sequence[Tensor], add: Add) -> None:
        for tokens in batches:
            self._forward(tokens, add)

    def _forward(self, tokens: Tensor, add: Add) -> LossOutput:
        tokens = tokens.to(self.device, non_blocking=True)
        output = self.model.loss(tokens[:, :-1], tokens[:, 1:], self.execute)
        add(self.pieces, output)
        return output


class Pipelined:
    """`MicroBatches` by the schedule of a plan. Making one is collective."""

    def __init__(
        self,
        plan: Plan,
        model: Transformer,
        execute: Executor,
        mesh: Mesh,
        options: StageOptions,
        open_channels: OpenChannels = Channels,
    ) -> None:
        config, pipeline = plan.config, plan.pipeline
        assert pipeline is not None and config.data.seq_len is not None
        log.info(pipeline.describe())
        self.model, self.execute, self.num_global = model, execute, plan.global_micro_batches
        self.device = next(model.parameters()).device
        self.overlap, self._lane = options.overlap, options.lane
        self._waiting_steps = options.waiting_steps
        self._num_run: Counter[tuple[bool, Dispatcher | None]] = Counter()
        """Steps and validations run so far, of each program."""
        self._batches: list[Tensor] = []
        self._add: Add | None = None
        table, place = pipeline.table, mesh.index("pp")
        self.stages = {number: pipeline.stages[number] for number in plan.stage_numbers(place)}
        self._lanes = lanes_of(table, place)
        positions = config.data.seq_len // plan.layout.size("cp_tp")
        shape = config.train.micro_batch_size, positions, config.model.hidden_size
        message = Spec(shape, next(model.parameters()).dtype)
        # A stage is given a hidden state, and one more for each later token predicted from before it.
        counts = [0, *(1 + stage.mtp.stop for stage in pipeline.stages[:-1]), 0]
        splits = schedule_of(config.pipeline.schedule).splits_backward
        runs = {
            number: Stage(
                functools.partial(self._run, number),
                (message,) * counts[number],
                (message,) * counts[number + 1],
                options.deferring if splits else None,
                lambda: _overlap_in_use(self.overlap, self.model),
            )
            for number in self.stages
        }
        self.channels = open_channels(channels_of(table), mesh.layout.groups("pp"), self.device)
        self.pipeline = Pipeline(table, place, runs, self.channels, copies=self._lane is not None)

    def train(self, batches: Iterable[Tensor], add: Add) -> None:
        """Train on the same batches as all ranks along pp."""
        self._begin(batches, add, self._waiting_steps)
        self.pipeline.train()
        if self.overlap:
            self.overlap.settle()

    def evaluate(self, batches: Sequence[Tensor], add: Add) -> None:
        self._begin(batches, add, 1)
        self.pipeline.evaluate(len(batches))

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
        trains = self._lane is not None and torch.is_grad_enabled()
        lane = (
            self._lane((number, self._lanes[number, micro_batch])) if self._lane and trains else nullcontext()
        )
        with lane:
            output = self.model.stage(pieces, received, tokens[:, :-1], tokens[:, 1:], self.execute)
        self._add(pieces, output)
        return output.carried, output.total / self.num_global


def _overlap_in_use(overlap: Overlap | None, model: Transformer) -> Overlap | None:
    """Return the overlap, or None where the host counts arriving rows and would wait between units."""
    dispatcher = model.dispatcher
    return overlap if dispatcher is not None and dispatcher.capacity is not None else None
