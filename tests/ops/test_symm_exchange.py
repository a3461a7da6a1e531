"""Exchanges on streams, with stand-ins for these, and the addresses that exchanges hand on."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from graphmoe.ops import IN_USE
from graphmoe.ops.symm.exchange import _aligned, _beside
from graphmoe.ops.symm.launches import WIDEST
from graphmoe.ops.symm.peers import before_products, beside_products_on
from tests.stand_in_streams import Gpu, use_streams


@pytest.fixture
def gpu(monkeypatch):
    return use_streams(monkeypatch)


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
    others = SimpleNamespace(streams=[torch.cuda.Stream() for _ in range(streams)])
    copies = [(Block(gpu, str(rank), rank in fails), "block") for rank in range(1, ranks)]
    gpu.queue("barrier")
    with _beside(others, copies):
        gpu.queue("kernel")


@pytest.mark.parametrize(("ranks", "streams"), [(2, 1), (4, 3), (3, 3)])
def test_each_copy_has_a_stream_of_its_own_and_none_holds_up_the_kernels(gpu, ranks, streams):
    exchange(gpu, ranks, streams)
    gpu.queue("reader")
    copies = [f"block to {rank}" for rank in range(1, ranks)]
    assert [gpu.on[name] for name in copies] == ["second", "third", "fourth"][: ranks - 1]
    assert all(gpu.behind[name] == {"barrier"} for name in (*copies, "kernel"))
    assert gpu.on["kernel"] == gpu.on["reader"] == "first"
    assert gpu.behind["reader"] == {"barrier", "kernel", *copies}


@pytest.mark.parametrize("fails", [(1,), (2,)])
def test_the_current_stream_waits_for_what_was_begun_when_an_error_leaves(gpu, monkeypatch, fails):
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


def test_an_error_beside_the_copies_leaves_none_behind(gpu):
    others = SimpleNamespace(streams=[torch.cuda.Stream()])
    with pytest.raises(KeyError), _beside(others, [(Block(gpu, "1"), "block")]):
        raise KeyError
    gpu.queue("later")
    assert gpu.behind["later"] == {"block to 1"}


def test_without_streams_copies_run_before_the_kernels(gpu):
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


def pack_and_copy(gpu):
    gpu.queue("reserve")
    with before_products():
        gpu.queue("pack")
    gpu.queue("copy")


def test_packing_is_queued_on_the_products_stream_between_what_was_before_and_the_copies(gpu):
    products, transfers = gpu.current, torch.cuda.Stream()
    gpu.queue("earlier products")
    with gpu.stream(transfers):
        gpu.queue("earlier transfer")
        with beside_products_on(products):
            pack_and_copy(gpu)
    gpu.queue("products")
    assert gpu.on == {
        "earlier products": "first", "earlier transfer": "second", "reserve": "second", "pack": "first",
        "copy": "second", "products": "first",
    }  # fmt: skip
    assert gpu.behind["pack"] == {"earlier products", "earlier transfer", "reserve"}
    assert gpu.behind["copy"] == {*gpu.behind["pack"], "pack"}
    assert "pack" in gpu.behind["products"] and "copy" not in gpu.behind["products"]
    assert gpu.current is products


def test_without_products_beside_it_an_exchange_packs_where_it_runs(gpu):
    with gpu.stream(torch.cuda.Stream()):
        pack_and_copy(gpu)
    assert {*gpu.on.values()} == {"second"} and gpu.behind["copy"] == {"reserve", "pack"}


def test_an_error_leaves_no_stream_behind(gpu):
    products = gpu.current
    transfers = gpu.stream(torch.cuda.Stream())
    with pytest.raises(KeyError), transfers, beside_products_on(products), before_products():
        raise KeyError
    assert IN_USE.products is None and gpu.current is products
