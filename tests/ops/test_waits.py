"""Waits for other ranks: what is counted, and on whose clock."""

from types import SimpleNamespace

import pytest
import torch

from graphmoe.ops import waits as module
from graphmoe.ops.waits import Waits, use_waits, waiting
from tests.ops.ahead_of_time import launches_of


@pytest.fixture
def waits():
    use_waits(found := Waits(torch.device("cpu")))
    yield found
    use_waits(None)


def test_waits_add_up_from_the_begin_of_a_step_that_counts(waits, monkeypatch):
    now = [0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    waits.begin(counts=True)
    for length in (20, 30):
        now[0] += 1
        with waiting():
            now[0] += length
    with pytest.raises(RuntimeError), waiting():
        now[0] += 7
        raise RuntimeError("a peer is gone")
    assert int(waits.total) == 57
    waits.begin(counts=False)
    with waiting():
        now[0] += 10
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
