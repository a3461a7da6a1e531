"""On which stream an exchange packs, and what waits for what: with stand-ins for streams."""

from __future__ import annotations

import pytest
import torch

from graphmoe.ops.symm import peers
from graphmoe.ops.symm.peers import before_products, beside_products_on
from tests.stand_in_streams import use_streams


@pytest.fixture
def gpu(monkeypatch):
    return use_streams(monkeypatch)


def exchange(gpu):
    """What one queues that moves rows by copies."""
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
            exchange(gpu)
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
        exchange(gpu)
    assert {*gpu.on.values()} == {"second"} and gpu.behind["copy"] == {"reserve", "pack"}


def test_an_error_leaves_no_stream_behind(gpu):
    products = gpu.current
    transfers = gpu.stream(torch.cuda.Stream())
    with pytest.raises(KeyError), transfers, beside_products_on(products), before_products():
        raise KeyError
    assert peers._products is None and gpu.current is products


def test_products_inside_products_give_way_to_those_around_them(gpu):
    outer, inner = gpu.current, torch.cuda.Stream()
    with beside_products_on(outer):
        with beside_products_on(inner):
            assert peers._products is inner
        assert peers._products is outer
