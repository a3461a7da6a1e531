"""Forward and backward of a step's micro-batches, on one rank or along a pipeline."""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from graphmoe.model.transformer import LossOutput, Transformer
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.pipeline.transfers import channels_of
from graphmoe.plan.plan import Plan
from graphmoe.runtime.capture import Capture
from graphmoe.runtime.overlap import Overlap
from graphmoe.runtime.pipeline.channels import Channels, Spec
from graphmoe.runtime.pipeline.engine import Deferring, Pipeline, Stage, lanes_of
from graphmoe.runtime.ranks import Mesh
from graphmoe.segments import Executor

log = logging.getLogger(__name__)

# called with a stage's output, per stage in micro-batch order
Add = Callable[[StagePieces, LossOutput], None]
Lane = Callable[[Hashable], AbstractContextManager[None]]  # context of a micro-batch slot's captured graphs


class MicroBatches:
    """Runs micro-batches without a pipeline; with overlap, a backward interleaves with the next forward."""

    def __init__(
        self, plan: Plan, model: Transformer, execute: Executor, overlap: Overlap | None, lane: Lane | None
    ) -> None:
        self.model, self.execute, self.num_global = model, execute, plan.global_micro_batches
        self.overlap, self._lane = overlap, lane
        self.device = next(model.parameters()).device
        self._weights: Tensor | None = None  # of the step's losses

    def train(self, batches: Iterable[Tensor], add: Add, weights: Tensor | None = None) -> None:
        """Run forward and backward of token ids [micro_batch_size, seq_len + 1] each.

        Gradients are means over micro-batches of all ranks; ``weights`` [micro-batches, 1 + mtp_depth]
        multiply their cross-entropies. Syncs only if the dispatcher does.
        """
        self._weights = weights
        if (overlap := self._overlap_in_use()) is None:
            for number, tokens in enumerate(batches):
                self._loss(tokens, add, number).backward()
            return

        def run(number: int, received: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
            return (), self._loss(tokens, add, number, number % 2)  # two are in flight

        stage, number = Stage(run, overlap=lambda: overlap), 0
        for number, tokens in enumerate(batches):  # noqa: B007  # ``run`` reads them
            if number:
                stage.together(number, (), stage, number - 1, (), weights=True)
            else:
                stage.forward(number, ())
        stage.backward(number, (), weights=True)

    def evaluate(self, batches: Sequence[Tensor], add: Add) -> None:
        for tokens in batches:
            self._forward(tokens, add, None)

    def _overlap_in_use(self) -> Overlap | None:
        dispatcher = self.model.dispatcher
        return self.overlap if dispatcher is not None and dispatcher.capacity is not None else None

    def _loss(self, tokens: Tensor, add: Add, number: int, slot: int = 0) -> Tensor:
        with self._lane(slot) if self._lane else nullcontext():
            return self._forward(tokens, add, self._weights_of(number)).total / self.num_global

    def _weights_of(self, number: int) -> Tensor | None:
        return None if self._weights is None else self._weights[number]

    def _forward(self, tokens: Tensor, add: Add, weights: Tensor | None) -> LossOutput:
        tokens = tokens.to(self.device, non_blocking=True)
        output = self.model.loss(tokens[:, :-1], tokens[:, 1:], self.execute, weights)
        add(self.model.stages[0], output)
        return output


class Pipelined(MicroBatches):
    """Runs micro-batches by the plan's pipeline schedule. Collective construction."""

    def __init__(
        self,
        plan: Plan,
        model: Transformer,
        execute: Executor,
        mesh: Mesh,
        overlap: Overlap | None,
        lane: Lane | None,
        deferring: Deferring | None,
        capture: Capture | None,
        open_channels: Callable[..., Channels],
    ) -> None:
        super().__init__(plan, model, execute, overlap, lane)
        pipeline = plan.pipeline
        assert pipeline is not None
        log.info(pipeline.describe())
        # compiling or capturing steps per program, whose messages pass through the host
        self._waiting_steps = 1 if capture is None else capture.warmup_steps + (not plan.captures_step)
        # steps and validations so far, by program
        self._num_run: Counter[tuple[bool, tuple[Dispatcher, ...]]] = Counter()
        self._batches: list[Tensor] = []
        self._add: Add | None = None
        table, place = pipeline.table, mesh.index("pp")
        self.stages = {number: pipeline.stages[number] for number in plan.stage_numbers(place)}
        self._lanes = lanes_of(table, place)
        runs = self._runs(plan, next(model.parameters()).dtype, deferring if plan.splits_backward else None)
        self.channels = open_channels(channels_of(table), mesh.layout.groups("pp"), self.device)
        self.pipeline = Pipeline(table, place, runs, self.channels, copies=self._lane is not None)

    def _runs(self, plan: Plan, dtype: torch.dtype, deferring: Deferring | None) -> dict[int, Stage]:
        pipeline = plan.pipeline
        assert pipeline is not None
        positions = plan.seq_len // plan.layout.size("cp_tp")
        message = Spec((plan.train.micro_batch_size, positions, plan.model.hidden_size), dtype)
        # A stage receives a hidden state, and one more for each MTP depth of the stages before it.
        counts = [0, *(1 + stage.mtp.stop for stage in pipeline.stages[:-1]), 0]
        return {
            number: Stage(
                functools.partial(self._run, number),
                (message,) * counts[number],
                (message,) * counts[number + 1],
                deferring,
                self._overlap_in_use,
            )
            for number in self.stages
        }

    def train(self, batches: Iterable[Tensor], add: Add, weights: Tensor | None = None) -> None:
        self._begin(batches, add, self._waiting_steps, weights)
        self.pipeline.train()
        if self.overlap:
            self.overlap.settle()

    def evaluate(self, batches: Sequence[Tensor], add: Add) -> None:
        self._begin(batches, add, 1)
        self.pipeline.evaluate(len(batches))

    def _begin(
        self, batches: Iterable[Tensor], add: Add, waiting: int, weights: Tensor | None = None
    ) -> None:
        self._batches = [tokens.to(self.device, non_blocking=True) for tokens in batches]
        self._add, self._weights = add, weights
        program = torch.is_grad_enabled(), self.model.dispatchers  # each program of a ReceiveLadder differs
        self.channels.by_host = self._num_run[program] < waiting
        if waiting and self.channels.has_nccl and not self._num_run[program]:
            what = "steps" if program[0] else "validations"
            log.info(
                "the first %d %s send tensors between stages through host memory, which is slow",
                waiting,
                what,
            )
        self._num_run[program] += 1

    def _run(
        self, number: int, micro_batch: int, received: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        assert self._add is not None
        pieces, tokens = self.stages[number], self._batches[micro_batch]
        in_lane = self._lane if torch.is_grad_enabled() else None
        with in_lane((number, self._lanes[number, micro_batch])) if in_lane else nullcontext():
            given = tokens[:, :-1], tokens[:, 1:], self.execute, self._weights_of(micro_batch)
            output = self.model.stage(pieces, received, *given)
        self._add(pieces, output)
        return output.carried, output.total / self.num_global


def micro_batches_of(
    plan: Plan,
    model: Transformer,
    execute: Executor,
    mesh: Mesh,
    *,
    overlap: Overlap | None = None,
    lane: Lane | None = None,
    deferring: Deferring | None = None,
    capture: Capture | None = None,
    open_channels: Callable[..., Channels] = Channels,
) -> MicroBatches:
    """Return the runner of micro-batches. Collective. ``deferring``: context that defers wgrad."""
    if plan.pipeline is None:
        return MicroBatches(plan, model, execute, overlap, lane)
    return Pipelined(plan, model, execute, mesh, overlap, lane, deferring, capture, open_channels)


def rooms_of(dispatchers: Sequence[Dispatcher], device: torch.device) -> Tensor:
    """Return receive capacities of dispatchers, int32 [L, 2]. Syncs the device."""
    return torch.tensor([each.capacity for each in dispatchers], dtype=torch.int32, device=device)
