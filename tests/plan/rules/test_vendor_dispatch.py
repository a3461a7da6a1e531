"""Limits of the vendors' dispatchers, and errors where their packages are not installed."""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch
from omegaconf import OmegaConf

from graphmoe.config.schema import ConfigError, DispatcherChoice, ModelConfig, RunConfig
from graphmoe.plan.experts import Load
from graphmoe.plan.layout import Layout
from graphmoe.plan.rules.check import violations
from graphmoe.runtime.dispatch import deepep, nvshmem, vendors
from graphmoe.runtime.dispatch.vendors import check_dispatcher, open_buffer, vendor_dispatcher
from graphmoe.runtime.ranks import Ranks
from tests.vendor_api import bind, install_module, recorded_signature

VALID = (
    "model.hidden_size=2048 model.num_experts=64 launch.nproc=8 train.global_batch_size=96 "
    "train.micro_batch_size=1"
)
RULES = [
    (
        "deepep",
        "parallel.ep=2 parallel.etp=2",
        "parallel.etp=2 shares each out to several; use parallel.etp=1",
    ),
    (
        "turbo",
        "parallel.ep=2 parallel.etp=2",
        "parallel.etp=2 shares each out to several; use parallel.etp=1",
    ),
    ("deepep", "", "parallel.ep=1; use parallel.ep of these, or moe.dispatcher=auto"),
    (
        "deepep",
        "parallel.ep=16 launch.nproc=16",
        "parallel.ep=16; use parallel.ep of these, or moe.dispatcher=alltoall, or symm within a node",
    ),
    (
        "deepep",
        "parallel.ep=2 model.num_experts=512",
        "up to 128 experts of a rank, and model.num_experts=512 over parallel.ep=2 are 256; use more ranks",
    ),
    (
        "deepep",
        "parallel.ep=2 precision.compute=fp32",
        "use precision.compute=bf16, or moe.dispatcher=alltoall",
    ),
    (
        "deepep",
        "parallel.ep=2 model.hidden_size=2880",
        "rows of a multiple of 256 numbers, 7936 at most, and model.hidden_size=2880; use such a size, or",
    ),
    ("deepep", "parallel.ep=2 model.hidden_size=8192", "7936 at most, and model.hidden_size=8192"),
    ("turbo", "parallel.ep=2 model.hidden_size=2052", "multiple of 8 numbers, and model.hidden_size=2052"),
    ("deepep", "parallel.ep=8 model.top_k=33", "takes up to 32 experts of a token, and model.top_k=33; use"),
    (
        "nvshmem",
        "parallel.ep=2 parallel.etp=3 model.expert_ffn_size=48 launch.nproc=6",
        "parallel.ep=2 * parallel.etp=3 = 6; use such a product, or moe.dispatcher=alltoall, or",
    ),
    ("nvshmem", "", "parallel.ep=1 * parallel.etp=1 = 1; use such a product, or moe.dispatcher=auto"),
]
FINE = [
    ("deepep", "parallel.ep=8"),
    ("deepep", "parallel.ep=2 model.hidden_size=7936 model.top_k=32 graph.scope=full_iteration"),
    ("turbo", "parallel.ep=4 model.hidden_size=2880 model.top_k=33"),
    ("turbo", "parallel.ep=8 model.hidden_size=8192 graph.scope=layer"),
    ("nvshmem", "parallel.ep=8 parallel.etp=2 precision.compute=fp32 launch.nproc=16"),
    ("nvshmem", "parallel.ep=2 graph.scope=moe moe.sync_free_stage=3"),
]


def broken(dispatcher, words):
    dotted = OmegaConf.from_dotlist([*VALID.split(), f"moe.dispatcher={dispatcher}", *words.split()])
    return violations(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), dotted)))


@pytest.mark.parametrize("dispatcher, words, message", RULES)
def test_a_dispatcher_is_refused_what_it_cannot_carry_with_what_would_do(dispatcher, words, message):
    found = broken(dispatcher, words)
    assert len(found) == 1 and message in found[0] and found[0].startswith(f"moe.dispatcher={dispatcher} ")


@pytest.mark.parametrize("dispatcher", ["deepep", "turbo"])
def test_the_advice_leads_no_group_of_several_nodes_into_another_refusal(dispatcher):
    on_two_nodes = "parallel.ep=16 launch.nproc=8 launch.nodes=2 launch.endpoint=node0:29500"
    (message,) = broken(dispatcher, on_two_nodes)
    advised = re.findall(r"moe\.dispatcher=(\w+)", message.partition("; use ")[2])
    assert advised and [found for choice in advised if (found := broken(choice, on_two_nodes))] == []


@pytest.mark.parametrize("dispatcher, words", FINE)
def test_a_dispatcher_is_allowed_what_it_carries(dispatcher, words):
    assert broken(dispatcher, words) == []


class SomeRanks(Ranks):
    """This rank of many."""

    def __init__(self, rank=0, size=4, local_size=4):
        self.rank, self.size, self.local_size = rank, size, local_size


def refused(choice, *, installed=lambda package: True, device="cuda", ranks=None, layout=None):
    layout = layout or Layout(dp=4, ep=4)
    with pytest.raises(ConfigError) as error:
        check_dispatcher(
            DispatcherChoice(choice), torch.device(device), layout, ranks or SomeRanks(), installed
        )
    return str(error.value)


