"""Functions that run in forks of this process, which report time, memory and TCP traffic after each stage."""

import ctypes
import gc
import math
import os
import select
import socket
import statistics
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

WHOLE = 64  # ranks that do all a rank does; summaries have their medians
COLUMNS = ("wall_s", "cpu_s", "store_operations", "bytes", "messages", "connections", "private_mib")
RECORD = struct.Struct(f"=q{len(COLUMNS)}d")  # a rank and its numbers; -1: it failed
Numbers = dict[str, list[float]]
"""Of each rank, by column."""


def traffic() -> dict[str, tuple[int, int]]:
    """Return bytes, and segments with data, of each TCP connection of this process (linux/tcp.h)."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, struct.error):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as peer:
                    info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
                (received,), (sent,) = (struct.unpack_from("=Q", info, offset) for offset in (128, 200))
                if info[0] != 10:  # a listening socket
                    found[link] = sent + received, sum(struct.unpack_from("=II", info, 152))
    return found


def private_mib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


class Gate:
    """Children pass it when the parent opens it, and report to the parent."""

    def __init__(self) -> None:
        # a child that is done early must not take what lets another one begin, so two pipes take turns
        self._gates, self._done, self._passed = (os.pipe(), os.pipe()), os.pipe(), 0

    def wait(self) -> None:
        self._passed += 1
        if not os.read(self._gates[self._passed % 2][0], 1):
            os._exit(1)

    def report(self, rank: int, *numbers: float) -> None:
        os.write(self._done[1], RECORD.pack(rank, *numbers))  # shorter than PIPE_BUF, so whole

    def let_pass(self, size: int) -> None:
        self._passed += 1
        os.write(self._gates[self._passed % 2][1], b"." * size)

    def numbers(self, size: int, limit_s: float = 1800.0) -> Numbers:
        """Let ``size`` children pass and wait for their numbers."""
        self.let_pass(size)
        records, end = list[tuple[float, ...]](), time.monotonic() + limit_s
        while len(records) < size:
            if not select.select([self._done[0]], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError(f"{size - len(records)} of {size} did not end a stage")
            records.append(RECORD.unpack(os.read(self._done[0], RECORD.size)))
            if records[-1][0] < 0:
                raise RuntimeError("a rank failed, as the trace above says")
        _, *columns = zip(*sorted(records), strict=True)
        return {name: [*column] for name, column in zip(COLUMNS, columns, strict=True)}


def in_children(count: int, run: Callable[[int, Gate], object], names: Iterable[str]) -> dict[str, Numbers]:
    """Run a function in ``count`` forks; return the numbers that they report after each of ``names``."""
    gc.collect()
    gc.freeze()
    gate, pids, errors, nowhere = Gate(), list[int](), os.dup(2), os.open(os.devnull, os.O_WRONLY)
    for number in range(count):
        if not (pid := os.fork()):
            try:
                ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
                os.dup2(nowhere, 1), os.dup2(nowhere, 2)
                held = run(number, gate)  # its connections, until all have reported
                gate.wait()
                del held
                os._exit(0)
            except BaseException:
                os.write(errors, traceback.format_exc().encode())
                gate.report(-1, *[0.0] * len(COLUMNS))
            finally:
                os._exit(1)
        pids.append(pid)
    found, ended = {}, False
    try:
        for name in names:
            found[name] = gate.numbers(count)
            say = f"{count} processes: {name or 'connect'}: {max(found[name]['wall_s']):.2f} s"
            print(say, file=sys.stderr, flush=True)
        gate.let_pass(count)
        ended = True
    finally:
        for pid in pids:
            if not ended:
                os.kill(pid, 9)
            os.waitpid(pid, 0)
        for descriptor in (errors, nowhere, *(end for pipe in (*gate._gates, gate._done) for end in pipe)):
            os.close(descriptor)
    return found


def alone(name: str, action: Callable[[], object]) -> dict[str, Numbers]:
    """Return the numbers of a function that one process runs; its memory is what it adds."""

    def run(_: int, gate: Gate) -> None:
        gate.wait()
        before, began, cpu = private_mib(), time.perf_counter(), time.process_time()
        action()
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        gate.report(0, wall, cpu, *[math.nan] * (len(COLUMNS) - 3), private_mib() - before)

    return in_children(1, run, [name])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def summary_of(numbers: Numbers) -> dict[str, float]:
    def usual(column: str) -> float:
        return statistics.median(numbers[column][1:WHOLE] or numbers[column])

    return {
        "wall_s": max(numbers["wall_s"]),
        "cpu_ms_of_rank_0": 1e3 * numbers["cpu_s"][0],
        "cpu_ms_of_a_rank": 1e3 * usual("cpu_s"),
        "store_operations": sum(numbers["store_operations"]),
        **{f"{column}_of_rank_0": numbers[column][0] for column in COLUMNS[3:]},
        **{f"{column}_of_a_rank": usual(column) for column in COLUMNS[3:]},
    }


def exponents(values: Mapping[int, float]) -> list[float]:
    """Return log(ratio of values) over log(ratio of sizes), of each two sizes in a row."""
    pairs = [*values.items()]
    return [
        math.log(b / a) / math.log(n / m) if a > 0 and b > 0 else math.nan
        for (m, a), (n, b) in zip(pairs, pairs[1:], strict=False)
    ]


class CountedStore(dist.Store):
    """A store client that counts operations; torch and gloo call it too."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.operations = store, 0


def _counted(name: str) -> Callable[..., Any]:
    def call(self: CountedStore, *arguments: Any) -> Any:
        self.operations += 1
        return getattr(self.store, name)(*arguments)

    return call


for _name in ("set", "get", "add", "wait", "check", "compare_set", "multi_get", "multi_set"):
    setattr(CountedStore, _name, _counted(_name))
