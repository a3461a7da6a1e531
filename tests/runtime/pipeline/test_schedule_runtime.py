"""ScheduleRuntime: torch's schedule runtime does our actions in our order."""

import logging

import pytest
import torch
from torch.profiler import profile

from graphmoe.runtime.torch_compat.pipelining import ScheduleRuntime

ORDERS = {
    0: [(("F", 0, 0),), (("F", 0, 1),), (("I", 0, 0),), (("B", 0, 1),), (("W", 0, 0),)],
    1: [(("F", 1, 0),), (("F", 1, 1), ("B", 1, 0)), (("B", 1, 1),)],
}


@pytest.mark.parametrize("rank", ORDERS)
@pytest.mark.parametrize("with_gradients", [True, False])
def test_actions_of_a_rank_run_in_order_at_each_call(rank, with_gradients):
    ran = []
    runtime = ScheduleRuntime(ORDERS, rank, [rank], 2, ran.append)
    with torch.set_grad_enabled(with_gradients):
        runtime()
        runtime()
    assert ran == 2 * ORDERS[rank]


def test_a_table_of_forwards_runs():
    ran = []
    order = [(("F", stage, number),) for number in range(3) for stage in range(2)]
    ScheduleRuntime({0: order}, 0, [0, 1], 2, ran.append)()
    assert ran == order


def test_actions_are_ranges_in_a_profile():
    with profile() as profiled:
        ScheduleRuntime(ORDERS, 1, [1], 2, lambda parts: None)()
    names = [event.name for event in profiled.events()]
    assert names == ["PP:1F0", "PP:(1F1;1B0)OVERLAP_F_B", "PP:1B1"]


def test_an_error_is_raised_as_it_is_and_its_action_is_logged(caplog):
    def run(parts):
        if parts == ORDERS[1][2]:
            raise ValueError("no")

    logger = logging.getLogger("torch.distributed.pipelining")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(ValueError, match="^no$"):
            ScheduleRuntime(ORDERS, 1, [1], 2, run)()
    finally:
        logger.removeHandler(caplog.handler)
    marked = [line for line in caplog.text.splitlines() if "ERROR HERE" in line]
    assert len(marked) == 1 and "1B1" in marked[0]