@pytest.mark.parametrize(
    "choice, package, command",
    [("deepep", "deep_ep", "DeepEP@v1.2.1"), ("turbo", "primus_turbo", "primus-turbo")],
)
def test_a_missing_package_is_named_with_its_command_and_what_needs_none(choice, package, command):
    asked = []
    message = refused(choice, installed=lambda name: asked.append(name))
    assert asked == [package]
    assert message.startswith(f"moe.dispatcher={choice} needs the package {package}, which is not installed")
    assert "pip install --no-build-isolation" in message and command in message
    assert message.endswith("or use moe.dispatcher=alltoall, or symm within a node")


@pytest.mark.parametrize("choice", ["deepep", "turbo", "nvshmem"])
def test_a_vendor_dispatcher_is_refused_on_a_cpu(choice):
    assert "runs on GPUs, and this run is on a cpu; use moe.dispatcher=auto" in refused(choice, device="cpu")


def test_a_torch_without_nvshmem_or_with_other_programs_is_refused(monkeypatch):
    monkeypatch.setattr(vendors, "has_nvshmem", lambda: False)
    assert "libnvshmem_host.so.3, and one of them is missing" in refused("nvshmem")
    monkeypatch.setattr(vendors, "has_nvshmem", lambda: True)
    monkeypatch.setenv("TORCH_SYMMMEM_NBLOCKS", "24")
    assert "TORCH_SYMMMEM_NBLOCKS=24 asks for others; unset TORCH_SYMMMEM_NBLOCKS" in refused("nvshmem")
    monkeypatch.delenv("TORCH_SYMMMEM_NBLOCKS")
    check_dispatcher(DispatcherChoice.nvshmem, torch.device("cuda"), Layout(dp=4, ep=4), SomeRanks())


@pytest.mark.parametrize("hip, wrong, right", [(None, "turbo", "deepep"), ("7.0", "deepep", "turbo")])
def test_each_package_wants_the_gpus_of_its_vendor(monkeypatch, hip, wrong, right):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert "and these have not; use moe.dispatcher=alltoall, or symm within a node" in refused(wrong)
    arguments = torch.device("cuda"), Layout(dp=4, ep=4), SomeRanks(), lambda package: True
    check_dispatcher(DispatcherChoice(right), *arguments)


def test_ranks_that_exchange_must_be_on_one_node(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    message = refused("deepep", ranks=SomeRanks(rank=5, size=8), layout=Layout(dp=8, ep=8))
    assert (
        "0, 1, 2, 3, 4, 5, 6, 7 of a group of parallel.ep=8 are on several; use parallel.ep of 4" in message
    )
    arguments = torch.device("cuda"), Layout(dp=8, ep=4), SomeRanks(rank=5, size=8), lambda package: True
    check_dispatcher(DispatcherChoice.deepep, *arguments)


@pytest.mark.parametrize("choice", ["auto", "local", "alltoall"])
def test_other_dispatchers_need_no_package_and_no_gpu(choice):
    check_dispatcher(
        DispatcherChoice(choice), torch.device("cpu"), Layout(), SomeRanks(), lambda package: False
    )


def test_a_buffer_has_room_for_all_rows_and_a_budget_of_slots():
    model, layout, room = ModelConfig(num_experts=64), Layout(dp=8, ep=4, etp=2), Load(100, 300)
    choice = DispatcherChoice.deepep
    assert vendor_dispatcher(choice, model, Layout(dp=4, ep=4), 50, room) == deepep.DeepEP(Load(200, 300), 16)
    found = vendor_dispatcher(DispatcherChoice.nvshmem, model, layout, 50, room)
    assert found == nvshmem.Nvshmem(room, 16, 2)


@pytest.mark.parametrize(
    "choice, library, path",
    [("deepep", "deepep", "deep_ep"), ("turbo", "primus_turbo", "primus_turbo.pytorch.deep_ep")],
)
def test_the_buffer_is_opened_by_calls_that_the_package_takes(monkeypatch, choice, library, path):
    calls = []

    def recorded(name, result=None):
        signature = recorded_signature(library, f"{path}.Buffer", name)

        def call(*args, **kwargs):
            calls.append((name, bind(signature, args, kwargs)))
            return result

        return call

    opened = types.SimpleNamespace(destroy=recorded("destroy"))
    init = recorded("__init__", opened)
    for name, size in (("dispatch", 256), ("combine", 512)):
        hint = types.SimpleNamespace(
            get_nvl_buffer_size_hint=lambda row, ranks, size=size: size * row * ranks
        )
        setattr(init, f"get_{name}_config", recorded(f"get_{name}_config", hint))
    init.set_num_sms = recorded("set_num_sms")
    install_module(monkeypatch, path, Buffer=init)
    if choice == "turbo":
        monkeypatch.setattr(sys.modules["primus_turbo.pytorch"], "deep_ep", sys.modules[path], raising=False)
    group = types.SimpleNamespace(size=lambda: 4)
    mesh = types.SimpleNamespace(layout=Layout(dp=4, ep=4), group=lambda axis: group)
    open_buffer(DispatcherChoice(choice), mesh, hidden_size=2048)
    assert deepep._in_use is opened
    vendors.close_vendor()
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
