"""Lanes: graphs of several micro-batches in flight, I and W apart or not, are bitwise the compiled units.

Memory that graphs share is simulated at its worst: each replay spoils all results that its pool has made
since, and every buffer that is filled for one replay only.
"""

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from graphmoe.ops.gradients import Gradient, PendingWeightGrads
from graphmoe.passes.table import PASSES, PassRunner
from graphmoe.runtime.capture.capture import Capture
from graphmoe.runtime.compile.captured_units import UnitCapture
from graphmoe.runtime.compile.code import UnitCode
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.segments import Segment
from tests.runtime.chains import CPU, Scale

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


class Lookup(nn.Module):
    """Rows of a table: nothing that it reads wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


class Mix(nn.Module):
    """A product, times something that an earlier unit reads too: its gradient waits for that one's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, received: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        return self.linear(received) * e.cos()


class Stage:
    """A layer cut into a unit for each segment; runs micro-batches as a schedule says."""

    def __init__(self, names: tuple[str, ...] = (), times: int = 1, device: torch.device = CPU) -> None:
        """The layer runs so many ``times`` in each micro-batch."""
        torch.manual_seed(0)
        self.device = device
        embed, first, experts, last = (m.to(device) for m in (Lookup(), Scale(), Mix(), Scale()))
        self.parameters = [p for module in (embed, first, experts, last) for p in module.parameters()]
        self.shift = torch.full((4,), 0.5, device=device)
        self.times = times
        self.segments = [
            Segment("embed", embed, ("ids",), ("e",)),
            Segment("attn", first, ("x", "shift"), ("x",), stream="comm"),
            Segment("moe_preprocess", lambda x: (x > 0.1) * 2.0, ("x",), ("plan",)),
            Segment("moe_dispatch", lambda x, e: (x * 2).cos() + e, ("x", "e"), ("received",), stream="comm"),
            Segment("moe_experts", experts, ("received", "e"), ("routed",)),
            Segment("moe_combine", lambda x, r, p: x + r * p, ("x", "routed", "plan"), ("x",), stream="comm"),
            Segment("mlp", lambda x: x.sin(), ("x",), ("x",)),
            Segment("attn", last, ("x", "shift"), ("x",), stream="comm"),  # the code of the first
        ]
        self.gradients = {id(p): Gradient(torch.full_like(p, torch.nan)) for p in self.parameters}
        self.capture = Capture("test", device, warmup_steps=1)
        self.units = UnitCapture(frozenset(names), self.capture)
        self.execute = CompiledSegments(
            lambda trains: PassRunner(SPLIT), lambda p: self.gradients[id(p)], self.units if names else None
        )
        self.made: dict[object, list[list[torch.Tensor]]] = {}
        """Results of each pool's graphs, in the order in which they are made."""
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
        """Outputs, gradients of inputs and sums of weights' gradients of one step."""
        actions = schedule.split()
        lanes, results, self.later = {}, {}, {}
        with self.capture.step():
            for kind, number in ((action[0], int(action[1:])) for action in actions):
                if kind == "F":
                    lanes[number] = next(i for i in range(9) if i not in lanes.values())
                    later = [] if f"I{number}" in actions else None
                    results[number] = self._forward(100 * seed + number, lanes[number], later)
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

    def _forward(
        self, seed: int, lane: object, later: PendingWeightGrads | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(3, 4, generator=generator).to(self.device).requires_grad_()
        ids = torch.randint(0, 7, (3,), generator=generator).to(self.device)
        y, deferring = x, nullcontext() if later is None else self.execute.deferring(later)
        with self.execute.lane(lane), deferring:
            for _ in range(self.times):
                (y,) = self.execute(self.segments, {"x": y, "ids": ids, "shift": self.shift}, ("x",))
        return x, y


def assert_bitwise(
    names: tuple[str, ...], schedules: list[str], reverse: bool = False, times: int = 1
) -> Stage:
    plain, captured = Stage((), times), Stage(names, times)
    for seed, schedule in enumerate(schedules):
        wanted = plain.step(schedule.replace("I", "B").replace("W", "_"), seed)
        found = captured.step(schedule, seed, reverse)
        assert all(map(torch.equal, found, wanted)), f"step {seed}: {schedule}"
    assert captured.capture.ready and captured.graphs
    return captured


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in (ONE_F_ONE_B, ZERO_BUBBLE, W_AT_THE_END)]


