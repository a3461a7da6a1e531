"""Transfers on a stream of their own: what waits for what, with stand-ins for streams."""

import pytest
import torch

from graphmoe.ops.symm import peers
from graphmoe.ops.symm.peers import before_products
from graphmoe.runtime.overlap.runner import TransferStream
from tests.stand_in_streams import use_streams


def exchange(gpu, number):
    """Queue the work of an exchange that moves rows by copies."""
    gpu.queue(f"reserve {number}")
    with before_products():
        gpu.queue(f"pack {number}")
    gpu.queue(f"copy {number}")
    return "received"


def test_transfers_follow_each_other_and_only_their_readers_wait_for_them(monkeypatch):
    gpu = use_streams(monkeypatch)
    transfers = TransferStream(torch.device("cuda"))
    gpu.queue("earlier products")
    assert transfers.run("a", lambda: exchange(gpu, "a"), reads="held") == "received"
    gpu.queue("products beside a")
    transfers.run("b", lambda: exchange(gpu, "b"), reads=None)
    gpu.queue("products beside b")
    transfers.wait(["a", "not under way"])
    gpu.queue("reader of a")
    transfers.wait_for_all()
    gpu.queue("reader of b")
    on_transfers = {name for name, stream in gpu.on.items() if stream == "second"}
    assert on_transfers == {"reserve a", "copy a", "reserve b", "copy b"}
    assert gpu.behind["reserve a"] == {"earlier products"}
    assert {"copy a", "products beside a"} <= gpu.behind["pack b"]  # so it waits for the transfer before it
    assert "copy a" not in gpu.behind["products beside a"] and "copy b" not in gpu.behind["reader of a"]
    assert "copy a" in gpu.behind["reader of a"] and "copy b" in gpu.behind["reader of b"]


def test_a_cpu_has_no_stream_of_transfers():
    transfers = TransferStream(torch.device("cpu"))
    assert transfers.run("a", lambda: "received", reads=None) == "received"
    transfers.wait(["a"])
    transfers.wait_for_all()


def test_an_error_in_a_transfer_leaves_the_current_stream_and_no_products(monkeypatch):
    gpu = use_streams(monkeypatch)
    products, transfers = gpu.current, TransferStream(torch.device("cuda"))
    with pytest.raises(ZeroDivisionError):
        transfers.run("a", lambda: 1 // 0, reads=None)
    assert gpu.current is products and peers._products is None
    transfers.wait(["a"])
    transfers.run("a", lambda: exchange(gpu, "a"), reads=None)
    assert gpu.on == {"reserve a": "second", "pack a": "first", "copy a": "second"}
