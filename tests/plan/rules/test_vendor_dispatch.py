"""Vendors' dispatchers on the devices of a run: errors where they cannot run, and their buffers."""

import sys
from types import SimpleNamespace

import pytest
import torch

from graphmoe.config import packages
from graphmoe.config.schema import ConfigError
from graphmoe.plan.experts import Load
from graphmoe.plan.layout import Layout
from graphmoe.plan.plan import plan_of
from graphmoe.runtime import dispatch
from graphmoe.runtime.dispatch import deepep, nvshmem
from graphmoe.runtime.ranks import Ranks
from tests.runs import config
from tests.vendor_api import bind, install_module, recorded_signature


class SomeRanks(Ranks):
    """This rank of many."""

    def __init__(self, rank=0, size=4, local_size=4):
        self.rank, self.size, self.local_size = rank, size, local_size


@pytest.fixture(autouse=True)
def all_packages(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: True)


def check(choice, ranks=None, layout=None):
    layout = layout or Layout(dp=4, ep=4)
    dispatch.check_dispatcher(choice, torch.device("cuda"), layout, ranks or SomeRanks())


def refused(*arguments):
    with pytest.raises(ConfigError) as error:
        check(*arguments)
    return str(error.value)


def test_a_missing_package_is_named_with_its_command_and_what_needs_none(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: name not in ("deep_ep", "primus_turbo"))
    for choice, name, command in (
        ("deepep", "deep_ep", "DeepEP@v1.2.1"), ("turbo", "primus_turbo", "graphmoe[turbo]"),
    ):  # fmt: skip
        message = refused(choice)
        assert message.startswith(f"moe.dispatcher={choice} needs the package {name}, which is not installed")
        assert "pip install --no-build-isolation" in message and command in message
        assert message.endswith("or use moe.dispatcher=alltoall, or symm within a node")


def test_a_torch_without_nvshmem_or_with_other_programs_is_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "has_nvshmem", lambda: False)
    assert "libnvshmem_host.so.3, and one of them is missing" in refused("nvshmem")
    monkeypatch.setattr(dispatch, "has_nvshmem", lambda: True)
    monkeypatch.setenv("TORCH_SYMMMEM_NBLOCKS", "24")
    assert "TORCH_SYMMMEM_NBLOCKS=24 sets another; unset TORCH_SYMMMEM_NBLOCKS" in refused("nvshmem")
    monkeypatch.delenv("TORCH_SYMMMEM_NBLOCKS")
    check("nvshmem")


@pytest.mark.parametrize("hip, wrong, right", [(None, "turbo", "deepep"), ("7.0", "deepep", "turbo")])
def test_each_package_wants_the_gpus_of_its_vendor(monkeypatch, hip, wrong, right):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert "which this torch lacks; use moe.dispatcher=alltoall, or symm within a node" in refused(wrong)
    check(right)


def test_ranks_that_exchange_must_be_on_one_node(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    rank = SomeRanks(rank=5, size=8)
    said = "0, 1, 2, 3, 4, 5, 6, 7 of a group of parallel.ep=8 are on several; use parallel.ep of 4"
    assert said in refused("deepep", rank, Layout(dp=8, ep=8))
    check("deepep", rank, Layout(dp=8, ep=4))


@pytest.mark.parametrize("choice, etp", [("deepep", 1), ("turbo", 1), ("nvshmem", 2)])
def test_a_buffer_has_room_for_all_rows_and_a_budget_of_slots(choice, etp):
    words = "parallel.ep=4", "model.num_experts=64", "model.hidden_size=256", "precision.compute=bf16"
    run = config(*words, f"moe.dispatcher={choice}", f"parallel.etp={etp}", "run.device=cuda")
    plan = plan_of(run, 4 * etp)
    room = plan.room()
    every_row = deepep.DeepEP(Load(4 * plan.tokens, room.slots), 16)
    expected = nvshmem.Nvshmem(room, 16, etp) if choice == "nvshmem" else every_row
    assert dispatch.planned_dispatcher(plan) == expected


@pytest.mark.parametrize(
    "library, path", [("deepep", "deep_ep"), ("primus_turbo", "primus_turbo.pytorch.deep_ep")]
)
def test_the_buffer_is_opened_by_calls_that_the_package_takes(monkeypatch, library, path):
    calls = []

    def recorded(name, result=None):
        signature = recorded_signature(library, f"{path}.Buffer", name)

        def call(*args, **kwargs):
            calls.append((name, bind(signature, args, kwargs)))
            return result

        return call

    opened = SimpleNamespace(destroy=recorded("destroy"))
    init = recorded("__init__", opened)
    for name, size in (("dispatch", 256), ("combine", 512)):
        hint = SimpleNamespace(get_nvl_buffer_size_hint=lambda row, ranks, size=size: size * row * ranks)
        setattr(init, f"get_{name}_config", recorded(f"get_{name}_config", hint))
    init.set_num_sms = recorded("set_num_sms")
    install_module(monkeypatch, path, Buffer=init)
    if library == "primus_turbo":
        monkeypatch.setattr(sys.modules["primus_turbo.pytorch"], "deep_ep", sys.modules[path], raising=False)
    group = SimpleNamespace(size=lambda: 4)
    mesh = SimpleNamespace(layout=Layout(dp=4, ep=4), group=lambda axis: group)
    dispatch.open_buffer(library.removeprefix("primus_"), mesh, hidden_size=2048)
    assert deepep._in_use is opened
    dispatch.close_dispatcher()
    assert deepep._in_use is None
    made = dict(calls)
    assert made["__init__"]["group"] is group and made["__init__"]["explicitly_destroy"]
    assert made["__init__"]["num_nvl_bytes"] == 512 * 4096 * 4
    assert made["set_num_sms"] == {"new_num_sms": 2 * deepep.CHANNELS}
    assert [name for name, _ in calls][-1] == "destroy"


def test_without_a_buffer_or_memory_the_operations_say_what_to_call():
    tokens = torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="no buffer for rows to other ranks: call use_buffer"):
        deepep.DeepEP(Load(8, 8), 4).dispatch(*tokens)
    ints = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="no symmetric memory for rows to other ranks: call use_rows"):
        nvshmem.Nvshmem(Load(8, 8), 4, 1).dispatch(*tokens, ints, ints, ints.view(1, 2), ints)