@pytest.mark.parametrize("schedule", [*SLOW, MIXED])
@pytest.mark.parametrize("names", SCOPES, ids="-".join)
def test_every_schedule_gives_the_bits_of_the_compiled_units(names, schedule):
    assert_bitwise(names, [schedule] * 4)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("names", SCOPES, ids="-".join)
@pytest.mark.slow
def test_schedules_may_change_and_a_w_that_adds_may_run_first_when_all_else_is_captured(names, reverse):
    """The step that warms up has one micro-batch, so nothing has been added to."""
    schedules = [
        ONE,
        ONE,
        ZERO_BUBBLE,
        ONE_F_ONE_B,
        MIXED,
        ZERO_BUBBLE,
        W_AT_THE_END,
        ONE_F_ONE_B,
        MIXED,
        ONE,
    ]
    assert_bitwise(names, schedules, reverse)


@pytest.mark.parametrize("names", SCOPES, ids="-".join)
def test_a_unit_may_run_twice_in_a_micro_batch(names):
    stage = assert_bitwise(names, [ZERO_BUBBLE, ONE_F_ONE_B] * 3, times=2)
    assert set(stage.graphs) == {(lane, number) for lane in range(3) for number in range(2)}


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
    assert [stage.graphs[lane, 0] for lane in range(3)] == lanes and len(stage.graphs) == 3


def test_nothing_of_a_micro_batch_is_held_outside_of_graphs_when_its_w_has_run():
    """Check without collecting garbage, which training does at fixed steps only."""
    stage, seen = Stage(("attn", "moe_dispatch")), []
    for seed in range(3):
        stage.step(ZERO_BUBBLE, seed)
    lasting = {t.data_ptr() for pools in stage.made.values() for results in pools for t in results}
    lasting |= {t.data_ptr() for t in stage.parameters}
    run_weights = UnitCode.backward_weights

    def noting(self, handed, gradients):
        seen.extend(StorageWeakRef(t.untyped_storage()) for t in handed if t.data_ptr() not in lasting)
        return run_weights(self, handed, gradients)

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(UnitCode, "backward_weights", noting)
            stage.step(ZERO_BUBBLE, 3)
        assert len(seen) >= 2 * 5 and all(storage.expired() for storage in seen)  # of embed and moe_experts
    finally:
        gc.enable()


def test_what_a_micro_batch_on_another_lane_has_made_is_copied():
    """Stages of one rank whose micro-batches meet in other pairs in every step."""
    plain, captured = Stage(), Stage(ALL)
    for step in range(8):
        found = []
        for stage in (plain, captured):
            with stage.capture.step():
                x, y = stage._forward(step, ("first", step // 2 % 2), None)
                between = y.detach().requires_grad_()
                with stage.execute.lane(("second", step % 2)):
                    values = {"x": between, "ids": torch.arange(3), "shift": stage.shift}
                    (z,) = stage.execute(stage.segments, values, ("x",))
                z.sum().backward()
                y.backward(between.grad)
            found.append([y.detach().clone(), z.detach().clone(), x.grad.clone()])
        assert all(map(torch.equal, *found)), step


def test_w_of_captured_units_is_left_for_later_on_a_lane_only():
    stage = Stage(ALL)
    values = {"x": torch.randn(3, 4), "ids": torch.arange(3), "shift": stage.shift}
    with pytest.raises(AssertionError, match="the micro-batch has no lane"), stage.execute.deferring([]):
        stage.execute(stage.segments, values, ("x",))


def test_a_lane_is_not_taken_before_the_last_w_has_run():
    stage, later = Stage(ALL), PendingWeightGrads()
    for _ in range(2):
        with stage.capture.step():
            _, y = stage._forward(0, 0, later)
            y.sum().backward()
            if stage.capture.ready:
                later.pop()
            while later:
                later.pop()()
    with pytest.raises(AssertionError, match="lane 0 is taken before its last weight gradients are made"):
        stage._forward(0, 0, None)
