"""Lanes: graphs of several micro-batches in flight, I and W apart or not, are bitwise the compiled units.

Memory that graphs share is simulated at its worst: each replay spoils all results that its pool has made
since, and every buffer that is filled for one replay only.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from graphmoe.ops.gradients import Gradient, PendingWeightGrads
from graphmoe.passes import PASSES
from graphmoe.passes.base import PassRunner
from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.capture import Capture
from graphmoe.runtime.compile.captured_units import UnitCapture
from graphmoe.runtime.compile.code import UnitCode
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.overlap import Backward, Overlap
from graphmoe.segments import Segment
from tests.runs import slow_but

CPU, IDS = torch.device("cpu"), torch.arange(3)
pytestmark = pytest.mark.usefixtures("unmeasured", "graphs_as_they_are")
SPLIT = [spec for spec in PASSES if spec.name == "split_backward"]
ALL = ("embed", "attn", "moe_preprocess", "moe_dispatch", "moe_experts", "moe_combine", "mlp")
SCOPES = [
    ALL,
    ("attn", "moe_preprocess", "moe_dispatch"),
    ("moe_dispatch", "moe_combine"),
    ("embed", "moe_experts"),
]

ONE_F_ONE_B = "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
ZERO_BUBBLE = "F0 F1 F2 I0 I1 W0 F3 I2 W1 F4 W2 I3 I4 W3 W4"
W_AT_THE_END = "F0 F1 F2 I0 I1 I2 W0 W1 W2"
MIXED = "F0 F1 I0 F2 B1 W0 F3 B2 I3 W3"
ONE = "F0 B0"


class Scale(nn.Module):
    """sin(x times its weight, shifted)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return (x * self.weight + shift).sin()


