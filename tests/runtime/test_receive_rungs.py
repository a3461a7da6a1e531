"""Rungs: which is taken, the memory that they need, and a host that never waits for the newest step."""

import itertools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from graphmoe.model.layer import MoELayer
from graphmoe.plan.experts import Load, room_bytes
from graphmoe.plan.layout import Layout
from graphmoe.plan.plan import plan_of
from graphmoe.runtime.dispatch import ladder as receive_ladder
from graphmoe.runtime.dispatch.ladder import ReceiveLadder
from graphmoe.runtime.dispatch.symm import Symm
from graphmoe.training import build
from graphmoe.training.build import has_bytes, levels_of
from graphmoe.training.step import Steps as TrainSteps
from graphmoe.training.step_rows import RECEIVED, SCALARS, StepRows, device_row
from tests.runs import config

SMALL, LARGE, LARGER, TOO_MUCH = Load(10, 20), Load(15, 30), Load(30, 60), Load(40, 80)
ROOMS = Load(10, 20), Load(20, 40), Load(40, 80)


class Steps:
    """A ladder of three layers, and steps that run on it."""

    def __init__(self, memory: Callable[[tuple[Load, ...]], bool] = lambda rooms: True, layers: int = 3):
        self.used: list[int | None] = []  # programs
        self.num_void, self.slow = 0, list[int]()
        *levels, last = (SimpleNamespace(capacity=room) for room in (*ROOMS, None))

        def has_memory(now, then) -> bool:
            return memory(tuple(each.capacity for each in then))

        self.ladder = ReceiveLadder(levels, last, layers, self._use, has_memory)
        self._use([levels[0]] * layers, 0)

    def _use(self, dispatchers, program: int | None) -> None:
        self.rooms = [each.capacity for each in dispatchers]
        self.used.append(program)

    def fits(self, loads: Sequence[Load]) -> bool:
        pairs = zip(loads, self.rooms, strict=True)
        return all(room is None or (load <= room and load.slots <= room.slots) for load, room in pairs)

    def run(self, step: int, *loads: Load) -> None:
        while not self.fits(loads):
            self.num_void += 1
            self.ladder.climb(step, loads)
        if self.ladder.on_last:
            self.slow.append(step)
        self.ladder.passed(step, loads)


def test_layers_that_found_too_little_room_get_the_first_level_that_has_it(caplog):
    caplog.set_level(logging.INFO)
    steps = Steps()
    steps.run(1, SMALL, SMALL, SMALL)
    steps.run(2, SMALL, LARGE, Load(9, 18))
    assert steps.rooms == [ROOMS[1], ROOMS[1], ROOMS[0]] and steps.used == [0, 1] and steps.num_void == 1
    assert caplog.messages == [
        "step 2: 15 rows and 30 slots arrived at a rank in MoE layer 1, over its capacity of 10 and 20; the "
        "step runs again with more than the receive budget in 2 of 3 MoE layers (up to 20 rows, 40 slots)"
    ]
    steps.run(99, SMALL, SMALL, Load(9, 40))
    assert steps.rooms == [ROOMS[1], ROOMS[1], ROOMS[2]] and steps.used == [0, 1, 2]
    steps.run(200, TOO_MUCH, LARGE, TOO_MUCH)
    assert steps.rooms == [ROOMS[2], ROOMS[1], ROOMS[2]] and steps.slow == [] and steps.num_void == 3


def test_all_layers_rise_where_one_rose_lately_unless_there_is_memory_for_some_only():
    for memory, last in ((lambda rooms: True, ROOMS[1]), (lambda rooms: set(rooms) != {ROOMS[1]}, ROOMS[0])):
        steps = Steps(memory)
        steps.run(1, LARGE, Load(1, 1), Load(1, 1))
        steps.run(50, LARGE, LARGE, Load(1, 1))
        assert steps.rooms == [ROOMS[1], ROOMS[1], last] and steps.used == [0, 1, 2]


def test_without_memory_a_step_runs_alone_with_the_counts_of_the_host(caplog):
    caplog.set_level(logging.INFO)
    steps = Steps(lambda rooms: False)
    steps.run(1, SMALL, SMALL, LARGE)
    assert steps.slow == [1] and steps.used == [0, None, 0] and not steps.ladder.on_last
    assert [text.partition("; ")[2] or text for text in caplog.messages] == [
        "the step runs again with the counts of the host",
        "step 1: later steps run with the receive budget (10 rows, 20 slots)",
    ]
    steps.run(20, SMALL, SMALL, LARGE)
    assert steps.ladder.on_last
    steps.run(21, SMALL, SMALL, LARGE)
    steps.run(22, SMALL, SMALL, SMALL)
    assert steps.slow == [1, 20, 21, 22] and not steps.ladder.on_last and steps.num_void == 2


