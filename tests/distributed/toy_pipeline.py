"""A toy model in stages, and cases that run it through a pipeline or in one process. B rows, D width."""

import functools
import weakref
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from graphmoe.plan.pipeline import Action, Table
from graphmoe.plan.pipeline.transfers import channels_of
from graphmoe.runtime.pipeline.channels import Channels, Spec
from graphmoe.runtime.pipeline.engine import Pipeline, Stage

B, D = 3, 6
MESSAGE = (Spec((B, D), torch.float64),)
WITH_SUMS = (*MESSAGE, Spec((B,), torch.float64))


class Token:
    """Object that lives as long as the tensors that a backward needs."""


class Product(torch.autograd.Function):
    """x @ w, whose W is put off if a list for it was there in the forward."""

    @staticmethod
    def forward(ctx, x_BD, part, token):
        ctx.part, ctx.token, ctx.later = part, token, part.later
        ctx.save_for_backward(x_BD)
        return x_BD @ part.w_DD

    @staticmethod
    def backward(ctx, of_output_BD):
        w = functools.partial(ctx.part.add, ctx.saved_tensors[0], of_output_BD, ctx.token)
        w() if ctx.later is None else ctx.later.append(w)
        return of_output_BD @ ctx.part.w_DD.T, None, None


class Part:
    """The layers of one stage: a product, tanh, and an addend to the loss."""

    def __init__(self, stage, num_stages, sums):
        generator = torch.Generator().manual_seed(stage)
        self.w_DD = torch.randn(D, D, generator=generator, dtype=torch.float64)
        self.gradient_DD = torch.zeros_like(self.w_DD)
        self.bias_D = torch.randn(D, generator=generator, dtype=torch.float64).requires_grad_()
        self.stage, self.num_stages, self.sums = stage, num_stages, sums
        self.later, self.tokens, self.losses = None, weakref.WeakSet(), {}

    def add(self, x_BD, of_output_BD, token):
        self.gradient_DD += x_BD.T @ of_output_BD

    @contextmanager
    def deferring(self, later):
        self.later = later
        yield
        self.later = None

    def __call__(self, micro_batch, received):
        data = torch.Generator().manual_seed(1000 + micro_batch)
        if not self.stage:
            x_BD = torch.randn(B, D, generator=data, dtype=torch.float64, requires_grad=True)
            received = (x_BD, torch.zeros(B).double())
        x_BD, token = received[0].clone(), Token()
        h_BD = torch.tanh(Product.apply(x_BD, self, token) + self.bias_D)
        self.tokens.add(token)
        loss = (1 + micro_batch) * h_BD.square().mean()
        sent = (h_BD, received[1].clone() + x_BD.sum(1)) if self.sums else (h_BD,)
        if self.stage == self.num_stages - 1:
            loss, sent = loss + sum(tensor.sum() for tensor in sent), ()
        self.losses[micro_batch] = loss.item()
        return sent, loss

    def found(self):
        return self.losses, self.gradient_DD, self.bias_D.grad


class Watched:
    """Stage that notes for each action how many micro-batches the rank keeps then, and whether W has run."""

    def __init__(self, stage, part, parts, log, fails=None):
        self._stage, self._part, self._parts, self._log, self._fails = stage, part, parts, log, fails
        self.received, self.sent, self._units = stage.received, stage.sent, stage._units

    def forward(self, micro_batch, received):
        with self._noted("F", micro_batch):
            return self._stage.forward(micro_batch, received)

    def backward(self, micro_batch, gradients, *, weights):
        with self._noted("B" if weights else "I", micro_batch):
            return self._stage.backward(micro_batch, gradients, weights=weights)

    def backward_weights(self, micro_batch):
        with self._noted("W", micro_batch):
            self._stage.backward_weights(micro_batch)

    def together(self, *given):
        return type(self._stage).together(self, *given)

    @contextmanager
    def _noted(self, kind, micro_batch):
        if self._fails == (kind, self._part.stage, micro_batch):
            raise ValueError(f"{Action(*self._fails)} has failed")
        before = self._part.gradient_DD.clone()
        yield
        kept = sum(len(part.tokens) for part in self._parts)
        ran = not torch.equal(before, self._part.gradient_DD)
        self._log.append((kind, self._part.stage, micro_batch, kept, ran))


def stage_of(part, *, defers=False):
    message = WITH_SUMS if part.sums else MESSAGE
    received = message if part.stage else ()
    sent = message if part.stage < part.num_stages - 1 else ()
    return Stage(part, received, sent, part.deferring if defers else None)


def in_one_process(num_stages, num_micro_batches, sums=False, steps=1):
    parts = [Part(stage, num_stages, sums) for stage in range(num_stages)]
    for micro_batch in steps * list(range(num_micro_batches)):
        sent, losses = (), []
        for part in parts:
            sent, loss = part(micro_batch, sent)
            losses.append(loss)
        torch.autograd.backward(losses)
    return [part.found() for part in parts]


@dataclass(frozen=True)
class Case:
    """Case that trains a step twice, as a pipeline; each rank returns its stages' findings and its log."""

    table: Table
    pipelines: tuple[tuple[int, ...], ...]
    """Ranks of each pipeline."""
    defers: bool = False
    sums: bool = False
    evaluates: int = 0
    """Micro-batches that are evaluated instead."""
    fails: tuple[str, int, int] | None = None

    def place(self, rank):
        return next(ranks.index(rank) for ranks in self.pipelines if rank in ranks)

    def run(self, place, channels):
        placement, log = self.table.placement, []
        parts = [Part(s, placement.num_stages, self.sums) for s in placement.stages_of(place)]
        stages = {
            part.stage: Watched(stage_of(part, defers=self.defers), part, parts, log, self.fails)
            for part in parts
        }
        pipeline = Pipeline(self.table, place, stages, channels)
        if self.evaluates:
            with torch.no_grad():
                pipeline.evaluate(self.evaluates)
        else:
            pipeline.train()
            first = list(log)
            pipeline.train()
            assert log[len(first) :] == first
            log = first
        return {part.stage: part.found() for part in parts}, log


@dataclass(frozen=True)
class Cases:
    """Cases one after the other; those with the same channels share them, which take longer than a case."""

    cases: dict[str, Case]

    def __call__(self, ranks, folder):
        opened, found = {}, {}
        for name, case in self.cases.items():
            needed = tuple(channels_of(case.table)), case.pipelines
            if needed not in opened:
                opened[needed] = Channels(*needed, torch.device("cpu"))
            found[name] = case.run(case.place(ranks.rank), opened[needed])
        return found
