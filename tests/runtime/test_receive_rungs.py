"""Rungs: their order, the memory each needs, and a host that never waits for the newest step."""

import dataclasses
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from graphmoe.model.layer import MoELayer
from graphmoe.ops.symm import CollectivePeers, use_peers
from graphmoe.plan.experts import Load, balanced_load, room_bytes, worst_load
from graphmoe.plan.layout import Layout
from graphmoe.plan.plan import plan_of
from graphmoe.runtime.dispatch import ladder as receive_ladder
from graphmoe.runtime.dispatch.ladder import ReceiveLadder, Rung
from graphmoe.runtime.dispatch.symm import Symm
from graphmoe.training.retry import RetryingSteps, rungs_of
from graphmoe.training.step_rows import RECEIVED, SCALARS, StepRows, device_row
from tests.runs import config

LAYOUT = Layout(dp=4, ep=4)
SMALL, LARGE, TOO_MUCH = Load(10, 20), Load(15, 30), Load(30, 60)


def rungs() -> list[Rung]:
    rooms = Load(10, 20), Load(20, 40), None
    return [
        Rung(number, f"rung {number}", SimpleNamespace(capacity=room), num_bytes=100 * number)
        for number, room in enumerate(rooms)
    ]


def ladder(memory: float = 1e9) -> tuple[ReceiveLadder, list[int]]:
    used: list[int] = []
    return ReceiveLadder(rungs(), lambda rung: used.append(rung.number), lambda n: n <= memory), used


def test_a_run_climbs_to_the_next_rung_and_to_the_one_without_limit(caplog):
    steps, used = ladder()
    assert steps.climb(3, LARGE, steps.rung) and steps.climb(3, TOO_MUCH, steps.rung) and used == [1, 2]
    assert not steps.rung.has_limit and steps.rung.takes(Load(10**9, 10**9))
    again = "it runs again with"
    assert caplog.messages == [
        f"step 3: 15 rows and 30 slots arrived at a rank, and rung 0 has room for 10 and 20; {again} "
        "rung 1 (20 rows, 40 slots)",
        f"step 3: 30 rows and 60 slots arrived at a rank, and rung 1 has room for 20 and 40; {again} rung 2",
    ]


def test_a_rung_without_memory_is_left_out_unless_it_has_its_memory_already(caplog):
    steps, used = ladder(memory=99)
    steps.climb(1, LARGE, steps.rung)
    assert used == [2] and "rung 1 needs 0.00 GiB, which not every rank has left" in caplog.messages
    memory = iter([True])  # asked once only
    steps = ReceiveLadder(rungs(), lambda rung: None, lambda num_bytes: next(memory))
    for step in (1, 200):
        assert steps.climb(step, LARGE, steps.rung) is (step == 1)
        for each in range(step + 1, step + 60):
            steps.passed(each, SMALL)
    assert steps.rung.number == 0


def test_after_enough_small_loads_in_a_row_the_first_rung_is_taken_again(caplog):
    caplog.set_level(logging.INFO)
    steps, used = ladder()
    steps.climb(1, LARGE, steps.rung)
    for step in range(2, 51):
        steps.passed(step, SMALL)
    steps.passed(51, LARGE)
    for step in range(52, 101):
        steps.passed(step, SMALL)
    assert used == [1]
    steps.passed(101, SMALL)
    assert used == [1, 0] and caplog.messages[-1].startswith("step 101: the last 50 steps had room in rung 0")
    steps.passed(102, SMALL)
    assert used == [1, 0] and receive_ladder.CALM_STEPS == 50


def test_a_spike_does_not_hold_a_run_where_a_lower_rung_would_do():
    steps, used = ladder()
    steps.climb(1, LARGE, steps.rung)
    steps.climb(1, TOO_MUCH, steps.rung)
    for step in range(2, 200):
        steps.passed(step, LARGE if step % 10 == 0 else SMALL)
    assert used == [1, 2, 1]
    ran_on = steps.rung
    for step in range(200, 260):
        steps.passed(step, SMALL)
    assert used == [1, 2, 1, 0]
    steps.climb(260, TOO_MUCH, ran_on)  # a step that was launched before the run went down
    assert used == [1, 2, 1, 0, 2]


def test_the_rung_without_limit_is_used_for_a_while_only():
    steps, used = ladder()
    with pytest.raises(KeyError), steps.without_limit():
        assert used == [2]
        raise KeyError
    assert used == [2, 0]


def run_config(*words: str):
    return config("moe.dispatcher=symm", "model.num_experts=16", "model.top_k=4", "parallel.ep=4", *words)


def test_rungs_are_the_budget_twice_the_budget_and_no_limit_as_far_as_there_is_more_to_come():
    mesh = SimpleNamespace(layout=LAYOUT, group=lambda axis: None)

    def rooms(budget) -> list[Load | None]:
        found = rungs_of(plan_of(run_config(f"moe.receive_budget={budget}"), 4), mesh, fused=True)
        assert not found or found[-1].dispatcher.chunk == found[0].dispatcher.capacity
        assert [rung.number for rung in found] == [*range(len(found))]
        return [rung.dispatcher.capacity for rung in found]

    run = run_config()
    worst, balanced = (of(run.model, LAYOUT, 32) for of in (worst_load, balanced_load))
    assert worst == (128, 512) and balanced.slots == 128
    assert rooms("worst_case") == rooms(4.0) == []
    assert rooms(3.0) == [(128, 384), worst, None]
    assert rooms(1.5) == [(128, 192), (128, 384), None]