def test_rooms_rise_after_the_last_rung_where_its_exact_loads_find_the_memory():
    steps = Steps(lambda rooms: rooms[0] == ROOMS[0])
    steps.ladder.climb(1, [LARGE, LARGE, SMALL])
    assert steps.used == [0, None] and steps.ladder.passed(1, [Load(1, 1), LARGE, SMALL])
    assert steps.rooms == [ROOMS[0], ROOMS[1], ROOMS[1]] and steps.used == [0, None, 1]


def test_memory_is_asked_for_once_for_the_same_rooms():
    asked = []
    steps = Steps(lambda rooms: asked.append(rooms))
    for step in range(1, 200):
        steps.run(step, LARGE, SMALL, Load(1, 1))
    assert asked == [(ROOMS[1], ROOMS[1], ROOMS[0])]


def sequences() -> Iterator[list[bool]]:
    """Steps that need more room, True, in orders that are hard for a ladder."""
    yield from map(list, itertools.product((False, True), repeat=10))
    draw = random.Random(0)
    for share in (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 0.9):
        yield [draw.random() < share for _ in range(2000)]
    for period in (2, 3, 7, 49, 50, 51, 100):
        yield [step % period == 0 for step in range(2000)]
        yield [step % period < min(20, period - 1) for step in range(2000)]


@pytest.mark.parametrize("every", [1, 7, 50, 60, None])
def test_with_memory_the_number_of_programs_is_bounded_and_no_step_is_slow(every):
    """Loads of each layer and step are drawn, or by an opponent who takes the layer with the least room."""
    draw = random.Random(0)
    for largest in (LARGE, LARGER, TOO_MUCH):
        steps = Steps(layers=20)
        for step in range(1, 3000):
            loads = [Load(1, 1)] * 20
            if every is None and draw.random() < 0.03:
                loads[draw.randrange(20)] = draw.choice((LARGE, LARGER, largest))
            elif every is not None and step % every == 0:
                tight = min(range(20), key=lambda layer: steps.rooms[layer])
                loads[tight] = min(largest, Load(*(count + 1 for count in steps.rooms[tight])))
            steps.run(step, *loads)
        most = receive_ladder.MOST_ALONE + len(ROOMS)
        assert 2 < len(steps.used) <= most and steps.num_void == len(steps.used) - 1 and steps.slow == []


def test_programs_are_bounded_where_there_is_memory_for_some_layers_only():
    steps = Steps(lambda rooms: len({*rooms}) > 1, layers=20)
    for step in range(0, 6000, 60):
        loads = [Load(1, 1)] * 20
        loads[min(range(20), key=lambda layer: steps.rooms[layer])] = LARGE
        steps.run(step, *loads)
    assert {*steps.used} == {None, *range(receive_ladder.MOST_ALONE + 1)} and len(steps.slow) > 20


def without_memory(needs: Sequence[bool]) -> Steps:
    """Steps of one layer, which need more room or not."""
    steps = Steps(lambda rooms: False, layers=1)
    for step, tight in enumerate(needs):
        steps.run(step, LARGE if tight else SMALL)
    return steps


def test_steps_that_fit_count_on_the_last_rung_where_they_come_in_a_row():
    steps = without_memory([*[True] * 15, False, True, False, False, False])
    assert steps.slow == [*range(19)]  # two of the last three: 15 others needed it lately


def test_without_memory_a_slow_step_in_50_is_all_that_one_void_step_in_50_costs():
    """In general slow steps that would have fitted are no more than 5 behind each that would not."""
    for needs in sequences():
        steps = without_memory(needs)
        tight = [step for step, needed in enumerate(needs) if needed]
        assert {*tight} <= {*steps.slow} and steps.num_void <= len(tight)
        gaps = [after - before for before, after in itertools.pairwise(tight)]
        if all(gap >= receive_ladder.WINDOW for gap in gaps):
            assert steps.slow == tight and len(tight) <= len(needs) / 50 + 1
        idle = "".join("s" if step in steps.slow and not needed else " " for step, needed in enumerate(needs))
        assert max(map(len, idle.split(" "))) <= 5
        assert len(steps.slow) <= 6 * len(tight)


def test_the_rung_without_limit_is_used_for_a_while_only():
    steps = Steps()
    with pytest.raises(KeyError), steps.ladder.without_limit():
        assert steps.used == [0, None]
        raise KeyError
    assert steps.used == [0, None, 0]


def run_config(*words: str):
    sizes = "model.num_experts=16", "model.top_k=4", "parallel.ep=4"
    return config("moe.dispatcher=symm", "moe.balance=none", *sizes, *words)


