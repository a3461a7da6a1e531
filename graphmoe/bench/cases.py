"""Cases of all suites: one runner, one table; those of operations have alternatives, which take turns.

Before anything is timed, each alternative's results are compared with those of the first; one that computes
something else is reported and not timed.
"""

import gc
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from graphmoe.bench.arguments import BenchArgs
from graphmoe.config.schema import ConfigError
from graphmoe.ops.timing import WARM_UP_CALLS, spread, time_in_turns

log = logging.getLogger(__name__)
FLOPS_PER_S = 790e12
"""An 8192 x 8192 x 8192 bf16 matrix product on random data on an H200."""
FP8_FLOPS_PER_S = 1450e12
"""The same product of numbers of 8 bits, a scale for each row of either side."""
BYTES_PER_S = 4.3e12
"""A copy on an H200, bytes read and written."""
RATES = {"FLOPs": FLOPS_PER_S, "fp8 FLOPs": FP8_FLOPS_PER_S, "bytes": BYTES_PER_S}
TOLERANCE = 0.03
"""Largest relative difference (Frobenius) of right results; bf16 sums in another order differ by 0.005."""
MOST_NAMED = 30
"""Names of cases that an error lists; of more, their beginnings."""
SKEW = 4
"""Rows of the largest expert over the mean, in a skewed routing."""

Row = dict[str, Any]
"""Numbers of one measurement as the JSON document has them; ``error`` is None where it did not fail."""
Measured = tuple[list[Row], list[str], dict[str, Any]]
"""Rows of a suite, lines on what was left out, and the facts of how it was measured."""


class CaseFailed(Exception):
    """The reason, in words, why a case has no result."""


class Case(NamedTuple):
    """One measured thing of a suite."""

    name: str
    about: Row
    """Facts that each of its rows begins with, also the one of a case that fails."""
    run: Callable[[], list[Row]]
    """Return what rows have beyond that. *Raises* anything, which becomes the error of a row."""


Results = tuple[Tensor | None, ...]
"""Results of a call, in the order of the case's ``results``; None is not compared."""


class Run(NamedTuple):
    """A timed call with its inputs in place, and its forward alone, for the memory kept for the backward."""

    call: Callable[[], Results]
    forward: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class Operation:
    """One operation at one shape, and the least that the device has to do for it."""

    name: str
    shape: dict[str, int]
    amount: int
    kind: Literal["FLOPs", "fp8 FLOPs", "bytes"]
    results: tuple[str, ...]
    make: Callable[[], Mapping[str, Callable[[], Run]]]
    """Allocate inputs; return the alternatives, reference first, each with what puts its inputs in place."""
    memory: Literal["kept", "peak"] | None = None
    """kept: bytes held between forward and backward beside inputs and output. peak: most bytes in use
    above the inputs and all results but the first."""

    @property
    def floor_ms(self) -> float:
        """Milliseconds at the rate that was measured on an H200."""
        return self.amount / RATES[self.kind] * 1e3

    def case(self, device: torch.device, repeats: int) -> Case:
        """Its case, whose alternatives are timed ``repeats`` times each."""
        about: Row = {"case": self.name, "shape": self.shape, "floor_kind": self.kind}
        about |= {"floor_amount": self.amount, "floor_ms": self.floor_ms, "alternative": "all"}
        return Case(self.name, about, lambda: self._rows(device, repeats))

    def _rows(self, device: torch.device, repeats: int) -> list[Row]:
        """Check, warm up and time the alternatives; one that fails is a row, and the others go on."""
        rows: dict[str, Row] = {}
        calls: dict[str, Callable[[], Results]] = {}
        expected: Results | None = None
        for name, bind in self.make().items():
            row = rows[name] = {"alternative": name, "error": None}
            try:
                run = bind()
                results = _warm(run, device)
                row["error"] = compare(self.results, results, expected)
                if row["error"] is None:
                    expected = results if expected is None else expected
                    memory = memory_bytes(self.memory, run, device)
                    row |= {"memory_kind": self.memory, "memory_bytes": memory}
                    calls[name] = run.call
            except Exception as error:  # whatever a kernel, a compiler or the allocator may raise
                row["error"] = reason(error)
            results = ()
        del expected
        for name, samples in time_in_turns(calls, repeats, device).items():
            rows[name] |= times_of(samples, self.floor_ms)
        return [*rows.values()]


def times_of(samples_ms: Sequence[float], floor_ms: float) -> Row:
    """Samples with their spread, and the median against a floor."""
    p10, median, p90 = (round(ms, 6) for ms in spread(samples_ms))
    return {
        "samples_ms": [round(ms, 6) for ms in samples_ms],
        "p10_ms": p10,
        "median_ms": median,
        "p90_ms": p90,
        "time_over_floor": median / floor_ms,
        "share_of_floor_rate": floor_ms / median,
    }


def compare(names: Sequence[str], results: Results, expected: Results | None) -> str | None:
    """An error if results are not finite or not the expected ones."""
    wrong: list[str] = []
    for number, (name, result) in enumerate(zip(names, results, strict=False)):
        if result is None or not result.is_floating_point():
            continue
        if not bool(torch.isfinite(result).all()):
            wrong.append(f"{name} is not finite")
        elif expected is not None and (wanted := expected[number]) is not None:
            difference = float("inf")
            if result.shape == wanted.shape:
                norms = [
                    vector_norm(each, dtype=torch.float32)
                    for each in (result.to(wanted.dtype) - wanted, wanted)
                ]
                difference = float(norms[0] / norms[1].clamp_min(1e-30))
            if not difference <= TOLERANCE:
                wrong.append(f"{name} differs by {difference:.1%} from the first alternative's")
    return "; ".join(wrong) or None


