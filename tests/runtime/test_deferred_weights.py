"""W left for later: the same sums bit by bit, in the order in which I has run, and nothing held after."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphmoe.model.build import build_model
from graphmoe.ops.gradients import Gradient, PendingWeightGrads
from graphmoe.passes.table import PASSES, PassRunner
from graphmoe.runtime.compile.code import UnitCode
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.overlap.runner import Overlap
from graphmoe.segments import Segment
from tests.runs import COMPILED, config

pytestmark = pytest.mark.usefixtures("unmeasured", "graphs_as_they_are")
SPLIT = [spec for spec in PASSES if spec.name == "split_backward"]


class Stage:
    """A small model whose units sum the gradients of their weights themselves."""

    def __init__(self, overlap: Overlap | None = None) -> None:
        run = config(*COMPILED, "model.num_layers=2")
        self.model = build_model(
            run.model, device=torch.device("cpu"), dtype=torch.float32, seed=0, execution=run.moe
        )
        self.added: list[str] = []
        self.gradients = {name: Gradient(torch.empty(p.shape)) for name, p in self.model.named_parameters()}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for name, gradient in self.gradients.items():
            gradient.on_added = lambda name=name: self.added.append(name)
        self.execute = CompiledSegments(
            lambda trains: PassRunner(SPLIT), lambda p: self.gradients[names[id(p)]], unit_turns=overlap
        )

    def loss(self, seed: int) -> torch.Tensor:
        tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(seed))
        return self.model.loss(tokens[:, :-1], tokens[:, 1:], self.execute).total

    def totals(self) -> dict[str, torch.Tensor]:
        for gradient in self.gradients.values():
            gradient.finish()
        return {name: gradient.total.clone() for name, gradient in self.gradients.items()}


def run_all(later: PendingWeightGrads) -> None:
    while later:
        later.pop(0)()


def plain(num_micro_batches: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    stage = Stage()
    for seed in range(num_micro_batches):
        stage.loss(seed).backward()
    return stage.totals(), stage.added


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_sums_are_bitwise_those_of_whole_backwards_and_w_runs_in_the_order_of_i():
    wanted, order = plain(2)
    stage = Stage()
    for seed in range(2):
        later: PendingWeightGrads = []
        with stage.execute.deferring(later):
            loss = stage.loss(seed)
        loss.backward()
        assert len(later) > 3 and len(stage.added) == seed * len(order) // 2
        run_all(later)
    assert stage.added == order
    assert_same(stage.totals(), wanted)


def test_only_forwards_inside_leave_their_w():
    stage = Stage()
    later: PendingWeightGrads = []
    with stage.execute.deferring(later):
        with torch.no_grad():
            stage.loss(0)
        inside = stage.loss(0)
    stage.loss(1).backward()
    assert stage.added and not later
    before = len(stage.added)
    inside.backward()
    assert later and len(stage.added) == before


@pytest.mark.slow
def test_an_overlap_under_way_has_a_list_of_its_own():
    wanted, _ = plain(1)
    stage = Stage(overlap := Overlap(torch.device("cpu")))
    later: PendingWeightGrads = []
    with stage.execute.deferring(later):
        overlap.backward(overlap.forward(lambda: stage.loss(0)))
        overlap.finish()
    assert not later
    assert_same(stage.totals(), wanted)


def test_nothing_of_a_micro_batch_is_held_when_its_w_has_run():
    """Check without collecting garbage, which training does at fixed steps only."""
    stage = Stage()
    stage.loss(0).backward()
    lasting = {tensor.data_ptr() for tensor in (*stage.model.parameters(), *stage.model.buffers())}
    kept: list[StorageWeakRef] = []
    run_weights = UnitCode.backward_weights

    def noting(self, handed, gradients):
        made = [tensor.untyped_storage() for tensor in handed if tensor.data_ptr() not in lasting]
        kept.extend(map(StorageWeakRef, made))
        return run_weights(self, handed, gradients)

    later: PendingWeightGrads = []
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(UnitCode, "backward_weights", noting)
            with stage.execute.deferring(later):
                loss = stage.loss(1)
            loss.backward()
            for weights in later:
                weights()
            del weights, later, loss
        assert kept and all(storage.expired() for storage in kept)
    finally:
        gc.enable()


def test_a_dynamic_unit_makes_its_weight_gradients_with_i():
    linear = torch.nn.Linear(4, 4)
    execute = CompiledSegments(lambda trains: PassRunner(SPLIT), lambda p: Gradient(torch.zeros(p.shape)))
    segments = [Segment("attn", linear, ("x",), ("x",), dynamic=True)]
    later: PendingWeightGrads = []
    with execute.deferring(later):
        (y,) = execute(segments, {"x": torch.ones(2, 4)}, ("x",))
    y.sum().backward()
    assert linear.weight.grad is not None and not later
