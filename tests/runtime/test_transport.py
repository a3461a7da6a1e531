"""Transport that ``moe.transport=auto`` picks for the rows of symm, in runs and in projections of them."""

import functools
from dataclasses import replace

import pytest
import torch

from graphmoe.config.schema import DeviceChoice, RunConfig
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.experts import transport_of
from graphmoe.plan.layout import Layout
from graphmoe.plan.plan import plan_of
from graphmoe.plan.rules.check import resolve
from graphmoe.project.memory import projected_memory, with_its_transport
from graphmoe.runtime.dispatch import planned_dispatcher
from tests.runs import config

SYMM = ("moe.dispatcher=symm", "parallel.ep=2", "launch.nproc=2", "run.device=cuda")
OVERLAP = ("pipeline.ep_overlap=true", "compile.enabled=true")
LAYOUT = Layout(dp=2, ep=2)


@pytest.mark.parametrize(
    ("hip", "words", "copies"),
    [
        (None, (*SYMM, *OVERLAP), True),
        ("6.4", (*SYMM, *OVERLAP), False),
        (None, (*SYMM, *OVERLAP, "run.device=cpu"), False),
        (None, (*SYMM, *OVERLAP, "run.device=cpu", "moe.transport=copy_engine"), True),
        (None, SYMM, False),
        (None, (*SYMM, *OVERLAP, "moe.transport=pull"), False),
        ("6.4", (*SYMM, "moe.transport=copy_engine"), True),
    ],
)
def test_a_run_has_blocks_where_copies_move_rows_and_so_has_its_projection(monkeypatch, hip, words, copies):
    monkeypatch.setattr(torch.version, "hip", hip)
    run = config(*words)
    dispatcher = planned_dispatcher(plan_of(run, 2))
    assert (dispatcher.block > 0) == copies
    sizes = Sizes.from_config(with_its_transport(plan_of(run, 2)), LAYOUT, on_nvidia=hip is None)
    assert (sizes.block, sizes.room) == (dispatcher.block, dispatcher.capacity)


def test_a_dispatcher_that_moves_no_rows_by_symm_has_no_transport():
    words = ("parallel.ep=2", "launch.nproc=2", "moe.transport=copy_engine")
    assert transport_of(config(*words), on_nvidia=True) is None


def test_the_projected_memory_of_a_run_is_that_of_the_transport_that_it_takes():
    def shared_gib(*words: str) -> float:
        run = config(*SYMM, *OVERLAP, "precision.compute=bf16", *words)
        (place,) = projected_memory(plan_of(run, 2))["places"]
        return place["dispatch"]

    pulls, copies = (shared_gib(f"moe.transport={name}") for name in ("pull", "copy_engine"))
    assert shared_gib("run.device=cpu") == pulls < copies == shared_gib()


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_a_dry_run_takes_the_transport_of_the_gpus_that_torch_is_built_for(monkeypatch, hip):
    """Include machines without such a GPU, where run.device=auto means the device that is there."""
    monkeypatch.setattr(torch.version, "hip", hip)
    found = []
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", functools.partial(bool, available))
        run = dry_config(*OVERLAP)
        assert run.run.device is (DeviceChoice.cuda if available else DeviceChoice.cpu)
        dispatcher = planned_dispatcher(plan_of(run, 2))
        assert (dispatcher.block > 0) == (hip is None)
        found.append(dispatcher)
    assert found[0] == found[1]


def dry_config(*words: str) -> RunConfig:
    """Configuration of a dry run of two ranks, on the device that this machine is said to have."""
    run = config("launch.fake_world=2", "moe.dispatcher=symm", "parallel.ep=2", *words)
    return resolve(replace(run, run=replace(run.run, device=DeviceChoice.auto)))
