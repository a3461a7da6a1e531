"""Micro-batches in turns: orders, who waits for transfers, and the gradients of what was received."""

import functools
import random
from types import SimpleNamespace

import pytest
import torch

from graphmoe.ops import IN_USE
from graphmoe.ops.symm.peers import before_products
from graphmoe.runtime.overlap import (
    Backward,
    OrderedUnit,
    Overlap,
    Tape,
    TransferStream,
    backward_of,
    interleaved,
    transfers_first,
    turns,
)
from tests.distributed.layouts import watched
from tests.stand_in_streams import use_streams

LAYER = ("attn", "dispatch", "shared", "experts", "combine")
NEEDS = {
    "attn": ("combine",),
    "dispatch": ("attn",),
    "shared": ("attn",),
    "experts": ("dispatch",),
    "combine": ("attn", "shared", "experts"),
}


def model(num_layers: int) -> list[OrderedUnit]:
    units, number = [OrderedUnit("embed")], {"combine": 0}
    for layer in range(num_layers):
        for name in LAYER:
            needs = frozenset(number[source] for source in NEEDS[name])
            units.append(OrderedUnit(f"{name}{layer}", needs, name in ("dispatch", "combine")))
            number[name] = len(units) - 1
    return [*units, OrderedUnit("loss", frozenset({number["combine"]}))]


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_each_transfer_has_work_of_the_other_micro_batch_beside_it(num_layers):
    forward = model(num_layers)
    backward = backward_of(forward)
    order = interleaved(turns(forward, range(len(forward))), turns(backward, transfers_first(backward)))
    units = {"forward": forward, "backward": backward}
    exposed = []
    for place, (direction, number) in enumerate(order):
        if not units[direction][number].transfers:
            continue
        later = order[place + 1 :]
        waits = next(i for i, (d, n) in enumerate(later) if d == direction and number in units[d][n].needs)
        if not any(d != direction and not units[d][n].transfers for d, n in later[:waits]):
            exposed.append(units[direction][number].name)
    assert exposed == []


@pytest.mark.parametrize("seed", range(20))
def test_every_order_has_each_piece_once_and_behind_what_it_needs(seed):
    draw = random.Random(seed)
    forward = [
        OrderedUnit(str(i), frozenset(draw.sample(range(i), min(i, draw.randint(0, 3)))), draw.random() < 0.3)
        for i in range(30)
    ]
    backward = backward_of(forward)
    readers = {(29 - i, 29 - source) for i, unit in enumerate(forward) for source in unit.needs}
    assert {(reader, i) for i, unit in enumerate(backward) for reader in unit.needs} == readers
    order = interleaved(turns(forward, range(30)), turns(backward, transfers_first(backward)))
    for direction, units in (("forward", forward), ("backward", backward)):
        found = [number for way, number in order if way == direction]
        assert sorted(found) == list(range(30))
        for place, number in enumerate(found):
            assert units[number].needs <= set(found[:place])


def run(overlap: Overlap, pieces: list[OrderedUnit], done: list) -> torch.Tensor:
    results: list[torch.Tensor] = []
    for piece in pieces:
        segment = SimpleNamespace(stream="comm" if piece.transfers else "compute")
        unit = SimpleNamespace(name=piece.name, segments=(segment,))
        read = [results[source] for source in sorted(piece.needs)]

        def call(own, later, name=piece.name, transfers=piece.transfers):
            if not transfers:
                later.append(functools.partial(done.append, ("weights", name)))
            return [sum(own, torch.ones(1, requires_grad=True))]

        results += overlap.run_unit(unit, read, call)
    return results[-1]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("num_layers", [2, 3])
def test_weight_gradients_run_beside_the_transfers_of_each_turn_to_the_end(num_layers, alone):
    overlap = Overlap(torch.device("cpu"))
    done = watched(overlap)
    loss, tape = overlap.record(lambda: run(overlap, model(num_layers), done))
    tape.start([loss])
    done.clear()
    if alone:
        overlap.run_backward(Backward(tape))
    else:
        overlap.record(lambda: run(overlap, model(1), done), Backward(tape), model(1))
    of_backward = [(kind[0], name) for kind, name in done if kind != "forward"]
    expected = [("b", "loss")]
    for n in reversed(range(num_layers)):
        expected += [("b", f"combine{n}"), ("w", f"attn{n + 1}" if n + 1 < num_layers else "loss")]
        expected += [("b", f"experts{n}"), ("b", f"dispatch{n}"), ("b", f"shared{n}")]
        expected += [("w", f"experts{n}"), ("w", f"shared{n}"), ("b", f"attn{n}")]
    assert of_backward == [*expected, ("b", "embed"), ("w", "attn0"), ("w", "embed")]


def test_gradients_of_all_units_that_read_the_same_are_added_and_zeros_where_nothing_did():
    x, y = torch.randn(2, 3, dtype=torch.float64), torch.ones(4, dtype=torch.bfloat16)
    tape, total = Tape(torch.zeros((), requires_grad=True)), torch.zeros((), dtype=torch.float64)
    given = tape.receive([x, y.double(), y])
    for number in (0, 1, 0):
        (result,) = tape.run("attn", False, [given[number]], lambda own, later: [own[0].square()])
        total = total + (number + 1) * result.sum()
    tape.start([total])
    Overlap(torch.device("cpu")).run_backward(Backward(tape))
    of_x, of_y, unread = tape.gradients_of_received()
    torch.testing.assert_close(of_x, (1 + 1) * 2 * x, rtol=1e-15, atol=0)
    torch.testing.assert_close(of_y, 2 * 2 * y.double(), rtol=1e-15, atol=0)
    assert torch.equal(unread, torch.zeros_like(y)) and unread.dtype == y.dtype


def test_pieces_that_need_each_other_are_an_error():
    with pytest.raises(AssertionError, match="need each other"):
        transfers_first([OrderedUnit("a", frozenset({1})), OrderedUnit("b", frozenset({0}))])


def exchange(gpu, number):
    gpu.queue(f"reserve {number}")
    with before_products():
        gpu.queue(f"pack {number}")
    gpu.queue(f"copy {number}")
    return "received"


def test_transfers_follow_each_other_and_only_their_readers_wait_for_them(monkeypatch):
    gpu = use_streams(monkeypatch)
    transfers = TransferStream(torch.device("cuda"))

    gpu.queue("earlier products")
    for number in ("a", "b"):
        assert transfers.run(number, functools.partial(exchange, gpu, number), reads="held") == "received"
        gpu.queue(f"products beside {number}")
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


def test_an_error_in_a_transfer_leaves_the_current_stream_and_no_products(monkeypatch):
    gpu = use_streams(monkeypatch)
    products, transfers = gpu.current, TransferStream(torch.device("cuda"))
    with pytest.raises(ZeroDivisionError):
        transfers.run("a", lambda: 1 // 0, reads=None)
    assert gpu.current is products and IN_USE.products is None
    transfers.wait(["a"])
    transfers.run("a", lambda: exchange(gpu, "a"), reads=None)
    assert gpu.on == {"reserve a": "second", "pack a": "first", "copy a": "second"}
