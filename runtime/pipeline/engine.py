"""Pipeline: runs one rank of a table."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

from graphmoe.plan.pipeline.actions import Action, Step, Table, Together, parts
from graphmoe.plan.pipeline.check import check, needs, result
from graphmoe.plan.pipeline.schedules.one_f_one_b import forward_only
from graphmoe.plan.pipeline.simulate import Track
from graphmoe.plan.pipeline.transfers import Message, Transfers, transfers_of
from graphmoe.runtime.pipeline.channels import Arrival, Channels, Specs, specs_of
from graphmoe.runtime.pipeline.recorder import StepRecorder
from graphmoe.runtime.pipeline.stages import Stage, Tensors


class Pipeline:
    """One rank of a pipeline. With NCCL the host never waits, so a step can be captured."""

    def __init__(
        self,
        table: Table,
        rank: int,
        stages: Mapping[int, Stage],
        channels: Channels,
        recorder: StepRecorder | None = None,
        *,
        copies: bool = False,
    ) -> None:
        """``rank``: index in the pipeline; ``copies``: stages may overwrite results after their micro-batch.

        Raises `TableError` for a table that cannot run.
        """
        check(table)
        assert tuple(sorted(stages)) == table.placement.stages_of(rank)
        self.recorder = recorder  # may be exchanged between steps
        self._table, self._rank, self._stages, self._channels = table, rank, stages, channels
        self._copies = copies
        self._arriving: dict[Action, Arrival] = {}
        self._handed: dict[Action, Tensors] = {}  # results for another stage of this rank
        self._training = table, transfers_of(table, rank)
        self._evaluating: dict[int, tuple[Table, Transfers]] = {}
        self._transfers, self._recording = self._training[1], recorder

    def train(self) -> None:
        assert torch.is_grad_enabled()
        if self.recorder:
            self.recorder.start()
        self._do(*self._training, self.recorder)

    def evaluate(self, num_micro_batches: int) -> None:
        assert not torch.is_grad_enabled()
        if num_micro_batches not in self._evaluating:
            table = forward_only(self._table.placement, num_micro_batches)
            self._evaluating[num_micro_batches] = table, transfers_of(table, self._rank)
        self._do(*self._evaluating[num_micro_batches], None)

    def _do(self, table: Table, transfers: Transfers, recorder: StepRecorder | None) -> None:
        self._transfers, self._recording = transfers, recorder
        for step in table.ranks[self._rank]:
            try:
                with record_function(f"PP:{step}"):
                    self._run(step)
            except Exception as error:
                error.add_note(f"in {step} of the pipeline's rank {self._rank}")
                raise
        self._channels.finish()
        assert not self._arriving and not self._handed

    def _run(self, step: Step) -> None:
        for message in self._transfers.posts.get(step, ()):
            self._arriving[message.content] = self._channels.receive(message, self._specs(message))
        inputs = [self._inputs(action) for action in parts(step)]
        self._channels.release(self._transfers.over.get(step, ()))
        with self._recorded("compute", step):
            if not isinstance(step, Together):
                self._alone(step, inputs[0])
                return
            forward, backward = step
            stage, other = self._stages[forward.stage], self._stages[backward.stage]
            results = stage.together(forward.micro_batch, inputs[0], other, backward.micro_batch, inputs[1])
            for action, made in zip(step, results, strict=True):  # the order in which the next rank receives
                self._deliver(action, made)

    def _alone(self, action: Action, inputs: Tensors) -> None:
        stage = self._stages[action.stage]
        if action.kind == "W":
            stage.backward_weights(action.micro_batch)
        elif action.kind == "F":
            self._deliver(action, stage.forward(action.micro_batch, inputs))
        else:
            self._deliver(action, stage.backward(action.micro_batch, inputs, weights=action.kind == "B"))

    def _inputs(self, action: Action) -> Tensors:
        of_others = [n for n in needs(action, self._table.placement.num_stages) if n.stage != action.stage]
        if not of_others:
            return ()
        if of_others[0] in self._handed:
            return self._handed.pop(of_others[0])
        with self._recorded("comm", action):
            return self._arriving.pop(of_others[0])()

    def _deliver(self, action: Action, results: Tensors) -> None:
        content, stage = result(action), self._stages[action.stage]
        promised = stage.sent if action.kind == "F" else stage.received
        assert specs_of(results) == promised, f"{action} made {specs_of(results)}, {promised} was said"
        if self._copies and torch.is_grad_enabled():
            results = tuple(tensor.clone() for tensor in results)
        reader = action.stage + (1 if action.kind == "F" else -1)
        if content in self._transfers.sends:
            self._channels.send(self._transfers.sends[content], results)
        elif reader in self._stages:
            self._handed[content] = results

    def _specs(self, message: Message) -> Specs:
        kind, stage, _ = message.content
        return self._stages[stage + 1].received if kind == "F" else self._stages[stage - 1].sent

    def _recorded(self, track: Track, step: Step) -> AbstractContextManager[None]:
        return self._recording.span(track, step) if self._recording else nullcontext()


Lanes = dict[tuple[int, int], int]
"""Micro-batch slot, from 0, by stage and micro-batch."""


def lanes_of(table: Table, rank: int) -> Lanes:
    """Return the lowest free slot of its stage for each forward."""
    steps = [parts(step) for step in table.ranks[rank]]
    last = {(a.stage, a.micro_batch): time for time, actions in enumerate(steps) for a in actions}
    found: Lanes = {}
    free_from: dict[int, list[int]] = {}
    for time, actions in enumerate(steps):
        for kind, stage, micro_batch in actions:
            if kind != "F":
                continue
            times = free_from.setdefault(stage, [])
            lane = next((lane for lane, since in enumerate(times) if since <= time), len(times))
            if lane == len(times):
                times.append(0)
            # free after the last part of the backward; a step's first micro-batch has slot 0
            times[lane] = last[stage, micro_batch] + 1
            found[stage, micro_batch] = lane
    return found
