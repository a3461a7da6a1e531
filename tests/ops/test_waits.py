"""Waits for other ranks: what is counted, and on whose clock."""

import time

import pytest
import torch

from graphmoe.ops.waits import Waits, use_waits, waiting
from tests.ops.ahead_of_time import launches_of


@pytest.fixture
def waits():
    use_waits(found := Waits(torch.device("cpu")))
    yield found
    use_waits(None)


def test_waits_add_up_from_the_begin_of_a_step_that_counts(waits):
    waits.begin(counts=True)
    for _ in range(2):
        time.sleep(0.01)
        with waiting():
            time.sleep(0.02)
    with pytest.raises(RuntimeError), waiting():
        raise RuntimeError("a peer is gone")
    assert 0.04e9 <= int(waits.total) < 0.055e9
    waits.begin(counts=False)
    with waiting():
        time.sleep(0.01)
    assert int(waits.total) == 0
    use_waits(None)
    with waiting():
        pass


def ahead_of_time_cases():
    from graphmoe.ops.waits_kernel import add_clock

    total, cases = torch.zeros((), dtype=torch.int64, device="meta"), []
    for on_rocm, targets in ((False, ("sm_90", "sm_100")), (True, ("gfx942", "gfx950"))):
        for case in launches_of("", lambda on_rocm=on_rocm: add_clock(total, -1, on_rocm)):
            cases.append(case | {"name": f"{case['name']} on_rocm={on_rocm}", "only": targets})
    return cases
