"""Exchanges of several ranks' traces: who waits, for whom, and how fast the transfer is."""

import pytest

from graphmoe.trace.__main__ import main
from graphmoe.trace.events import read_trace, recorded
from graphmoe.trace.ranks import exchanges_of
from tests.kineto import KinetoTrace
from tests.runs import document_of


def rank_trace(folder, rank, *calls, host="a", clock=0.0, base=0, bytes_each=None):
    """A trace of one step with collectives at (begin, end), on a host whose clock is off by ``clock`` us."""
    trace = KinetoTrace(step_us=1000)
    trace.range("attn:F", 1, 900)
    more = {
        "Collective name": "allreduce",
        "In msg nelems": bytes_each and bytes_each // 2,
        "dtype": "BFloat16",
    }
    more |= {"Out msg nelems": 1, "Process Group Ranks": "[0, 1, 2]"}
    name, off = "ncclDevKernel_AllReduce_Sum(ncclArgs)", clock - base
    for number, (begin, end) in enumerate(calls):
        trace.call("cudaLaunchKernel", 10 + number, 10.5 + number, number)
        trace.activity("kernel", name, begin + off, end + off, number, **(more if bytes_each else {}))
    path = folder / "profile" / f"rank{rank}.trace.json.gz"
    facts = {"rank": rank, "num_ranks": 3, "steps": [10], "host": host}
    return trace.write(path, facts, baseTimeNanoseconds=base * 1000)


STEPPING = {0: ((100, 160), (300, 360)), 1: ((140, 162), (300, 361)), 2: ((120, 161), (340, 362))}
"""Rank 1 comes last in the first call, rank 2 in the second; 22 us of each are the transfer."""


def joined(folder):
    return exchanges_of({rank: read_trace(path) for rank, path in recorded(folder).items()})


@pytest.mark.parametrize("hosts", ["aaa", "aab", "abb"])
def test_ranks_out_of_step_wait_for_the_last_one(tmp_path, hosts):
    for rank, calls in STEPPING.items():
        clock = 0.0 if hosts[rank] == "a" else 5e6
        rank_trace(tmp_path, rank, *calls, host=hosts[rank], clock=clock, base=2 * rank, bytes_each=2_200_000)
    (found,), notes = joined(tmp_path)
    near = 1.0 * (hosts != "aaa")  # ends of a call differ by up to 2 us
    assert notes == [] and (found.name, found.ranks, found.calls) == ("allreduce", [0, 1, 2], 2)
    assert found.transfer_ms == pytest.approx(0.044, abs=2e-3 * near)
    assert found.gb_per_s == pytest.approx(100, rel=0.05 * near, abs=1e-6)
    assert found.last == {1: 0.5, 2: 0.5}
    assert found.waiting_ms == pytest.approx({0: 0.08, 1: 0.04, 2: 0.02}, abs=5e-3 * near)


def test_a_rank_without_a_trace_or_with_other_calls_is_named(tmp_path):
    for rank in (0, 2):
        rank_trace(tmp_path, rank, *STEPPING[rank])
    (found,), notes = joined(tmp_path)
    assert (found.name, found.ranks, found.gb_per_s) == ("ncclDevKernel_AllReduce_Sum", [0, 2], None)
    assert notes == [
        "the trace does not name the ranks of ncclDevKernel_AllReduce_Sum: all are taken as one group",
        "no trace of rank 1: others may wait for it, which counts as transfer here",
    ]
    rank_trace(tmp_path, 1, STEPPING[1][0], host="b")
    found, notes = joined(tmp_path)
    assert found == [] and "is not joined, since its calls differ: 2 on rank 0, 1 on rank 1, 2 on" in notes[0]
    assert notes[-1] == "no exchange joins b to a: their clocks are not aligned"


def test_kernels_of_experts_are_joined_within_the_ranks_that_share_them(tmp_path):
    for rank, begin in enumerate((100, 120, 500, 450)):
        trace = KinetoTrace(step_us=1000)
        for number, (name, more) in enumerate((("pull_kernel", 30), ("Memcpy PtoP (Device -> Device)", 10))):
            trace.call("cudaLaunchKernel", 10, 11, number)
            kind = "gpu_memcpy" if name[0] == "M" else "kernel"
            trace.activity(kind, name, begin, begin + more, number, bytes=None if kind == "kernel" else 10**6)
        facts = {"rank": rank, "num_ranks": 4, "steps": [10], "experts_on": [0, 1] if rank < 2 else [2, 3]}
        trace.write(tmp_path / "profile" / f"rank{rank}.trace.json.gz", facts)
    found, notes = joined(tmp_path)
    assert notes == [] and [(e.name, e.ranks, e.last) for e in found] == [
        ("pull_kernel", [2, 3], {2: 1}),
        ("pull_kernel", [0, 1], {1: 1}),
        ("Memcpy PtoP", [0, 1, 2, 3], {}),
    ]
    assert [e.gb_per_s for e in found] == [None, None, pytest.approx(100)]
    assert [e.waiting_ms for e in found[:2]] == [{2: 0, 3: 0.05}, {0: pytest.approx(0.02), 1: 0}]


def test_exchanges_of_all_ranks_are_a_table_and_part_of_the_document(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    for rank, calls in STEPPING.items():
        rank_trace(tmp_path, rank, *calls, bytes_each=2_200_000)
    words = f"run={tmp_path}", "ranks=all", "tracelens=false"
    (found,) = document_of(main, capsys, *words)["exchanges"]
    assert found["last"] == {"1": 0.5, "2": 0.5} and found["transfer_ms"] == pytest.approx(0.044)
    main(list(words))
    row = "allreduce 0, 1, 2 2 0.044 0.047 100.0 1: 50%, 2: 50%"
    assert row in {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
