"""Pipeline engine: runs one rank's part of a schedule table with its stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from graphmoe.ops.gradients import PendingWeightGrads
from graphmoe.plan.pipeline import Action, Step, Table, Together, parts
from graphmoe.plan.pipeline.check import check, needs, result
from graphmoe.plan.pipeline.schedules.one_f_one_b import forward_only
from graphmoe.plan.pipeline.simulate import Track
from graphmoe.plan.pipeline.transfers import Message, Transfers, transfers_of
from graphmoe.runtime.overlap import Backward, OrderedUnit, Overlap, Tape
from graphmoe.runtime.pipeline.channels import Arrival, Channels, Specs, specs_of
from graphmoe.runtime.pipeline.recorder import StepRecorder

Tensors = tuple[Tensor, ...]
# context whose forwards append wgrad to the list
Deferring = Callable[[PendingWeightGrads], AbstractContextManager[object]]
Run = Callable[[int, Tensors], tuple[Tensors, Tensor | None]]
"""(micro-batch, received) -> (sent, addend of the loss, if any)."""


@dataclass
class _Kept:
    received: Tensors  # leaves of autograd's graph; none if an Overlap ran the forward
    # edges instead of tensors, which are free after the send; None: no gradient
    sent: list[GradientEdge | None]
    loss: Tensor | None
    later: PendingWeightGrads
    tape: Tape | None

    def roots(self, gradients: Tensors) -> tuple[list[Tensor | GradientEdge], list[Tensor | None]]:
        pairs = zip(self.sent, gradients, strict=True)
        roots: list[tuple[Tensor | GradientEdge, Tensor | None]] = [(e, g) for e, g in pairs if e is not None]
        if self.loss is not None:
            roots.append((self.loss, None))
        return [root for root, _ in roots], [gradient for _, gradient in roots]

    def started(self, tape: Tape, gradients: Tensors, *, weights: bool) -> Backward:
        tape.start(*self.roots(gradients))
        return Backward(tape, None if weights else self.later)


class Stage:
    """Part of the model; its backward is one autograd call, or interleaved by an `Overlap`. No sync."""

    def __init__(
        self,
        run: Run,
        received: Specs = (),
        sent: Specs = (),
        deferring: Deferring | None = None,
        overlap: Callable[[], Overlap | None] = lambda: None,
    ) -> None:
        """``deferring``: context that defers wgrad, for schedules that separate it from dgrad."""
        self.received, self.sent = received, sent
        # overlap is called at each forward; its answer must not change within a step
        self._run, self._overlap = run, overlap
        self._deferring: Deferring = deferring or nullcontext
        self._kept: dict[int, _Kept] = {}
        self._later: dict[int, PendingWeightGrads] = {}
        self._units: Sequence[OrderedUnit] = ()  # of the last forward that an Overlap ran

    @property
    def kept(self) -> set[int]:
        return {*self._kept, *self._later}

    def forward(self, micro_batch: int, received: Tensors, beside: Backward | None = None) -> Tensors:
        """Run a forward, interleaved with the backward ``beside``; return the tensors for the next stage."""
        if not torch.is_grad_enabled():
            return self._run(micro_batch, received)[0]
        assert micro_batch not in self.kept, f"micro-batch {micro_batch} is still saved"
        overlap, later, tape = self._overlap(), PendingWeightGrads(), None
        if overlap is None:
            leaves = tuple(tensor.detach().requires_grad_() for tensor in received)
            with self._deferring(later):
                sent, loss = self._run(micro_batch, leaves)
        else:
            leaves, of_step = (), overlap
            (sent, loss), tape = overlap.record(
                lambda: self._run(micro_batch, of_step.receive(received)), beside, self._units
            )
            self._units = tape.units
            if sent or received:  # a transfer may have made what is sent, also by the backward
                overlap.settle()
        edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in sent]
        loss = loss if loss is not None and loss.requires_grad else None
        self._kept[micro_batch] = _Kept(leaves, edges, loss, later, tape)
        return tuple(tensor.detach() for tensor in sent)

    def backward(self, micro_batch: int, gradients: Tensors, *, weights: bool) -> Tensors:
        """Return gradients of received tensors. Without ``weights``, wgrad is deferred."""
        kept = self._kept.pop(micro_batch)
        if kept.tape is not None:
            overlap = self._overlap()
            assert overlap is not None
            overlap.run_backward(kept.started(kept.tape, gradients, weights=weights))
            overlap.settle()
            self._keep(micro_batch, kept.later, weights=weights)
            return kept.tape.gradients_of_received()
        roots, values = kept.roots(gradients)
        if roots:
            torch.autograd.backward(roots, values)  # type: ignore[arg-type]
        self._keep(micro_batch, kept.later, weights=weights)
        return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in kept.received)

    def together(
        self, micro_batch: int, received: Tensors, other: Stage, other_micro_batch: int, gradients: Tensors,
        *, weights: bool,
    ) -> tuple[Tensors, Tensors]:  # fmt: skip
        """Run ``forward`` interleaved with another micro-batch's ``backward``; return the results of both."""
        kept = other._kept[other_micro_batch] if self._units else None
        if kept is None or kept.tape is None:
            sent = self.forward(micro_batch, received)
            return sent, other.backward(other_micro_batch, gradients, weights=weights)
        del other._kept[other_micro_batch]
        sent = self.forward(micro_batch, received, kept.started(kept.tape, gradients, weights=weights))
        other._keep(other_micro_batch, kept.later, weights=weights)
        return sent, kept.tape.gradients_of_received()

    def _keep(self, micro_batch: int, later: PendingWeightGrads, *, weights: bool) -> None:
        self._later[micro_batch] = later
        if weights:
            self.backward_weights(micro_batch)

    def backward_weights(self, micro_batch: int) -> None:
        """Run the wgrad that ``backward`` deferred."""
        later = self._later.pop(micro_batch)
        while later:
            later.pop(0)()  # frees what each wgrad has read


class Pipeline:
    """One rank of a pipeline. With NCCL the host never waits, so a step can be captured."""

    def __init__(
        self,
        table: Table,
        rank: int,
        stages: Mapping[int, Stage],
        channels: Channels,
        *,
        copies: bool = False,
    ) -> None:
        """``rank``: position along pp; ``copies``: results are copied, since a replay may overwrite them."""
        check(table)
        assert tuple(sorted(stages)) == table.placement.stages_of(rank)
        self.recorder: StepRecorder | None = None  # may be set between steps
        self._table, self._rank, self._stages, self._channels = table, rank, stages, channels
        self._copies = copies
        self._arriving: dict[Action, Arrival] = {}
        self._handed: dict[Action, Tensors] = {}  # results for another stage of this rank
        self._training = table, transfers_of(table, rank)
        self._evaluating: dict[int, tuple[Table, Transfers]] = {}
        self._transfers = self._training[1]
        self._recording: StepRecorder | None = None

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
            pair = forward.micro_batch, inputs[0], other, backward.micro_batch, inputs[1]
            results = stage.together(*pair, weights=backward.kind == "B")
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
        assert specs_of(results) == promised, f"{action} returned {specs_of(results)}, not {promised}"
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


Lanes = dict[tuple[int, int], int]  # micro-batch slot, from 0, by stage and micro-batch


def lanes_of(table: Table, rank: int) -> Lanes:
    """Return for each forward the lowest free micro-batch slot of its stage."""
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
