"""A case of a benchmark, its alternatives, and the rows that running it gives.

Before anything is timed, each alternative's results are compared with those of the first; one that computes
something else is reported and not timed.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from graphmoe.ops.timing import WARM_UP_CALLS, spread, time_in_turns

FLOPS_PER_S = 790e12
"""An 8192 x 8192 x 8192 bf16 matrix product on random data on an H200."""
BYTES_PER_S = 4.3e12
"""A copy on an H200, bytes read and written."""
TOLERANCE = 0.03
"""Largest relative difference (Frobenius) of right results; bf16 sums in another order differ by 0.005."""

Results = tuple[Tensor | None, ...]
"""What a call gives, in the order of the case's ``results``; None is not compared, and the end may lack."""


@dataclass(frozen=True)
class Floor:
    """The least that the device has to do, and the time that takes."""

    amount: int
    kind: Literal["FLOPs", "bytes"]

    @property
    def ms(self) -> float:
        """Milliseconds at the rate that was measured on an H200."""
        return self.amount / (FLOPS_PER_S if self.kind == "FLOPs" else BYTES_PER_S) * 1e3


@dataclass(frozen=True)
class Run:
    """An alternative with its inputs in place."""

    call: Callable[[], Results]
    """What is timed."""
    forward: Callable[[], Tensor] | None = None
    """The forward alone, with gradients: where the memory kept for the backward is measured."""


@dataclass(frozen=True)
class Alternative:
    """One way to compute a case. ``bind`` prepares what is not timed, such as another layout of weights."""

    name: str
    bind: Callable[[], Run]
    is_peer: bool = False


@dataclass(frozen=True)
class Case:
    """One operation at one shape. ``make`` allocates inputs and lists the alternatives, reference first."""

    name: str
    shape: dict[str, int]
    floor: Floor
    results: tuple[str, ...]
    make: Callable[[], list[Alternative]]
    memory: Literal["kept", "peak"] | None = None
    """kept: bytes held between forward and backward beside inputs and output. peak: most bytes in use
    above the inputs and all results but the first."""


@dataclass
class Row:
    """What one alternative of a case took; an error instead of times where it failed."""

    case: str
    alternative: str
    is_peer: bool
    shape: dict[str, int]
    floor_kind: str
    floor_amount: int
    floor_ms: float
    samples_ms: list[float] = field(default_factory=list)
    p10_ms: float | None = None
    median_ms: float | None = None
    p90_ms: float | None = None
    time_over_floor: float | None = None
    share_of_floor_rate: float | None = None
    memory_kind: str | None = None
    memory_bytes: int | None = None
    note: str | None = None
    error: str | None = None

    def take(self, samples_ms: Sequence[float]) -> None:
        """Fill in the samples and what follows from them."""
        self.samples_ms = [round(ms, 6) for ms in samples_ms]
        self.p10_ms, self.median_ms, self.p90_ms = (round(ms, 6) for ms in spread(samples_ms))
        self.time_over_floor = self.median_ms / self.floor_ms
        self.share_of_floor_rate = self.floor_ms / self.median_ms


def run_case(case: Case, device: torch.device, repeats: int) -> list[Row]:
    """Check, warm up and time the alternatives of a case, ``repeats`` times each. Raises nothing.

    What fails becomes the error of its row, and the others go on.
    """
    try:
        alternatives = case.make()
    except Exception as error:  # whatever a kernel, a compiler or the allocator may raise
        return [_row(case, "all", False, reason(error))]
    rows = {a.name: _row(case, a.name, a.is_peer) for a in alternatives}
    runs: dict[str, Run] = {}
    expected: Results | None = None
    for alternative in alternatives:
        row = rows[alternative.name]
        try:
            run = alternative.bind()
            results = _warm(run, device)
            row.error, row.note = compare(case.results, results, expected, alternative.is_peer)
            if row.error is None:
                expected = results if expected is None else expected
                row.memory_kind, row.memory_bytes = case.memory, _memory(case, run, device)
                runs[alternative.name] = run
        except Exception as error:
            row.error = reason(error)
        results = ()
    del expected
    calls = {name: run.call for name, run in runs.items()}
    try:
        for name, times in (time_in_turns(calls, repeats, device) if calls else {}).items():
            rows[name].take(times)
    except Exception as error:
        for name in runs:
            rows[name].error = reason(error)
    return list(rows.values())


def free_memory(device: torch.device, *, after_error: bool) -> None:
    """Return what the last case held to the device, so that the next one starts as the first did."""
    if after_error:  # a traceback holds its frames, and those the tensors
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compare(
    names: Sequence[str], results: Results, expected: Results | None, is_peer: bool
) -> tuple[str | None, str | None]:
    """An error if results are not finite or not the expected ones, and a note.

    A peer whose first result is right and another is not gets a note: it may define a gradient otherwise.
    """
    wrong: list[str] = []
    for number, (name, result) in enumerate(zip(names, results, strict=False)):
        if result is None or not result.is_floating_point():
            continue
        if not bool(torch.isfinite(result).all()):
            wrong.append(f"{name} is not finite")
        elif expected is not None and (wanted := expected[number]) is not None:
            difference = relative_difference(result, wanted)
            if not difference <= TOLERANCE:
                wrong.append(f"{name} differs by {difference:.1%} from the first alternative's")
        if wrong and (number == 0 or not is_peer):
            return "; ".join(wrong), None
    return None, "; ".join(wrong) or None


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of what is expected; infinite for another shape."""
    if actual.shape != expected.shape:
        return float("inf")
    norm = torch.linalg.vector_norm(expected, dtype=torch.float32)
    difference = torch.linalg.vector_norm(actual.to(expected.dtype) - expected, dtype=torch.float32)
    return float(difference / norm.clamp_min(1e-30))


def reason(error: BaseException) -> str:
    """The kind and first line of an error, without folders of this machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return without_folders(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def without_folders(text: str) -> str:
    """The text with absolute paths cut to their last part."""
    return re.sub(r"(?<![\w./:~])/(?:[^/\s'\",=]+/)+", "", text)


def _row(case: Case, alternative: str, is_peer: bool, error: str | None = None) -> Row:
    floor = case.floor
    return Row(case.name, alternative, is_peer, case.shape, floor.kind, floor.amount, floor.ms, error=error)


def _warm(run: Run, device: torch.device) -> Results:
    """Results of the first call, after some more."""
    results = run.call()
    for _ in range(WARM_UP_CALLS - 1):
        run.call()
    _synchronize(device)  # an error of a kernel is raised here
    return results


def _memory(case: Case, run: Run, device: torch.device) -> int | None:
    """Bytes by the device's allocator; None on a CPU, which has none to ask."""
    if case.memory is None or device.type != "cuda":
        return None
    _synchronize(device)
    before = torch.cuda.memory_allocated(device)
    if case.memory == "kept":
        assert run.forward is not None, case.name
        output = run.forward()
        return torch.cuda.memory_allocated(device) - before - output.nbytes
    torch.cuda.reset_peak_memory_stats(device)
    results = run.call()
    peak = torch.cuda.max_memory_allocated(device)
    return peak - before - sum(result.nbytes for result in results[1:] if result is not None)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_plain(rows: Sequence[object]) -> list[dict[str, Any]]:
    """Rows as a JSON document has them."""
    return [dict(vars(row)) for row in rows]
