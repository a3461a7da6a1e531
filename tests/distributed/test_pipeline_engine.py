"""A pipeline of ranks finds what one process finds, and keeps what its table promises.

Its stages are those of a toy model. B rows, D width.
"""

import functools
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import profile

from graphmoe.plan.pipeline import Action, Placement, Table
from graphmoe.plan.pipeline.check import peak_activations
from graphmoe.plan.pipeline.schedules import SCHEDULES, make_table
from graphmoe.plan.pipeline.schedules.one_f_one_b import forward_only
from graphmoe.plan.pipeline.simulate import Costs
from graphmoe.plan.pipeline.transfers import channels_of
from graphmoe.runtime.pipeline.channels import Channels, Spec
from graphmoe.runtime.pipeline.engine import Pipeline, Stage
from tests.distributed.ranks import run_ranks

B, D = 3, 6
MESSAGE = (Spec((B, D), torch.float64), Spec((B,), torch.float64))


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

    def __init__(self, stage, num_stages):
        generator = torch.Generator().manual_seed(stage)
        self.w_DD = torch.randn(D, D, generator=generator, dtype=torch.float64)
        self.gradient_DD = torch.zeros_like(self.w_DD)
        self.bias_D = torch.randn(D, generator=generator, dtype=torch.float64).requires_grad_()
        self.stage, self.is_last = stage, stage == num_stages - 1
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
        sent = h_BD, received[1].clone() + x_BD.sum(1)
        if self.is_last:
            loss, sent = loss + sum(tensor.sum() for tensor in sent), ()
        self.losses[micro_batch] = loss.item()
        return sent, loss

    def found(self):
        return self.losses, self.gradient_DD, self.bias_D.grad


class Watched:
    """Stage that notes for each action how many micro-batches the rank keeps then, and whether W has run."""

    def __init__(self, part, parts, log, case):
        self.received, self.sent = MESSAGE if part.stage else (), () if part.is_last else MESSAGE
        self._stage = Stage(part, self.received, self.sent, part.deferring if case.defers else None)
        self._part, self._parts, self._log, self._fails = part, parts, log, case.fails

    def forward(self, micro_batch, received):
        with self._noted("F", micro_batch):
            return self._stage.forward(micro_batch, received)

    def backward(self, micro_batch, gradients, *, weights):
        with self._noted("B" if weights else "I", micro_batch):
            return self._stage.backward(micro_batch, gradients, weights=weights)

    def backward_weights(self, micro_batch):
        with self._noted("W", micro_batch):
            self._stage.backward_weights(micro_batch)

    _units = ()
    together = Stage.together

    @contextmanager
    def _noted(self, kind, micro_batch):
        if self._fails == (kind, self._part.stage, micro_batch):
            raise ValueError(f"{Action(*self._fails)} has failed")
        before = self._part.gradient_DD.clone()
        yield
        kept = sum(len(part.tokens) for part in self._parts)
        ran = not torch.equal(before, self._part.gradient_DD)
        self._log.append((kind, self._part.stage, micro_batch, kept, ran))


def in_one_process(num_stages, num_micro_batches, steps):
    parts = [Part(stage, num_stages) for stage in range(num_stages)]
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
    pipelines: tuple[tuple[int, ...], ...]  # ranks of each
    defers: bool = False
    evaluates: int = 0  # micro-batches, instead
    fails: tuple[str, int, int] | None = None

    def place(self, rank):
        return next(ranks.index(rank) for ranks in self.pipelines if rank in ranks)

    def run(self, place, channels):
        placement, log = self.table.placement, []
        parts = [Part(s, placement.num_stages) for s in placement.stages_of(place)]
        stages = {part.stage: Watched(part, parts, log, self) for part in parts}
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


def run_all(cases, ranks, folder):
    """Run cases; those with the same channels share them, which take longer than a case."""
    opened, found = {}, {}
    for name, case in cases.items():
        needed = tuple(channels_of(case.table)), case.pipelines
        if needed not in opened:
            opened[needed] = Channels(*needed, torch.device("cpu"))
        found[name] = case.run(case.place(ranks.rank), opened[needed])
    return found


VARIANTS = [(name, schedule.virtual_stages[0]) for name, schedule in SCHEDULES.items()]
VARIANTS += [("interleaved", 3)]
SPLIT = ("zb1p", "zbv", "dualpipe_v", "v_half", "v_min")
MICRO_BATCHES = {2: (1, 2, 5), 4: (2, 5)}


