"""Exchanges on streams, with stand-ins for these, and the addresses that exchanges hand on."""

from types import SimpleNamespace

import pytest
import torch

from graphmoe.ops.symm.exchange import _aligned, _beside
from graphmoe.ops.symm.launches import WIDEST
from graphmoe.ops.symm.peers import before_products, beside_products_on
from tests.stand_in_streams import use_streams


@pytest.fixture
def gpu(monkeypatch):
    return use_streams(monkeypatch)


def exchange(gpu, ranks, streams, fails=""):
    """Copy a block to each other rank beside a kernel, of which one raises an error."""

    def queue(work):
        if work == fails:
            raise RuntimeError(work)
        gpu.queue(work)

    others = SimpleNamespace(streams=[torch.cuda.Stream() for _ in range(streams)])
    rooms = [SimpleNamespace(copy_=lambda of, to=rank: queue(f"{of} to {to}")) for rank in range(1, ranks)]
    queue("barrier")
    with _beside(others, [(room, "block") for room in rooms]):
        queue("kernel")


@pytest.mark.parametrize(("ranks", "streams"), [(2, 1), (4, 3), (3, 3)])
def test_each_copy_has_a_stream_of_its_own_and_none_holds_up_the_kernels(gpu, ranks, streams):
    exchange(gpu, ranks, streams)
    gpu.queue("reader")
    copies = [f"block to {rank}" for rank in range(1, ranks)]
    assert [gpu.on[name] for name in copies] == ["second", "third", "fourth"][: ranks - 1]
    assert all(gpu.behind[name] == {"barrier"} for name in (*copies, "kernel"))
    assert gpu.on["kernel"] == gpu.on["reader"] == "first"
    assert gpu.behind["reader"] == {"barrier", "kernel", *copies}


@pytest.mark.parametrize(("fails", "begun"), [("block to 1", 1), ("block to 2", 2), ("kernel", 3)])
def test_the_current_stream_waits_for_what_was_begun_when_an_error_leaves(gpu, monkeypatch, fails, begun):
    joined, wait = [], type(gpu.current).wait_stream

    def wait_stream(stream, other):
        joined.append((stream.name, other.name))
        wait(stream, other)

    monkeypatch.setattr(type(gpu.current), "wait_stream", wait_stream)
    with pytest.raises(RuntimeError, match=fails):
        exchange(gpu, 4, 3, fails)
    names = ["second", "third", "fourth"][:begun]
    assert joined == [*((name, "first") for name in names), *(("first", name) for name in names)]
    assert gpu.current.name == "first"


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


def test_packing_is_queued_on_the_products_stream_between_what_was_before_and_the_copies(gpu):
    products, transfers = gpu.current, torch.cuda.Stream()
    gpu.queue("earlier products")
    with gpu.stream(transfers):
        gpu.queue("earlier transfer")
        with beside_products_on(products):
            gpu.queue("reserve")
            with before_products():
                gpu.queue("pack")
            gpu.queue("copy")
    gpu.queue("products")
    on_first = {"earlier products", "pack", "products"}
    assert {name for name, stream in gpu.on.items() if stream == "first"} == on_first
    assert gpu.behind["pack"] == {"earlier products", "earlier transfer", "reserve"}
    assert gpu.behind["copy"] == {*gpu.behind["pack"], "pack"}
    assert "pack" in gpu.behind["products"] and "copy" not in gpu.behind["products"]
    assert gpu.current is products
