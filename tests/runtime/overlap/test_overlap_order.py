import random

import pytest

from graphmoe.runtime.overlap.runner import backward_of, interleaved, transfers_first, turns
from graphmoe.runtime.overlap.tape import OrderedUnit

LAYER = ("attn", "dispatch", "shared", "experts", "combine")
NEEDS = {
    "attn": ("combine",),
    "dispatch": ("attn",),
    "shared": ("attn",),
    "experts": ("dispatch",),
    "combine": ("attn", "shared", "experts"),
}


def model(num_layers: int) -> list[OrderedUnit]:
    """Embedding, MoE layers and loss, each layer after the one before."""
    units, number = [OrderedUnit("embed")], {"combine": 0}
    for layer in range(num_layers):
        for name in LAYER:
            needs = frozenset(number[source] for source in NEEDS[name])
            units.append(OrderedUnit(f"{name}{layer}", needs, name in ("dispatch", "combine")))
            number[name] = len(units) - 1
    return [*units, OrderedUnit("loss", frozenset({number["combine"]}))]


def names(units: list[OrderedUnit], cut: list[list[int]]) -> list[list[str]]:
    return [[units[number].name for number in turn] for turn in cut]


def test_a_turn_ends_where_its_transfer_would_be_waited_for():
    units = model(2)
    assert names(units, turns(units, range(len(units)))) == [
        ["embed", "attn0", "dispatch0", "shared0"],
        ["experts0", "combine0"],
        ["attn1", "dispatch1", "shared1"],
        ["experts1", "combine1"],
        ["loss"],
    ]


def test_the_backward_starts_transfers_as_early_as_it_can():
    units = backward_of(model(2))
    assert names(units, turns(units, transfers_first(units))) == [
        ["loss", "combine1"],
        ["experts1", "dispatch1", "shared1"],
        ["attn1", "combine0"],
        ["experts0", "dispatch0", "shared0"],
        ["attn0", "embed"],
    ]


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


def test_the_turns_that_one_side_has_more_follow_at_the_end():
    assert interleaved([[0], [1]], [[0], [1], [2], [3]])[-2:] == [("backward", 2), ("backward", 3)]
    assert interleaved([[0], [1, 2]], []) == [("forward", 0), ("forward", 1), ("forward", 2)]


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
    in_turns = [turns(forward, range(30)), turns(backward, transfers_first(backward))]
    order = interleaved(*in_turns)
    for direction, units in (("forward", forward), ("backward", backward)):
        found = [number for way, number in order if way == direction]
        assert sorted(found) == list(range(30))
        for place, number in enumerate(found):
            assert units[number].needs <= set(found[:place])


def test_pieces_that_need_each_other_are_an_error():
    with pytest.raises(AssertionError, match="need each other"):
        transfers_first([OrderedUnit("a", frozenset({1})), OrderedUnit("b", frozenset({0}))])