class _Event:
    """Event that says when it is recorded and when the host waits for it."""

    def __init__(self, said: list[str]) -> None:
        self._said, self._of = said, ""

    def record(self) -> None:
        self._of = self._said[-1].partition(" ")[2]

    def synchronize(self) -> None:
        self._said.append(f"wait {self._of}")


def launches(voids: set[tuple[str, int]], monkeypatch) -> tuple[RetryingSteps, list[str], StepRows]:
    """Steps that are void on a rung, and what happens one after the other."""
    said: list[str] = []
    rows = StepRows(6, (1, 2), torch.device("cpu"), planned=True)
    rows._arrived = [_Event(said) for _ in range(6)]
    steps, void = ReceiveLadder(rungs(), lambda rung: None, lambda n: True), torch.zeros(())

    def run(batches: list[Tensor]) -> Tensor:
        number, rung = int(batches[0]), steps.rung.number
        batches[0].fill_(-1)  # as what stands for a graph on a CPU does
        said.append(f"launch {number} on {rung}")
        if (number, rung) in voids:
            void.fill_(1.0)
        scalars = dict.fromkeys((*SCALARS, *RECEIVED), torch.tensor(float(number)))
        return device_row({**scalars, "void": void}, torch.ones(1, 2, dtype=torch.int32))

    heartbeat = SimpleNamespace(restart=lambda what: said.append(what))
    return RetryingSteps(run, rows, void, heartbeat, steps), said, rows


def start(run: RetryingSteps, *steps: int) -> Iterator[None]:
    for step in steps:
        run(step, (torch.tensor(number) for number in (step,)))


def test_the_host_asks_for_a_step_only_when_the_next_was_launched(monkeypatch):
    run, said, _ = launches(set(), monkeypatch)
    start(run, 1, 2, 3)
    assert said == ["launch 1 on 0", "launch 2 on 0", "wait 1 on 0", "launch 3 on 0", "wait 2 on 0"]
    run.settle()
    assert said[5:] == ["wait 3 on 0"]
    run.settle()
    assert len(said) == 6


def test_void_steps_run_again_in_order_on_the_same_tokens(monkeypatch):
    run, said, rows = launches({(2, 0), (2, 1)}, monkeypatch)
    start(run, 1, 2, 3)
    assert said[3:] == [
        "launch 3 on 0", "wait 2 on 0",
        "step 2, again with more room", "launch 2 on 1", "launch 3 on 1", "wait 2 on 1",
        "step 2, again with more room", "launch 2 on 2", "launch 3 on 2", "wait 2 on 2",
    ]  # fmt: skip
    run.settle()
    assert [(row.step, row.values["void"]) for row in rows.read()] == [(1, 0.0), (2, 0.0), (3, 0.0)]
    run, said, rows = launches({(2, 0)}, monkeypatch)
    start(run, 1, 2)
    run.settle()  # nothing follows the void step
    assert said[3:] == ["wait 2 on 0", "step 2, again with more room", "launch 2 on 1", "wait 2 on 1"]
    assert [row.step for row in rows.read()] == [1, 2]


@pytest.mark.parametrize("fused", [False, True], ids=["in steps", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kept_bytes_grow_with_the_room_by_the_formula(dtype, fused):
    run = run_config("model.num_layers=1", "model.num_dense_layers=0")
    rooms = Load(40, 100), Load(60, 100), Load(40, 160)
    kept = [_kept(run.model, dtype, room, fused) for room in rooms]
    sizes = [_of_one_layer(run.model, room, dtype, fused) for room in rooms]
    assert kept[1] - kept[0] == sizes[1] - sizes[0] > 0
    assert kept[2] - kept[0] == sizes[2] - sizes[0] > 0


def _of_one_layer(model, room: Load, dtype: torch.dtype, fused: bool) -> int:
    """Bytes that each further layer adds to the formula."""
    one, two = (
        room_bytes(room, dataclasses.replace(model, num_layers=n), Layout(), dtype.itemsize, fused=fused)
        for n in (1, 2)
    )
    return two - one


def _kept(model, dtype: torch.dtype, room: Load, fused: bool) -> int:
    """Bytes that autograd keeps of a layer's forward."""
    layer = MoELayer(model, run_config().moe, dispatcher=Symm(room, model.num_experts, 1)).to(dtype)
    experts = layer.moe_experts
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if fused:

        def planned(h_ND, weight_NK, ends_L, row_NK, slot_R):
            weights = experts.w_gate_up, experts.w_down
            return torch.ops.graphmoe.grouped_mlp(h_ND, *weights, weight_NK, slot_R, row_NK, ends_L, "torch")[
                0
            ]

        experts.planned = planned
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other takes its address
        return tensor

    x = torch.randn(2, 16, model.hidden_size, dtype=dtype, requires_grad=True)
    use_peers(CollectivePeers(None))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x, torch.ones(16, 2), torch.zeros(16, 2))
    finally:
        use_peers(None)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())
