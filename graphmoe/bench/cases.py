"""Cases of a benchmark, their alternatives, and the rows that running them gives, one case after the other.

Before anything is timed, each alternative's results are compared with those of the first; one that computes
something else is reported and not timed.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from graphmoe.config.schema import ConfigError
from graphmoe.ops.timing import WARM_UP_CALLS, spread, time_in_turns

log = logging.getLogger(__name__)
FLOPS_PER_S = 790e12
"""An 8192 x 8192 x 8192 bf16 matrix product on random data on an H200."""
BYTES_PER_S = 4.3e12
"""A copy on an H200, bytes read and written."""
TOLERANCE = 0.03
"""Largest relative difference (Frobenius) of right results; bf16 sums in another order differ by 0.005."""

SKEW = 4
"""Rows of the largest expert over the mean, in a skewed routing."""

Measured = tuple[Sequence[Any], list[str], dict[str, Any]]
"""Rows of a suite, lines on what was left out, and the facts of how it was measured."""
Results = tuple[Tensor | None, ...]
"""Results of a call, in the order of the case's ``results``; None is not compared."""


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
    """The timed call."""
    forward: Callable[[], Tensor] | None = None
    """The forward alone, with gradients, for the memory kept for the backward."""


@dataclass(frozen=True)
class Alternative:
    """One way to compute a case. ``bind`` puts the inputs in place, which is not timed."""

    name: str
    bind: Callable[[], Run]


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
    """Times of one alternative of a case; an error instead where it failed."""

    case: str
    alternative: str
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
    error: str | None = None

    def take(self, samples_ms: Sequence[float]) -> None:
        """Fill in the samples and the numbers that follow from them."""
        self.samples_ms = [round(ms, 6) for ms in samples_ms]
        self.p10_ms, self.median_ms, self.p90_ms = (round(ms, 6) for ms in spread(samples_ms))
        self.time_over_floor = self.median_ms / self.floor_ms
        self.share_of_floor_rate = self.floor_ms / self.median_ms


def run_case(case: Case, device: torch.device, repeats: int) -> list[Row]:
    """Check, warm up and time the alternatives of a case, ``repeats`` times each. Raises nothing.

    A failure becomes the error of its row, and the others go on.
    """
    try:
        alternatives = case.make()
    except Exception as error:  # whatever a kernel, a compiler or the allocator may raise
        return [_row(case, "all", reason(error))]
    rows = {a.name: _row(case, a.name) for a in alternatives}
    runs: dict[str, Run] = {}
    expected: Results | None = None
    for alternative in alternatives:
        row = rows[alternative.name]
        try:
            run = alternative.bind()
            results = _warm(run, device)
            row.error = compare(case.results, results, expected)
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


def compare(names: Sequence[str], results: Results, expected: Results | None) -> str | None:
    """An error if results are not finite or not the expected ones."""
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
    return "; ".join(wrong) or None


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


def _row(case: Case, alternative: str, error: str | None = None) -> Row:
    floor = case.floor
    return Row(case.name, alternative, case.shape, floor.kind, floor.amount, floor.ms, error=error)


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


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyCase = TypeVar("AnyCase", bound=Named)
AnyRow = TypeVar("AnyRow")


def one_by_one(
    cases: Sequence[AnyCase],
    run: Callable[[AnyCase], list[AnyRow]],
    brief: Callable[[list[AnyRow]], str],
    out: Path | None,
) -> list[AnyRow]:
    """The rows of all cases, each logged and kept as soon as it is there."""
    rows: list[AnyRow] = []
    for number, case in enumerate(cases, start=1):
        started = time.monotonic()
        found = run(case)
        seconds = time.monotonic() - started
        log.info("[%d/%d] %s: %s (%.1f s)", number, len(cases), case.name, brief(found), seconds)
        keep(out, found)
        rows += found
    return rows


def keep(out: Path | None, rows: Sequence[object]) -> None:
    """Add rows to a file beside the one that the document will be, for a suite that ends before."""
    if out is None or not is_first():
        return
    lines = "".join(json.dumps(row) + "\n" for row in as_plain(rows))
    try:
        with rows_file(out).open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        log.warning("rows are not kept meanwhile: %s", error)


def rows_file(out: Path) -> Path:
    """The file of rows until the document is written."""
    return out.with_suffix(".rows.jsonl")


def chosen(cases: list[AnyCase], prefixes: Sequence[str]) -> list[AnyCase]:
    """Cases whose name starts with one of the prefixes. *Raises* ConfigError for a prefix of none."""
    unknown = [prefix for prefix in prefixes if not any(case.name.startswith(prefix) for case in cases)]
    if unknown:
        names = ", ".join(case.name for case in cases)
        raise ConfigError(f"only={','.join(unknown)}: no case starts with that; cases are {names}")
    return [case for case in cases if not prefixes or case.name.startswith(tuple(prefixes))]


def is_first() -> bool:
    """Return whether this process prints and writes, the first of those of torchrun."""
    return int(os.environ.get("RANK", "0")) == 0


def as_plain(rows: Sequence[object]) -> list[dict[str, Any]]:
    """Rows as a JSON document has them."""
    return [dict(vars(row)) for row in rows]


def table(
    columns: Mapping[str, Callable[[dict[str, Any]], str]], rows: Sequence[dict[str, Any]], *, named: int = 1
) -> Iterator[str]:
    """Lines of a Markdown table; a failed row has its first ``named`` cells and the reason."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        if row["error"]:
            cells = [cell(row) for cell in list(columns.values())[:named]]
            cells += [f"failed: {row['error'].replace('|', '/')}", *[""] * (len(columns) - named - 1)]
        else:
            cells = [cell(row) for cell in columns.values()]
        yield f"| {' | '.join(cells)} |"
    yield ""


class Routing(NamedTuple):
    """The experts of each slot, and the plan that the operations take; R = T * K are the routed rows."""

    expert_TK: Tensor
    slot_R: Tensor
    row_TK: Tensor
    ends_E: Tensor

    @property
    def plan(self) -> tuple[Tensor, Tensor, Tensor]:
        """slot_R, row_TK and ends_E, as the operations take them."""
        return self.slot_R, self.row_TK, self.ends_E


def route(
    T: int, E: int, K: int, generator: torch.Generator, device: torch.device, *, skewed: bool = False
) -> tuple[Routing, Tensor]:
    """A random routing of T tokens to K of E experts, and its weights [T, K] fp32: softmax of random logits.

    Natural: the K largest. Skewed: expert 0 is chosen by exactly ``SKEW * T * K / E`` tokens (which must be
    whole and at most T), the other slots go to the largest of the rest.
    """
    from graphmoe.ops import permute  # noqa: F401  # registers the ops

    logits_TE = torch.randn(T, E, generator=generator, device=device)
    choice_TE = logits_TE.clone()
    if skewed:
        num_busy, rest = divmod(SKEW * T * K, E)
        assert rest == 0 and num_busy <= T, (T, E, K)
        order_T = torch.randperm(T, generator=generator, device=device)
        choice_TE[:, 0] = -torch.inf
        choice_TE[order_T[:num_busy], 0] = torch.inf
    expert_TK = choice_TE.topk(K, dim=-1).indices
    weight_TK = logits_TE.softmax(dim=-1).gather(1, expert_TK)
    expert_TK = expert_TK.int()
    _, ends_E, row_TK, slot_R = torch.ops.graphmoe.routing_plan(expert_TK, E)
    return Routing(expert_TK, slot_R, row_TK, ends_E), weight_TK
