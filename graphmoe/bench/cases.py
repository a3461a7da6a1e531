"""Cases of operations with their alternatives, and the rows and the table that every suite makes.

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
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.linalg import vector_norm

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

Row = dict[str, Any]
"""Numbers of one measurement as the JSON document has them; ``error`` is None where it did not fail."""
Measured = tuple[list[Row], list[str], dict[str, Any]]
"""Rows of a suite, lines on what was left out, and the facts of how it was measured."""
Results = tuple[Tensor | None, ...]
"""Results of a call, in the order of the case's ``results``; None is not compared."""


class Run(NamedTuple):
    """A timed call with its inputs in place, and its forward alone, for the memory kept for the backward."""

    call: Callable[[], Results]
    forward: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class Case:
    """One operation at one shape, and the least that the device has to do for it."""

    name: str
    shape: dict[str, int]
    amount: int
    kind: Literal["FLOPs", "bytes"]
    results: tuple[str, ...]
    make: Callable[[], Mapping[str, Callable[[], Run]]]
    """Allocate inputs; return the alternatives, reference first, each with what puts its inputs in place."""
    memory: Literal["kept", "peak"] | None = None
    """kept: bytes held between forward and backward beside inputs and output. peak: most bytes in use
    above the inputs and all results but the first."""

    @property
    def floor_ms(self) -> float:
        """Milliseconds at the rate that was measured on an H200."""
        return self.amount / (FLOPS_PER_S if self.kind == "FLOPs" else BYTES_PER_S) * 1e3


def run_case(case: Case, device: torch.device, repeats: int) -> list[Row]:
    """Check, warm up and time the alternatives of a case, ``repeats`` times each. Raises nothing.

    A failure becomes the error of its row, and the others go on.
    """
    about = {"case": case.name, "shape": case.shape, "floor_kind": case.kind, "floor_amount": case.amount}
    about |= {"floor_ms": case.floor_ms, "error": None}
    try:
        alternatives = case.make()
    except Exception as error:  # whatever a kernel, a compiler or the allocator may raise
        return [about | {"alternative": "all", "error": reason(error)}]
    rows: dict[str, Row] = {name: about | {"alternative": name} for name in alternatives}
    calls: dict[str, Callable[[], Results]] = {}
    expected: Results | None = None
    for name, bind in alternatives.items():
        row = rows[name]
        try:
            run = bind()
            results = _warm(run, device)
            row["error"] = compare(case.results, results, expected)
            if row["error"] is None:
                expected = results if expected is None else expected
                row |= {"memory_kind": case.memory, "memory_bytes": _memory(case, run, device)}
                calls[name] = run.call
        except Exception as error:
            row["error"] = reason(error)
        results = ()
    del expected
    try:
        for name, samples in time_in_turns(calls, repeats, device).items():
            rows[name] |= times_of(samples, case.floor_ms)
    except Exception as error:
        for name in calls:
            rows[name]["error"] = reason(error)
    return list(rows.values())


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


def free_memory(device: torch.device, rows: Sequence[Row]) -> None:
    """Return what the case of some rows held to the device, so that the next one starts as the first did."""
    if any(row["error"] for row in rows):  # a traceback holds its frames, and those the tensors
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
    """The kind and first line of an error, without folders of this machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return without_folders(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def without_folders(text: str) -> str:
    """The text with absolute paths cut to their last part."""
    return re.sub(r"(?<![\w./:~])/(?:[^/\s'\",=]+/)+", "", text)


def _warm(run: Run, device: torch.device) -> Results:
    results = run.call()
    for _ in range(WARM_UP_CALLS - 1):
        run.call()
    synchronize(device)  # an error of a kernel is raised here
    return results


def _memory(case: Case, run: Run, device: torch.device) -> int | None:
    """Bytes by the device's allocator; None on a CPU, which has none to ask."""
    if case.memory is None or device.type != "cuda":
        return None
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    if case.memory == "kept":
        assert run.forward is not None, case.name
        output = run.forward()
        return torch.cuda.memory_allocated(device) - before - output.nbytes
    torch.cuda.reset_peak_memory_stats(device)
    results = run.call()
    peak = torch.cuda.max_memory_allocated(device)
    return peak - before - sum(result.nbytes for result in results[1:] if result is not None)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyCase = TypeVar("AnyCase", bound=Named)


def one_by_one(
    cases: Sequence[AnyCase],
    run: Callable[[AnyCase], list[Row]],
    brief: Callable[[Row], str],
    out: Path | None,
) -> list[Row]:
    """The rows of all cases, each logged, ``brief`` if it has no error, and kept as soon as it is there."""
    rows: list[Row] = []
    for number, case in enumerate(cases, start=1):
        started = time.monotonic()
        found = run(case)
        seconds = time.monotonic() - started
        said = ", ".join(row["error"] or brief(row) for row in found)
        log.info("[%d/%d] %s: %s (%.1f s)", number, len(cases), case.name, said, seconds)
        keep(out, found)
        rows += found
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


def chosen(cases: Sequence[AnyCase], prefixes: Sequence[str]) -> list[AnyCase]:
    """Cases whose name starts with one of the prefixes. *Raises* ConfigError for a prefix of none."""
    unknown = [prefix for prefix in prefixes if not any(case.name.startswith(prefix) for case in cases)]
    if unknown:
        names = ", ".join(case.name for case in cases)
        raise ConfigError(f"only={','.join(unknown)}: no case starts with that; cases are {names}")
    return [case for case in cases if not prefixes or case.name.startswith(tuple(prefixes))]


def is_first() -> bool:
    """Return whether this process prints and writes, the first of those of torchrun."""
    return int(os.environ.get("RANK", "0")) == 0


Cell = str | Callable[[Row], str]
"""A format of a row's numbers by name, or a function of a row; a cell without its numbers is empty."""


def table(columns: Mapping[str, Cell], rows: Sequence[Row], *, named: int = 1) -> Iterator[str]:
    """Lines of a Markdown table; a failed row has its first ``named`` cells and the reason."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        forms = list(columns.values())[: named if row["error"] else None]
        cells = [_cell(form, row) for form in forms]
        if row["error"]:
            cells += [f"failed: {row['error'].replace('|', '/')}", *[""] * (len(columns) - named - 1)]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _cell(form: Cell, row: Row) -> str:
    try:
        return form(row) if callable(form) else form.format_map(row)
    except TypeError:  # None has no format of numbers
        return ""


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
