"""Order of an `Overlap`: I and W of a backward beside the forward of another micro-batch."""

import functools
from types import SimpleNamespace

import pytest
import torch

from graphmoe.runtime.overlap.runner import Backward, Overlap
from graphmoe.runtime.overlap.tape import OrderedUnit
from tests.distributed.turns import watched
from tests.runtime.overlap.test_overlap_order import model


def run(overlap: Overlap, pieces: list[OrderedUnit], done: list) -> torch.Tensor:
    """Forward of the pieces, whose weight gradients tell ``done`` of themselves."""
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