def test_levels_rise_by_a_quarter_from_the_budget_to_the_worst_case():
    def rooms(budget) -> list[Load | None]:
        return [each.capacity for each in levels_of(plan_of(run_config(f"moe.receive_budget={budget}"), 4))]

    plan = plan_of(run_config(), 4)
    worst = plan.worst
    assert worst == (128, 512) and plan.balanced.slots == 128
    assert rooms("worst_case") == rooms(4.0) == [worst]
    assert rooms(3.0) == [(128, 384), (128, 480), worst]
    assert rooms(1.5) == [(128, 192), (128, 240), (128, 300), (128, 375), (128, 469), worst]


@pytest.mark.parametrize("free", [5, 70])
def test_memory_is_what_a_step_took_at_most_and_the_growth_beside_what_lasts(monkeypatch, free):
    gib, device = 2**30, torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free * gib, 139 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: (132 - free) * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 40 * gib)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: int(peak * gib))
    more, peak = int(17.33 * gib), 92.36
    assert has_bytes(more, device, pool_unused=55 * gib)
    assert not has_bytes(40 * gib, device, pool_unused=55 * gib)
    assert not has_bytes(more, device, pool_unused=80 * gib)  # a pool that is full of holes
    peak = 42  # since the last measured step: replays allocate nothing
    assert not has_bytes(more, device, pool_unused=80 * gib)
    assert has_bytes(more, device, pool_unused=0)
    assert has_bytes(10**15, torch.device("cpu"), pool_unused=0)


def climb_twice(monkeypatch, *words: str) -> tuple[list[object], list[int]]:
    """What happens to graphs and memory, and the bytes that a larger capacity is found to need."""
    plan, said, more = plan_of(run_config(*words), 4), list[object](), list[int]()
    monkeypatch.setattr(build, "forget_graphs", lambda: said.append("forget"))
    monkeypatch.setattr(build, "make_room", lambda *_: said.append("room"))
    monkeypatch.setattr(build, "has_bytes", lambda num_bytes, *_: more.append(num_bytes) or True)
    model = SimpleNamespace(dispatcher=levels_of(plan)[0], num_moe_layers=2, use=lambda rooms: None)
    maker = SimpleNamespace(pool_unused_bytes=lambda: 0)
    capture = SimpleNamespace(use=lambda program: said.append(program) or program == 1, maker=maker)
    monkeypatch.setattr(build, "bounded_dispatcher", lambda *_: SimpleNamespace(capacity=None))
    ranks = SimpleNamespace(gather=lambda has: [has])
    ladder = build.receive_ladder(plan, None, ranks, model, torch.device("cpu"), capture, fused=True)
    for step in (1, 2):
        ladder.climb(step, [plan.worst] * 2)
    return said, more


def test_graphs_end_and_give_their_memory_back_before_there_is_more_room(monkeypatch):
    assert climb_twice(monkeypatch)[0] == [1, "forget", "room", None]


COMPILED, OVERLAP, EXPERTS = "compile.enabled=true", "pipeline.ep_overlap=true", "graph.scope=[moe_experts]"


@pytest.mark.parametrize(
    "words, slots",
    [
        ((OVERLAP,), 1), ((EXPERTS,), 1), ((OVERLAP, "graph.scope=partial"), 1), ((OVERLAP, EXPERTS), 2),
        ((OVERLAP, EXPERTS, "parallel.pp=2", "parallel.ep=2"), 1),
    ],
)  # fmt: skip
def test_graphs_of_experts_in_two_slots_need_twice_the_memory(monkeypatch, words, slots):
    more, least = (climb_twice(monkeypatch, COMPILED, *each)[1] for each in (words, words[2:]))
    assert more == [slots * num_bytes for num_bytes in least] and more[0] > 0


class _Event:
    """Event that says when it is recorded and when the host waits for it."""

    def __init__(self, said: list[str]) -> None:
        self._said, self._of = said, ""

    def record(self) -> None:
        self._of = self._said[-1].partition(" ")[2]

    def synchronize(self) -> None:
        self._said.append(f"wait {self._of}")


