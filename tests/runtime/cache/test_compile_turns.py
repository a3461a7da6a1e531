"""One of the ranks that need equal graphs compiles, and the others wait for it."""

import threading
import time

import pytest
import torch

from graphmoe.runtime.compile.code import CompileTurns
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


def test_who_fails_or_never_ends_or_compiles_another_graph_is_not_waited_for(tmp_path, caplog):
    with pytest.raises(ValueError), CompileTurns(tmp_path).turn(graph()):
        raise ValueError
    turns = CompileTurns(tmp_path, patience_s=0)
    with turns.turn(graph()), turns.turn(graph(width=8)), turns.turn(graph(factor=3.0)):
        assert not caplog.text
        with turns.turn(graph(width=8)):
            assert "waited 0 s for another rank's code; compiling it here" in caplog.text