def cases_of(num_ranks):
    found = {}
    of_all = functools.partial(Case, pipelines=(tuple(range(num_ranks)),))
    for number in MICRO_BATCHES[num_ranks]:
        for name, virtual in VARIANTS:
            table = make_table(name, num_ranks, number, virtual)
            found[f"{name} {virtual} of {number}"] = of_all(table, defers=name in SPLIT)
        for name, virtual in (("1f1b", 1), ("interleaved", 2), ("zb1p", 1), ("zbv", 2)):
            table = make_table(name, num_ranks, number, virtual, overlap=True)
            found[f"{name} together of {number}"] = of_all(table, defers=name in SPLIT)
    for name in ("1f1b", "interleaved", "zbv"):
        table = make_table(name, num_ranks, 5)
        found[f"{name}, W not put off"] = of_all(table)
        found |= {f"{name}, evaluates {many}": of_all(table, evaluates=many) for many in (1, 6)}
    short = Costs.of_rank(Placement.folded(num_ranks), 1, 2.3, 0.3, comm=0.02)
    for name in ("zbv", "v_half", "v_min"):
        table = make_table(name, num_ranks, 5, costs=short)
        found[f"{name}, short weight gradients"] = of_all(table, defers=True)
    if num_ranks == 4:
        for name in ("1f1b", "zbv"):
            table = make_table(name, 2, 3)
            found[f"two of {name}"] = Case(table, defers=name in SPLIT, pipelines=((0, 2), (3, 1)))
    return found


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 4])
def runs(request, tmp_path_factory):
    cases = cases_of(request.param)
    run = functools.partial(run_all, cases)
    of_ranks = run_ranks(tmp_path_factory.mktemp("ranks"), {"all": run}, request.param)["all"]
    return {name: (case, [of_rank[name] for of_rank in of_ranks]) for name, case in cases.items()}


def test_losses_and_gradients_are_those_of_one_process(runs):
    for name, (case, results) in runs.items():
        number, steps = (case.evaluates, 1) if case.evaluates else (case.table.num_micro_batches, 2)
        expected = in_one_process(case.table.placement.num_stages, number, steps)
        for stage, (losses, *gradients) in [each for stages, _ in results for each in stages.items()]:
            wanted_losses, *wanted = expected[stage]
            assert losses == wanted_losses, name
            if case.evaluates:
                assert not gradients[0].any() and gradients[1] is None, name
            else:
                same = (torch.equal(*pair) for pair in zip(gradients, wanted, strict=True))
                assert all(same), (name, stage)


def test_each_rank_does_what_its_table_says_and_keeps_no_more(runs):
    for name, (case, results) in runs.items():
        table = forward_only(case.table.placement, case.evaluates) if case.evaluates else case.table
        for rank, (_, log) in enumerate(results):
            place = case.place(rank)
            assert [entry[:3] for entry in log] == table.actions(place), name
            ends = "F" if case.evaluates else "BI" if name.endswith("not put off") else "BW"
            expected = kept = peak = 0
            for kind, _, _, kept, _ in log:
                expected += (kind == "F") - (kind in ends)
                assert kept == expected, name
                peak = max(peak, kept)
            if not case.evaluates and not name.endswith("not put off"):
                share = len(table.placement.stages_of(place))
                assert peak == peak_activations(table)[place] * share, name


def test_weight_gradients_are_made_in_w_and_not_before(runs):
    for name, (case, results) in runs.items():
        for _, log in results:
            ran = {kind: {added for k, *_, added in log if k == kind} for kind, *_ in log}
            assert ran == {kind: {kind in ("BW" if case.defers else "BI")} for kind in ran}, name


def test_an_error_of_a_stage_ends_the_run_there(tmp_path):
    case = Case(make_table("1f1b", 2, 3), pipelines=((0, 1),), fails=("B", 1, 1))
    said = r"rank 1: (.|\n)*: 1B1 has failed\nin 1B1 of the pipeline's rank 1"
    with pytest.raises(AssertionError, match=said):
        run_ranks(tmp_path, {"all": functools.partial(run_all, {"fails": case})}, 2)


def test_each_step_is_a_range_of_a_profile():
    table = make_table("gpipe", 1, 2)
    alone = SimpleNamespace(release=lambda messages: None, finish=lambda: None)
    with profile() as profiled:
        Pipeline(table, 0, {0: Stage(lambda number, received: ((), torch.ones(())))}, alone).train()
    names = [event.name for event in profiled.events() if event.name.startswith("PP:")]
    assert names == [f"PP:{step}" for step in table.ranks[0]] and "PP:0F1" in names