class Mix(nn.Module):
    """A product, times something that an earlier unit reads too: its gradient waits for that one's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, received: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        return self.linear(received) * e.cos()


class Stage:
    """A layer cut into a unit for each segment; runs micro-batches as a schedule says."""

    def __init__(
        self, names: tuple[str, ...] = (), times: int = 1, device: torch.device = CPU, **more: Any
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        embed, first, experts, last = (m.to(device) for m in (nn.Embedding(7, 4), Scale(), Mix(), Scale()))
        self.parameters = [p for module in (embed, first, experts, last) for p in module.parameters()]
        self.shift = torch.full((4,), 0.5, device=device)
        self.times = times  # that the layer runs in each micro-batch
        compute, comm = {"layer": 0}, {"layer": 0, "stream": "comm"}
        self.segments = [
            Segment("embed", embed, ("ids",), ("e",), **compute),
            Segment("attn", first, ("x", "shift"), ("x",), **comm),
            Segment("moe_preprocess", lambda x: (x > 0.1) * 2.0, ("x",), ("plan",), **compute),
            Segment("moe_dispatch", lambda x, e: (x * 2).cos() + e, ("x", "e"), ("received",), **comm),
            Segment("moe_experts", experts, ("received", "e"), ("routed",), **compute),
            Segment("moe_combine", lambda x, r, p: x + r * p, ("x", "routed", "plan"), ("x",), **comm),
            Segment("mlp", lambda x: x.sin(), ("x",), ("x",), **compute),
            Segment("attn", last, ("x", "shift"), ("x",), **comm),  # the code of the first
        ]
        self.gradients = {id(p): Gradient(torch.full_like(p, torch.nan)) for p in self.parameters}
        self.capture = Capture("test", device, warmup_steps=1)
        self.units = UnitCapture(frozenset(names), self.capture)
        self.execute = CompiledSegments(
            PassRunner(SPLIT), lambda p: self.gradients[id(p)], self.units if names else None, **more
        )
        # results of each pool's graphs, in the order in which they are made
        self.made: dict[object, list[list[torch.Tensor]]] = {}
        self.graphs = Counter[object]()
        self._make = self.capture.maker.make
        self.capture.maker.make = self._spoiling

    def _spoiling(self, run: Callable, given=(), pool: object = 0):
        def checked():
            results = run()
            scratch = {t.untyped_storage().data_ptr() for t in self.units._scratch.values()}
            assert not scratch & {t.untyped_storage().data_ptr() for t in results}
            return results

        graph, of_pool = self._make(checked, given, pool), self.made.setdefault(pool, [])
        number, replay = len(of_pool), graph.replay
        of_pool.append([])
        self.graphs[pool] += 1

        def spoiling():
            for results in of_pool[number + 1 :]:
                for result in results:
                    result.fill_(torch.nan)
            of_pool[number] = [*replay()]
            for tensor in self.units._scratch.values():
                tensor.fill_(torch.nan)
            return tuple(of_pool[number])

        graph.replay = spoiling
        return graph

    def step(self, schedule: str, seed: int, reverse: bool = False) -> list[torch.Tensor]:
        actions = schedule.split()
        lanes, results, self.later = {}, {}, {}
        with self.capture.step():
            for kind, number in ((action[0], int(action[1:])) for action in actions):
                if kind == "F":
                    lanes[number] = next(i for i in range(9) if i not in lanes.values())
                    later = [] if f"I{number}" in actions else None
                    results[number] = self.forward(100 * seed + number, lanes[number], later)
                    self.later[number] = later
                elif kind in "BI":
                    x, y = results[number]
                    y.square().sum().backward()
                    results[number] = y.detach().clone(), x.grad.clone()
                    del x, y
                if kind in "BW":
                    left = self.later.pop(number) or []
                    for weights in left[::-1] if reverse else left:
                        weights()
                    del lanes[number], left
        sums = [gradient.total.clone() for gradient in self.gradients.values()]
        for gradient in self.gradients.values():
            gradient.finish()
        return [*(tensor for number in sorted(results) for tensor in results[number]), *sums]

    def forward(
        self, seed: int, lane: object = 0, later: PendingWeightGrads | None = None, tokens: int = 3
    ) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, 4, generator=generator).to(self.device).requires_grad_()
        ids = torch.randint(0, 7, (tokens,), generator=generator).to(self.device)
        y, deferring = x, nullcontext() if later is None else self.execute.deferring(later)
        with self.execute.lane(lane), deferring:
            for _ in range(self.times):
                y = self.layer(y, ids)
        return x, y

    def layer(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        (y,) = self.execute(self.segments, {"x": x, "ids": ids, "shift": self.shift}, ("x",))
        return y


def assert_same(captured: Stage, plain: Stage, schedule: str, seed: int, reverse: bool = False) -> None:
    wanted = plain.step(schedule.replace("I", "B").replace("W", "_"), seed)
    found = captured.step(schedule, seed, reverse)
    assert all(map(torch.equal, found, wanted)), f"step {seed}: {schedule}"


def assert_bitwise(
    names: tuple[str, ...], schedules: list[str], reverse: bool = False, times: int = 1, **more: Any
) -> Stage:
    plain, captured = Stage((), times), Stage(names, times, **more)
    for seed, schedule in enumerate(schedules):
        assert_same(captured, plain, schedule, seed, reverse)
    assert captured.capture.ready and bool(captured.graphs) == bool(names)
    return captured


SCOPES_BY_NAME = {"-".join(names): names for names in SCOPES}
SOME_SCOPES = slow_but(SCOPES_BY_NAME, *[*SCOPES_BY_NAME][::2])
SCHEDULES = slow_but((ONE_F_ONE_B, ZERO_BUBBLE, W_AT_THE_END, MIXED), MIXED)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("names", [(), *SOME_SCOPES])
def test_every_schedule_gives_the_bits_of_the_compiled_units(names, schedule):
    assert_bitwise(names, [schedule] * 4)


@pytest.mark.slow
def test_a_new_program_has_units_of_its_own_and_lets_go_of_those_before():
    plain, captured = Stage(), Stage(SCOPES[0])

    def run(*programs: int | None) -> int:
        for seed, program in enumerate(programs):
            captured.capture.use(program)
            assert_same(captured, plain, MIXED, seed)
        return captured.capture.report.sums()["graphs"]

    num_graphs = run(0, 0, 0)
    pools = [weakref.ref(pool) for pool in captured.units._pools.values()]
    assert run(None, 0) == num_graphs > 0 and all(pool() for pool in pools)
    assert run(1, 1, None, 1) == 2 * num_graphs
    gc.collect()
    assert not any(pool() for pool in pools)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("names", SCOPES, ids="-".join)
@pytest.mark.slow
def test_schedules_may_change_and_a_w_that_adds_may_run_first_when_all_else_is_captured(names, reverse):
    """The step that warms up has one micro-batch, so nothing has been added to."""
    first, then = [ONE, ONE, ZERO_BUBBLE, ONE_F_ONE_B, MIXED], [W_AT_THE_END, ONE_F_ONE_B, MIXED, ONE]
    assert_bitwise(names, [*first, ZERO_BUBBLE, *then], reverse)


@pytest.mark.parametrize("names", SOME_SCOPES)
def test_a_unit_may_run_twice_in_a_micro_batch(names):
    stage = assert_bitwise(names, [ZERO_BUBBLE, ONE_F_ONE_B] * 3, times=2)
    assert set(stage.graphs) == {(lane, "compute", number) for lane in range(3) for number in range(2)}


@pytest.mark.parametrize(
    "schedule, lanes",
    [
        # F of eight units, seven with a backward: I has a graph in six, W in four, twice where it stores too
        (ZERO_BUBBLE, [8 + 6 + 2 * 4, 8 + 6 + 4, 8 + 6 + 4]),
        # behind the first W that adds, units without weights have a second graph
        (ONE_F_ONE_B, [8 + 7 + 7, 8 + 7, 8 + 7]),
    ],
)
def test_no_graph_is_made_twice_without_need(schedule, lanes):
    stage = assert_bitwise(ALL, [schedule] * 5)
    assert [stage.graphs[lane, "compute", 0] for lane in range(3)] == lanes and len(stage.graphs) == 3


@pytest.mark.parametrize("names", [(), ("attn", "moe_dispatch")], ids="-".join)
def test_nothing_of_a_micro_batch_is_held_outside_of_graphs_when_its_w_has_run(names, monkeypatch):
    stage, seen = Stage(names), []
    for seed in range(3):
        stage.step(ZERO_BUBBLE, seed)
    lasting = {t.data_ptr() for pools in stage.made.values() for results in pools for t in results}
    lasting |= {t.data_ptr() for t in (*stage.parameters, stage.shift)}
    run_weights = UnitCode.backward_weights

    def noting(self, handed, gradients):
        seen.extend(StorageWeakRef(t.untyped_storage()) for t in handed if t.data_ptr() not in lasting)
        return run_weights(self, handed, gradients)

    monkeypatch.setattr(UnitCode, "backward_weights", noting)
    gc.disable()
    try:
        stage.step(ZERO_BUBBLE, 3)
        assert len(seen) >= 2 * 5 and all(storage.expired() for storage in seen)  # of embed and moe_experts
    finally:
        gc.enable()


def test_only_forwards_inside_leave_their_w_and_an_overlap_has_a_list_of_its_own():
    stage, later = Stage(), PendingWeightGrads()
    with torch.no_grad():
        stage.forward(0, 0, later)
    _, inside = stage.forward(0, 0, later)
    stage.forward(1, 0)[1].sum().backward()
    weights = [gradient for gradient in stage.gradients.values() if gradient.begun]
    assert len(weights) == len(stage.parameters) and not later
    inside.sum().backward()
    assert len(later) == 4
    overlapped = Stage(unit_turns=(overlap := Overlap(CPU)))
    later.clear()
    with overlapped.execute.deferring(later):
        loss, tape = overlap.record(lambda: overlapped.layer(torch.randn(3, 4), IDS).sum())
        tape.start([loss])
        overlap.run_backward(Backward(tape))
    assert not later and all(gradient.begun for gradient in overlapped.gradients.values())


def step_in_turns(stage: Stage, turns: Overlap, seed: int) -> list[torch.Tensor]:
    """Four micro-batches in two slots, each beside the backward of the one before."""
    found, beside, units = list[torch.Tensor](), None, ()
    with stage.capture.step():
        for number, x in enumerate(torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(seed))):
            with stage.execute.lane(number % 2):
                run = lambda x=x: stage.layer(*turns.receive([x]), IDS).square().sum()  # noqa: E731
                loss, tape = turns.record(run, beside, units)
            tape.start([loss])
            found.append(loss.detach().clone())
            beside, units = Backward(tape), tape.units
        turns.run_backward(beside)
    for gradient in stage.gradients.values():
        found.append(gradient.total.clone())
        gradient.finish()
    return found


@pytest.mark.parametrize("names", SOME_SCOPES)
def test_two_micro_batches_in_turns_have_graphs_by_slot_and_stream(names, monkeypatch):
    turns, forget = Overlap(CPU), mock.Mock()
    monkeypatch.setattr("graphmoe.runtime.compile.captured_units.forget_order", forget)
    plain, captured = Stage(unit_turns=turns), Stage(names, unit_turns=turns)
    for seed in range(4):
        wanted, found = (step_in_turns(stage, turns, seed) for stage in (plain, captured))
        assert all(map(torch.equal, found, wanted)), seed
    streams = [segment.stream for segment in captured.segments if segment.name in names]
    assert set(captured.graphs) == {(slot, stream, 0) for slot in (0, 1) for stream in streams}
    assert {key[0] for key in captured.units._scratch} <= {*streams}
    assert forget.call_count == 3 * 4 * 2 * streams.count("comm")  # before each graph, forward and backward


def test_a_dynamic_unit_makes_its_weight_gradients_with_i():
    stage, later = Stage(), PendingWeightGrads()
    stage.segments = [replace(s, dynamic=True) for s in stage.segments if s.name == "attn"]
    _, y = stage.forward(0, 0, later)
    y.sum().backward()
    assert not later and all(segment.run.weight.grad is not None for segment in stage.segments)


@pytest.mark.parametrize("names", [pytest.param(("moe_experts",), marks=pytest.mark.slow), ALL], ids="-".join)
def test_a_captured_unit_computes_again_inside_its_graph(names):
    plain = Stage(names)
    plain.step(MIXED, 0)
    kept = {report.unit: report.kept_bytes for report in plain.execute.reports}
    stage = assert_bitwise(names, [MIXED] * 4, recompute=Recompute(all=True))
    again = {report.unit: report.kept_bytes for report in stage.execute.reports if report.recomputed}
    assert again == {"moe_experts": 0, "mlp": 0} and kept["moe_experts"] > 0


def test_a_forward_without_a_backward_does_not_hold_its_buffers_for_ever():
    stage = Stage(("mlp",))
    for seed in range(5):
        with stage.capture.step():
            stage.forward(seed)
    assert stage.graphs == {(0, "compute", 0): 1}


def test_lasting_tensors_are_read_where_they_lie_and_must_stay_there():
    plain, captured = Stage(), Stage(("attn",))
    for seed in range(4):
        if seed == 3:  # in place: seen by the next replay
            for stage in (plain, captured):
                stage.shift.fill_(0.25)
        assert_same(captured, plain, ONE, seed)
    captured.shift = captured.shift.clone()
    with pytest.raises(RuntimeError, match="attn: shift moved after the unit was captured"):
        captured.step(ONE, 4)


def test_another_shape_is_an_error_that_names_segment_and_tensor():
    stage = Stage(("attn",))
    stage.step(ONE, 0)
    message = r"attn is captured, and x was torch.float32 \[3, 4\] and is torch.float32 \[5, 4\]"
    with pytest.raises(ValueError, match=message):
        stage.forward(0, 0, tokens=5)


def test_what_a_micro_batch_on_another_lane_has_made_is_copied():
    """Stages of one rank whose micro-batches meet in other pairs in every step."""
    plain, captured = Stage(), Stage(ALL)
    for step in range(8):
        found = []
        for stage in (plain, captured):
            with stage.capture.step():
                x, y = stage.forward(step, ("first", step // 2 % 2), None)
                between = y.detach().requires_grad_()
                with stage.execute.lane(("second", step % 2)):
                    z = stage.layer(between, IDS)
                z.sum().backward()
                y.backward(between.grad)
            found.append([y.detach().clone(), z.detach().clone(), x.grad.clone()])
        assert all(map(torch.equal, *found)), step


def test_a_lane_is_not_taken_before_the_last_w_has_run():
    stage, later = Stage(ALL), PendingWeightGrads()
    for _ in range(2):
        with stage.capture.step():
            _, y = stage.forward(0, 0, later)
            y.sum().backward()
            if stage.capture.ready:
                later.pop()
            while later:
                later.pop()()
    with pytest.raises(AssertionError, match="slot 0 is reused before its last wgrad has run"):
        stage.forward(0, 0, None)


def test_captured_units_run_on_a_lane_only():
    with pytest.raises(AssertionError, match="the micro-batch has no slot"):
        Stage(ALL).layer(torch.randn(3, 4), IDS)
