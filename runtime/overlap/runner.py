"""Runner of micro-batches in which the backward of each overlaps with the forward of the next.

A transfer between ranks hides beside products that do not wait for it: those of the other micro-batch. So the
two take turns, and a turn is over where the next unit would wait for a transfer of its own micro-batch.
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
"""A unit's forward, given what it reads and a list for what its backward leaves to be done."""


class Overlap:
    """Interleaves the units of two micro-batches; transfers between ranks get a stream of their own.

    A stage calls ``record`` and ``run_backward``, then ``settle`` where it reads results; a step ends with
    that. An executor calls ``run_unit`` for each unit. Weight gradients are made when the transfers of a turn
    are under way; they are summed over micro-batches in their order, as without overlap. No device sync.
    """

    def __init__(self, device: torch.device) -> None:
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._transfers = TransferStream(device)
        self._tape: Tape | None = None
        """The tape of the forward that runs, or has run."""
        self._beside: Backward | None = None
        """The backward that runs in turns with the forward under way, or alone."""
        self._queue: deque[tuple[Direction, int]] = deque()
        """Queue of units that are still to run, of a forward and the backward beside it."""

    @property
    def runs(self) -> bool:
        """Return whether a forward is under way whose units are to come here."""
        return self._tape is not None

    def record(
        self, run: Callable[[], Result], beside: Backward | None = None, like: Sequence[OrderedUnit] = ()
    ) -> tuple[Result, Tape]:
        """Return what ``run`` returns, a forward, and its tape; ``beside`` runs in between, all of it.

        ``like`` are the units of an earlier forward through the same units, for their turns.
        """
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
        """``Tape.receive`` of the forward that is under way."""
        assert self._tape is not None
        return self._tape.receive(tensors)

    def run_backward(self, backward: Backward) -> None:
        """Run the backward of a micro-batch, with nothing beside it."""
        self._beside = backward
        self._queue.extend(interleaved((), backward.turns))
        self._run_backward()
        self._beside = None

    def settle(self) -> None:
        """Let the current stream wait for the transfers that are under way, and for gradients of replicas."""
        self._transfers.wait_for_all()
        replicas.settle()

    def run_unit(self, unit: Unit, read: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
        """Return the results of a unit's forward, which runs when it is its turn."""
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
        """Run turns of the backward up to the next unit of the forward: the units of a turn, then their W."""
        left: list[PendingWeightGrads] = []
        while self._queue and self._queue[0][0] == "backward":
            _, number = self._queue.popleft()
            assert self._beside is not None
            left.append(self._back(self._beside, number))
            if number not in self._beside.ends:
                continue
            with replicas.homes_deferred():
                for weights in left:  # a unit that holds what its W reads would be a cycle, never collected
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
    """The backward of a micro-batch, cut into turns; its tape has been started."""

    def __init__(self, tape: Tape) -> None:
        self.tape, self.units = tape, backward_of(tape.units)
        self.turns = turns(self.units, transfers_first(self.units))
        self.ends = {turn[-1] for turn in self.turns}
        """The last unit of each turn: then its transfers are under way, and W runs beside them."""


class TransferStream:
    """Runs transfers one after the other, each behind all that was queued before it; none on a CPU.

    A transfer may pack what it sends on the current stream, which then waits for the transfer before it.

    What a transfer reads must stay until the current stream has waited for it: the allocator knows one stream
    for each memory, and would give it to others.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        self._under_way: dict[Hashable, tuple[torch.cuda.Event, Any]] = {}

    def run(self, key: Hashable, call: Callable[[], Result], reads: Any) -> Result:
        """Return what ``call`` returns, to be read after ``wait`` for the key; holds ``reads`` till then."""
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
        """Let the current stream wait for those of these that are under way. No device sync."""
        for key in keys:
            if key in self._under_way:
                done, _ = self._under_way.pop(key)
                done.wait()

    def wait_for_all(self) -> None:
        """Let the current stream wait for all of them."""
        self.wait([*self._under_way])


def backward_of(forward: Sequence[OrderedUnit]) -> list[OrderedUnit]:
    """Return the gradients of units in their own order, each a unit that needs those of its readers.

    The order is the reverse, but for transfers, which start as soon as the tensors to send are there.
    """
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
    """Return an order in which each unit comes after those that it needs, and transfers come early."""
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
    """Cut the order before each unit that waits for a transfer that has started since the last cut."""
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
    """Turns of the two one after the other, the forward first; what one has more follows at the end."""
    order: list[tuple[Direction, int]] = []
    for i in range(max(len(forward), len(backward))):
        for direction, of in (("forward", forward), ("backward", backward)):
            order += [(direction, number) for number in (of[i] if i < len(of) else ())]  # type: ignore[misc]
    return order