def launches(voids: set[tuple[int, int]], memory=lambda rooms: True) -> tuple[TrainSteps, list, StepRows]:
    said: list[str] = []
    rows = StepRows(6, (1, 2), torch.device("cpu"), planned=True)
    rows._arrived = [_Event(said) for _ in range(6)]
    steps, void = Steps(memory, layers=1), torch.zeros(())

    def run(batches: list[Tensor]) -> Tensor:
        number, program = int(batches[0]), steps.used[-1]
        batches[0].fill_(-1)  # as what stands for a graph on a CPU does
        said.append(f"launch {number} on {program}")
        load = SMALL
        if (number, program) in voids or program is None:
            load = (LARGE, LARGER)[program or 0]
        if program is not None and load != SMALL:
            void.fill_(1.0)
        scalars = dict.fromkeys((*SCALARS, *RECEIVED), torch.tensor(float(number)))
        counts_LE = torch.ones(1, 2, dtype=torch.int32)
        return device_row({**scalars, "void": void}, counts_LE, received_L2=torch.tensor([load]))

    heartbeat = SimpleNamespace(restart=said.append, slow=said.append)
    step = SimpleNamespace(optimizer=SimpleNamespace(void=void), prepare=lambda number: None)
    launched = TrainSteps(step, rows, heartbeat, ladder=steps.ladder)
    launched.run = run
    return launched, said, rows


NO_MEMORY = {"memory": lambda rooms: False}
LAUNCHES = {  # void steps by their program, memory, steps, and what is said until all are settled
    "room for all": (
        set(), {}, 3,
        "launch 1 on 0; launch 2 on 0; wait 1 on 0; launch 3 on 0; wait 2 on 0; settle; wait 3 on 0",
    ),
    "void twice": (
        {(2, 0), (2, 1)}, {}, 3,
        "launch 1 on 0; launch 2 on 0; wait 1 on 0; launch 3 on 0; wait 2 on 0; "
        "step 2, again with more room; launch 2 on 1; launch 3 on 1; wait 2 on 1; "
        "step 2, again with more room; launch 2 on 2; launch 3 on 2; wait 2 on 2; settle; wait 3 on 2",
    ),
    "the last step is void": (
        {(2, 0)}, {}, 2,
        "launch 1 on 0; launch 2 on 0; wait 1 on 0; settle; wait 2 on 0; "
        "step 2, again with more room; launch 2 on 1; wait 2 on 1",
    ),
    "the last rung is confirmed before planned room": (
        {(2, 0)}, NO_MEMORY, 4,
        "launch 1 on 0; launch 2 on 0; wait 1 on 0; launch 3 on 0; wait 2 on 0; "
        "step 2, again with more room; launch 2 on None; wait 2 on None; launch 3 on 0; "
        "launch 4 on 0; wait 3 on 0; settle; wait 4 on 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("voids", "memory", "count", "wanted"), LAUNCHES.values(), ids=LAUNCHES)
def test_the_host_asks_a_step_late_and_repeats_void_steps(voids, memory, count, wanted):
    run, said, rows = launches(voids, **memory)
    for step in range(1, count + 1):
        run(step, (torch.tensor(step) for _ in range(1)))  # the same tokens again, though read once
    said.append("settle")
    for _ in range(2):
        run.settle()
    assert "; ".join(said) == wanted
    assert [(row.step, row.values["void"]) for row in rows.read()] == [(n + 1, 0.0) for n in range(count)]


@pytest.mark.parametrize("fused", [False, True], ids=["in steps", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kept_bytes_grow_with_the_room_by_the_formula(one_peer, dtype, fused):
    run = run_config("model.num_layers=1", "model.num_dense_layers=0")
    rooms = Load(40, 100), Load(60, 100), Load(40, 160)
    kept = [_kept(run.model, dtype, room, fused) for room in rooms]
    one, two = (
        [room_bytes([room] * layers, run.model, Layout(), dtype.itemsize, fused=fused) for room in rooms]
        for layers in (1, 2)
    )
    for larger in (1, 2):
        assert kept[larger] - kept[0] == two[larger] - one[larger] - (two[0] - one[0]) > 0


def _kept(model, dtype: torch.dtype, room: Load, fused: bool) -> int:
    layer = MoELayer(model, run_config().moe, dispatcher=Symm(room, model.num_experts, 1)).to(dtype)
    experts = layer.moe_experts
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if fused:

        def planned(h_ND, weight_NK, ends_L, row_NK, slot_R):
            given = h_ND, experts.w_gate_up, experts.w_down, weight_NK, slot_R, row_NK, ends_L
            return torch.ops.graphmoe.grouped_mlp(*given, "torch")[0]

        experts.planned = planned
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:  # held, so that no other takes its address
        return found.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    x = torch.randn(2, 16, model.hidden_size, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, torch.ones(16, 2), torch.zeros(16, 2))
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def test_an_opponent_who_sees_the_ladder_gains_no_more():
    steps = Steps(lambda rooms: False, layers=1)
    for step in range(3000):
        steps.run(step, SMALL if steps.ladder.on_last else LARGE)
    assert len(steps.slow) <= 3 * steps.num_void
    for step in range(3000, 3100):
        steps.run(step, SMALL)
    assert max(steps.slow) < 3005
