"""Memory that GPUs share for symm, and the transport that moe.transport=auto picks for its rows."""

import functools
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import _SymmetricMemory

from graphmoe.config.schema import ConfigError, DeviceChoice
from graphmoe.ops import IN_USE, symm
from graphmoe.ops.collectives import use_groups
from graphmoe.ops.dispatch import send_plan
from graphmoe.ops.fp8 import fp8_dtype, quantise
from graphmoe.ops.symm.exchange import _take
from graphmoe.ops.symm.peers import ALIGNMENT, Region, Sizes
from graphmoe.plan.experts import transport_of
from graphmoe.plan.layout import Layout
from graphmoe.plan.plan import plan_of
from graphmoe.plan.rules import resolve
from graphmoe.runtime.dispatch import close_dispatcher, planned_dispatcher
from graphmoe.runtime.dispatch import symm as module
from graphmoe.runtime.ranks import Mesh
from graphmoe.worker import projected_memory
from tests.runs import config

SIZES = Sizes(tokens=6, row_bytes=20, slots=2, places=4, rows=30, block=3)


@pytest.fixture
def device(monkeypatch):
    state = SimpleNamespace(capturing=False, made=[], met=[], synchronized=0)

    def symmetric_memory(num_bytes, group):
        state.made.append([torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2)])
        return state.made[-1], functools.partial(state.met.append, len(state.made))

    def synchronize():
        state.synchronized += 1

    monkeypatch.setattr(module, "symmetric_memory", symmetric_memory)
    monkeypatch.setattr(module.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return state


@pytest.fixture
def pair(device):
    return module.SymmetricPeers(SimpleNamespace(size=lambda: 2))


def test_parts_of_a_region_are_apart_aligned_and_large_enough():
    region = Region.with_room_for(SIZES, 2)
    parts = {"tokens": 6 * 20, "blocks": 2 * 3 * 20, "records": 6 * 4 * 5 * 4, "counts": 8, "sums": 600}
    starts = [getattr(region, name) for name in (*parts, "dweights", "num_bytes")]
    for start, end, length in zip(starts, starts[1:], (*parts.values(), 30 * 2 * 4), strict=False):
        assert start % ALIGNMENT == 0 and end - start >= length


def test_gpus_that_cannot_share_memory_are_an_error_with_another_dispatcher(pair, monkeypatch):
    def forbidden(*_):
        raise RuntimeError("CUDA driver error: operation not permitted\nException raised from ...")

    monkeypatch.setattr(module, "symmetric_memory", forbidden)
    with pytest.raises(ConfigError, match=r"\(CUDA driver error: operation not permitted\); .*=alltoall$"):
        pair.reserve(SIZES)


def test_rows_and_replicas_have_memories_that_grow_to_the_most(pair, device):
    first = pair.reserve(SIZES)
    assert pair.reserve(replace(SIZES, tokens=1, rows=2)) is first
    pair.replicas.reserve(100)
    pair.replicas.reserve(60)
    larger = pair.reserve(replace(SIZES, tokens=1, rows=50))
    assert larger.sizes == replace(SIZES, rows=50)
    sizes = [first.num_bytes, 100, larger.num_bytes]
    assert [[*map(len, made)] for made in device.made] == [[size] * 2 for size in sizes]
    assert device.synchronized == 3
    for memory, number in ((pair, 2), (pair.replicas, 1)):
        assert memory.addresses.tolist() == [buffer.data_ptr() for buffer in device.made[number]]
        memory.barrier()
    assert device.met == [3, 2]
    view = pair.view(0, larger.sums, (30, 5), torch.float32)
    view.fill_(1.0)
    of_first, of_second = device.made[2]
    assert view.data_ptr() == of_first.data_ptr() + larger.sums
    assert int((of_first.view(torch.float32) == 1).sum()) == 150 and not of_second.any()


def test_a_capture_cannot_make_more_memory_and_graphs_keep_what_they_hold(pair, device):
    pair.reserve(SIZES)
    pair.replicas.reserve(100)
    device.capturing = True
    assert pair.reserve(SIZES).sizes == SIZES
    pair.replicas.reserve(100)
    pair.barrier()
    pair.replicas.barrier()
    with pytest.raises(RuntimeError, match="a capture cannot allocate"):
        pair.reserve(replace(SIZES, rows=31))
    with pytest.raises(RuntimeError, match="the traffic of replicas needs 101 shared bytes"):
        pair.replicas.reserve(101)
    device.capturing = False
    for rows in (31, 32):
        pair.reserve(replace(SIZES, rows=rows))
    pair.replicas.reserve(200)
    rows, replicas, of_no_graph = (weakref.ref(buffers[0]) for buffers in device.made[:3])
    device.made.clear()
    assert rows() is not None and replicas() is not None and of_no_graph() is None
    symm.use_peers(pair)
    symm.forget_graphs()
    symm.use_peers(None)
    assert rows() is replicas() is None


def test_sides_in_turn_take_no_barrier_and_a_capture_begins_with_one(pair, device):
    pair.reserve(SIZES)
    for side, capturing, barriers in (
        ("out", False, 0), ("back", False, 0), ("out", False, 0), ("out", False, 1),
        ("back", True, 2), ("out", True, 2), ("out", True, 3), ("back", False, 4),
    ):  # fmt: skip
        device.capturing = capturing
        _take(pair, side)
        assert len(device.met) == barriers


def test_a_cpu_and_a_rank_alone_need_no_memory_in_common():
    peers = module.make_peers(Mesh(Layout()), torch.device("cuda"))
    assert isinstance(peers, symm.CollectivePeers) and (peers.rank, peers.size) == (0, 1)


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("problem", ["", "no memory"])
def test_an_axis_shares_memory_if_each_rank_sees_peers_and_has_memory(device, monkeypatch, peers, problem):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    of_other = iter([peers, problem])
    ranks = SimpleNamespace(local_size=2, gather=lambda own: [own, next(of_other)])
    group = mock.Mock(size=lambda: 2)
    mesh = SimpleNamespace(layout=Layout(tp=2), rank=1, group={"tp": group, "cp_tp": group}.get)
    module.share_axes(mesh, ranks, torch.device("cuda"))
    assert len(device.made) == peers
    assert {*IN_USE.shared} == ({"tp", "cp_tp"} if peers and not problem else set())
    assert len({*IN_USE.shared.values()}) <= 1
    for ends in (close_dispatcher, functools.partial(use_groups, None)):
        IN_USE.shared["tp"] = mock.Mock()
        ends()
        assert IN_USE.shared == {}


EXPERT = torch.tensor([[1, 0], [2, 1], [0, 2]], dtype=torch.int32)


@pytest.mark.parametrize("block", [0, 1, 4])
def test_a_rank_alone_sends_rows_to_itself(one_peer, block):
    h, weight = torch.randn(3, 5, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    plan, dy = send_plan(EXPERT, 3, 1, 1), torch.randn(3, 5)
    sent = torch.ops.graphmoe.symm_dispatch(h, weight, EXPERT, *plan, 6, 3, 1, block)
    received, of_slots, numbers, arrivals = sent
    made = received * of_slots.sum(1, keepdim=True)
    out = torch.ops.graphmoe.symm_combine(made, *plan, arrivals, block)
    dh, dweight = torch.autograd.grad(out, (h, weight), dy)
    assert arrivals.tolist() == [[3]] and numbers.tolist() == [*EXPERT.tolist(), *[[-1, -1]] * 3]
    total = weight.detach().sum(1, keepdim=True)
    assert out.equal(h * total) and dh.equal(dy * total)
    assert torch.allclose(dweight, (h * dy).sum(1, keepdim=True).expand(3, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_carrier_holds_what_was_sent_and_nan_in_dead_rows_as_torch_is_told(one_peer, dtype):
    q, scale = quantise(torch.randn(3, 32, dtype=dtype), fp8_dtype())
    slots = torch.cat([torch.rand(3, 2), scale], 1), torch.nn.functional.pad(EXPERT, (0, 1), value=-1)
    sent = q, *slots, *send_plan(EXPERT, 3, 1, 1), 6, 3, 1, 0, dtype
    carrier = torch.ops.graphmoe.symm_bring_fp8(*sent)[0]
    torch.library.opcheck(torch.ops.graphmoe.symm_bring_fp8, sent, test_utils="test_faketensor")
    torch.library.opcheck(torch.ops.graphmoe.fp8_arrived, (carrier,), test_utils="test_faketensor")
    numbers, scales = torch.ops.graphmoe.fp8_arrived(carrier)
    assert carrier.shape == (6, 32) and carrier.dtype == dtype
    assert numbers[:3].float().equal(q.float()) and scales[:3].equal(scale)
    assert numbers[3:].float().isnan().all() and scales[3:].isnan().all()


def test_operations_say_what_is_missing(one_peer):
    plan = torch.ops.graphmoe.routing_plan(torch.tensor([[0, 1]], dtype=torch.int32), 2)
    arguments = (torch.ones(1, 3), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32), *plan, 4, 1, 1, 0)
    with pytest.raises(RuntimeError, match="the send plan is for 2 ranks, but there are 1 peers"):
        torch.ops.graphmoe.symm_dispatch(*arguments)
    symm.use_peers(None)
    with pytest.raises(
        RuntimeError, match="no peers to exchange rows with; call graphmoe.ops.symm.use_peers"
    ):
        torch.ops.graphmoe.symm_dispatch(*arguments)


def test_torch_has_what_symmetric_memory_calls():
    called = "empty_strided_p2p", "rendezvous", "get_buffer", "barrier", "buffer_ptrs", "rank", "world_size"
    assert [name for name in called if not hasattr(_SymmetricMemory, name)] == []


SYMM = ("moe.dispatcher=symm", "parallel.ep=2", "launch.nproc=2", "run.device=cuda")
OVERLAP = ("pipeline.ep_overlap=true", "compile.enabled=true")


@pytest.mark.parametrize(
    ("hip", "words", "copies"),
    [
        (None, OVERLAP, True),
        ("6.4", OVERLAP, False),
        (None, (*OVERLAP, "run.device=cpu"), False),
        (None, (*OVERLAP, "run.device=cpu", "moe.transport=copy_engine"), True),
        (None, (), False),
        (None, (*OVERLAP, "moe.balance=none"), True),
        (None, (*OVERLAP, "moe.transport=pull"), False),
        ("6.4", ("moe.transport=copy_engine",), True),
    ],
)
def test_a_run_has_blocks_where_copies_move_rows_and_so_has_its_projection(monkeypatch, hip, words, copies):
    monkeypatch.setattr(torch.version, "hip", hip)
    plan = plan_of(config(*SYMM, *words), 2)
    dispatcher = planned_dispatcher(plan)
    assert (dispatcher.block > 0) == copies
    sizes = plan.with_its_transport().sizes(on_nvidia=hip is None)
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
    monkeypatch.setattr(torch.version, "hip", hip)
    found = []
    for device in (DeviceChoice.cpu, DeviceChoice.cuda):  # the device that is there
        monkeypatch.setattr(torch.cuda, "is_available", lambda device=device: device is DeviceChoice.cuda)
        run = config("launch.fake_world=2", *SYMM[:2], *OVERLAP)
        run = resolve(replace(run, run=replace(run.run, device=DeviceChoice.auto)))
        assert run.run.device is device
        found.append(planned_dispatcher(plan_of(run, 2)))
    assert found[0] == found[1] and (found[0].block > 0) == (hip is None)
