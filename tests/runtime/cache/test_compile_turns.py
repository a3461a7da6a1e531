"""One of the ranks that need equal graphs compiles, and the others wait for it."""

import threading
import time

import pytest
import torch

from graphmoe.runtime.compile.code import CompileTurns, graph_fingerprint
from graphmoe.runtime.torch_compat import fake_mode, make_fx


def graph(width: int = 4, factor: float = 2.0):
    with fake_mode():
        return make_fx(lambda x: x * factor)(torch.empty(width))


def test_the_second_waits_until_the_first_is_done(tmp_path):
    order: list[str] = []
    begun = threading.Event()

    def first() -> None:
        with CompileTurns(tmp_path).turn(graph()) as turn:
            assert not turn.elsewhere
            begun.set()
            time.sleep(0.2)
            order.append("first")

    rank = threading.Thread(target=first)
    rank.start()
    assert begun.wait(10)
    with CompileTurns(tmp_path).turn(graph()) as turn:
        assert turn.elsewhere
        order.append("second")
    rank.join()
    assert order == ["first", "second"]


def test_a_first_that_fails_lets_the_others_compile(tmp_path):
    with pytest.raises(ValueError), CompileTurns(tmp_path).turn(graph()):
        raise ValueError
    with CompileTurns(tmp_path, patience_s=0).turn(graph()):
        pass


def test_a_first_that_never_ends_is_waited_for_only_so_long(tmp_path, caplog):
    turns = CompileTurns(tmp_path, patience_s=0.05)
    with turns.turn(graph()), turns.turn(graph()):
        assert "waited 0 s for another rank's code; compiling it here" in caplog.text


def test_other_graphs_and_other_shapes_do_not_wait(tmp_path):
    turns = CompileTurns(tmp_path, patience_s=0)
    with turns.turn(graph()), turns.turn(graph(width=8)), turns.turn(graph(factor=3.0)):
        assert len({graph_fingerprint(g) for g in (graph(), graph(8), graph(4, 3.0), graph())}) == 3
