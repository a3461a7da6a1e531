"""Who moves the rows of symm where ``moe.transport=auto``: in runs, and in projections of them."""

from __future__ import annotations

import pytest
import torch

from graphmoe.config import Transport
from graphmoe.dispatch_rules import transport_of
from graphmoe.layout import Layout
from graphmoe.projection.sizes import Sizes
from runtime.dispatch import planned_dispatcher
from tests.runs import config

SYMM = ("moe.dispatcher=symm", "parallel.ep=2", "launch.nproc=2", "run.device=cuda")
OVERLAP = ("pipeline.ep_overlap=true", "compile.enabled=true")
LAYOUT = Layout(dp=2, ep=2)


@pytest.mark.parametrize(
    ("words", "on_nvidia", "expected"),
    [
        ((*SYMM, *OVERLAP), True, Transport.copy_engine),
        ((*SYMM, *OVERLAP), False, Transport.pull),
        (SYMM, True, Transport.pull),
        ((*SYMM, *OVERLAP, "moe.transport=pull"), True, Transport.pull),
        ((*SYMM, "moe.transport=copy_engine"), False, Transport.copy_engine),
        (("parallel.ep=2", "launch.nproc=2", "moe.transport=copy_engine"), True, None),
    ],
)
def test_copies_are_taken_where_products_run_beside_them(words, on_nvidia, expected):
    assert transport_of(config(*words), on_nvidia=on_nvidia) is expected


@pytest.mark.parametrize(
    ("hip", "words", "copies"),
    [
        (None, (*SYMM, *OVERLAP), True),
        ("6.4", (*SYMM, *OVERLAP), False),
        (None, (*SYMM, *OVERLAP, "run.device=cpu"), False),
        (None, SYMM, False),
    ],
)
def test_a_run_has_blocks_where_copies_move_rows_and_so_has_its_projection(monkeypatch, hip, words, copies):
    monkeypatch.setattr(torch.version, "hip", hip)
    run = config(*words)
    dispatcher = planned_dispatcher(run, LAYOUT)
    assert (dispatcher.block > 0) == copies
    if "run.device=cpu" not in words:
        sizes = Sizes.of(run, LAYOUT, on_nvidia=hip is None)
        assert (sizes.block, sizes.room) == (dispatcher.block, dispatcher.capacity)
