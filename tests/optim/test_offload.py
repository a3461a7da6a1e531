"""Optimizer state in host memory: the bits of a run whose state is on the device, and what is refused."""

import gc
import math
import mmap
from types import SimpleNamespace

import pytest
import torch

from graphmoe.config.schema import ConfigError, MasterDtype, MomentDtype
from graphmoe.optim import offload
from graphmoe.plan.buckets import SLOTS
from graphmoe.plan.plan import plan_of
from graphmoe.plan.rules import check
from graphmoe.training import start_checks
from tests.optim.test_zero1 import (
    LOSS,
    compile_update,
    gradients,
    net_and_optimizer,
    snapshot,
    step,
    tensors_of,
)
from tests.runs import assert_same_state, config, final_state, numbers, spoil_steps, train_in, trainer_in

FP32, BF16, INT8, IN_PLACE = MomentDtype.fp32, MomentDtype.bf16, MomentDtype.int8, MasterDtype.bf16
KINDS = {
    "fp32 weights": {},
    "fp32": {"dtype": torch.bfloat16},
    "bf16": {"dtype": torch.bfloat16, "moment_dtype": BF16},
    "int8": {"dtype": torch.bfloat16, "moment_dtype": INT8},
    "int8, in place": {"dtype": torch.bfloat16, "moment_dtype": INT8, "master_dtype": IN_PLACE},
    "muon": {"dtype": torch.bfloat16, "name": "muon"},
    "muon, int8": {"dtype": torch.bfloat16, "name": "muon", "moment_dtype": INT8},
}
COMPILED = ["fp32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp32 weights", "int8"))]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(offload, "PIECE_ELEMENTS", 64)


def assert_same_updates(named, *, compiled):
    (net, plain), (other, on_host) = (
        net_and_optimizer(0.5, lr=1e-2, **named, offload=o) for o in (False, True)
    )
    assert len(on_host._host.pieces) >= SLOTS
    for optimizer in (plain, on_host) if compiled else ():
        compile_update(optimizer)
    for number in range(4):
        loss = torch.tensor(math.nan) if number == 1 else LOSS
        one, two = (step(*of, gradients(net, number), loss) for of in ((net, plain), (other, on_host)))
        assert all(map(torch.equal, one[:3], two[:3]))
    for one, two in zip(*map(tensors_of, map(snapshot, (plain, on_host))), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("named", KINDS.values(), ids=KINDS)
def test_updates_and_skips_in_pieces_are_the_same_bits(small_pieces, named):
    assert_same_updates(named, compiled=False)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_updates_in_pieces_are_the_same_bits(small_pieces, name):
    assert_same_updates(KINDS[name], compiled=True)


def test_pieces_are_all_of_a_state_and_slots_hold_the_largest(small_pieces):
    _, optimizer = net_and_optimizer(0.0, torch.bfloat16, moment_dtype=INT8, offload=True)
    family, host = optimizer.families[0], optimizer._host
    stored = [tensor for piece in host.pieces for tensor, _ in piece.stores]
    state = [family.main, *family.moments.values()]
    state += [rows for name, rows in family.rows.items() if "scales" in name]
    assert sum(each.numel() for each in stored) == sum(each.numel() for each in state)
    ours = {each.untyped_storage().data_ptr() for each in host.slots}
    staged = [tensor for piece in host.pieces for tensor, _ in piece.fetches]
    assert {each.untyped_storage().data_ptr() for each in staged} == ours
    assert all(each.data_ptr() % offload.ALIGNED == 0 for each in staged)


RUN = ("train.steps=6", "checkpoint.interval=3", "checkpoint.keep_last=9", "precision.compute=bf16")
RUNS = {
    "fp32": (),
    "int8": ("optim.moment_dtype=int8",),
    "muon, in place": ("optim.name=muon", "optim.moment_dtype=bf16", "optim.master_dtype=bf16"),
}


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_a_resume_with_state_elsewhere_is_bitwise(words, tmp_path):
    for first, second in ((False, True), (True, False)):
        one, two = tmp_path / f"{first}", tmp_path / f"{first}, then {second}"
        whole = train_in(one, *RUN, *words, f"optim.offload={first}")
        source = f"checkpoint.resume_from={one}/checkpoints/step_00000003"
        resumed = train_in(two, *RUN, *words, f"optim.offload={second}", source)
        assert numbers(two)[-1] == numbers(one)[-1]
        states = [{**t.optimizer.state_dict(), "weights": t.optimizer.weights} for t in (whole, resumed)]
        assert_same_state(*states)
    assert numbers(tmp_path / "True") == numbers(tmp_path / "False")


@pytest.mark.usefixtures("unmeasured", "as_traced")
@pytest.mark.parametrize("words", [("compile.enabled=true",), ("optim.name=muon",)], ids=["adamw", "muon"])
def test_a_captured_run_with_a_bad_step_is_one_without_offload(words, tmp_path, monkeypatch):
    words = (*words, "precision.compute=bf16", "train.steps=7")
    captured = ("graph.scope=full_iteration", "graph.warmup_steps=2", "optim.offload=true")
    for name, more in (("plain", ()), ("captured", captured)):
        with monkeypatch.context() as patch:
            trainer = trainer_in(tmp_path / name, *words, *more)
            spoil_steps(patch, trainer, (5,))
            assert trainer.run()
    assert trainer.execution.capture.ready and trainer.optimizer.slots
    assert numbers(tmp_path / "captured") == numbers(tmp_path / "plain")
    folders = [(tmp_path / name / "checkpoints", tmp_path / f"{name}_") for name in ("plain", "captured")]
    assert_same_state(*(final_state(*each, *words) for each in folders))


REFUSED = {"optim.qk_clip=100": "in host memory then; use optim.qk_clip=0, or optim.offload=false"}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_in_host_memory_is_refused_in_one_line(word):
    with pytest.raises(ConfigError, match=REFUSED[word]):
        check(config("optim.offload=true", "optim.name=muon", word))


def test_a_host_without_memory_for_the_state_is_refused(monkeypatch):
    plan = plan_of(config("optim.offload=true", "precision.compute=bf16", "launch.nproc=2"), 2)
    (needed,) = start_checks.host_of_places(plan)
    for there, is_refused in ((2 * needed + 1, False), (2 * needed - 1, True)):
        monkeypatch.setattr(start_checks, "memory_of", lambda _, size=there: size)
        if not is_refused:
            start_checks._check_host(plan, 0.0)
            continue
        with pytest.raises(ConfigError, match="of the 2 ranks of a node take .* GiB of host memory"):
            start_checks._check_host(plan, 0.0)


def test_pages_stay_pinned_for_as_long_as_a_tensor_has_them(monkeypatch):
    pinned = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, _: pinned.update({address: size}) or 0,
        cudaHostUnregister=pinned.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    whole = offload.host_zeros(5000, torch.float32, torch.device("cuda"))
    address, part = whole.data_ptr(), whole[:7]
    assert not whole.any() and pinned == {address: 5 * mmap.PAGESIZE} and address % mmap.PAGESIZE == 0
    del whole
    gc.collect()
    assert pinned and part.fill_(1).sum() == 7
    del part
    gc.collect()
    assert not pinned
