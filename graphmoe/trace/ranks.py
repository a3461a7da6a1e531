"""Exchanges of several ranks' traces, joined call by call: transfer, waiting, and which rank came last.

A kernel of an exchange waits for other ranks until the last one begins; what follows is the transfer.
"""

import operator
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graphmoe.trace.events import Trace, is_communication, listed

Call = tuple[float, float, int | None]  # begin, end, bytes
Calls = dict[tuple[str, str], dict[int, list[Call]]]  # by kind and group, then by rank

_LIBRARY = re.compile("nccl|rccl", re.IGNORECASE)  # whose kernels in graphs may be of any group


@dataclass(frozen=True)
class Exchange:
    """One kind of exchange; times are per step, means over its ranks where no rank is named."""

    name: str
    ranks: list[int]
    calls: float
    transfer_ms: float
    waiting_ms: dict[int, float]
    gb_per_s: float | None  # bytes of a rank over the transfer
    last: dict[int, float]  # share of calls that began last on this rank; empty for copies


def exchanges_of(traces: Mapping[int, Trace]) -> tuple[list[Exchange], list[str]]:
    """Return the exchanges of ranks' traces, the longest first, and notes on what could not be joined."""
    steps = min(len(trace.steps) for trace in traces.values()) or 1
    calls, notes = _calls(traces), list[str]()
    whole: Calls = {}
    for (name, group), of_ranks in calls.items():
        counts = {rank: len(each) for rank, each in of_ranks.items()}
        if _is_copy(name) or len({*counts.values()}) == 1:
            whole[name, group] = of_ranks
        else:
            shown = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
            notes.append(f"{name} is not joined, since its calls differ: {shown}")
    if unknown := sorted({name for name, group in whole if not group and not _is_copy(name)}):
        notes.append(f"the trace does not name the ranks of {', '.join(unknown)}: all are taken as one group")
    notes += _missing(traces)
    shifts = _shifts(traces, whole, notes)
    found = [_exchange(name, of_ranks, shifts, steps) for (name, _), of_ranks in whole.items()]
    return sorted(found, key=lambda e: -e.transfer_ms - sum(e.waiting_ms.values()) / len(e.ranks)), notes


def _is_copy(name: str) -> bool:
    return name.startswith("Memcpy")


def _calls(traces: Mapping[int, Trace]) -> Calls:
    found: Calls = defaultdict(lambda: defaultdict(list))
    first = min(trace.base_us for trace in traces.values())
    for rank, trace in sorted(traces.items()):
        base, experts_on = trace.base_us - first, str(trace.facts.get("experts_on", ""))
        for a in filter(is_communication, trace.activities):
            name = a.name.partition("(")[0].rstrip()
            of_experts = not _is_copy(name) and not _LIBRARY.match(name)
            found[a.message or (name, experts_on if of_experts else "")][rank].append(
                (a.start + base, a.end + base, a.num_bytes)
            )
    return found


def _missing(traces: Mapping[int, Trace]) -> Iterator[str]:
    num_ranks = max(trace.facts.get("num_ranks", 0) for trace in traces.values())
    if missing := {*range(num_ranks)} - {*traces}:
        yield f"no trace of rank {listed(missing)}: others may wait for it, which counts as transfer here"


def _shifts(traces: Mapping[int, Trace], calls: Calls, notes: list[str]) -> dict[int, float]:
    # microseconds to add to each rank's times; hosts have clocks of their own, and an exchange ends together
    hosts = {rank: trace.facts.get("host", "") for rank, trace in traces.items()}
    first, shifts = hosts[min(hosts)], dict.fromkeys(hosts, 0.0)
    for host in {*hosts.values()} - {first}:
        gaps: list[float] = []
        for of_ranks in (each for (name, _), each in calls.items() if not _is_copy(name)):
            ours, theirs = ([calls for r, calls in of_ranks.items() if hosts[r] == h] for h in (host, first))
            if ours and theirs:
                gaps += map(operator.sub, _ends(theirs), _ends(ours))
        if gaps:
            shifts |= {r: statistics.median(gaps) for r in hosts if hosts[r] == host}
        else:
            notes.append(f"no exchange joins {host} to {first}: their clocks are not aligned")
    return shifts


def _ends(of_ranks: list[list[Call]]) -> list[float]:
    return [max(end for _, end, _ in joined) for joined in zip(*of_ranks, strict=True)]


def _exchange(name: str, of_ranks: dict[int, list[Call]], shifts: dict[int, float], steps: int) -> Exchange:
    ranks, last, transfer, size = sorted(of_ranks), Counter[int](), 0.0, 0.0
    waiting = dict.fromkeys(ranks, 0.0)
    if _is_copy(name) or len(ranks) == 1:
        every = [call for each in of_ranks.values() for call in each]
        count: float = len(every) / len(ranks)
        transfer = sum(end - begin for begin, end, _ in every) / len(ranks)
        size = sum(num or 0 for *_, num in every) / len(ranks)
    else:
        count = len(of_ranks[ranks[0]])
        for joined in zip(*(of_ranks[rank] for rank in ranks), strict=True):
            begins = {r: begin + shifts[r] for r, (begin, _, _) in zip(ranks, joined, strict=True)}
            came = max(begins, key=begins.__getitem__)
            ends = max(end + shifts[r] for r, (_, end, _) in zip(ranks, joined, strict=True))
            last[came] += 1
            transfer += max(ends - begins[came], 0.0)
            size += max(num or 0 for *_, num in joined)
            for rank, begin in begins.items():
                waiting[rank] += begins[came] - begin
    return Exchange(
        name,
        ranks,
        count / steps,
        transfer / steps / 1e3,
        {rank: us / steps / 1e3 for rank, us in waiting.items()},
        size / transfer / 1e3 if size and transfer else None,
        {rank: times / count for rank, times in sorted(last.items())},
    )
