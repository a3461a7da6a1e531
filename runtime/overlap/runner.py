"""Runner that overlaps each micro-batch's backward with the next one's forward.

A turn ends before a unit that would wait for a transfer, which the other's GEMMs hide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from graphmoe.ops.gradients import PendingWeightGrads
from graphmoe.ops.replicas import exchange as replicas
from graphmoe.ops.symm.peers import beside_products_on
from graphmoe.runtime.compile.units import Unit
from graphmoe.runtime.overlap.tape import OrderedUnit, Tape

Result = TypeVar("Result")
Direction = Literal["forward", "backward"]
Call = Callable[[Sequence[Tensor], PendingWeightGrads], Sequence[Tensor]]


class Overlap:
    """Interleaves the units of two micro-batches; transfers run on their own stream. No device sync.

    Call ``settle`` before results are read. Weight gradients are summed in micro-batch order, as without
    overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._transfers = TransferStream(device)
        self._tape: Tape | None = None
        # backward that is interleaved with the running forward, or runs alone
        self._beside: Backward | None = None
        self._queue: deque[tuple[Direction, int]] = deque()  # units still to run

    @property
    def runs(self) -> bool:
        return self._tape is not None

    def record(
        self, run: Callable[[], Result], beside: Backward | None = None, like: Sequence[OrderedUnit] = ()
    ) -> tuple[Result, Tape]:
        """Run a forward with all of ``beside`` interleaved; ``like``: its units, from an earlier forward."""
        self._tape = tape = Tape(self._anchor)
        self._beside = beside
        if beside is not None:
            self._queue.extend(interleaved(turns(like, range(len(like))), beside.turns))
        result = run()
        self._run_backward()
        assert not self._queue, f"the forward has ended before its {self._queue[0]}"
        self._tape = self._beside = None
        return result, tape

    def receive(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        assert self._tape is not None
        return self._tape.receive(tensors)

    def run_backward(self, backward: Backward) -> None:
        self._beside = backward
        self._queue.extend(interleaved((), backward.turns))
        self._run_backward()
        self._beside = None

    def settle(self) -> None:
        """Let the current stream wait for transfers and replicas' gradients."""
        self._transfers.wait_for_all()
        replicas.settle()

    def run_unit(self, unit: Unit, read: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
        tape = self._tape
        assert tape is not None, "a unit that trains is run outside a micro-batch"
        number = len(tape.units)
        self._run_backward()
        if self._queue:
            turn = self._queue.popleft()
            assert turn == ("forward", number), turn
        self._transfers.wait((tape, "forward", source) for source in tape.sources(read))

        def run() -> tuple[Tensor, ...]:
            return tape.run(unit.name, transfers, read, call)

        transfers = unit.segments[0].stream == "comm"
        return self._transfers.run((tape, "forward", number), run, read) if transfers else run()

    def _run_backward(self) -> None:
        left: list[PendingWeightGrads] = []
        while self._queue and self._queue[0][0] == "backward":
            _, number = self._queue.popleft()
            assert self._beside is not None
            left.append(self._back(self._beside, number))
            if number not in self._beside.ends:
                continue
            with replicas.homes_deferred():
                for weights in left:  # wgrad overlaps the transfers in flight
                    # pop: a unit that holds its wgrad's inputs is a cycle that leaks
                    while weights:
                        weights.pop(0)()
            left.clear()

    def _back(self, backward: Backward, number: int) -> PendingWeightGrads:
        tape, unit = backward.tape, backward.units[number]
        key: Hashable = (tape, "backward", number)
        self._transfers.wait((tape, "backward", source) for source in unit.needs)
        place = len(backward.units) - 1 - number
        if not unit.transfers:
            return tape.back(place)
        reads = tape.what_back_reads(place)
        return self._transfers.run(key, lambda: tape.back(place, keep=True), reads)


class Backward:
    """The backward of a started tape, cut into turns."""

    def __init__(self, tape: Tape) -> None:
        self.tape, self.units = tape, backward_of(tape.units)
        self.turns = turns(self.units, transfers_first(self.units))
        # last unit of each turn: its transfers have started, so wgrad overlaps them
        self.ends = {turn[-1] for turn in self.turns}


class TransferStream:
    """Runs transfers in order on their own stream; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        # The allocator ties memory to one stream and would reuse a transfer's inputs: they are held until the
        # current stream has waited for it.
        self._under_way: dict[Hashable, tuple[torch.cuda.Event, Any]] = {}

    def run(self, key: Hashable, call: Callable[[], Result], reads: Any) -> Result:
        """Return the result of ``call``, to be read after ``wait``."""
        if self._stream is None:
            return call()
        products = torch.cuda.current_stream()
        self._stream.wait_stream(products)
        with torch.cuda.stream(self._stream), beside_products_on(products):
            result = call()
            done = torch.cuda.Event()
            done.record()
        self._under_way[key] = done, reads
        return result

    def wait(self, keys: Iterable[Hashable]) -> None:
        """Make the current stream wait for those tensors still being transferred. No device sync."""
        for key in keys:
            if key in self._under_way:
                done, _ = self._under_way.pop(key)
                done.wait()

    def wait_for_all(self) -> None:
        self.wait([*self._under_way])


def backward_of(forward: Sequence[OrderedUnit]) -> list[OrderedUnit]:
    """Return the units' backward, in reverse; each needs that of its readers."""
    last = len(forward) - 1
    readers: list[set[int]] = [set() for _ in forward]
    for number, unit in enumerate(forward):
        for source in unit.needs:
            readers[last - source].add(last - number)
    return [
        OrderedUnit(unit.name, frozenset(needs), unit.transfers)
        for unit, needs in zip(reversed(forward), readers, strict=True)
    ]


def transfers_first(units: Sequence[OrderedUnit]) -> list[int]:
    """Return a topological order with early transfers."""
    order: list[int] = []
    left = dict.fromkeys(range(len(units)))
    while left:
        ready = [number for number in left if units[number].needs <= set(order)]
        assert ready, "units need each other"
        chosen = next((number for number in ready if units[number].transfers), ready[0])
        order.append(chosen)
        del left[chosen]
    return order


def turns(units: Sequence[OrderedUnit], order: Sequence[int]) -> list[list[int]]:
    """Cut before each unit that waits for a transfer in flight."""
    cut: list[list[int]] = []
    under_way: set[int] = set()
    for number in order:
        if not cut or units[number].needs & under_way:
            cut.append([])
            under_way = set()
        cut[-1].append(number)
        if units[number].transfers:
            under_way.add(number)
    return cut


def interleaved(
    forward: Sequence[Sequence[int]], backward: Sequence[Sequence[int]]
) -> list[tuple[Direction, int]]:
    """Alternate turns, the forward first."""
    order: list[tuple[Direction, int]] = []
    for i in range(max(len(forward), len(backward))):
        for direction, of in (("forward", forward), ("backward", backward)):
            order += [(direction, number) for number in (of[i] if i < len(of) else ())]  # type: ignore[misc]
    return order