def reason(error: BaseException) -> str:
    """The kind and first line of an error, without folders of this machine; all of one that is in words."""
    if isinstance(error, (CaseFailed, ConfigError)):
        return " ".join(str(error).split())
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return without_folders(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def without_folders(text: str) -> str:
    """The text with absolute paths cut to their last part."""
    return re.sub(r"(?<![\w./:~])/(?:[^/\s'\",=]+/)+", "", text)


def _warm(run: Run, device: torch.device) -> Results:
    results = run.call()
    for _ in range(WARM_UP_CALLS - 1):
        run.call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # an error of a kernel is raised here
    return results


def memory_bytes(kind: Literal["kept", "peak"] | None, run: Run, device: torch.device) -> int | None:
    """Bytes by the device's allocator; None on a CPU, which has none to ask."""
    if kind is None or device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    gc.collect()  # or tensors of an earlier alternative may be freed between the two counts
    before = torch.cuda.memory_allocated(device)
    if kind == "kept":
        assert run.forward is not None
        output = run.forward()
        return torch.cuda.memory_allocated(device) - before - output.nbytes
    torch.cuda.reset_peak_memory_stats(device)
    results = run.call()
    peak = torch.cuda.max_memory_allocated(device)
    return peak - before - sum(result.nbytes for result in results[1:] if result is not None)


def run_cases(
    cases: Sequence[Case], brief: Callable[[Row], str], out: Path | None, only: Sequence[str] = ()
) -> list[Row]:
    """The rows of the chosen cases, each logged, ``brief`` if it has no error, and kept beside ``out``.

    What a case raises is its row's error, and the others go on. *Raises* ConfigError for an ``only`` that
    begins no case's name.
    """
    unknown = [prefix for prefix in only if not any(case.name.startswith(prefix) for case in cases)]
    if unknown:
        names = [case.name for case in cases]
        if len(names) > MOST_NAMED:
            parts = (name.rpartition("/") for name in names)
            names = [*dict.fromkeys(f"{start}/..." if start else name for start, _, name in parts)]
        raise ConfigError(f"only={','.join(unknown)}: no case starts with that; cases are {', '.join(names)}")
    cases = [case for case in cases if not only or case.name.startswith(tuple(only))]
    rows: list[Row] = []
    for number, case in enumerate(cases, start=1):
        started = time.monotonic()
        try:
            found = [{**case.about, "error": None, **row} for row in case.run()]
        except Exception as error:  # whatever a kernel, a job or the allocator may raise
            found = [{**case.about, "error": reason(error)}]
        seconds = time.monotonic() - started
        said = ", ".join(row["error"] or brief(row) for row in found)
        log.info("[%d/%d] %s: %s (%.1f s)", number, len(cases), case.name, said, seconds)
        keep(out, found)
        rows += found
        if any(row["error"] for row in found):  # a traceback holds its frames, and those the tensors
            gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return rows


def keep(out: Path | None, rows: Sequence[Row]) -> None:
    """Add rows to a file beside the one that the document will be, for a suite that ends before."""
    if out is None or not is_first():
        return
    try:
        with rows_file(out).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        log.warning("rows are not kept meanwhile: %s", error)


def rows_file(out: Path) -> Path:
    """The file of rows until the document is written."""
    return out.with_suffix(".rows.jsonl")


def is_first() -> bool:
    """Return whether this process prints and writes, the first of those of torchrun."""
    return int(os.environ.get("RANK", "0")) == 0


Cell = str | Callable[[Row], str]
"""A format of a row's numbers by name, or a function of a row; a cell without its numbers is empty."""


class Suite(NamedTuple):
    """A suite: what measures it, and how its rows are shown."""

    measure: Callable[[BenchArgs, torch.device, bool], Measured]
    """(arguments, device, whether shapes are full). *Raises* ConfigError."""
    columns: Mapping[str, Cell]
    legend: Callable[[dict[str, Any]], Iterator[str]]
    """Lines below the table, from the whole document."""


def table(columns: Mapping[str, Cell], rows: Sequence[Row]) -> Iterator[str]:
    """Lines of a Markdown table; a failed row has its first cells and the reason."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        cells = [_cell(form, row) for form in columns.values()]
        if row["error"]:
            named = cells.index(None)
            cells[named:] = [f"failed: {row['error'].replace('|', '/')}", *[""] * (len(cells) - named - 1)]
        yield f"| {' | '.join(cell or '' for cell in cells)} |"
    yield ""


def _cell(form: Cell, row: Row) -> str | None:
    try:
        return form(row) if callable(form) else form.format_map(row)
    except (KeyError, TypeError):  # None has no format of numbers
        return None


def route(
    T: int, E: int, K: int, generator: torch.Generator, device: torch.device, *, skewed: bool = False
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
    """A random routing of T tokens to K of E experts: experts, plan, and weights [T, K] fp32.

    Weights are the softmax of random logits; the plan is slot_R, row_TK and ends_E, as the operations take
    it, with R = T * K.

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
    return expert_TK, (slot_R, row_TK, ends_E), weight_TK
