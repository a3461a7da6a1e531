"""What exchanges queue on which stream, with stand-ins for streams, and the addresses that they hand on."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from graphmoe.ops.symm.exchange import _aligned, _beside
from graphmoe.ops.symm.launches import WIDEST
from tests.stand_in_streams import Gpu, use_streams


@dataclass
class Block:
    """A tensor that says when it is copied."""

    gpu: Gpu
    name: str
    fails: bool = False

    def copy_(self, source: str) -> None:
        if self.fails:
            raise RuntimeError(self.name)
        self.gpu.queue(f"{source} to {self.name}")


def exchange(gpu, ranks, streams, fails=()):
    """Copies from all other ranks, and a kernel beside them."""
    peers = SimpleNamespace(streams=[torch.cuda.Stream() for _ in range(streams)])
    copies = [(Block(gpu, str(rank), rank in fails), "block") for rank in range(1, ranks)]
    gpu.queue("barrier")
    with _beside(peers, copies):
        gpu.queue("kernel")


@pytest.mark.parametrize(("ranks", "streams"), [(2, 1), (4, 3), (3, 3)])
def test_each_copy_has_a_stream_of_its_own_and_none_holds_up_the_kernels(monkeypatch, ranks, streams):
    gpu = use_streams(monkeypatch)
    exchange(gpu, ranks, streams)
    gpu.queue("reader")
    copies = [f"block to {rank}" for rank in range(1, ranks)]
    assert [gpu.on[name] for name in copies] == ["second", "third", "fourth"][: ranks - 1]
    assert all(gpu.behind[name] == {"barrier"} for name in (*copies, "kernel"))
    assert gpu.on["kernel"] == gpu.on["reader"] == "first"
    assert gpu.behind["reader"] == {"barrier", "kernel", *copies}


@pytest.mark.parametrize("fails", [(1,), (2,)])
def test_the_current_stream_waits_for_what_was_begun_when_an_error_leaves(monkeypatch, fails):
    gpu = use_streams(monkeypatch)
    joined, wait = [], type(gpu.current).wait_stream

    def wait_stream(stream, other):
        joined.append((stream.name, other.name))
        wait(stream, other)

    monkeypatch.setattr(type(gpu.current), "wait_stream", wait_stream)
    with pytest.raises(RuntimeError, match=str(fails[0])):
        exchange(gpu, 4, 3, fails)
    names = ["second", "third"][: fails[0]]
    assert joined == [*((name, "first") for name in names), *(("first", name) for name in names)]
    assert gpu.current.name == "first"


def test_an_error_beside_the_copies_leaves_none_behind(monkeypatch):
    gpu = use_streams(monkeypatch)
    peers = SimpleNamespace(streams=[torch.cuda.Stream()])
    with pytest.raises(KeyError), _beside(peers, [(Block(gpu, "1"), "block")]):
        raise KeyError
    gpu.queue("later")
    assert gpu.behind["later"] == {"block to 1"}


def test_without_streams_copies_run_before_the_kernels(monkeypatch):
    gpu = use_streams(monkeypatch)
    exchange(gpu, ranks=4, streams=0)
    copies = {f"block to {rank}" for rank in (1, 2, 3)}
    assert {*gpu.on.values()} == {"first"} and gpu.behind["kernel"] == {"barrier", *copies}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [5, 37, 64])
def test_rows_are_read_from_an_address_that_suits_the_widest_load(dtype, columns):
    x = torch.arange(4 * columns, dtype=dtype).view(4, columns)
    assert x.data_ptr() % WIDEST == 0
    for part in (x, x[1:], x[:, 1:], x.T):
        aligned = _aligned(part)
        assert aligned.data_ptr() % WIDEST == 0 and aligned.is_contiguous() and aligned.equal(part)
    assert _aligned(x) is x
    assert (x[1:].data_ptr() % WIDEST == 0) == (columns == 64)
